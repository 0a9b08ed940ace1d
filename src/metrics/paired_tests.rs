use super::*;

/// About normal, variance 1.
fn noise(stream: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| stream.random::<f64>()).sum::<f64>() - 6.0
}

/// Spreads of a simulated study.
#[derive(Clone, Copy)]
struct Study {
    seeds: usize,
    images: usize,
    gain: f64,
    /// Of a training's mean score.
    by_seed: f64,
    /// Of what the arm does to an image, the same for all seeds.
    by_image: f64,
}

/// Scores of both arms `[seed][image]`; each image has a difficulty of its own.
fn study(study: Study, stream: &mut ChaCha8Rng) -> [Vec<Vec<f64>>; 2] {
    let difficulty: Vec<f64> = (0..study.images).map(|_| 0.7 + 0.15 * noise(stream)).collect();
    let effect: Vec<f64> = (0..study.images).map(|_| study.gain + study.by_image * noise(stream)).collect();
    let mut arm = |helped: bool| {
        (0..study.seeds)
            .map(|_| {
                let level = study.by_seed * noise(stream);
                let own = |i: usize| difficulty[i] + if helped { effect[i] } else { 0.0 } + level;
                (0..study.images).map(|i| own(i) + 0.05 * noise(stream)).collect()
            })
            .collect::<Vec<Vec<f64>>>()
    };
    [arm(false), arm(true)]
}

/// Shares of (gain, harm) in repeated studies.
fn shares(of: Study, trials: u32) -> (f64, f64) {
    let mut stream = rng::stream(5, "studies", &[of.seeds as u64, of.images as u64, of.by_seed.to_bits()]);
    let groups = vec!["skin".to_owned(); of.images];
    let (mut gains, mut harms) = (0.0, 0.0);
    for trial in 0..trials {
        let [baseline, other] = study(of, &mut stream);
        let found = compare(&Scores { groups: &groups, baseline: &baseline, other: &other }, trial.into()).unwrap();
        match found[1].verdict {
            Verdict::Gain => gains += 1.0,
            Verdict::Harm => harms += 1.0,
            Verdict::NoGain => {}
        }
    }
    (gains / f64::from(trials), harms / f64::from(trials))
}

#[test]
fn equal_arms_seldom_differ() {
    for (seeds, by_seed, by_image) in [(3, 0.02, 0.0), (3, 0.005, 0.1), (5, 0.02, 0.05)] {
        let of = Study { seeds, images: 30, gain: 0.0, by_seed, by_image };
        let (gains, harms) = shares(of, 300);
        assert!(gains <= 0.05 && harms <= 0.05, "{seeds} seeds, {by_seed}, {by_image}: {gains} and {harms}");
    }
}

#[test]
fn a_gain_is_found() {
    let of = Study { seeds: 5, images: 60, gain: 0.04, by_seed: 0.01, by_image: 0.05 };
    let (gains, harms) = shares(of, 60);
    assert!(gains > 0.8 && harms == 0.0, "{gains} {harms}");
    let (gains, harms) = shares(Study { gain: -0.04, ..of }, 60);
    assert!(gains == 0.0 && harms > 0.8, "{gains} {harms}");
}

#[test]
fn both_intervals_must_agree() {
    let at = |low, high| Some(Interval { low, high });
    assert_eq!(verdict(&[at(0.1, 0.2), at(0.01, 0.3)]), Verdict::Gain);
    assert_eq!(verdict(&[at(0.1, 0.2), at(-0.01, 0.3)]), Verdict::NoGain);
    assert_eq!(verdict(&[at(0.1, 0.2), at(-0.2, -0.1)]), Verdict::NoGain);
    assert_eq!(verdict(&[at(-0.1, -0.02), None]), Verdict::Harm);
    assert_eq!(verdict(&[at(0.0, 0.2), None]), Verdict::NoGain);
}

#[test]
fn groups_means_and_order() {
    let groups: Vec<String> = ["b", "a", "b"].map(str::to_owned).into();
    let baseline = [vec![0.1, 0.2, 0.3], vec![0.1, 0.4, 0.3]];
    let other = [vec![0.2, 0.2, 0.4], vec![0.2, 0.4, 0.4]];
    let scores = Scores { groups: &groups, baseline: &baseline, other: &other };
    let found = compare(&scores, 0).unwrap();
    assert_eq!(found.iter().map(|c| c.group.as_str()).collect::<Vec<_>>(), ["a", "b", ALL]);
    assert!((found[0].baseline - 0.3).abs() < 1e-12 && found[0].difference.abs() < 1e-12);
    assert_eq!(found[0].verdict, Verdict::NoGain);
    assert!((found[1].difference - 0.1).abs() < 1e-12 && found[1].images == 2);
    assert_eq!(found[1].verdict, Verdict::Gain, "{:?}", found[1]);
    assert!((found[2].difference - 0.2 / 3.0).abs() < 1e-12);
    assert_eq!(found, compare(&scores, 0).unwrap(), "the same seed gives the same intervals");
    let text = table(&found);
    assert!(text.contains("all images") && !text.contains("one seed"), "{text}");
    let json = serde_json::to_string(&found).unwrap();
    assert!(json.contains("\"no_gain\""), "{json}");
}

#[test]
fn one_seed_says_so() {
    let groups = vec!["a".to_owned(); 4];
    let (baseline, other) = ([vec![0.1, 0.2, 0.3, 0.4]], [vec![0.2, 0.3, 0.5, 0.5]]);
    let found = compare(&Scores { groups: &groups, baseline: &baseline, other: &other }, 0).unwrap();
    assert!(found[0].images_only && found[0].over_seeds.is_none() && found[0].verdict == Verdict::Gain);
    assert!(table(&found).contains("one seed: "));
}

#[test]
fn the_t_interval_is_students() {
    // R: t.test(c(1, 2, 4)), qt(.975, c(9, 30, 1000))
    let found = t_interval(&[1.0, 2.0, 4.0]).unwrap();
    assert!((found.low + 1.461_25).abs() < 1e-3 && (found.high - 6.127_92).abs() < 1e-3, "{found:?}");
    for (freedom, want) in [(9, 2.2622), (30, 2.0423), (1000, 1.9623)] {
        assert!((t_975(freedom) - want).abs() < 1e-3, "{freedom}: {}", t_975(freedom));
    }
    assert_eq!(t_interval(&[1.0]), None);
}

#[test]
fn scores_that_do_not_pair_are_refused() {
    let groups = vec!["a".to_owned(); 2];
    let two = [vec![0.1, 0.2]];
    let refused = |baseline: &[Vec<f64>], other: &[Vec<f64>]| {
        compare(&Scores { groups: &groups, baseline, other }, 0).unwrap_err().to_string()
    };
    assert!(refused(&two, &[]).contains("1 seeds of the baseline and 0"));
    assert!(refused(&two, &[vec![0.1]]).contains("1 scores for 2 images"));
    assert!(refused(&two, &[vec![0.1, f64::NAN]]).contains("NaN is no score"));
    assert!(refused(&[], &[]).contains("no scores"));
}
