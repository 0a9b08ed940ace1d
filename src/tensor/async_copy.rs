//! Asynchronous copies between pinned CPU memory and a GPU (`native/async_copy.cpp`): of large tensors to the GPU on a
//! separate stream, and of small tensors in both directions on the compute stream.
//!
//! The CPU needs no copies. **Not yet run on a GPU.**

use super::{Device, Kind, META, Result, Tensor, native};
use prsmed_base::units::Bytes;
use std::ffi::c_void;

/// A copy of a CPU tensor in pinned memory, from which a GPU reads at the full rate of the bus.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] without a GPU, or if the system has no more memory to pin.
pub fn pinned(host: &Tensor) -> Result<Tensor> {
    // SAFETY: a live tensor; an owned one is written when no message is returned.
    unsafe { native::made(|out| native::prsmed_pinned_copy(native::raw(host), out)) }
}

/// Uninitialized pinned memory of `bytes` bytes.
///
/// # Panics
/// With [`prsmed_base::Error::Config`] without a GPU, or if the system has no more memory to pin.
pub(super) fn pinned_empty(bytes: i64) -> Tensor {
    // SAFETY: an owned tensor is written when no message is returned.
    let made = unsafe { native::made(|out| native::prsmed_pinned_empty(bytes, out)) };
    made.unwrap_or_else(|error| {
        let size = Bytes(u64::try_from(bytes).unwrap_or_default());
        let hint = "lower `model.stream_layers`, or free host memory";
        let reason = format!("the system cannot pin {size} more of host memory: {error}");
        native::raise(prsmed_base::Error::config("model.stream_layers", reason, hint))
    })
}

/// Asynchronous copies to one GPU. Do not use the copied tensors before [`Self::complete`].
#[derive(Debug)]
#[must_use]
pub struct AsyncCopy {
    gpu: i32,
    pending: Vec<*mut c_void>,
}

// SAFETY: the pending copies are events of the GPU, which any thread may wait for; one owner uses them at a time.
unsafe impl Send for AsyncCopy {}

impl AsyncCopy {
    /// Starts a set of copies to `device`; `None` if that is the CPU.
    pub fn to(device: Device) -> Option<Self> {
        let Device::Cuda(gpu) = device else { return None };
        Some(Self { gpu: i32::try_from(gpu).expect("a few GPUs"), pending: Vec::new() })
    }

    /// Starts to copy a CPU tensor. Returns the tensor on the GPU.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn send(&mut self, host: &Tensor) -> Tensor {
        self.send_from(host, false)
    }

    /// As [`Self::send`], for a tensor of [`pinned_empty`], which must not change before the copy is complete.
    pub(super) fn send_pinned(&mut self, host: &Tensor) -> Tensor {
        self.send_from(host, true)
    }

    fn send_from(&mut self, host: &Tensor, is_pinned: bool) -> Tensor {
        let (host, mut completion) = (native::raw(host), std::ptr::null_mut());
        // SAFETY: the tensor outlives the call; `out` and `completion` are set when no message is returned.
        let sent = native::result(|out| unsafe {
            native::prsmed_async_copy_send(host, is_pinned, self.gpu, out, &raw mut completion)
        });
        self.pending.push(completion);
        sent
    }

    /// Makes the compute stream wait for the copies. The CPU does not wait.
    pub fn complete(self) {
        drop(self);
    }
}

impl Drop for AsyncCopy {
    /// Waits for the copies, because the memory of an unfinished copy must not be reused. Panics with libtorch's message,
    /// like its operators, if the GPU cannot: a tensor that is read before its copy is complete would be wrong.
    fn drop(&mut self) {
        let mut failed = None;
        for completion in self.pending.drain(..) {
            // SAFETY: each arrival comes from `prsmed_async_copy_send` and is given back once.
            let completed = unsafe { native::check(native::prsmed_async_copy_complete(completion)) };
            failed = failed.or(completed.err());
        }
        if let Some(error) = failed.filter(|_| !std::thread::panicking()) {
            native::raise(error);
        }
    }
}

/// Small tensors that are copied to a device as one block of bytes. The result is views of that block.
#[derive(Debug, Default)]
pub struct Bundle {
    bytes: Vec<u8>,
    parts: Vec<BlockPart>,
}

/// A tensor of a [`Bundle`]: its place among the tensors that [`Bundle::send`] returns.
#[derive(Debug, Clone, Copy)]
pub struct BundlePlace(usize);

/// A tensor inside a block of bytes.
#[derive(Debug, Clone)]
pub(super) struct BlockPart {
    start: usize,
    kind: Kind,
    shape: Vec<i64>,
}

impl BlockPart {
    /// Every tensor begins at a multiple of this number of bytes, as the first one does.
    pub(super) const ALIGNMENT: usize = 64;

    /// A place for a tensor after the first `end` bytes, which is then set to its end.
    pub(super) fn after(end: &mut usize, kind: Kind, shape: &[i64]) -> Self {
        let part = Self { start: end.next_multiple_of(Self::ALIGNMENT), kind, shape: shape.to_vec() };
        *end = part.start + part.bytes();
        part
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.shape.iter().product::<i64>()).expect("a shape") * self.kind.elt_size_in_bytes()
    }

    /// The tensor as a view of `block`.
    pub(super) fn of(&self, block: &Tensor) -> Tensor {
        let [start, bytes] = [self.start, self.bytes()].map(|n| i64::try_from(n).expect("a block of bytes"));
        block.narrow(0, start, bytes).view_dtype(self.kind).view(self.shape.as_slice())
    }
}

impl Bundle {
    /// Adds an i64 tensor.
    pub fn numbers(&mut self, values: &[i64], shape: &[i64]) -> BundlePlace {
        self.add(Kind::Int64, shape, values.iter().flat_map(|value| value.to_ne_bytes()))
    }

    /// Adds an i32 tensor.
    pub fn short_numbers(&mut self, values: &[i32], shape: &[i64]) -> BundlePlace {
        self.add(Kind::Int, shape, values.iter().flat_map(|value| value.to_ne_bytes()))
    }

    /// Adds a bool tensor.
    pub fn flags(&mut self, values: &[bool], shape: &[i64]) -> BundlePlace {
        self.add(Kind::Bool, shape, values.iter().map(|value| u8::from(*value)))
    }

    /// Adds an f32 tensor.
    pub fn floats(&mut self, values: &[f32], shape: &[i64]) -> BundlePlace {
        self.add(Kind::Float, shape, values.iter().flat_map(|value| value.to_ne_bytes()))
    }

    fn add(&mut self, kind: Kind, shape: &[i64], bytes: impl Iterator<Item = u8>) -> BundlePlace {
        let part = BlockPart::after(&mut self.bytes.len(), kind, shape);
        self.bytes.resize(part.start, 0);
        self.bytes.extend(bytes);
        self.parts.push(part);
        BundlePlace(self.parts.len() - 1)
    }

    /// Copies everything to `device` without waiting for it.
    ///
    /// # Panics
    /// With libtorch's message, like its operators; also for a shape that does not fit its values.
    pub fn send(self, device: Device) -> Sent {
        let block = send_small(&Tensor::from_slice(&self.bytes), device);
        Sent(self.parts.iter().map(|part| part.of(&block)).collect())
    }
}

/// The tensors of a [`Bundle`] on a device.
#[derive(Debug)]
pub struct Sent(Vec<Tensor>);

impl Sent {
    /// The tensor at `place` of this bundle.
    pub fn get(&self, place: BundlePlace) -> Tensor {
        self.0[place.0].shallow_clone()
    }
}

/// A small tensor of the CPU on `device`. The CPU does not wait for a GPU. A tensor that is there already stays.
fn send_small(host: &Tensor, device: Device) -> Tensor {
    let Device::Cuda(gpu) = device else { return host.to_device(device) };
    if host.device() == device {
        return host.shallow_clone();
    }
    let gpu = i32::try_from(gpu).expect("a few GPUs");
    // SAFETY: the tensor outlives the call; an owned one is written when no message is returned.
    native::result(|out| unsafe { native::prsmed_send_small(native::raw(host), gpu, out) })
}

/// A tensor that a device computes and the CPU reads later.
#[derive(Debug)]
pub struct Fetch(State);

#[derive(Debug)]
enum State {
    Here(Tensor),
    Pending(*mut c_void),
}

impl Fetch {
    /// Starts to copy `tensor` to the host. The CPU does not wait for a GPU, and the GPU may reuse the tensor's memory
    /// at once. A tensor of the CPU or of the meta device is not copied.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn begin(tensor: &Tensor) -> Self {
        let Device::Cuda(_) = tensor.device() else { return Self(State::Here(tensor.detach())) };
        let null = std::ptr::null_mut();
        // SAFETY: the tensor outlives the call; the handle is written when no message is returned.
        let begun = unsafe { native::written(null, |out| native::prsmed_fetch_begin(native::raw(tensor), out)) };
        Self(State::Pending(begun.unwrap_or_else(|error| native::raise(error))))
    }

    /// True if [`Self::tensor`] would not wait.
    ///
    /// # Errors
    /// An error of the GPU in earlier work.
    pub fn is_complete(&self) -> Result<bool> {
        let State::Pending(handle) = self.0 else { return Ok(true) };
        // SAFETY: the handle is open until `tensor` or `drop`.
        unsafe { native::written(false, |out| native::prsmed_fetch_is_complete(handle, out)) }
    }

    /// The tensor on the host. Waits for the GPU.
    ///
    /// # Errors
    /// An error of the GPU in earlier work.
    pub fn tensor(mut self) -> Result<Tensor> {
        match std::mem::replace(&mut self.0, State::Here(Tensor::new())) {
            State::Here(tensor) => Ok(tensor),
            // SAFETY: the handle is closed once, here; on success an owned tensor is written.
            State::Pending(handle) => unsafe { native::made(|out| native::prsmed_fetch_end(handle, out)) },
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if let State::Pending(handle) = self.0 {
            // SAFETY: the handle is closed once, here.
            let ended = unsafe { native::check(native::prsmed_fetch_end(handle, std::ptr::null_mut())) };
            debug_assert!(ended.is_ok(), "{ended:?}");
        }
    }
}

/// Numbers that a device computes and the CPU reads later.
#[derive(Debug)]
pub struct ReadBack {
    count: usize,
    /// fp64 `[count]`; `None` without numbers.
    numbers: Option<Fetch>,
}

impl ReadBack {
    /// Starts to read scalars, without waiting for a GPU. Meta tensors read as 1. Scalars of the CPU beside some of a GPU
    /// are sent there first.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn begin(scalars: &[Tensor]) -> Self {
        let count = scalars.len();
        let Some(first) = scalars.first() else { return Self { count, numbers: None } };
        let number = |scalar: &Tensor| send_small(&scalar.detach().to_kind(Kind::Double), first.device());
        let all: Vec<Tensor> = scalars.iter().map(number).collect();
        Self { count, numbers: Some(Fetch::begin(&Tensor::stack(&all, 0))) }
    }

    /// True if [`Self::numbers`] would not wait.
    ///
    /// # Errors
    /// An error of the GPU in earlier work.
    pub fn is_complete(&self) -> Result<bool> {
        self.numbers.as_ref().map_or(Ok(true), Fetch::is_complete)
    }

    /// The numbers, in the order of the scalars. Waits for the GPU.
    ///
    /// # Errors
    /// An error of the GPU in earlier work.
    pub fn numbers(self) -> Result<Vec<f64>> {
        let Some(numbers) = self.numbers else { return Ok(Vec::new()) };
        let numbers = numbers.tensor()?;
        if numbers.device() == META {
            return Ok(vec![1.0; self.count]);
        }
        Ok((0..self.count).map(|i| numbers.double_value(&[i64::try_from(i).expect("few")])).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default_device;

    #[test]
    fn a_bundle_gives_back_its_tensors() {
        let mut bundle = Bundle::default();
        let flags = bundle.flags(&[true, false, true], &[3]);
        let numbers = bundle.numbers(&[7, -1, i64::MAX, i64::MIN], &[2, 2]);
        let floats = bundle.floats(&[0.5, f32::MAX], &[2, 1]);
        let none = bundle.numbers(&[], &[0, 4]);
        let sent = bundle.send(Device::Cpu);
        assert_eq!(sent.get(flags), Tensor::from_slice(&[true, false, true]));
        assert_eq!(sent.get(numbers), Tensor::from_slice(&[7, -1, i64::MAX, i64::MIN]).view([2, 2]));
        assert_eq!(sent.get(floats), Tensor::from_slice(&[0.5, f32::MAX]).view([2, 1]));
        assert_eq!((sent.get(none).size(), sent.get(none).kind()), (vec![0, 4], Kind::Int64));
        let places: Vec<usize> = [flags, numbers, floats].map(|place| sent.get(place).data_ptr() as usize).into();
        assert!(places.iter().all(|place| place % BlockPart::ALIGNMENT == 0), "{places:?}");
    }

    #[test]
    fn numbers_are_read_in_their_order() {
        let scalars: Vec<Tensor> = [2.5, f64::NAN, -1e300].iter().map(|x| Tensor::from(*x)).collect();
        let read = ReadBack::begin(&scalars);
        assert!(read.is_complete().unwrap());
        let numbers = read.numbers().unwrap();
        assert!(numbers[0] == 2.5 && numbers[1].is_nan() && numbers[2] == -1e300 && numbers.len() == 3);
        assert!(ReadBack::begin(&[]).numbers().unwrap().is_empty());
    }

    #[test]
    fn the_cpu_needs_no_copies() {
        assert!(AsyncCopy::to(Device::Cpu).is_none() && AsyncCopy::to(crate::META).is_none());
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn a_completed_copy_has_the_values_of_its_source() {
        let gpu = default_device();
        let host: Vec<Tensor> = (0..8).map(|i| Tensor::full([1 << 20], i, (Kind::Uint8, Device::Cpu))).collect();
        for _ in 0..20 {
            let mut copy = AsyncCopy::to(gpu).expect("a GPU");
            let there: Vec<Tensor> = host.iter().map(|tensor| copy.send(tensor)).collect();
            copy.complete();
            for (sent, completed) in host.iter().zip(there) {
                assert_eq!(*sent, completed.to_device(Device::Cpu));
            }
        }
    }
}
