use super::*;

/// Approximately normal noise with variance 1.
fn noise(stream: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| stream.random::<f64>()).sum::<f64>() - 6.0
}

/// Parameters of a simulated ablation.
#[derive(Clone, Copy)]
struct SimulatedAblation {
    seeds: usize,
    images: usize,
    gain: f64,
    /// Standard deviation of a training's mean score.
    by_seed: f64,
    /// Standard deviation of an arm's effect on an image, the same for all seeds.
    by_image: f64,
}

/// Scores of both arms `[seed][image]`. Each image has a difficulty.
fn ablation(ablation: SimulatedAblation, stream: &mut ChaCha8Rng) -> [Vec<Vec<f64>>; 2] {
    let difficulty: Vec<f64> = (0..ablation.images).map(|_| 0.7 + 0.15 * noise(stream)).collect();
    let effect: Vec<f64> = (0..ablation.images).map(|_| ablation.gain + ablation.by_image * noise(stream)).collect();
    let mut arm = |helped: bool| {
        (0..ablation.seeds)
            .map(|_| {
                let level = ablation.by_seed * noise(stream);
                let own = |i: usize| difficulty[i] + if helped { effect[i] } else { 0.0 } + level;
                (0..ablation.images).map(|i| own(i) + 0.05 * noise(stream)).collect()
            })
            .collect::<Vec<Vec<f64>>>()
    };
    [arm(false), arm(true)]
}

/// Fractions of gain and harm in repeated simulations.
fn shares(of: SimulatedAblation, trials: u32) -> (f64, f64) {
    let mut stream = rng::stream(5, "studies", &[of.seeds as u64, of.images as u64, of.by_seed.to_bits()]);
    let groups = vec!["skin".to_owned(); of.images];
    let (mut gains, mut harms) = (0.0, 0.0);
    for trial in 0..trials {
        let [baseline, other] = ablation(of, &mut stream);
        let found = compare(&Scores { groups: &groups, baseline: &baseline, other: &other }, trial.into()).unwrap();
        match found[1].verdict {
            Conclusion::Gain => gains += 1.0,
            Conclusion::Harm => harms += 1.0,
            Conclusion::NoGain => {}
        }
    }
    (gains / f64::from(trials), harms / f64::from(trials))
}

#[test]
fn equal_arms_rarely_differ() {
    for (seeds, by_seed, by_image) in [(3, 0.02, 0.0), (3, 0.005, 0.1), (5, 0.02, 0.05)] {
        let of = SimulatedAblation { seeds, images: 30, gain: 0.0, by_seed, by_image };
        let (gains, harms) = shares(of, 300);
        assert!(gains <= 0.05 && harms <= 0.05, "{seeds} seeds, {by_seed}, {by_image}: {gains} and {harms}");
    }
}

#[test]
fn a_gain_is_found() {
    let of = SimulatedAblation { seeds: 5, images: 60, gain: 0.04, by_seed: 0.01, by_image: 0.05 };
    let (gains, harms) = shares(of, 60);
    assert!(gains > 0.8 && harms == 0.0, "{gains} {harms}");
    let (gains, harms) = shares(SimulatedAblation { gain: -0.04, ..of }, 60);
    assert!(gains == 0.0 && harms > 0.8, "{gains} {harms}");
}

#[test]
fn a_gain_needs_both_intervals() {
    let at = |low, high| Some(Interval { low, high });
    assert_eq!(conclude(&[at(0.1, 0.2), at(0.01, 0.3)]), Conclusion::Gain);
    assert_eq!(conclude(&[at(0.1, 0.2), at(-0.01, 0.3)]), Conclusion::NoGain);
    assert_eq!(conclude(&[at(0.1, 0.2), at(-0.2, -0.1)]), Conclusion::NoGain);
    assert_eq!(conclude(&[at(-0.1, -0.02), None]), Conclusion::Harm);
    assert_eq!(conclude(&[at(0.0, 0.2), None]), Conclusion::NoGain);
}

#[test]
fn groups_have_means_in_order() {
    let groups: Vec<String> = ["b", "a", "b"].map(str::to_owned).into();
    let baseline = [vec![0.1, 0.2, 0.3], vec![0.1, 0.4, 0.3]];
    let other = [vec![0.2, 0.2, 0.4], vec![0.2, 0.4, 0.4]];
    let scores = Scores { groups: &groups, baseline: &baseline, other: &other };
    let found = compare(&scores, 0).unwrap();
    assert_eq!(found.iter().map(|c| c.group.as_str()).collect::<Vec<_>>(), ["a", "b", ALL]);
    assert!((found[0].baseline - 0.3).abs() < 1e-12 && found[0].difference.abs() < 1e-12);
    assert_eq!(found[0].verdict, Conclusion::NoGain);
    assert!((found[1].difference - 0.1).abs() < 1e-12 && found[1].images == 2);
    assert_eq!(found[1].verdict, Conclusion::Gain, "{:?}", found[1]);
    assert!((found[2].difference - 0.2 / 3.0).abs() < 1e-12);
    assert_eq!(found, compare(&scores, 0).unwrap(), "the same seed gives the same intervals");
    let text = table(&found);
    assert!(text.contains("all images") && !text.contains("one seed"), "{text}");
    let json = serde_json::to_string(&found).unwrap();
    assert!(json.contains("\"no_gain\""), "{json}");
}

#[test]
fn a_comparison_with_one_seed_says_so() {
    let groups = vec!["a".to_owned(); 4];
    let (baseline, other) = ([vec![0.1, 0.2, 0.3, 0.4]], [vec![0.2, 0.3, 0.5, 0.5]]);
    let found = compare(&Scores { groups: &groups, baseline: &baseline, other: &other }, 0).unwrap();
    assert!(found[0].images_only && found[0].over_seeds.is_none() && found[0].verdict == Conclusion::Gain);
    assert!(table(&found).contains("one seed: "));
}

#[test]
fn the_t_interval_is_that_of_student() {
    // R: t.test(c(1, 2, 4)), qt(.975, c(9, 30, 1000))
    let found = t_interval(&[1.0, 2.0, 4.0]).unwrap();
    assert!((found.low + 1.461_25).abs() < 1e-3 && (found.high - 6.127_92).abs() < 1e-3, "{found:?}");
    for (freedom, want) in [(9, 2.2622), (30, 2.0423), (1000, 1.9623)] {
        assert!((t_975(freedom) - want).abs() < 1e-3, "{freedom}: {}", t_975(freedom));
    }
    assert_eq!(t_interval(&[1.0]), None);
}

#[test]
fn scores_that_do_not_match_are_an_error() {
    let groups = vec!["a".to_owned(); 2];
    let two = [vec![0.1, 0.2]];
    let refused = |baseline: &[Vec<f64>], other: &[Vec<f64>]| {
        compare(&Scores { groups: &groups, baseline, other }, 0).unwrap_err().to_string()
    };
    assert!(refused(&two, &[]).contains("1 seeds for the baseline and 0"));
    assert!(refused(&two, &[vec![0.1]]).contains("1 scores for 2 images"));
    assert!(refused(&two, &[vec![0.1, f64::NAN]]).contains("NaN is not a score"));
    assert!(refused(&[], &[]).contains("no scores"));
}
