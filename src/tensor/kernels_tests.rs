use super::*;
use crate::tensor::adamw::{self, Coded, Moments, Rate, Slot, Step};
use crate::tensor::functions::packed_bias;
use crate::tensor::rng;

/// Our kernels on the CPU, with a card's threads emulated, until dropped. Of this thread.
struct Emulated;

impl Emulated {
    fn begin() -> Self {
        // SAFETY: sets a pointer of this thread.
        unsafe { native::prsmed_kernels_emulate(true) };
        Self
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { native::prsmed_kernels_emulate(false) };
    }
}

fn bits(xs: &Tensor) -> Tensor {
    xs.view_dtype(if xs.kind() == Kind::Float { Kind::Int } else { Kind::Int16 })
}

fn assert_close(own: &Tensor, chain: &Tensor, kind: Kind, what: &str) {
    assert_eq!((own.size(), own.kind()), (chain.size(), chain.kind()), "{what}");
    let wrong = differing(own, chain, kind);
    assert_eq!(wrong, 0, "{what}: {wrong} of {} differ", own.numel());
    assert!(own.isfinite().all().int64_value(&[]) == 1, "{what} is not finite");
}

fn compare(rows: i64, dim: i64, wide: i64, kind: Kind, device: Device) {
    for Case { name, inputs, number } in cases(rows, dim, wide, kind, device) {
        let what = format!("{name} of {rows} x {dim} ({wide}) in {kind:?}");
        let own = run(name, Way::Own, &inputs, number).unwrap();
        let chain = run(name, Way::Chain, &inputs, number).unwrap();
        assert_eq!(own.len(), chain.len(), "{what}");
        if name == "packed_bias" {
            // no number to compute with: some are infinite
            assert_eq!(bits(&own[0]), bits(&chain[0]), "{what}");
        } else {
            own.iter().zip(&chain).for_each(|(own, chain)| assert_close(own, chain, kind, &what));
        }
        // a few numbers may all be zero; more are only where nothing was computed
        assert!(
            own[0].numel() < 16 || own[0].to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]) > 0.0,
            "{what}"
        );
    }
}

/// Odd sizes take one element at a time, multiples of eight take packs; 300 and 1,028 end within a warp and within a pack.
const SHAPES: [(i64, i64, i64); 8] =
    [(1, 2, 1), (3, 6, 5), (2, 8, 16), (5, 38, 63), (1, 128, 64), (7, 300, 65), (2, 1028, 129), (3, 2048, 5504)];

#[test]
fn kernels_compute_what_libtorch_computes() {
    let (_turn, _emulated) = (rng::TURN.lock(), Emulated::begin());
    rng::seed(11);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in SHAPES {
            compare(rows, dim, wide, kind, Device::Cpu);
        }
    }
}

#[test]
fn a_difference_is_found_and_kernels_can_be_refused() {
    let (_turn, _emulated) = (rng::TURN.lock(), Emulated::begin());
    rng::seed(13);
    assert_eq!(first_difference(Device::Cpu).unwrap(), None);
    let [a, b] =
        [[1.0_f32, -2.0, f32::NEG_INFINITY], [1.0, -2.001, f32::NEG_INFINITY]].map(|xs| Tensor::from_slice(&xs));
    assert_eq!([Kind::Float, Kind::BFloat16].map(|kind| differing(&a, &b, kind)), [1, 0]);
    let broken = Tensor::from_slice(&[f32::NAN, -2.0, 0.0]);
    assert_eq!(differing(&broken, &a, Kind::BFloat16), 2);
    let before = unavailable();
    refuse("on this card `nf4` gives other numbers");
    assert_eq!(unavailable().as_deref(), Some("on this card `nf4` gives other numbers"));
    refuse("");
    assert_eq!(unavailable(), before);
}

#[test]
fn elementwise_kernels_are_equal_to_the_bit() {
    let (_turn, _emulated) = (rng::TURN.lock(), Emulated::begin());
    rng::seed(12);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for Case { name, inputs, number } in cases(9, 120, 200, kind, Device::Cpu) {
            if ["rotary", "rotary_backward", "dropout", "nf4", "packed_bias"].contains(&name) {
                let own = run(name, Way::Own, &inputs, number).unwrap();
                assert_eq!(own, run(name, Way::Chain, &inputs, number).unwrap(), "{name} in {kind:?}");
            }
        }
    }
}

/// A parameter with its gradient and moments in 8 bits.
struct Trained {
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
}

impl Trained {
    /// Views that begin at odd places; a block without a gradient where there is more than one.
    fn new(count: i64) -> Self {
        rng::seed(15);
        let zeros = |count: i64, kind| Tensor::zeros([count + 3], (kind, Device::Cpu)).narrow(0, 3, count);
        let random = || Tensor::randn([count + 1], (Kind::Float, Device::Cpu)).narrow(0, 1, count);
        let coded = || Coded { codes: zeros(count, Kind::Uint8), scales: zeros((count + 255) / 256, Kind::Float) };
        let (param, grad) = (random(), random() * 0.01);
        if count > 256 {
            let _ = grad.narrow(0, 0, 256).zero_();
        }
        let moments = Moments::Eight([coded(), coded()]);
        Self { param, grad, moments, step: Tensor::zeros([0; 0], (Kind::Float, Device::Cpu)) }
    }

    fn step(&self, rate: Rate, skip: f32, maps: &Maps, piece: i64) {
        let skip = Tensor::from(skip);
        let settings =
            Step { rate, betas: (0.9, 0.99), weight_decay: 0.1, epsilon: 1e-8, skip: &skip, maps: Some(maps), piece };
        let slot = Slot { param: &self.param, grad: &self.grad, moments: &self.moments, step: &self.step };
        adamw::step(&[slot], settings).unwrap();
    }

    fn tensors(&self) -> Vec<Tensor> {
        let moments = self.moments.named().into_iter().map(|(_, tensor)| tensor.copy());
        moments.chain([self.param.copy(), self.step.copy()]).collect()
    }
}

/// Sizes that end within a block, a warp and a block of threads; whole and in pieces from host memory; rates that the host
/// knows and others.
#[test]
fn steps_with_moments_in_8_bits_are_those_of_the_cpu_to_the_bit() {
    let _turn = rng::TURN.lock();
    let (maps, rate) = (Maps::new(Device::Cpu), Tensor::from(0.003_f32));
    for (count, piece) in [(1, 0), (5, 0), (256, 0), (257, 0), (4099, 0), (4099, 1024)] {
        let (own, cpu) = (Trained::new(count), Trained::new(count));
        for (i, rate) in [Rate::Number(0.01), Rate::OnDevice(&rate), Rate::Number(0.02)].into_iter().enumerate() {
            cpu.step(rate, 0.0, &maps, 0);
            let before = own.tensors();
            {
                let _emulated = Emulated::begin();
                own.step(rate, 0.0, &maps, piece);
            }
            assert_eq!(own.tensors(), cpu.tensors(), "{count} elements, step {i}");
            assert_ne!(own.tensors(), before);
        }
        let _emulated = Emulated::begin();
        own.step(Rate::Number(0.01), 1.0, &maps, piece);
        assert_eq!(own.tensors(), cpu.tensors(), "{count} elements: a step is left out");
    }
}

/// Halves of one projection, as of a fused gate and up; tables of each sequence; every second row.
#[test]
fn strided_tensors_and_tables_of_each_sequence_are_taken() {
    let _emulated = Emulated::begin();
    let options = (Kind::BFloat16, Device::Cpu);
    let both = Tensor::randn([2, 5, 48], options);
    let inputs = [both.narrow(2, 0, 24), both.narrow(2, 24, 24)];
    let [own, chain] = [Way::Own, Way::Chain].map(|way| run("swiglu", way, &inputs, 0.0).unwrap());
    assert_close(&own[0], &chain[0], Kind::BFloat16, "swiglu of halves");
    let angles = Tensor::randn([2, 5, 8], (Kind::Float, Device::Cpu));
    let tables = [angles.cos().to_kind(Kind::BFloat16), angles.sin().to_kind(Kind::BFloat16)];
    let inputs = [Tensor::randn([2, 5, 48], options), tables[0].shallow_clone(), tables[1].shallow_clone()];
    let [own, chain] = [Way::Own, Way::Chain].map(|way| run("rotary", way, &inputs, 0.0).unwrap());
    assert_eq!(own, chain);
}

/// As the language model asks for it: by the kernel, and by libtorch's operators.
#[test]
fn packed_bias_is_the_same_by_both_ways() {
    let blocks = Tensor::from_slice(&[0_i64, 0, 1, 1, 1, 2, 2, 3, 3, 0, 1, 1, 2, 2, 2, 2, 2, 3]).view([2, 9]);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let chain = packed_bias(&blocks, kind);
        let _emulated = Emulated::begin();
        let own = packed_bias(&blocks, kind);
        assert_eq!((own.size(), own.stride()), (chain.size(), chain.stride()));
        assert_eq!(bits(&own), bits(&chain), "{kind:?}");
        // the padding of rows, which attention on a card may load
        let [own, chain] = [own, chain].map(|bias| bias.as_strided([2, 9, 16], [144, 16, 1], 0));
        assert_eq!(bits(&own), bits(&chain), "{kind:?}");
    }
}

#[test]
fn tensors_that_a_kernel_cannot_take_are_left_to_libtorch() {
    let inputs = [Tensor::randn([4, 8], (Kind::Float, Device::Cpu)), Tensor::ones([8], (Kind::Float, Device::Cpu))];
    assert!(run("rms_norm", Way::Own, &inputs, 1e-5).is_err(), "not on the CPU");
    let _emulated = Emulated::begin();
    assert!(run("rms_norm", Way::Own, &inputs, 1e-5).is_ok());
    let doubles = inputs.map(|tensor| tensor.to_kind(Kind::Double));
    assert!(run("rms_norm", Way::Own, &doubles, 1e-5).is_err(), "not in fp64");
    let turned =
        [Tensor::randn([8, 4], (Kind::Float, Device::Cpu)).tr(), Tensor::ones([8], (Kind::Float, Device::Cpu))];
    assert!(run("rms_norm", Way::Own, &turned, 1e-5).is_err(), "not transposed");
    assert!(run("nothing", Way::Own, &turned, 0.0).is_err());
}

#[test]
fn nvrtc_compiles_every_kernel_for_every_card() {
    for capability in CAPABILITIES {
        let compiled = compile(capability).unwrap();
        assert!(compiled.is_native && compiled.code > Bytes(10_000), "{capability}: {compiled:?}");
    }
    // a card between two that the compiler knows gets PTX of the lower one; older ones are refused
    assert!(!compile(125).unwrap().is_native);
    assert!(compile(50).is_err());
}

#[test]
fn compiled_kernels_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    set_folder(folder.path());
    let first = compile(80).unwrap();
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.iter().any(|file| file.to_string_lossy().contains("sm_80")), "{files:?}");
    assert_eq!(compile(80).unwrap(), first);
    set_folder(Path::new(""));
}

#[test]
#[ignore = "needs CUDA"]
fn kernels_of_a_card_compute_what_libtorch_computes() {
    assert_eq!(unavailable(), None);
    check(Device::Cuda(0)).unwrap();
    assert_eq!(unavailable(), None);
    set_mode(Mode::On);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in SHAPES.into_iter().chain([(1024, 4096, 14336)]) {
            compare(rows, dim, wide, kind, Device::Cuda(0));
        }
    }
    set_mode(Mode::Off);
}

#[test]
#[ignore = "needs CUDA"]
fn kernels_are_timed() {
    set_mode(Mode::On);
    let timings = measure(Device::Cuda(0)).unwrap();
    set_mode(Mode::Off);
    for timing in &timings {
        let mut record = serde_json::to_value(timing).unwrap();
        record["kind"] = "kernel".into();
        #[expect(clippy::print_stdout, reason = "the numbers are what this is run for")]
        {
            println!("{record}");
        }
    }
    assert!(timings.iter().all(|t| t.own_us > 0.0 && t.chain_us > 0.0));
}
