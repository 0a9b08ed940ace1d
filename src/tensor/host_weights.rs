//! Frozen weights of layers that are not on the device as a whole: they stay in host memory and are copied to the device
//! for each use, or several ranks divide them and collect a layer for each use.
//!
//! The tensors of a layer share one block of bytes, in pinned memory if the device is a GPU, so that one copy brings them
//! all. On a GPU, the copy of the next layer runs on a separate stream while the current layer computes, so the weights of
//! two layers are on the GPU at a time. The next layer is the following one; where gradients are enabled (in the backward
//! pass, which recomputes a layer) it is the one before.
//!
//! On the CPU a layer is copied when it is used. That saves no memory there; it serves tests.
//!
//! Divided layers ([`HostWeights::divided`]): the block of a layer is cut into as many equal parts as there are ranks, and
//! each rank keeps one, on its device or in its host memory. A layer is collected one layer ahead of its use too, on the
//! CPU as on a GPU. All ranks must use the layers equally often: a rank without work calls [`HostWeights::join_pass`].
//!
//! **Not yet run on a GPU.**

use super::async_copy::{AsyncCopy, BlockPart, pinned_empty};
use super::collective::{Peers, Pending};
use super::{Device, Kind, META, Tensor, ledger, meta, native, no_grad};
use prsmed_base::Result;
use prsmed_base::units::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// An uninitialized tensor in the host memory of a computation on `device`. In a planned GPU run, where host memory is
/// not counted, one expanded number represents it ([`is_stand_in`]).
pub fn host_tensor(shape: &[i64], kind: Kind, device: Device) -> Tensor {
    match device {
        META if meta::target() == meta::PlanTarget::Cuda => {
            Tensor::zeros(vec![1; shape.len()], (kind, Device::Cpu)).expand(shape, false)
        }
        META => Tensor::empty(shape, (kind, META)),
        _ => Tensor::empty(shape, (kind, Device::Cpu)),
    }
}

/// True if `tensor` represents a tensor of a planned GPU run's host memory. It must not be written to.
pub fn is_stand_in(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && meta::target() == meta::PlanTarget::Cuda
}

/// A layer whose frozen weights can be in host memory.
pub trait FrozenLayer: Sized {
    /// This layer with `copy(tensor)` in place of each frozen tensor, in a fixed order. Trained tensors are shared.
    #[must_use]
    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self;
}

/// The frozen weights of consecutive layers, in host memory or divided among ranks.
#[derive(Debug)]
pub struct HostWeights {
    device: Device,
    layers: Vec<Layer>,
    /// The ranks that divide the layers, if they do.
    peers: Option<Peers>,
    /// The layer whose copy was started ahead of its use.
    ahead: Mutex<Option<Copied>>,
    sent: AtomicU64,
    collected: AtomicU64,
}

#[derive(Debug)]
struct Layer {
    /// Handles of the tensors.
    tensors: Vec<Tensor>,
    parts: Vec<BlockPart>,
    /// Size of the block.
    bytes: i64,
    /// The bytes of all tensors, or this rank's part of them; `None` for host memory of a planned GPU run.
    block: Option<Tensor>,
    /// Whether `block` is in the host memory of a computation on a GPU.
    is_on_host: bool,
}

/// A layer's block on the device.
#[derive(Debug)]
struct Copied {
    layer: usize,
    block: Tensor,
    copy: Option<AsyncCopy>,
    gather: Vec<Pending>,
}

impl HostWeights {
    /// Moves the frozen tensors of each layer into one block. All handles of a tensor stay valid and show the moved
    /// values.
    ///
    /// The tensors come from [`host_tensor`] and are contiguous; `device` computes. Without `keeps_values` the content is
    /// undefined, for a checkpoint to fill. `ranks`: the number of processes that will divide the layers; 1 if none.
    ///
    /// # Panics
    /// With libtorch's message, like its operators, for example if the system has no more memory to pin.
    pub fn of<'a, L: FrozenLayer + 'a>(
        layers: impl Iterator<Item = &'a L>,
        device: Device,
        keeps_values: bool,
        ranks: usize,
    ) -> Self {
        let frozen = |layer: &L| {
            let mut tensors = Vec::new();
            let _same = layer.copied(&mut |tensor| {
                tensors.push(tensor.shallow_clone());
                tensor.shallow_clone()
            });
            tensors
        };
        Self::new(layers.map(frozen).collect(), device, keeps_values, ranks)
    }

    fn new(layers: Vec<Vec<Tensor>>, device: Device, keeps_values: bool, ranks: usize) -> Self {
        let packed = |tensors| Layer::packed(tensors, device, keeps_values, ranks);
        Self::with_layers(layers.into_iter().map(packed).collect(), device, None)
    }

    fn with_layers(layers: Vec<Layer>, device: Device, peers: Option<Peers>) -> Self {
        let ahead = Mutex::new(None);
        Self { device, layers, peers, ahead, sent: AtomicU64::new(0), collected: AtomicU64::new(0) }
    }

    /// These layers, divided among `peers`, with the values that the first rank has. The parts of the first `on_host`
    /// layers stay in host memory. Handles of the tensors are empty afterwards, except on the first rank if it
    /// `keeps_whole`.
    ///
    /// The layers were made for as many ranks ([`HostWeights::of`]).
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] if another rank does not answer.
    pub fn divided(&self, peers: &Peers, on_host: usize, keeps_whole: bool) -> Result<Self> {
        let keeps_whole = keeps_whole && peers.rank == 0;
        let divide = |(i, layer): (usize, &Layer)| layer.divided(peers, self.device, i < on_host, keeps_whole);
        let layers = self.layers.iter().enumerate().map(divide).collect::<Result<_>>()?;
        Ok(Self::with_layers(layers, self.device, Some(peers.clone())))
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// True without layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// True if several ranks divide the layers.
    pub fn is_divided(&self) -> bool {
        self.peers.is_some() && !self.is_empty()
    }

    /// Host memory of all layers. Pinned memory comes in powers of two.
    pub fn bytes(&self) -> Bytes {
        let rounded = |bytes: i64| u64::try_from(bytes).expect("a size").next_power_of_two();
        let on_host = self.layers.iter().filter(|layer| layer.is_on_host);
        Bytes(on_host.map(|layer| rounded(self.own_bytes(layer))).sum())
    }

    /// Size of the largest layer that ranks divide; 0 if they divide none.
    pub fn divided_block(&self) -> Bytes {
        let divided = self.layers.iter().filter(|_| self.is_divided());
        Bytes(divided.map(|layer| u64::try_from(layer.bytes).expect("a size")).max().unwrap_or(0))
    }

    /// Bytes of a layer that this process keeps.
    fn own_bytes(&self, layer: &Layer) -> i64 {
        layer.bytes / i64::try_from(self.peers.as_ref().map_or(1, |peers| peers.size)).expect("a few ranks")
    }

    /// Bytes that were copied to the device so far.
    pub fn sent(&self) -> Bytes {
        Bytes(self.sent.load(Ordering::Relaxed))
    }

    /// Bytes of divided layers that were collected from all ranks so far.
    pub fn collected(&self) -> Bytes {
        Bytes(self.collected.load(Ordering::Relaxed))
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

    /// Collects the layers as a pass through all of them does, for other ranks that have one: in order, and if `trains`
    /// in reverse order too. Does nothing if the layers are not divided.
    ///
    /// # Panics
    /// As [`Self::with`].
    pub fn join_pass(&self, trains: bool) {
        if !self.is_divided() {
            return;
        }
        no_grad(|| (0..self.len()).for_each(|layer| drop(self.fetch(layer))));
        if trains {
            (0..self.len()).rev().for_each(|layer| drop(self.fetch(layer)));
        }
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
        copied.gather.into_iter().try_for_each(Pending::wait).unwrap_or_else(|error| native::raise(error));
        self.layers[layer].parts.iter().map(|part| part.of(&copied.block)).collect()
    }

    fn copies_ahead(&self) -> bool {
        match self.device {
            _ if self.peers.is_some() => true,
            META => meta::target() == meta::PlanTarget::Cuda,
            device => device != Device::Cpu,
        }
    }

    fn send(&self, layer: usize) -> Copied {
        let _category = ledger::enter(ledger::Category::Frozen);
        let bytes = self.layers[layer].bytes;
        let Some(peers) = &self.peers else {
            let (block, copy) = self.send_block(&self.layers[layer], bytes);
            return Copied { layer, block, copy, gather: Vec::new() };
        };
        self.collected.fetch_add(u64::try_from(bytes).expect("a size"), Ordering::Relaxed);
        let (part, copy) = self.part_on_device(&self.layers[layer]);
        // the copy waits for all earlier users of free memory, so the parts may be collected in this block after it
        let block = Tensor::empty([bytes], (Kind::Uint8, self.device));
        let gather = peers.gather(&part, &block, copy.is_some()).unwrap_or_else(|error| native::raise(error));
        Copied { layer, block, copy, gather }
    }

    /// This rank's part of a layer on the device, or on its way there.
    fn part_on_device(&self, layer: &Layer) -> (Tensor, Option<AsyncCopy>) {
        match &layer.block {
            Some(part) if !layer.is_on_host => (part.shallow_clone(), None),
            _ => self.send_block(layer, self.own_bytes(layer)),
        }
    }

    /// Starts to copy the block of a layer in host memory to the device.
    fn send_block(&self, layer: &Layer, bytes: i64) -> (Tensor, Option<AsyncCopy>) {
        self.sent.fetch_add(u64::try_from(bytes).expect("a size"), Ordering::Relaxed);
        let mut copy = AsyncCopy::to(self.device);
        let block = match (&layer.block, &mut copy) {
            (Some(block), Some(copy)) => copy.send_pinned(block),
            (Some(block), None) if self.device == Device::Cpu => block.copy(),
            _ => Tensor::empty([bytes], (Kind::Uint8, self.device)),
        };
        (block, copy)
    }
}

impl Layer {
    fn packed(tensors: Vec<Tensor>, device: Device, keeps_values: bool, ranks: usize) -> Self {
        let _category = ledger::enter(ledger::Category::Frozen);
        let mut end = 0;
        let parts: Vec<BlockPart> =
            tensors.iter().map(|tensor| BlockPart::after(&mut end, tensor.kind(), &tensor.size())).collect();
        // a rank's part is a multiple of the alignment
        let end = if ranks > 1 { end.next_multiple_of(BlockPart::ALIGNMENT * ranks) } else { end };
        let bytes = i64::try_from(end).expect("a layer");
        let block = match device {
            META if meta::target() == meta::PlanTarget::Cuda => None,
            // ranks pin their parts only
            Device::Cuda(_) if ranks > 1 => Some(Tensor::empty([bytes], (Kind::Uint8, Device::Cpu))),
            Device::Cuda(_) => Some(pinned_empty(bytes)),
            _ => Some(Tensor::empty([bytes], (Kind::Uint8, device))),
        };
        if let Some(block) = &block {
            no_grad(|| {
                for (tensor, part) in tensors.iter().zip(&parts) {
                    let mut moved = part.of(block);
                    if keeps_values {
                        moved.copy_(tensor);
                    }
                    tensor.shallow_clone().set_data(&moved);
                }
            });
        }
        Self { tensors, parts, bytes, block, is_on_host: true }
    }

    /// This rank's part.
    fn divided(&self, peers: &Peers, device: Device, on_host: bool, keeps_whole: bool) -> Result<Self> {
        let _category = ledger::enter(ledger::Category::Frozen);
        let length = self.bytes / i64::try_from(peers.size).expect("a few ranks");
        let is_on_host =
            on_host && device != Device::Cpu && !(device == META && meta::target() == meta::PlanTarget::Cpu);
        let block = match (&self.block, device) {
            (None, _) => (!is_on_host).then(|| Tensor::empty([length], (Kind::Uint8, device))),
            (Some(whole), _) => {
                let mut part = match device {
                    Device::Cuda(_) if is_on_host => pinned_empty(length),
                    _ => Tensor::empty([length], (Kind::Uint8, whole.device())),
                };
                peers.scatter(whole, &mut part)?;
                Some(if is_on_host || part.device() == device { part } else { part.to_device(device) })
            }
        };
        if self.block.is_some() && !keeps_whole {
            for tensor in &self.tensors {
                tensor.shallow_clone().set_data(&Tensor::empty([0], (tensor.kind(), tensor.device())));
            }
        }
        let (tensors, bytes) = (self.tensors.iter().map(Tensor::shallow_clone).collect(), self.bytes);
        Ok(Self { tensors, parts: self.parts.clone(), bytes, block, is_on_host })
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
        let weights = HostWeights::new(layers, Device::Cpu, true, 1);
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
        let weights = HostWeights::new(layers(2), Device::Cpu, true, 1);
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
        let _target = meta::enter_target(meta::PlanTarget::Cuda);
        let shape = [1 << 20, 1 << 10];
        let host = || vec![host_tensor(&shape, Kind::Float, META)];
        let weights = HostWeights::new((0..3).map(|_| host()).collect(), META, true, 1);
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
        let device = crate::default_device();
        // copies of 64 MiB take longer than the kernels that read them
        let host = |layer: i64| vec![Tensor::full([1 << 24], layer, (Kind::Float, Device::Cpu))];
        let weights = HostWeights::new((0..8).map(host).collect(), device, true, 1);
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
