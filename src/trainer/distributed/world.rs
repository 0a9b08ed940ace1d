//! The processes of a job, and what they tell each other on the host.

use super::meeting::{self, Rendezvous};
use prsmed_base::{Error, Result};
use prsmed_tensor::collective::{Backend, Group, JobStore, PeerLinks, Peers, Pending, ReduceOp};
use prsmed_tensor::{Device, Kind, Tensor};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// Micro-batches of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

impl Shard {
    /// Everything: the shard of a job with one process.
    pub const WHOLE: Self = Self { rank: 0, size: 1 };

    /// The part of rank `rank` of `size`.
    pub fn new(rank: usize, size: usize) -> Self {
        Self { rank, size: size.max(1) }
    }

    /// Indices of this rank's items among `count`: consecutive ones, as evenly as possible.
    pub fn range(self, count: usize) -> Range<usize> {
        let start = |rank: usize| (rank * count).div_ceil(self.size);
        start(self.rank)..start(self.rank + 1)
    }

    /// The micro-batches of this rank, of at most `micro_batch` items, and their number in each of `steps`.
    pub fn micro_batches(self, steps: &[Vec<usize>], micro_batch: usize) -> (Vec<usize>, Vec<Vec<usize>>) {
        let (mut counts, mut all) = (Vec::with_capacity(steps.len()), Vec::new());
        for step in steps {
            let micro_batches: Vec<&[usize]> = step.chunks(micro_batch).collect();
            let own = &micro_batches[self.range(micro_batches.len())];
            counts.push(own.len());
            all.extend(own.iter().map(|items| items.to_vec()));
        }
        (counts, all)
    }
}

/// Connections to the other ranks.
#[derive(Debug)]
struct Links {
    /// Numbers of the host, over Gloo.
    control: Arc<Group>,
    /// Tensors of the GPU, over NCCL; `None` on the CPU, where `control` has them too.
    data: Option<Group>,
    /// Its server must outlive the groups.
    store: Arc<JobStore>,
    /// To open further groups.
    rendezvous: Rendezvous,
    /// Those that opened further groups. Kept, so that [`World::close`] can end the groups.
    opened: Mutex<Vec<Peers>>,
}

/// The processes of a job.
#[derive(Debug)]
pub struct World {
    rank: usize,
    size: usize,
    /// `None` in a dry run.
    links: Option<Links>,
    /// In a dry run, the largest number of micro-batches of a rank in a step.
    planned_passes: usize,
}

impl World {
    /// Connects this process, which trains on `device`, with the others. `on_wait` gets what is waited for, once a minute.
    ///
    /// # Errors
    /// [`Error::Config`] for processes that do not come in time; [`Error::Interrupted`] if `interrupt` becomes true while
    /// this process waits for them; [`Error::Torch`].
    pub fn join(
        rendezvous: &Rendezvous,
        device: Device,
        interrupt: &AtomicBool,
        on_wait: &dyn Fn(String),
    ) -> Result<Self> {
        let Rendezvous { rank, size, interface, timeout, .. } = rendezvous;
        let store = meeting::meet(rendezvous, interrupt, on_wait)?;
        let gloo = Backend::Gloo { interface: interface.clone() };
        let ranks = (*rank, *size);
        let control = Arc::new(Group::open(&store, "control", &gloo, ranks, *timeout)?);
        let data = match device {
            Device::Cuda(_) => Some(Group::open(&store, "data", &Backend::Nccl, ranks, *timeout)?),
            _ => None,
        };
        let links = Some(Links {
            control,
            data,
            store: Arc::new(store),
            rendezvous: rendezvous.clone(),
            opened: Mutex::default(),
        });
        Ok(Self { rank: *rank, size: *size, links, planned_passes: 0 })
    }

    /// Rank `rank` of `size` in a dry run, where collective operations do nothing. `passes`: the largest number of
    /// micro-batches of a rank in a step.
    pub fn planned(rank: usize, size: usize, passes: usize) -> Self {
        Self { rank, size, links: None, planned_passes: passes }
    }

    fn data(&self) -> Option<&Group> {
        self.links.as_ref().map(|links| links.data.as_ref().unwrap_or(&links.control))
    }

    /// Starts to sum `tensor` over all ranks, in place; `None` in a dry run.
    pub(super) fn all_reduce(&self, tensor: &Tensor) -> Result<Option<Pending>> {
        self.data().map(|group| group.all_reduce(tensor, ReduceOp::Sum)).transpose()
    }

    /// As [`Self::all_reduce`], for `root` only.
    pub(super) fn reduce(&self, tensor: &Tensor, root: usize) -> Result<Option<Pending>> {
        self.data().map(|group| group.reduce(tensor, root)).transpose()
    }

    /// Starts to copy `tensor` of `root` to all ranks; `None` in a dry run.
    pub(super) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Option<Pending>> {
        self.data().map(|group| group.broadcast(tensor, root)).transpose()
    }

    /// The ranks as owners of parts of weights on `device`, with a group of their own: a rank without a pass collects
    /// weights for the passes of others, and their gradients come in between.
    fn peers(&self, device: Device) -> Result<Peers> {
        let Some(Links { control, store, rendezvous, opened, .. }) = &self.links else {
            return Ok(Peers::new(self.rank, self.size, None));
        };
        let backend = match device {
            Device::Cuda(_) => Backend::Nccl,
            _ => Backend::Gloo { interface: rendezvous.interface.clone() },
        };
        // all ranks open them in the same order
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("weights/{}", opened.len());
        let group = Group::open(store, &name, &backend, (self.rank, self.size), rendezvous.timeout)?;
        let links = PeerLinks { device: group, host: Arc::clone(control), store: Arc::clone(store) };
        let peers = Peers::new(self.rank, self.size, Some(links));
        opened.push(peers.clone());
        Ok(peers)
    }

    /// Ends the connections after all work; every rank calls it. Connections that are dropped without are aborted, as they
    /// must be after a failure.
    ///
    /// # Errors
    /// [`Error::Torch`] if a connection cannot be ended.
    pub fn close(&self) -> Result<()> {
        let Some(Links { control, data, opened, .. }) = &self.links else { return Ok(()) };
        opened.lock().unwrap_or_else(PoisonError::into_inner).iter().try_for_each(Peers::shut_down)?;
        data.as_ref().map_or(Ok(()), Group::shut_down)?;
        control.shut_down()
    }

    /// Copies a CPU tensor of `from` to rank 0; both call it.
    pub(super) fn collect_on_host(&self, tensor: &Tensor, from: usize) -> Result<()> {
        let Some(Links { control, .. }) = &self.links else { return Ok(()) };
        if self.rank == 0 { control.receive(tensor, from) } else { control.send(tensor, 0) }
    }
}

/// An error as other ranks see it.
#[derive(Serialize, Deserialize)]
struct Failure {
    reason: String,
    hint: String,
    disk_full: bool,
    interrupted: bool,
}

/// The processes of a run: this one alone (the default), or those of a [`World`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Ranks<'a>(Option<&'a World>);

impl<'a> Ranks<'a> {
    /// The processes of `world`.
    pub fn of(world: &'a World) -> Self {
        Self(Some(world))
    }

    /// The processes of `world`, if there is one.
    pub fn of_some(world: Option<&'a World>) -> Self {
        Self(world)
    }

    /// The world of several processes.
    pub fn world(self) -> Option<&'a World> {
        self.0
    }

    /// Number of this process, from 0.
    pub fn rank(self) -> usize {
        self.0.map_or(0, |world| world.rank)
    }

    /// Number of processes.
    pub fn size(self) -> usize {
        self.0.map_or(1, |world| world.size)
    }

    /// In a dry run of several processes, the largest number of micro-batches of a rank in a step.
    pub fn planned_passes(self) -> Option<usize> {
        self.0.filter(|world| world.links.is_none()).map(|world| world.planned_passes)
    }

    /// True for the process that writes files and reports progress.
    pub fn is_main(self) -> bool {
        self.rank() == 0
    }

    /// The ranks as owners of parts of weights on `device`; `None` for one process.
    ///
    /// # Errors
    /// [`Error::Torch`] if the processes cannot be connected.
    pub fn peers(self, device: Device) -> Result<Option<Peers>> {
        self.0.map(|world| world.peers(device)).transpose()
    }

    /// This rank's part.
    pub fn shard(self) -> Shard {
        Shard::new(self.rank(), self.size())
    }

    fn control(self) -> Option<&'a Group> {
        self.0.and_then(|world| world.links.as_ref()).map(|links| &*links.control)
    }

    /// Sums each number over all ranks.
    ///
    /// # Errors
    /// [`Error::Torch`] if another rank does not answer.
    pub fn sum(self, numbers: &mut [f64]) -> Result<()> {
        self.control().map_or(Ok(()), |group| group.reduce_numbers(numbers, ReduceOp::Sum))
    }

    /// The largest of each number over all ranks.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn max(self, numbers: &mut [f64]) -> Result<()> {
        self.control().map_or(Ok(()), |group| group.reduce_numbers(numbers, ReduceOp::Max))
    }

    /// True on all ranks if `flag` is true on one.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn any(self, flag: bool) -> Result<bool> {
        let mut number = [f64::from(u8::from(flag))];
        self.max(&mut number)?;
        Ok(number[0] > 0.0)
    }

    /// The bytes of each rank, in the order of the ranks.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn gather(self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control().map_or_else(|| Ok(vec![own.to_vec()]), |group| group.gather(own))
    }

    /// The values of all ranks if each of them succeeded.
    ///
    /// # Errors
    /// The own error, else that of the first rank that failed: [`Error::Interrupted`], or [`Error::Peer`]; and as
    /// [`Self::sum`].
    pub fn gather_if_all<T: Serialize + for<'de> Deserialize<'de>>(self, outcome: Result<T>) -> Result<Vec<T>> {
        let Some(_) = self.control() else { return outcome.map(|value| vec![value]) };
        let message = outcome.as_ref().map_err(|error| Failure {
            reason: error.to_string(),
            hint: error.hint(),
            disk_full: error.is_disk_full(),
            interrupted: matches!(error, Error::Interrupted),
        });
        let bytes = serde_json::to_vec(&message).expect("plain values serialise");
        let all = self.gather(&bytes)?;
        outcome?;
        let read =
            all.iter().enumerate().map(|(rank, bytes)| {
                let value: Result<T, Failure> = serde_json::from_slice(bytes)
                    .map_err(|error| Error::Torch { reason: format!("rank {rank} sent something else: {error}") })?;
                value.map_err(|Failure { reason, hint, disk_full, interrupted }| {
                    if interrupted { Error::Interrupted } else { Error::Peer { rank, reason, hint, disk_full } }
                })
            });
        read.collect()
    }

    /// The CPU tensor of rank `from`, which gives it as `own`, on the first rank; `None` on the others. All ranks know its
    /// shape and dtype, and call it.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub fn collect(self, own: Option<Tensor>, (shape, kind): (&[i64], Kind), from: usize) -> Result<Option<Tensor>> {
        let (Some(world), false) = (self.0, from == 0) else { return Ok(own) };
        if let Some(own) = own {
            world.collect_on_host(&own.contiguous(), from)?;
        } else if self.is_main() {
            let values = Tensor::zeros(shape, (kind, Device::Cpu));
            world.collect_on_host(&values, from)?;
            return Ok(Some(values));
        }
        Ok(None)
    }

    /// Sums named numbers over all ranks; a name that this rank does not have is left out.
    ///
    /// # Errors
    /// As [`Self::sum`].
    pub(crate) fn sum_named(self, mut numbers: Vec<(&'static str, f64)>) -> Result<Vec<(&'static str, f64)>> {
        if self.control().is_none() {
            return Ok(numbers);
        }
        // as bits, because JSON has no NaN
        let own = numbers.iter().map(|(name, value)| ((*name).to_owned(), value.to_bits())).collect::<Vec<_>>();
        let all: Vec<(String, u64)> = self.gather_if_all(Ok(own))?.concat();
        for (name, value) in &mut numbers {
            let same = all.iter().filter(|(other, _)| other == name);
            *value = same.map(|(_, bits)| f64::from_bits(*bits)).sum();
        }
        Ok(numbers)
    }

    /// `outcome` if all ranks succeeded.
    ///
    /// # Errors
    /// As [`Self::gather_if_all`].
    pub fn agree(self, outcome: Result<()>) -> Result<()> {
        self.gather_if_all(outcome).map(drop)
    }

    /// As [`Self::agree`], with the own value.
    ///
    /// # Errors
    /// As [`Self::agree`].
    pub fn agree_on<T>(self, outcome: Result<T>) -> Result<T> {
        let mut value = None;
        self.agree(outcome.map(|own| value = Some(own)))?;
        Ok(value.expect("this rank succeeded"))
    }

    /// Refuses a job whose ranks have different values.
    ///
    /// # Errors
    /// [`Error::Config`] that names the first rank with another value than rank 0; and as [`Self::sum`].
    pub fn check_equal(self, what: &str, value: &str, hint: &str) -> Result<()> {
        let all = self.gather(value.as_bytes())?;
        all.iter().position(|other| *other != all[0]).map_or(Ok(()), |rank| {
            Err(Error::config("train", format!("rank {rank} has {what} other than those of rank 0"), hint))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once_and_evenly() {
        for (count, size) in [(0, 3), (1, 4), (5, 4), (8, 4), (9, 2), (7, 1)] {
            let ranges: Vec<Range<usize>> = (0..size).map(|rank| Shard::new(rank, size).range(count)).collect();
            let all: Vec<usize> = ranges.iter().cloned().flatten().collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            let lengths = ranges.iter().map(ExactSizeIterator::len);
            assert!(lengths.clone().max().unwrap() - lengths.min().unwrap() <= 1, "{ranges:?}");
        }
    }

    #[test]
    fn one_process_needs_no_others() {
        let ranks = Ranks::default();
        assert_eq!((ranks.rank(), ranks.size(), ranks.shard()), (0, 1, Shard::WHOLE));
        let mut numbers = [2.0];
        ranks.sum(&mut numbers).unwrap();
        assert_eq!((numbers, ranks.any(true).unwrap()), ([2.0], true));
        assert_eq!(ranks.gather_if_all(Ok(3)).unwrap(), [3]);
        let error = ranks.agree(Err(Error::Interrupted)).unwrap_err();
        assert!(matches!(error, Error::Interrupted));
    }
}
