use super::*;
use crate::plan::dry_run::Job;
use crate::plan::machine::Offer;
use crate::plan::report::GraphPlan;
use crate::plan::time::PhaseTime;

#[test]
fn the_largest_number_that_fits_is_found_with_few_plans() {
    for limit in 1..=40 {
        let mut asked = 0;
        let found = largest(1..=30, |n| {
            asked += 1;
            Ok(n < limit)
        });
        let expected = if limit > 1 { Some((limit - 1).min(30)) } else { None };
        assert_eq!(found.unwrap(), expected);
        assert!(asked <= 11, "{asked}");
    }
}

#[test]
fn the_last_value_of_a_setting_counts_and_settings_change_one_after_another() {
    assert_eq!(value_of("a.b=1 a.bc=2 a.b=3 ", "a.b"), Some("3"));
    assert_eq!(value_of("a.b=1", "a"), None);
    let values = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
    let all = steps(&[("a", values(&["0", "1"])), ("b", values(&["x"])), ("c", values(&["0", "1", "2"]))]);
    assert_eq!(all, ["a=0 b=x c=0", "a=1 b=x c=0", "a=1 b=x c=1", "a=1 b=x c=2"]);
}

/// The number that assignments give to `key`.
fn number(sets: &str, key: &str) -> u64 {
    value_of(sets, key).unwrap_or_else(|| panic!("no {key} in {sets}")).parse().unwrap()
}

/// A ladder of five savings, of which the last three recompute layers, and steps of four samples.
fn ladder(copies_weights: bool) -> Ladder {
    let saving = |saved: usize| Saving {
        sets: format!("saved={saved} copied={}", u8::from(copies_weights && saved > 1)),
        recomputes: saved > 1,
        copies_weights: copies_weights && saved > 1,
    };
    let batch = |micro_batch: usize| BatchChoice { sets: format!("micro={micro_batch}"), micro_batch, samples: 4 };
    Ladder { savings: (0..5).map(saving).collect(), batches: vec![[1, 2, 4].map(batch).to_vec()] }
}

/// A problem with simple rules: an image of 64 pixels takes 10 bytes and 10 seconds, a saving saves 3 of the bytes, a
/// larger image takes more bytes in proportion to its side, the feature cache saves the fraction `tower` of the time, and CUDA graphs take 25 bytes and save the time of the CPU.
struct Rule {
    budget: u64,
    host_bound: bool,
    tower: f64,
}

impl SearchProblem for Rule {
    fn plan(&self, sets: &str, _effort: Effort) -> Result<Plan> {
        let saved = number(sets, "saved");
        let peak = Bytes(number(sets, "micro") * (10 - 3 * saved.min(3)) * number(sets, "size") / 64);
        let kept = if sets.contains("cache") { self.tower } else { 0.0 };
        let gpu = 4.0 * (10.0 + saved as f64) * (1.0 - kept);
        let seconds = if self.host_bound { 2.0 * gpu } else { gpu };
        let time = PhaseTime { seconds, gpu_seconds: gpu, host_bound: self.host_bound, ..PhaseTime::default() };
        let with_pool = Bytes(peak.0 + 25);
        let graphs = GraphPlan {
            device_peak: with_pool,
            fits: with_pool.0 <= self.budget,
            seconds: Some(gpu),
            compared_seconds: Some(gpu),
        };
        Ok(Plan {
            job: Job::Train,
            phases: Vec::new(),
            allocated_peak: peak,
            reserved_peak: peak,
            device_peak: peak,
            peak_phase: "step",
            scopes: Vec::new(),
            terms: Vec::new(),
            fits: peak.0 <= self.budget,
            budget: Offer { device: "a GPU".into(), bytes: Bytes(self.budget), note: String::new() },
            time: Some(time),
            link: None,
            compared_time: Some(time),
            flops: 0.0,
            host_weights: Bytes(0),
            host_state: Bytes(0),
            with_graphs: sets.contains("graphs").then_some(graphs),
        })
    }

    fn ladders(&self, _compromise: &str) -> Result<Vec<Ladder>> {
        Ok(vec![ladder(false)])
    }

    fn num_kept(&self) -> usize {
        2
    }

    fn may_try(&self, extra: &Extra, candidate: &PlannedSettings) -> bool {
        !extra.captures || candidate.plan.compared_time.is_some_and(|time| time.host_bound)
    }
}

fn space() -> Space {
    let extra = |what: &'static str, captures: bool| Extra { what, sets: format!("{what}=1"), captures };
    Space {
        sizes: vec!["size=64".into()],
        compromises: vec!["bits=16".into()],
        extras: vec![extra("cache", false), extra("graphs", true)],
        ..Space::default()
    }
}

fn found(rule: &Rule) -> PlannedSettings {
    search(rule, &space()).unwrap().fitting.remove(0)
}

#[test]
fn the_first_image_size_that_fits_is_used() {
    let space = Space { sizes: [256, 128, 64].map(|side| format!("size={side}")).into(), ..space() };
    let found = search(&Rule { budget: 3, host_bound: false, tower: 0.0 }, &space).unwrap();
    assert_eq!(found.fitting.iter().map(|one| number(&one.sets, "size")).collect::<Vec<_>>(), [128]);
}

#[test]
fn the_smallest_settings_are_those_that_save_most() {
    let space = Space { sizes: vec!["size=128".into(), "size=64".into()], ..space() };
    let rule = Rule { budget: 0, host_bound: false, tower: 0.0 };
    assert!(search(&rule, &space).unwrap().fitting.is_empty());
    let smallest = smallest(&rule, &space).unwrap().unwrap();
    assert_eq!(["size", "micro", "saved"].map(|key| number(&smallest.sets, key)), [64, 1, 4]);
    assert_eq!(smallest.plan.device_peak, Bytes(1));
}

#[test]
fn the_fastest_settings_that_fit_are_found_and_more_settings_are_tried_on_them() {
    let roomy = found(&Rule { budget: 100, host_bound: true, tower: 0.5 });
    assert_eq!(["micro", "saved", "cache", "graphs"].map(|key| number(&roomy.sets, key)), [4, 0, 1, 1]);
    assert!(roomy.captures);
    let saves: Vec<(f64, bool)> = roomy.tried.iter().map(|tried| (tried.saves_frac, tried.is_used)).collect();
    assert_eq!(saves, [(0.5, true), (0.5, true)]);
    assert!((roomy.seconds() - 5.0).abs() < 1e-12, "with CUDA graphs and without the vision tower");
}

#[test]
fn settings_that_save_little_or_do_not_fit_are_reported_but_not_used() {
    let tight = found(&Rule { budget: 40, host_bound: true, tower: 0.01 });
    assert_eq!(number(&tight.sets, "micro"), 4);
    assert!(!tight.sets.contains("cache") && !tight.captures);
    let [features, graphs] = tight.tried[..] else { panic!("{:?}", tight.tried) };
    assert!(features.fits && !features.is_used && (features.saves_frac - 0.01).abs() < 1e-9);
    assert!(!graphs.fits && !graphs.is_used && (graphs.saves_frac - 0.5).abs() < 1e-9);
    let busy = found(&Rule { budget: 100, host_bound: false, tower: 0.01 });
    assert_eq!(busy.tried.len(), 1, "CUDA graphs are not tried if the GPU limits the speed");
}

/// Only the last saving fits. Records the settings that are planned.
struct Tight {
    rule: Rule,
    planned: Mutex<Vec<(String, Effort)>>,
}

impl SearchProblem for Tight {
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan> {
        self.planned.lock().unwrap().push((sets.to_owned(), effort));
        let device_peak = Bytes(if number(sets, "saved") == 4 { 1 } else { 1000 });
        Ok(Plan { device_peak, ..self.rule.plan(sets, effort)? })
    }

    fn ladders(&self, compromise: &str) -> Result<Vec<Ladder>> {
        self.rule.ladders(compromise)
    }
}

#[test]
fn the_same_settings_are_planned_once_with_each_effort() {
    let tight = Tight { rule: Rule { budget: 10, host_bound: false, tower: 0.0 }, planned: Mutex::default() };
    let found = search(&tight, &space()).unwrap();
    assert_eq!(number(&found.fitting[0].sets, "saved"), 4);
    let planned = tight.planned.into_inner().unwrap();
    assert!(planned.len() > 4, "{}", planned.len());
    for (place, one) in planned.iter().enumerate() {
        assert!(!planned[..place].contains(one), "{one:?}");
    }
}

/// Weights of 16 bits take 8 bytes, those of 4 bits take 2, in host memory nothing. With them there, a step takes
/// `slowdown` times as long.
struct Weights {
    budget: u64,
    slowdown: f64,
}

impl SearchProblem for Weights {
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan> {
        let rule = Rule { budget: self.budget, host_bound: false, tower: 0.0 };
        let mut plan = rule.plan(&format!("{sets} saved=0"), effort)?;
        let resident = if number(sets, "bits") == 16 { 8 } else { 2 };
        let copies = number(sets, "copied") == 1;
        plan.device_peak = Bytes(if copies { 1 } else { resident });
        let time = plan.compared_time.as_mut().unwrap();
        time.seconds *= if copies { self.slowdown } else { 1.0 };
        Ok(plan)
    }

    fn ladders(&self, _compromise: &str) -> Result<Vec<Ladder>> {
        Ok(vec![ladder(false), ladder(true)])
    }
}

#[test]
fn weights_lose_bits_rather_than_being_copied_only_if_that_is_much_faster() {
    let space = Space { compromises: vec!["bits=16".into(), "bits=4".into()], ..space() };
    let found = |budget: u64, slowdown: f64| search(&Weights { budget, slowdown }, &space).unwrap();
    let of = |one: &PlannedSettings| ["bits", "copied"].map(|key| number(&one.sets, key));
    let chosen = |budget: u64, slowdown: f64| of(&found(budget, slowdown).fitting[0]);
    let named = |budget: u64, slowdown: f64| found(budget, slowdown).a_little_faster.as_ref().map(of);
    assert_eq!([named(8, 1.0), named(4, 1.2), named(4, 1.4), named(1, 1.4)], [None, Some([4, 0]), None, None]);
    assert_eq!(chosen(8, 1.0), [16, 0], "they fit");
    assert_eq!(chosen(4, 1.2), [16, 1]);
    assert_eq!(chosen(4, 1.4), [4, 0]);
    assert_eq!(chosen(1, 1.4), [16, 1], "4 bits do not help");
}
