//! Measures memory and speed of this machine for [`super::reading`]: what a process takes besides its tensors, and the
//! rates that operators reach.

use super::detect::{self, Detected};
use super::reading::{CONTEXT, CONVOLUTIONS, DeviceIdentity, DeviceReading, Level, PRODUCTS};
use super::speed::{ProductRate, Speed};
use super::{matmul, matmul::fastest, speed};
use crate::files;
use crate::tensor::graph::{CudaGraph, GraphPool, SideStream};
use crate::tensor::{self, Device, Kind, Tensor, async_copy, guard, kernels, ledger, memory, synchronize};
use crate::{Error, Result};
use rustix::fs::Advice;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

/// Sides of the square matrices of the timed products, from small to large: on a GPU, and on the CPU.
const SIDES: ([i64; 3], [i64; 3]) = ([1024, 4096, 8192], [128, 384, 1024]);
/// Seconds of each timed product and copy.
const SECONDS: f64 = 0.5;
/// Operators of the small chain whose time is measured.
const CHAIN: usize = 1000;
/// Bytes of a timed copy: on a GPU, and on the CPU.
const COPY: (i64, i64) = (512 << 20, 64 << 20);
/// Bytes of the file that is written and read.
const FILE: usize = 256 << 20;

/// A calibration in progress.
struct Calibration<'a> {
    device: Device,
    /// Memory that other processes use on the GPU, bytes. `None` without NVML: then the memory of this process cannot be
    /// separated from theirs.
    others: Option<u64>,
    levels: Vec<Level>,
    on_step: &'a mut dyn FnMut(&str),
}

/// Measures `device` and the disk of the folder `cache`, in less than a minute. `gpu`: what NVML says about the device.
/// Run it in a process that has not used `device` yet, or the first steps show no growth. `on_step` gets the name of
/// each step before it begins.
///
/// # Errors
/// [`Error::OutOfMemory`] (a GPU needs about 3 GiB of free memory) and other typed errors of libtorch, [`Error::Io`].
pub fn measure(
    device: Device,
    gpu: Option<&Detected>,
    cache: Option<&Path>,
    on_step: &mut dyn FnMut(&str),
) -> Result<DeviceReading> {
    ledger::install();
    let others = gpu.map(Detected::in_use);
    let mut calibration = Calibration { device, others, levels: Vec::new(), on_step };
    calibration.memory()?;
    let speed = calibration.speed(cache)?;
    let identity = identity(device, gpu)?;
    Ok(DeviceReading::new(identity, today(), calibration.levels, speed))
}

/// The identity of `device`, for which a reading is made or looked up. `gpu`: what NVML says about it.
///
/// # Errors
/// [`Error::Torch`] for a GPU that libtorch cannot use.
pub fn identity(device: Device, gpu: Option<&Detected>) -> Result<DeviceIdentity> {
    let (libtorch, num_threads) = (tensor::libtorch_version(), tensor::num_threads());
    if device == Device::Cpu {
        return Ok(DeviceIdentity { name: cpu_name(), libtorch, num_threads, ..DeviceIdentity::default() });
    }
    let bytes = match gpu {
        Some(gpu) => gpu.offered(),
        None => memory::read(device)?.system.device_total.map_or(0, |total| total.0),
    };
    Ok(DeviceIdentity {
        name: gpu.map_or_else(|| "GPU".into(), |gpu| gpu.name.clone()),
        bytes,
        capability: gpu.and_then(|gpu| gpu.capability),
        driver: detect::driver().ok().map(|driver| driver.version),
        libtorch,
        cudnn: tensor::cudnn_version(),
        num_threads,
    })
}

/// `CPU` and the model that the kernel names.
fn cpu_name() -> String {
    let text = files::read_to_string(Path::new("/proc/cpuinfo"), 1 << 22).unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(|| "CPU".into(), |(_, name)| format!("CPU {}", name.trim()))
}

/// Today's date in UTC, as 2026-11-22.
fn today() -> String {
    time::OffsetDateTime::now_utc().date().to_string()
}

impl Calibration<'_> {
    fn is_gpu(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }

    // --- memory

    /// Runs `work`, frees its tensors and reads the memory that stays in use. `work` returns the bytes of its own
    /// tensors at their peak, if it knows them.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<Option<u64>>) -> Result<()> {
        (self.on_step)(name);
        if self.device == Device::Cpu || !self.levels.is_empty() {
            memory::begin_window(self.device)?;
        }
        let before = if self.levels.is_empty() { 0 } else { memory::read(self.device)?.allocated.0 };
        let own = guard::guard(work)?;
        synchronize(self.device);
        let now = memory::read(self.device)?;
        let used = match self.device {
            Device::Cpu => Some(now.system.resident.0),
            _ => now.system.device_used.zip(self.others).map(|(used, others)| used.0.saturating_sub(others)),
        };
        self.levels.push(Level {
            step: name.into(),
            used,
            reserved: now.reserved.0,
            allocated: now.allocated.0,
            workspace: own.map(|own| now.allocated_peak.0.saturating_sub(before + own)),
        });
        Ok(())
    }

    fn memory(&mut self) -> Result<()> {
        let device = self.device;
        let half = Kind::BFloat16;
        let first = if self.is_gpu() { CONTEXT } else { "first tensor" };
        self.step(first, uncounted(|| drop(Tensor::zeros([1], (Kind::Float, device)))))?;
        self.step(PRODUCTS, uncounted(|| products(device, half)))?;
        self.step(CONVOLUTIONS, || Ok(Some(convolutions(device, half))))?;
        self.step("attention, forward and backward", uncounted(|| attention(device, half)))?;
        if !self.is_gpu() {
            return Ok(());
        }
        self.step("custom kernels", || kernels::check(device).map(|()| None))?;
        // without CUDA graphs there is nothing to measure
        self.step("a captured step", || Ok(captured(device).ok().and(None)))?;
        self.step("everything freed", || memory::release_cache(device).map(|_| None))
    }

    // --- speed

    fn speed(&mut self, cache: Option<&Path>) -> Result<Speed> {
        let sides = if self.is_gpu() { SIDES.0 } else { SIDES.1 };
        let mut rates = |kind| -> Result<Vec<ProductRate>> {
            let text = if kind == Kind::Float { "matrix products in fp32" } else { "matrix products in bf16" };
            (self.on_step)(text);
            sides.iter().map(|side| product_rate(self.device, kind, *side)).collect()
        };
        let (fp32, half) = (rates(Kind::Float)?, rates(Kind::BFloat16)?);
        (self.on_step)("copies and small operators");
        let bandwidth = guard::guard(|| Ok(copy_rate(self.device)))?;
        let operator = guard::guard(|| Ok(operator_seconds(self.device)))?;
        let (launch, host, bus) = if self.is_gpu() {
            // a GPU or driver without CUDA graphs keeps the assumption
            let launch = captured(self.device).unwrap_or(speed::LAUNCH);
            (launch, operator, Some(bus_rate(self.device)?))
        } else {
            (operator, 0.0, None)
        };
        let disk = cache.map(|folder| {
            (self.on_step)("disk");
            disk_rate(folder)
        });
        memory::release_cache(self.device)?;
        Ok(Speed { fp32, half, bandwidth, launch, host, bus, disk: disk.transpose()? })
    }
}

/// A step of a calibration that does not know the bytes of its tensors.
fn uncounted(work: impl FnOnce()) -> impl FnOnce() -> Result<Option<u64>> {
    || {
        work();
        Ok(None)
    }
}

/// A product and its backward pass.
fn products(device: Device, kind: Kind) {
    let [a, b] = [(); 2].map(|()| Tensor::randn([1024, 1024], (Kind::Float, device)).to_kind(kind));
    let a = a.set_requires_grad(true);
    a.matmul(&b).sum(Kind::Float).backward();
}

/// The convolutions that open the two image encoders at 1,024 and 336 pixels, and a depthwise one. Returns the bytes of
/// the largest one's tensors: input, result, their gradients and the weights'.
fn convolutions(device: Device, kind: Kind) -> u64 {
    // (channels in, channels out, kernel, stride, padding, groups, side)
    let cases: [(i64, i64, i64, i64, i64, i64, i64); 3] =
        [(3, 32, 3, 2, 1, 1, 1024), (3, 1024, 14, 14, 0, 1, 336), (256, 256, 3, 1, 1, 256, 256)];
    let mut most = 0;
    for (input, output, side, stride, padding, groups, pixels) in cases {
        let random = |shape: &[i64]| Tensor::rand(shape, (Kind::Float, device)).to_kind(kind).set_requires_grad(true);
        let (xs, weight) = (random(&[1, input, pixels, pixels]), random(&[output, input / groups, side, side]));
        let [stride, padding, dilation] = [stride, padding, 1].map(|n| [n, n]);
        let ys = xs.conv2d(&weight, None::<Tensor>, stride, padding, dilation, groups);
        let elements = 2 * (xs.numel() + weight.numel() + ys.numel());
        ys.sum(Kind::Float).backward();
        most = most.max(elements as u64 * tensor::kind_bytes(kind));
    }
    most
}

/// Attention of the language model's size and of the mask decoder's.
fn attention(device: Device, kind: Kind) {
    for (heads, tokens, size) in [(32, 768, 128), (8, 4096, 16)] {
        let random = || Tensor::rand([1, heads, tokens, size], (Kind::Float, device)).to_kind(kind);
        let q = random().set_requires_grad(true);
        let ys =
            Tensor::scaled_dot_product_attention(&q, &random(), &random(), None::<Tensor>, 0.0, false, None, false);
        ys.sum(Kind::Float).backward();
    }
}

/// Captures a chain of small kernels. Returns the seconds of one kernel in a replay.
fn captured(device: Device) -> Result<f64> {
    let _stream = SideStream::enter(device)?;
    let pool = GraphPool::new(device)?;
    let mut xs = guard::guard(|| Ok(Tensor::zeros([64], (Kind::Float, device))))?;
    let (graph, ()) = CudaGraph::capture(&pool, || {
        for _ in 0..CHAIN {
            xs += 1.0;
        }
        Ok(())
    })?;
    graph.replay()?;
    synchronize(device);
    let start = Instant::now();
    graph.replay()?;
    synchronize(device);
    Ok(start.elapsed().as_secs_f64() / CHAIN as f64)
}

fn product_rate(device: Device, kind: Kind, side: i64) -> Result<ProductRate> {
    let flops_per_s = matmul::rate_of_side(device, kind, side, SECONDS)?;
    Ok(ProductRate { flops: 2.0 * (side as f64).powi(3), flops_per_s })
}

/// Bytes that a copy within the device reads and writes, per second.
fn copy_rate(device: Device) -> f64 {
    let bytes = if device == Device::Cpu { COPY.1 } else { COPY.0 };
    let (from, mut to) = (Tensor::ones([bytes], (Kind::Uint8, device)), Tensor::zeros([bytes], (Kind::Uint8, device)));
    2.0 * bytes as f64 / fastest(device, SECONDS, || to.copy_(&from))
}

/// Seconds of a small operator with autograd, on the CPU's side: half of them run forward and half of them backward.
fn operator_seconds(device: Device) -> f64 {
    let xs = Tensor::ones([64], (Kind::Float, device)).set_requires_grad(true);
    let chain = || {
        let mut ys = xs.shallow_clone();
        for _ in 0..CHAIN / 2 {
            ys = ys.multiply_scalar(1.0);
        }
        ys.sum(Kind::Float).backward();
    };
    fastest(device, SECONDS, chain) / CHAIN as f64
}

/// Bytes per second from pinned memory of the host to the GPU.
fn bus_rate(device: Device) -> Result<f64> {
    let bytes = COPY.0 / 2;
    let from = async_copy::pinned(&Tensor::ones([bytes], (Kind::Uint8, Device::Cpu)))?;
    guard::guard(|| {
        let mut to = Tensor::zeros([bytes], (Kind::Uint8, device));
        Ok(bytes as f64 / fastest(device, SECONDS, || to.copy_(&from)))
    })
}

/// Bytes per second read from a new file in `folder` that is not in the page cache.
fn disk_rate(folder: &Path) -> Result<f64> {
    files::create_folders(folder).map_err(Error::io(folder, "create"))?;
    let mut file = tempfile::tempfile_in(folder).map_err(Error::io(folder, "write"))?;
    let mut block = vec![0_u8; 1 << 20];
    // no run of equal bytes, for file systems that compress
    block.iter_mut().zip(0_u32..).for_each(|(byte, i)| *byte = i.wrapping_mul(2_654_435_761).to_le_bytes()[3]);
    let blocks = FILE / block.len();
    for _ in 0..blocks {
        file.write_all(&block).map_err(Error::io(folder, "write"))?;
    }
    file.sync_all().map_err(Error::io(folder, "write"))?;
    // where the advice is not taken, the rate is that of the page cache
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    std::io::Seek::rewind(&mut file).map_err(Error::io(folder, "read"))?;
    let start = Instant::now();
    for _ in 0..blocks {
        file.read_exact(&mut block).map_err(Error::io(folder, "read"))?;
    }
    Ok(FILE as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::reading;

    #[test]
    fn a_cpu_is_measured_saved_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut steps = Vec::new();
        let reading = measure(Device::Cpu, None, Some(folder.path()), &mut |step| steps.push(step.to_owned())).unwrap();
        assert!(reading.speed.is_valid(), "{:?}", reading.speed);
        assert_eq!(steps[0], "first tensor");
        assert_eq!(steps.last().unwrap(), "disk");
        assert_eq!(reading.memory.len(), 4);
        assert!(reading.memory.iter().all(|level| level.used.is_some_and(|used| used > 50 << 20)));
        let rates = &reading.speed.fp32;
        assert!(rates.windows(2).all(|pair| pair[0].flops < pair[1].flops), "{rates:?}");
        assert!((1e-8..1e-2).contains(&reading.speed.launch) && reading.speed.host == 0.0);
        assert_eq!((reading.date.len(), &reading.date[..2]), (10, "20"));
        reading::save(folder.path(), &reading).unwrap();
        let identity = identity(Device::Cpu, None).unwrap();
        assert_eq!(reading::find(Some(folder.path()), &identity), (Some(reading), None));
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["readings"], "the file of the disk's measurement is gone");
    }
}
