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
fn savings_grow_from_nothing_to_everything() {
    let ladder = Saving::ladder(2, 0, Use::Never);
    let layers: Vec<FirstLayers> = ladder.iter().map(|saving| saving.checkpointing).collect();
    let full = FirstLayers::Full;
    assert_eq!(layers, [FirstLayers::None, FirstLayers::None, FirstLayers::Count(1), full, full, full]);
    assert!(ladder.iter().skip(1).all(|saving| saving.checkpoint_encoder == full));
    assert_eq!(ladder.iter().filter(|saving| saving.checkpoint_decoder).count(), 2);
    assert_eq!(ladder.iter().filter(|saving| saving.offload_optimizer).count(), 1);
    assert!(!ladder.iter().any(|saving| saving.step_in_backward));
    let stepped =
        |stepping| Saving::ladder(2, 0, stepping).iter().map(|saving| saving.step_in_backward).collect::<Vec<_>>();
    assert_eq!(stepped(Use::Possible), [false, true, true, true, true, true, true]);
    assert_eq!(stepped(Use::Wanted), [true; 6]);
    let counts = |most| -> Vec<[usize; 2]> {
        let counts = |saving: &Saving| [saving.checkpointing, saving.stream_layers].map(FirstLayers::count);
        Saving::ladder(3, most, Use::Never).iter().skip(2).map(counts).collect()
    };
    let all = usize::MAX;
    assert_eq!(counts(2), [[1, 1], [2, 2], [all, 2], [all, 2], [all, 2], [all, 2]], "recomputed, and in host memory");
    assert_eq!(counts(9), [[1, 1], [2, 2], [all; 2], [all; 2], [all; 2], [all; 2]]);
    let vision = Saving::ladder(3, 2, Use::Never).iter().map(|saving| saving.stream_vision).collect::<Vec<_>>();
    assert_eq!(vision, [false, false, false, false, false, true, true, true]);
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
        let saved = Saving::ladder(1, 0, Use::Never).iter().position(|saving| *saving == choice.saving).unwrap() as u64;
        let peak = Bytes(choice.micro_batch as u64 * (10 - 3 * saved.min(3)) * choice.image_size.unsigned_abs() / 64);
        let kept = if choice.cache_features { self.tower } else { 0.0 };
        let gpu = choice.samples() as f64 * (10.0 + saved as f64) * (1.0 - kept);
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
            with_graphs: choice.use_graphs.then_some(graphs),
        })
    }

    fn ladders(&self, _compromise: Compromise) -> Result<Vec<Vec<Saving>>> {
        Ok(vec![Saving::ladder(1, 0, Use::Never)])
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
    assert_eq!(Some(&saving), Saving::ladder(1, 0, Use::Never).last());
    assert_eq!(smallest.plan.device_peak, Bytes(1));
}

#[test]
fn the_fastest_settings_that_fit_are_found_and_more_settings_are_tried_on_them() {
    let roomy = found(&Rule { budget: 100, host_bound: true, tower: 0.5 });
    assert_eq!((roomy.choice.micro_batch, roomy.choice.saving), (4, Saving::ladder(1, 0, Use::Never)[0]));
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
        let is_last = self.ladders(choice.compromise)?[0].last() == Some(&choice.saving);
        let device_peak = Bytes(if is_last { 1 } else { 1000 });
        Ok(Plan { device_peak, ..self.rule.plan(choice, effort)? })
    }

    fn ladders(&self, compromise: Compromise) -> Result<Vec<Vec<Saving>>> {
        self.rule.ladders(compromise)
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
    let Choice { saving, compromise, .. } = found.fitting[0].choice;
    assert_eq!(Some(&saving), tight.ladders(compromise).unwrap()[0].last());
    let planned = tight.planned.into_inner().unwrap();
    assert!(planned.len() > 4, "{}", planned.len());
    for (number, choice) in planned.iter().enumerate() {
        assert!(!planned[..number].contains(choice), "{choice:?}");
    }
}

/// Weights of 16 bits take 8 bytes, those of 4 bits take 2, in host memory nothing. With them there, a step takes
/// `slowdown` times as long.
struct Weights {
    budget: u64,
    slowdown: f64,
}

impl Problem for Weights {
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan> {
        let rule = Rule { budget: self.budget, host_bound: false, tower: 0.0 };
        let first = Choice { saving: Saving::ladder(1, 0, Use::Never)[0], ..*choice };
        let mut plan = rule.plan(&first, effort)?;
        let resident = if choice.compromise.quantization == Quantization::None { 8 } else { 2 };
        let streams = choice.saving.stream_layers != FirstLayers::None;
        plan.device_peak = Bytes(if streams { 1 } else { resident });
        let time = plan.compared_time.as_mut().unwrap();
        time.seconds *= if streams { self.slowdown } else { 1.0 };
        Ok(plan)
    }

    fn ladders(&self, _compromise: Compromise) -> Result<Vec<Vec<Saving>>> {
        Ok([0, 1].map(|most| Saving::ladder(1, most, Use::Never)).into())
    }

    fn compromises(&self) -> Vec<Compromise> {
        let wanted = Compromise { quantization: Quantization::None, optimizer: OptimizerKind::AdamW };
        vec![wanted, Compromise { quantization: Quantization::Nf4, ..wanted }]
    }

    fn parallel(&self) -> bool {
        false
    }
}

#[test]
fn weights_lose_bits_rather_than_being_copied_only_if_that_is_much_faster() {
    let found = |budget: u64, slowdown: f64| search(&Weights { budget, slowdown }, &space()).unwrap();
    let chosen = |budget: u64, slowdown: f64| {
        let Choice { saving, compromise, .. } = found(budget, slowdown).fitting.remove(0).choice;
        (compromise.quantization, saving.stream_layers)
    };
    let named = |budget: u64, slowdown: f64| {
        found(budget, slowdown).a_little_faster.map(|candidate| candidate.choice.compromise.quantization)
    };
    assert_eq!(
        [named(8, 1.0), named(4, 1.2), named(4, 1.4), named(1, 1.4)],
        [None, Some(Quantization::Nf4), None, None]
    );
    assert_eq!(chosen(8, 1.0), (Quantization::None, FirstLayers::None), "they fit");
    assert_eq!(chosen(4, 1.2), (Quantization::None, FirstLayers::Full));
    assert_eq!(chosen(4, 1.4), (Quantization::Nf4, FirstLayers::None));
    assert_eq!(chosen(1, 1.4), (Quantization::None, FirstLayers::Full), "4 bits do not help");
}
