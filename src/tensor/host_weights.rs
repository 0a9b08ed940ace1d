//! Frozen weights of layers that stay in host memory and are copied to the device for each use.
//!
//! The tensors of a layer share one block of bytes, in pinned memory if the device is a GPU, so that one copy brings them
//! all. On a GPU, the copy of the next layer runs on a separate stream while the current layer computes, so the weights of
//! two layers are on the GPU at a time. The next layer is the following one; where gradients are enabled (in the backward
//! pass, which recomputes a layer) it is the one before.
//!
//! On the CPU a layer is copied when it is used. That saves no memory there; it serves tests. **Not yet run on a GPU.**

use super::async_copy::{AsyncCopy, Part, pinned_empty};
use super::{Device, Kind, META, Tensor, ledger, meta, native, no_grad};
use crate::units::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// An uninitialized tensor in the host memory of a computation on `device`. In a planned GPU run, where host memory is
/// not counted, one expanded number represents it ([`is_stand_in`]).
pub fn host_tensor(shape: &[i64], kind: Kind, device: Device) -> Tensor {
    match device {
        META if meta::target() == meta::Target::Cuda => {
            Tensor::zeros(vec![1; shape.len()], (kind, Device::Cpu)).expand(shape, false)
        }
        META => Tensor::empty(shape, (kind, META)),
        _ => Tensor::empty(shape, (kind, Device::Cpu)),
    }
}

/// True if `tensor` represents a tensor of a planned GPU run's host memory. It must not be written to.
pub fn is_stand_in(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && meta::target() == meta::Target::Cuda
}

/// A layer whose frozen weights can be in host memory.
pub trait FrozenLayer: Sized {
    /// This layer with `copy(tensor)` in place of each frozen tensor, in a fixed order. Trained tensors are shared.
    #[must_use]
    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self;
}

/// The frozen weights of consecutive layers, in host memory.
#[derive(Debug)]
pub struct HostWeights {
    device: Device,
    layers: Vec<Layer>,
    /// The layer whose copy was started ahead of its use.
    ahead: Mutex<Option<Copied>>,
    sent: AtomicU64,
}

#[derive(Debug)]
struct Layer {
    parts: Vec<Part>,
    bytes: i64,
    /// The bytes of all tensors; `None` in a planned GPU run.
    block: Option<Tensor>,
}

/// A layer's block on the device.
#[derive(Debug)]
struct Copied {
    layer: usize,
    block: Tensor,
    copy: Option<AsyncCopy>,
}

impl HostWeights {
    /// Moves the frozen tensors of each layer into one block. All handles of a tensor stay valid and show the moved
    /// values.
    ///
    /// The tensors come from [`host_tensor`] and are contiguous; `device` computes. Without `keeps_values` the content is
    /// undefined, for a checkpoint to fill.
    ///
    /// # Panics
    /// With libtorch's message, like its operators, for example if the system has no more memory to pin.
    pub fn of<'a, L: FrozenLayer + 'a>(
        layers: impl Iterator<Item = &'a L>,
        device: Device,
        keeps_values: bool,
    ) -> Self {
        let frozen = |layer: &L| {
            let mut tensors = Vec::new();
            let _same = layer.copied(&mut |tensor| {
                tensors.push(tensor.shallow_clone());
                tensor.shallow_clone()
            });
            tensors
        };
        Self::new(layers.map(frozen).collect(), device, keeps_values)
    }

    fn new(layers: Vec<Vec<Tensor>>, device: Device, keeps_values: bool) -> Self {
        let layers = layers.into_iter().map(|tensors| Layer::packed(tensors, device, keeps_values)).collect();
        Self { device, layers, ahead: Mutex::new(None), sent: AtomicU64::new(0) }
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// True without layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Host memory of all layers. Pinned memory comes in powers of two.
    pub fn bytes(&self) -> Bytes {
        let rounded = |bytes: i64| u64::try_from(bytes).expect("a size").next_power_of_two();
        Bytes(self.layers.iter().map(|layer| rounded(layer.bytes)).sum())
    }

    /// Bytes that were copied to the device so far.
    pub fn sent(&self) -> Bytes {
        Bytes(self.sent.load(Ordering::Relaxed))
    }

    /// Runs `work` on layer `i` of a model: on a copy on the device if its frozen weights are here.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn with<L: FrozenLayer, T>(&self, i: usize, layer: &L, work: impl FnOnce(&L) -> T) -> T {
        if i >= self.len() {
            return work(layer);
        }
        let mut weights = self.fetch(i).into_iter();
        work(&layer.copied(&mut |_| weights.next().expect("as many tensors as were moved")))
    }

    /// The tensors of `layer` on the device, in the order of [`FrozenLayer::copied`]. Starts the copy of the next layer.
    fn fetch(&self, layer: usize) -> Vec<Tensor> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let copied = ahead.take().filter(|copied| copied.layer == layer);
        let copied = copied.unwrap_or_else(|| self.send(layer));
        // SAFETY: reads a thread-local flag.
        let is_backward = unsafe { native::prsmed_grad_enabled() };
        let next = if is_backward { layer.checked_sub(1) } else { Some(layer + 1).filter(|next| *next < self.len()) };
        if self.copies_ahead() {
            *ahead = next.map(|next| self.send(next));
        }
        if let Some(copy) = copied.copy {
            copy.complete();
        }
        self.layers[layer].parts.iter().map(|part| part.of(&copied.block)).collect()
    }

    fn copies_ahead(&self) -> bool {
        match self.device {
            META => meta::target() == meta::Target::Cuda,
            device => device != Device::Cpu,
        }
    }

    fn send(&self, layer: usize) -> Copied {
        let _category = ledger::enter(ledger::Category::Frozen);
        let Layer { bytes, block, .. } = &self.layers[layer];
        self.sent.fetch_add(u64::try_from(*bytes).expect("a size"), Ordering::Relaxed);
        let mut copy = AsyncCopy::to(self.device);
        let block = match (block, &mut copy) {
            (Some(block), Some(copy)) => copy.send_pinned(block),
            (Some(block), None) if self.device == Device::Cpu => block.copy(),
            _ => Tensor::empty([*bytes], (Kind::Uint8, self.device)),
        };
        Copied { layer, block, copy }
    }
}

impl Layer {
    fn packed(tensors: Vec<Tensor>, device: Device, keeps_values: bool) -> Self {
        let _category = ledger::enter(ledger::Category::Frozen);
        let mut end = 0;
        let parts: Vec<Part> =
            tensors.iter().map(|tensor| Part::after(&mut end, tensor.kind(), &tensor.size())).collect();
        let bytes = i64::try_from(end).expect("a layer");
        let block = match device {
            META if meta::target() == meta::Target::Cuda => return Self { parts, bytes, block: None },
            Device::Cuda(_) => pinned_empty(bytes),
            _ => Tensor::empty([bytes], (Kind::Uint8, device)),
        };
        no_grad(|| {
            for (mut tensor, part) in tensors.into_iter().zip(&parts) {
                let mut moved = part.of(&block);
                if keeps_values {
                    moved.copy_(&tensor);
                }
                tensor.set_data(&moved);
            }
        });
        Self { parts, bytes, block: Some(block) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(count: i64) -> Vec<Vec<Tensor>> {
        let weight = |layer: i64| Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) + layer * 10;
        let codes = |layer: i64| Tensor::full([5, 1], layer, (Kind::Uint8, Device::Cpu));
        (0..count).map(|layer| vec![weight(layer), codes(layer)]).collect()
    }

    #[test]
    fn fetched_weights_equal_those_that_were_moved_and_handles_see_later_writes() {
        let layers = layers(3);
        let handles: Vec<Tensor> = layers.iter().map(|layer| layer[0].shallow_clone()).collect();
        let before: Vec<Vec<Tensor>> = layers.iter().map(|layer| layer.iter().map(Tensor::copy).collect()).collect();
        let weights = HostWeights::new(layers, Device::Cpu, true);
        for (layer, before) in before.iter().enumerate() {
            assert_eq!(&weights.fetch(layer), before, "layer {layer}");
        }
        // a file that is loaded later writes through the handles
        let _ = handles[1].shallow_clone().fill_(7.0);
        assert_eq!(weights.fetch(1)[0], Tensor::full([2, 3], 7.0, (Kind::Float, Device::Cpu)));
        assert_eq!(weights.fetch(1)[1], before[1][1]);
    }

    #[test]
    fn copies_and_host_memory_are_counted() {
        let weights = HostWeights::new(layers(2), Device::Cpu, true);
        assert_eq!(weights.sent(), Bytes(0));
        drop(weights.fetch(0));
        // 24 bytes, and 5 at the next multiple of 64
        assert_eq!(weights.sent(), Bytes(69));
        assert_eq!(weights.bytes(), Bytes(2 * 128));
        assert_eq!((weights.len(), weights.is_empty()), (2, false));
    }

    #[test]
    fn a_planned_gpu_has_two_layers_at_a_time_and_no_host_memory() {
        meta::install().unwrap();
        let _target = meta::enter_target(meta::Target::Cuda);
        let shape = [1 << 20, 1 << 10];
        let host = || vec![host_tensor(&shape, Kind::Float, META)];
        let weights = HostWeights::new((0..3).map(|_| host()).collect(), META, true);
        assert!(is_stand_in(&host()[0]));
        let ahead = || weights.ahead.lock().unwrap().as_ref().map(|copied| copied.layer);
        let mut order = Vec::new();
        no_grad(|| {
            for layer in 0..3 {
                assert_eq!(weights.fetch(layer)[0].size(), shape);
                order.push(ahead());
            }
        });
        for layer in (0..3).rev() {
            assert_eq!(weights.fetch(layer)[0].device(), META);
            order.push(ahead());
        }
        assert_eq!(order, [Some(1), Some(2), None, Some(1), Some(0), None]);
        assert_eq!(weights.sent(), Bytes(6 << 32), "no layer was copied twice in a pass");
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn a_gpu_computes_with_the_values_of_the_host() {
        let device = crate::tensor::default_device();
        // copies of 64 MiB take longer than the kernels that read them
        let host = |layer: i64| vec![Tensor::full([1 << 24], layer, (Kind::Float, Device::Cpu))];
        let weights = HostWeights::new((0..8).map(host).collect(), device, true);
        for _ in 0..20 {
            // forward, and with gradients backward
            let mut sums: Vec<(usize, Tensor)> =
                no_grad(|| (0..8).map(|layer| (layer, weights.fetch(layer)[0].mean(Kind::Float))).collect());
            sums.extend((0..8).rev().map(|layer| (layer, weights.fetch(layer)[0].mean(Kind::Float))));
            for (layer, sum) in sums {
                assert_eq!(sum.double_value(&[]), layer as f64);
            }
        }
    }
}
