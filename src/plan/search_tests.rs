use super::*;
use crate::plan::dry_run::Job;
use crate::plan::report::{GraphPlan, Offer};
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
fn savings_grow_from_nothing_to_everything() {
    let ladder = Saving::ladder(2, Use::Never);
    let layers: Vec<Checkpointing> = ladder.iter().map(|saving| saving.checkpointing).collect();
    let full = Checkpointing::Full;
    assert_eq!(layers, [Checkpointing::None, Checkpointing::None, Checkpointing::Layers(1), full, full, full]);
    assert!(ladder.iter().skip(1).all(|saving| saving.checkpoint_encoder == full));
    assert_eq!(ladder.iter().filter(|saving| saving.checkpoint_decoder).count(), 2);
    assert_eq!(ladder.iter().filter(|saving| saving.offload_optimizer).count(), 1);
    assert!(!ladder.iter().any(|saving| saving.step_in_backward));
    let stepped =
        |stepping| Saving::ladder(2, stepping).iter().map(|saving| saving.step_in_backward).collect::<Vec<_>>();
    assert_eq!(stepped(Use::Possible), [false, true, true, true, true, true, true]);
    assert_eq!(stepped(Use::Wanted), [true; 6]);
}

#[test]
fn compromises_begin_with_the_given_settings() {
    let wanted = Compromise { quantization: Quantization::None, optimizer: OptimizerKind::AdamW };
    let all = Compromise::ladder(wanted, true);
    let [nf4, double] = [Quantization::Nf4, Quantization::Nf4Double];
    let quantized = |quantization| Compromise { quantization, ..wanted };
    let last = Compromise { optimizer: OptimizerKind::AdamW8bit, ..quantized(double) };
    assert_eq!(all, [wanted, quantized(nf4), quantized(double), last]);
    assert_eq!(Compromise::ladder(last, true), [last]);
    let trained = Compromise::ladder(wanted, false);
    assert_eq!(trained, [wanted, Compromise { optimizer: OptimizerKind::AdamW8bit, ..wanted }]);
}

/// A problem with simple rules: an image of 64 pixels takes 10 bytes and 10 seconds, a saving saves 3 of the bytes, a
/// larger image takes more bytes in proportion to its side, the feature cache saves the fraction `tower` of the time, and CUDA graphs take 25 bytes and save the time of the CPU.
struct Rule {
    budget: u64,
    host_bound: bool,
    tower: f64,
}

impl Problem for Rule {
    fn plan(&self, choice: &Choice, _effort: Effort) -> Result<Plan> {
        let saved = self.savings().iter().position(|saving| *saving == choice.saving).unwrap() as u64;
        let peak = Bytes(choice.micro_batch as u64 * (10 - 3 * saved.min(3)) * choice.image_size.unsigned_abs() / 64);
        let kept = if choice.cache_features { self.tower } else { 0.0 };
        let gpu = choice.samples() as f64 * (10.0 + saved as f64) * (1.0 - kept);
        let seconds = if self.host_bound { 2.0 * gpu } else { gpu };
        let time = PhaseTime { seconds, gpu_seconds: gpu, host_bound: self.host_bound, ..PhaseTime::default() };
        let with_pool = Bytes(peak.0 + 25);
        let graphs = GraphPlan { device_peak: with_pool, fits: with_pool.0 <= self.budget, seconds: Some(gpu) };
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
            flops: 0.0,
            with_graphs: choice.use_graphs.then_some(graphs),
        })
    }

    fn savings(&self) -> Vec<Saving> {
        Saving::ladder(1, Use::Never)
    }

    fn compromises(&self) -> Vec<Compromise> {
        vec![Compromise { quantization: Quantization::None, optimizer: OptimizerKind::AdamW }]
    }

    fn parallel(&self) -> bool {
        false
    }
}

fn space() -> Space {
    Space {
        effective_batch: 4,
        questions: vec![1],
        image_sizes: vec![64],
        cache_features: Use::Possible,
        use_graphs: true,
        custom_kernels: true,
        headroom_frac: 0.0,
    }
}

fn found(rule: &Rule) -> Candidate {
    search(rule, &space()).unwrap().fitting.remove(0)
}

#[test]
fn the_first_image_size_that_fits_is_used() {
    let space = Space { image_sizes: vec![256, 128, 64], ..space() };
    let found = search(&Rule { budget: 3, host_bound: false, tower: 0.0 }, &space).unwrap();
    assert!(found.smallest.is_none());
    assert_eq!(found.fitting.iter().map(|one| one.choice.image_size).collect::<Vec<_>>(), [128]);
}

#[test]
fn the_smallest_settings_are_reported_if_nothing_fits() {
    let space = Space { image_sizes: vec![128, 64], questions: vec![2, 1, 4], ..space() };
    let found = search(&Rule { budget: 0, host_bound: false, tower: 0.0 }, &space).unwrap();
    assert!(found.fitting.is_empty());
    let smallest = found.smallest.unwrap();
    let Choice { image_size, questions, micro_batch, saving, .. } = smallest.choice;
    assert_eq!((image_size, questions, micro_batch), (64, 1, 1));
    assert_eq!(Some(&saving), Saving::ladder(1, Use::Never).last());
    assert_eq!(smallest.plan.device_peak, Bytes(1));
}

#[test]
fn the_fastest_settings_that_fit_are_found_and_more_settings_are_tried_on_them() {
    let roomy = found(&Rule { budget: 100, host_bound: true, tower: 0.5 });
    assert_eq!((roomy.choice.micro_batch, roomy.choice.saving), (4, Saving::ladder(1, Use::Never)[0]));
    assert!(roomy.choice.cache_features && roomy.choice.use_graphs && roomy.choice.custom_kernels);
    let saves: Vec<(f64, bool)> = roomy.tried.iter().map(|tried| (tried.saves_frac, tried.is_used)).collect();
    assert_eq!(saves, [(0.5, true), (0.5, true)]);
    assert!((roomy.seconds() - 5.0).abs() < 1e-12, "with CUDA graphs and without the vision tower");
}

#[test]
fn settings_that_save_little_or_do_not_fit_are_reported_but_not_used() {
    let tight = found(&Rule { budget: 40, host_bound: true, tower: 0.01 });
    assert_eq!(tight.choice.micro_batch, 4);
    assert!(!tight.choice.cache_features && !tight.choice.use_graphs);
    let [features, graphs] = tight.tried[..] else { panic!("{:?}", tight.tried) };
    assert!(features.fits && !features.is_used && (features.saves_frac - 0.01).abs() < 1e-9);
    assert!(!graphs.fits && !graphs.is_used && (graphs.saves_frac - 0.5).abs() < 1e-9);
    let busy = found(&Rule { budget: 100, host_bound: false, tower: 0.01 });
    assert_eq!(busy.tried.len(), 1, "CUDA graphs are not tried if the GPU limits the speed");
}

/// Only the last saving fits. Records the settings whose memory is planned.
struct Tight {
    rule: Rule,
    planned: Mutex<Vec<Choice>>,
}

impl Problem for Tight {
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan> {
        if effort == Effort::Memory {
            self.planned.lock().unwrap().push(*choice);
        }
        let is_last = self.savings().last() == Some(&choice.saving);
        let device_peak = Bytes(if is_last { 1 } else { 1000 });
        Ok(Plan { device_peak, ..self.rule.plan(choice, effort)? })
    }

    fn savings(&self) -> Vec<Saving> {
        self.rule.savings()
    }

    fn compromises(&self) -> Vec<Compromise> {
        self.rule.compromises()
    }

    fn parallel(&self) -> bool {
        false
    }
}

#[test]
fn the_memory_of_the_same_settings_is_planned_once() {
    let tight = Tight { rule: Rule { budget: 10, host_bound: false, tower: 0.0 }, planned: Mutex::default() };
    let found = search(&tight, &space()).unwrap();
    assert_eq!(Some(&found.fitting[0].choice.saving), tight.savings().last());
    let planned = tight.planned.into_inner().unwrap();
    assert!(planned.len() > 4, "{}", planned.len());
    for (number, choice) in planned.iter().enumerate() {
        assert!(!planned[..number].contains(choice), "{choice:?}");
    }
}
