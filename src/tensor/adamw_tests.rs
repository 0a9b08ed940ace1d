use super::*;
use crate::no_grad;

const CPU: Device = Device::Cpu;

/// Numbers between -1 and 1 with a long period.
fn numbers(count: i64, seed: f64) -> Tensor {
    let at = Tensor::arange(count, (Kind::Double, CPU));
    ((&at * 12.9898 + seed).sin() * 43_758.545).frac().to_kind(Kind::Float)
}

/// A parameter with its gradient and an optimizer state after some steps.
struct One {
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
}

impl One {
    fn new(count: i64, eight_bit: bool) -> Self {
        let param = numbers(count, 0.1);
        let moments = Moments::zeros(&param, eight_bit, false);
        Self { param, grad: numbers(count, 0.7) * 0.01, moments, step: Tensor::zeros([0; 0], (Kind::Float, CPU)) }
    }

    fn slot(&self) -> Slot<'_> {
        Slot { param: &self.param, grad: &self.grad, moments: &self.moments, step: &self.step }
    }

    fn tensors(&self) -> Vec<Tensor> {
        let moments = self.moments.named().into_iter().map(|(_, tensor)| tensor.copy());
        moments.chain([self.param.copy(), self.step.copy()]).collect()
    }
}

fn settings<'a>(maps: &'a Maps, found_inf: &'a Tensor, chunk: i64) -> Step<'a> {
    let rate = Rate::Number(0.01);
    Step { rate, betas: (0.9, 0.99), weight_decay: 0.1, epsilon: 1e-8, found_inf, maps: Some(maps), chunk }
}

fn flag(value: f64) -> Tensor {
    Tensor::from(value).to_kind(Kind::Float)
}

fn assert_equal(a: &[Tensor], b: &[Tensor]) {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).enumerate().for_each(|(i, (a, b))| assert!(a.equal(b), "tensor {i} differs"));
}

#[test]
fn chunks_from_cpu_memory_give_the_same_bytes() {
    let (maps, go) = (Maps::new(CPU), flag(0.0));
    for eight_bit in [false, true] {
        // several chunks, the last one not full; and a parameter smaller than a chunk
        let sizes = [10_000, 4100, 5];
        let make = || sizes.map(|count| One::new(count, eight_bit));
        let (whole, pieces) = (make(), make());
        for _ in 0..3 {
            let slots = |all: &'_ [One; 3]| step(&all.each_ref().map(One::slot), settings(&maps, &go, 0));
            slots(&whole).unwrap();
            step(&pieces.each_ref().map(One::slot), settings(&maps, &go, 1024)).unwrap();
        }
        for (whole, pieces) in whole.iter().zip(&pieces) {
            assert_equal(&whole.tensors(), &pieces.tensors());
            assert!(!whole.param.equal(&One::new(whole.param.size()[0], eight_bit).param), "no step was done");
        }
    }
}

#[test]
fn the_step_of_libtorchs_operators_equals_the_kernel() {
    let (maps, go, stop) = (Maps::new(CPU), flag(0.0), flag(1.0));
    // more than one chunk of the operators; the last block is not full
    let (kernel, composed) = (One::new((1 << 20) + 777, true), One::new((1 << 20) + 777, true));
    let by_operators = |found_inf: &Tensor| {
        let (slot, numbers) = (composed.slot().raw(), settings(&maps, found_inf, 0).raw());
        // SAFETY: a slot of live tensors.
        unsafe { native::check(native::prsmed_adamw8_composed(&raw const slot, &raw const numbers)) }
    };
    for _ in 0..3 {
        step(&[kernel.slot()], settings(&maps, &go, 0)).unwrap();
        by_operators(&go).unwrap();
    }
    let (one, other) = (kernel.tensors(), composed.tensors());
    // codes and scales; the square root of MKL, which libtorch uses on the CPU, is not always correctly rounded
    assert_equal(&one[..4], &other[..4]);
    let apart = (&one[4] - &other[4]).abs().max().double_value(&[]);
    assert!(apart <= 1.2e-7, "{apart}");
    let before = composed.tensors();
    by_operators(&stop).unwrap();
    assert_equal(&before, &composed.tensors());
}

#[test]
fn a_step_with_found_inf_changes_nothing() {
    let (maps, go, stop) = (Maps::new(CPU), flag(0.0), flag(1.0));
    for eight_bit in [false, true] {
        let mut one = One::new(5000, eight_bit);
        step(&[one.slot()], settings(&maps, &go, 0)).unwrap();
        let before = one.tensors();
        one.grad = one.grad.full_like(f64::NAN);
        for chunk in [0, 512] {
            step(&[one.slot()], settings(&maps, &stop, chunk)).unwrap();
            assert_equal(&before, &one.tensors());
        }
    }
}

#[test]
fn a_learning_rate_on_the_device_gives_the_same_step() {
    let (maps, go, rate) = (Maps::new(CPU), flag(0.0), Tensor::from(0.01));
    for eight_bit in [false, true] {
        let (a, b) = (One::new(5000, eight_bit), One::new(5000, eight_bit));
        step(&[a.slot()], settings(&maps, &go, 0)).unwrap();
        step(&[b.slot()], Step { rate: Rate::OnDevice(&rate), ..settings(&maps, &go, 0) }).unwrap();
        assert_equal(&a.tensors(), &b.tensors());
    }
}

#[test]
fn clip_scale_clips_and_finds_non_finite_norms() {
    let of = |norm: f64, clip: f64| Vec::<f32>::try_from(clip_scale(&flag(norm), clip).unwrap()).unwrap();
    assert_eq!(of(4.0, 1.0), [1.0 / 4.000_001, 0.0]);
    assert_eq!(of(0.5, 1.0), [1.0, 0.0]);
    assert_eq!(of(4.0, 0.0), [1.0, 0.0]);
    assert_eq!((of(f64::INFINITY, 1.0)[1], of(f64::NAN, 0.0)[1]), (1.0, 1.0));
}

#[test]
fn decoded_values_are_within_half_a_step_of_the_map() {
    let maps = Maps::new(CPU);
    let values = numbers(1000, 0.3) * 7.0;
    let coded = Coded::encode(&values, &maps.signed).unwrap();
    assert_eq!((coded.codes.kind(), coded.scales.size()), (Kind::Uint8, vec![4]));
    let off = no_grad(|| (coded.decode(&maps.signed).unwrap() - &values).abs().max()).double_value(&[]);
    // the largest step of the map is 0.9 / 64 of the scale
    assert!(off > 0.0 && off <= 7.0 * 0.9 / 128.0 + 1e-6, "{off}");
    let zeros = Coded::encode(&values.zeros_like(), &maps.unsigned).unwrap();
    assert_eq!(zeros.decode(&maps.unsigned).unwrap().abs().max().double_value(&[]), 0.0);
}
