//! Process groups of torch.distributed's engine (c10d): the rendezvous store, and collective operations over Gloo on the
//! CPU and NCCL on GPUs (`native/collective.cpp`).
//!
//! Every rank of a group must call the same operations in the same order. **NCCL has not yet run on a GPU.**

use super::{Device, Tensor, native, no_grad};
use prsmed_base::{Error, Result};
use std::ffi::{CString, c_void};
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Key-value store that all processes of a job share: a client of a TCP server in one of them.
#[derive(Debug)]
pub struct JobStore(*mut c_void);

// SAFETY: c10d's TCPStore locks a mutex in each operation.
unsafe impl Send for JobStore {}
// SAFETY: as above.
unsafe impl Sync for JobStore {}

/// Address of a [`JobStore`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreAddress {
    /// Host name or IP address of the server.
    pub host: String,
    /// Its TCP port.
    pub port: u16,
    /// Put in front of all keys, so that several jobs can share a server.
    pub prefix: String,
}

impl JobStore {
    /// Connects to the server at `address`, and starts it first if there is a `listener` for it. Waits up to `patience` for
    /// the server, and later up to `timeout` for what other processes do.
    ///
    /// # Errors
    /// [`Error::Torch`] if there is no server.
    pub fn open(
        address: &StoreAddress,
        listener: Option<TcpListener>,
        patience: Duration,
        timeout: Duration,
    ) -> Result<Self> {
        let (host, prefix) = (text(&address.host)?, text(&address.prefix)?);
        let (port, listener) = (i32::from(address.port), listener.map_or(-1, IntoRawFd::into_raw_fd));
        let (patience, timeout) = (patience.as_secs_f64(), timeout.as_secs_f64());
        let (host, prefix) = (host.as_ptr(), prefix.as_ptr());
        // SAFETY: NUL-terminated strings that outlive the call.
        let open = |out| unsafe { native::prsmed_store_open(host, port, listener, patience, timeout, prefix, out) };
        // SAFETY: the store is written on success.
        unsafe { native::written(std::ptr::null_mut(), open) }.map(Self)
    }

    /// Stores `value` under `key`.
    ///
    /// # Errors
    /// [`Error::Torch`] without a connection to the server.
    pub fn set(&self, key: &str, value: &str) -> Result<()> {
        let (key, value) = (text(key)?, text(&value.replace('\0', " "))?);
        // SAFETY: an open store, and strings that outlive the call.
        unsafe { native::check(native::prsmed_store_set(self.0, key.as_ptr(), value.as_ptr())) }
    }

    /// The value of `key`. Waits for it, at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Torch`] if nobody has set it in time, and as [`Self::set`].
    pub fn get(&self, key: &str, timeout: Duration) -> Result<String> {
        let (key, seconds) = (text(key)?, timeout.as_secs_f64());
        // SAFETY: as in `set`; a message is written on success.
        unsafe { native::made_text(|out| native::prsmed_store_get(self.0, key.as_ptr(), seconds, out)) }
    }

    /// True if `key` has a value.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn has(&self, key: &str) -> Result<bool> {
        let key = text(key)?;
        // SAFETY: as in `set`.
        unsafe { native::written(false, |out| native::prsmed_store_has(self.0, key.as_ptr(), out)) }
    }

    /// Adds `amount` to the counter `key`, which starts at 0, and returns the sum.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let key = text(key)?;
        // SAFETY: as in `has`.
        unsafe { native::written(0, |out| native::prsmed_store_add(self.0, key.as_ptr(), amount, out)) }
    }
}

impl Drop for JobStore {
    fn drop(&mut self) {
        // SAFETY: closed once.
        unsafe { native::prsmed_store_close(self.0) };
    }
}

/// Library that moves the data of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// Over TCP, for tensors on the CPU. `interface`: a network interface such as `eth0`; `None` takes that of the host
    /// name, else loopback.
    Gloo {
        /// The network interface.
        interface: Option<String>,
    },
    /// Between GPUs, for tensors on the current GPU.
    Nccl,
}

/// How [`Group::all_reduce`] combines values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum = 0,
    /// The largest one.
    Max = 1,
}

/// A process group.
#[derive(Debug)]
pub struct Group {
    raw: *mut c_void,
    rank: usize,
    size: usize,
    is_shut_down: AtomicBool,
}

// SAFETY: c10d's groups lock their queues. Operations of several threads would have no common order on all ranks, so
// callers start them one after another.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Group {
    /// Connects the `size` processes that open a group `name` of `store`, of which this is number `rank`. An operation
    /// fails if the others do not take part within `timeout`.
    ///
    /// # Errors
    /// [`Error::Torch`] if the processes cannot be connected.
    pub fn open(
        store: &JobStore,
        name: &str,
        backend: &Backend,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Result<Self> {
        let (name, seconds) = (text(name)?, timeout.as_secs_f64());
        let [number, count] = [rank, size].map(|n| i32::try_from(n).expect("a few processes"));
        let mut raw = std::ptr::null_mut();
        // SAFETY: an open store, and strings that outlive the call; `raw` is set on success.
        unsafe {
            let name = name.as_ptr();
            native::check(match backend {
                Backend::Gloo { interface } => {
                    let interface = interface.as_deref().map(text).transpose()?;
                    let interface = interface.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
                    native::prsmed_group_gloo(store.0, name, number, count, seconds, interface, &raw mut raw)
                }
                Backend::Nccl => native::prsmed_group_nccl(store.0, name, number, count, seconds, &raw mut raw),
            })?;
        }
        Ok(Self { raw, rank, size, is_shut_down: AtomicBool::new(false) })
    }

    /// Ends the group after its last operation; all ranks call it. A group that is dropped without is aborted.
    ///
    /// # Errors
    /// [`Error::Torch`] if the backend cannot end it.
    pub fn shut_down(&self) -> Result<()> {
        if self.is_shut_down.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        // SAFETY: an open group.
        unsafe { native::check(native::prsmed_group_shutdown(self.raw)) }
    }

    /// Starts to reduce `tensor` in place over all ranks.
    ///
    /// # Errors
    /// [`Error::Torch`] for a tensor that the backend cannot reduce.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        let tensor = tensor.detach();
        // SAFETY: an open group and a live tensor.
        Pending::start(&tensor, |raw, out| unsafe { native::prsmed_all_reduce(self.raw, raw, op as i32, out) })
    }

    /// Starts to sum `tensor` over all ranks. Only `root` gets the sum; the values of the others are undefined.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn reduce(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        let (tensor, root) = (tensor.detach(), i32::try_from(root).expect("a few processes"));
        // SAFETY: as above.
        Pending::start(&tensor, |raw, out| unsafe { native::prsmed_reduce(self.raw, raw, root, out) })
    }

    /// Starts to copy `tensor` of `root` to all ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        let (tensor, root) = (tensor.detach(), i32::try_from(root).expect("a few processes"));
        // SAFETY: as above.
        Pending::start(&tensor, |raw, out| unsafe { native::prsmed_broadcast(self.raw, raw, root, out) })
    }

    /// Starts to collect `part` of each rank in `whole`, in the order of the ranks. Only for NCCL. With `after_copies` it
    /// waits for the asynchronous copies to the GPU (`part` is one of them), and not for the compute stream.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn all_gather(&self, part: &Tensor, whole: &Tensor, after_copies: bool) -> Result<Pending> {
        let (part, whole) = (part.detach(), whole.detach());
        let mut pending = Pending::start(&whole, |raw, out| {
            // SAFETY: an open group and live tensors.
            unsafe { native::prsmed_all_gather(self.raw, native::raw(&part), raw, after_copies, out) }
        })?;
        pending.tensors.push(part);
        Ok(pending)
    }

    /// Sends `tensor` to rank `other`, which calls [`Self::receive`], and waits.
    ///
    /// # Errors
    /// As [`Self::reduce_numbers`].
    pub fn send(&self, tensor: &Tensor, other: usize) -> Result<()> {
        self.transfer(tensor, other, true)
    }

    /// Receives the values of `tensor` from rank `other`, and waits.
    ///
    /// # Errors
    /// As [`Self::reduce_numbers`].
    pub fn receive(&self, tensor: &Tensor, other: usize) -> Result<()> {
        self.transfer(tensor, other, false)
    }

    fn transfer(&self, tensor: &Tensor, other: usize, sends: bool) -> Result<()> {
        let (tensor, other) = (tensor.detach(), i32::try_from(other).expect("a few processes"));
        // SAFETY: an open group and a live tensor that nobody else uses until the call returns.
        unsafe { native::check(native::prsmed_transfer(self.raw, native::raw(&tensor), other, sends)) }
    }

    /// Reduces numbers of the host over all ranks, in place. Only for Gloo.
    ///
    /// # Errors
    /// [`Error::Torch`] if another rank has failed.
    pub fn reduce_numbers(&self, numbers: &mut [f64], op: ReduceOp) -> Result<()> {
        let count = i64::try_from(numbers.len()).expect("a few numbers");
        // SAFETY: `count` numbers that nobody else uses until the call returns.
        unsafe { native::check(native::prsmed_reduce_numbers(self.raw, numbers.as_mut_ptr(), count, op as i32)) }
    }

    /// The bytes of each rank, in the order of the ranks. Only for Gloo.
    ///
    /// # Errors
    /// As [`Self::reduce_numbers`].
    pub fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.gather_equal(&(own.len() as u64).to_le_bytes())?;
        let lengths: Vec<usize> = lengths
            .chunks_exact(8)
            .map(|bytes| usize::try_from(u64::from_le_bytes(bytes.try_into().expect("8 bytes"))).expect("a length"))
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![Vec::new(); self.size]);
        }
        let mut padded = own.to_vec();
        padded.resize(longest, 0);
        let all = self.gather_equal(&padded)?;
        Ok(all.chunks_exact(longest).zip(lengths).map(|(bytes, length)| bytes[..length].to_vec()).collect())
    }

    /// The bytes of all ranks, of which each gives the same number.
    fn gather_equal(&self, own: &[u8]) -> Result<Vec<u8>> {
        // a sum with zeros: unlike Gloo's own operation, it allocates no tensor that a memory plan would have to know
        let mut all = vec![0.0; own.len() * self.size];
        all.iter_mut().skip(own.len() * self.rank).zip(own).for_each(|(slot, byte)| *slot = f64::from(*byte));
        self.reduce_numbers(&mut all, ReduceOp::Sum)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole numbers from 0 to 255")]
        let bytes = all.into_iter().map(|value| value as u8).collect();
        Ok(bytes)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: closed once; pending operations have references of their own.
        unsafe { native::prsmed_group_close(self.raw, self.is_shut_down.load(Ordering::Relaxed)) };
    }
}

/// The ranks that divide something among them, of which each has one part.
#[derive(Debug, Clone)]
pub struct Peers {
    /// Number of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The connections; `None` in a dry run, where nothing is exchanged.
    links: Option<Arc<PeerLinks>>,
}

/// Connections of [`Peers`].
#[derive(Debug)]
pub struct PeerLinks {
    /// A group for tensors of the device.
    pub device: Group,
    /// A group over Gloo, for tensors of the host.
    pub host: Arc<Group>,
    /// Its server must outlive the groups.
    pub store: Arc<JobStore>,
}

impl Peers {
    /// Rank `rank` of `size`.
    pub fn new(rank: usize, size: usize, links: Option<PeerLinks>) -> Self {
        Self { rank, size, links: links.map(Arc::new) }
    }

    /// Ends the group for tensors of the device: see [`Group::shut_down`].
    ///
    /// # Errors
    /// As [`Group::shut_down`].
    pub fn shut_down(&self) -> Result<()> {
        self.links.as_ref().map_or(Ok(()), |links| links.device.shut_down())
    }

    /// Starts to collect the parts of all ranks in `whole`, a flat tensor of `size` times as many elements.
    /// `after_copies`: see [`Group::all_gather`].
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn gather(&self, part: &Tensor, whole: &Tensor, after_copies: bool) -> Result<Vec<Pending>> {
        let Some(links) = &self.links else { return Ok(Vec::new()) };
        if let Device::Cuda(_) = whole.device() {
            return Ok(vec![links.device.all_gather(part, whole, after_copies)?]);
        }
        // Gloo's own operation needs a second tensor of the size of `whole`
        let length = i64::try_from(part.numel()).expect("a size");
        let slot = |rank: usize| whole.narrow(0, i64::try_from(rank).expect("a rank") * length, length);
        no_grad(|| slot(self.rank).copy_(part));
        (0..self.size).map(|rank| links.device.broadcast(&slot(rank), rank)).collect()
    }

    /// Gives each rank its part of `whole`, a flat tensor of the first rank's host memory, in `part` on the host.
    ///
    /// # Errors
    /// [`Error::Torch`] if another rank does not answer.
    pub fn scatter(&self, whole: &Tensor, part: &mut Tensor) -> Result<()> {
        let Some(links) = &self.links else { return Ok(()) };
        if self.rank > 0 {
            return links.host.receive(part, 0);
        }
        let length = i64::try_from(part.numel()).expect("a size");
        let slot = |rank: usize| whole.narrow(0, i64::try_from(rank).expect("a rank") * length, length);
        no_grad(|| part.copy_(&slot(0)));
        (1..self.size).try_for_each(|rank| links.host.send(&slot(rank), rank))
    }

    /// The numbers of the first rank.
    ///
    /// # Errors
    /// As [`Self::scatter`].
    pub fn first(&self, numbers: &mut [f64]) -> Result<()> {
        let Some(links) = &self.links else { return Ok(()) };
        if self.rank > 0 {
            numbers.fill(0.0);
        }
        links.host.reduce_numbers(numbers, ReduceOp::Sum)
    }
}

/// A collective operation that was started. Dropping it waits.
#[derive(Debug)]
#[must_use]
pub struct Pending {
    raw: *mut c_void,
    /// Keep the memory of the operation.
    tensors: Vec<Tensor>,
}

// SAFETY: an operation counts its owners atomically, and any thread may wait for it; one owner uses it at a time.
unsafe impl Send for Pending {}

impl Pending {
    fn start(
        tensor: &Tensor,
        work: impl FnOnce(native::RawTensor, *mut *mut c_void) -> *mut std::ffi::c_char,
    ) -> Result<Self> {
        // SAFETY: `work` calls the native layer.
        let raw = unsafe { native::written(std::ptr::null_mut(), |out| work(native::raw(tensor), out)) }?;
        Ok(Self { raw, tensors: vec![tensor.shallow_clone()] })
    }

    /// Waits for the result. On a GPU the current stream waits, and the CPU does not.
    ///
    /// # Errors
    /// [`Error::Torch`] if another rank has failed or did not take part in time.
    pub fn wait(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: an operation that was started, and is freed once.
        let waited = unsafe { native::check(native::prsmed_work_wait(raw)) };
        self.tensors.clear();
        waited
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // the failure that dropped it is reported
        let _ = self.end();
    }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Torch { reason: format!("`{}` has a NUL character", text.escape_debug()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;
    use std::process::{Command, Stdio};

    const SHORT: Duration = Duration::from_secs(20);

    fn free_port() -> u16 {
        std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
    }

    fn rank_of(group: &Group) -> f64 {
        f64::from(u8::try_from(group.rank).unwrap())
    }

    /// Runs `work` in each of three ranks. Each is a process that runs the test named `test` again, as ranks are
    /// processes in the program. When they were threads of one process, these tests once crashed inside libtorch.
    fn ranks(test: &str, work: impl Fn(&Group)) {
        const RANK: &str = "PRSMED_TEST_RANK";
        const PORT: &str = "PRSMED_TEST_PORT";
        let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u16>().unwrap());
        let (Some(rank), Some(port)) = (number(RANK), number(PORT)) else {
            let (program, port) = (std::env::current_exe().unwrap(), free_port().to_string());
            let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
            let start = |rank: usize| {
                let mut command = Command::new(&program);
                command.args([name.as_str(), "--exact"]).env(RANK, rank.to_string()).env(PORT, &port);
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            };
            let children: Vec<_> = (0..3).map(start).collect();
            let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
            for (rank, output) in outputs.iter().enumerate() {
                let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
                let is_good = output.status.success() && text.contains("1 passed");
                assert!(is_good, "rank {rank}, {}: {text}{errors}", output.status);
            }
            return;
        };
        let address = StoreAddress { host: "127.0.0.1".into(), port, prefix: "test".into() };
        let backend = Backend::Gloo { interface: Some("lo".into()) };
        let store = open(&address, rank == 0);
        let group = Group::open(&store, "all", &backend, (usize::from(rank), 3), SHORT).unwrap();
        work(&group);
        // the server must outlive the other ranks
        group.reduce_numbers(&mut [0.0], ReduceOp::Sum).unwrap();
    }

    fn open(address: &StoreAddress, is_server: bool) -> JobStore {
        let listener = is_server.then(|| TcpListener::bind((address.host.as_str(), address.port)).unwrap());
        JobStore::open(address, listener, SHORT, SHORT).unwrap()
    }

    #[test]
    fn tensors_are_reduced_and_copied() {
        ranks("tensors_are_reduced_and_copied", |group| {
            let rank = rank_of(group);
            let own = || no_grad(|| Tensor::from_slice(&[rank, 1.0]).to_kind(Kind::Float));
            let (sum, largest, first, last) = (own(), own(), own(), own());
            let pending = [
                group.all_reduce(&sum, ReduceOp::Sum).unwrap(),
                group.all_reduce(&largest, ReduceOp::Max).unwrap(),
                group.broadcast(&first, 1).unwrap(),
                group.reduce(&last, 2).unwrap(),
            ];
            for pending in pending {
                pending.wait().unwrap();
            }
            let [sum, largest, first, last] =
                [sum, largest, first, last].map(|tensor| Vec::<f32>::try_from(&tensor).unwrap());
            assert_eq!((sum, largest, first), (vec![3.0, 3.0], vec![2.0, 1.0], vec![1.0, 1.0]));
            assert!(group.rank != 2 || last == [3.0, 3.0], "{last:?}");
        });
    }

    #[test]
    fn numbers_and_bytes_of_all_ranks_are_known_to_each() {
        ranks("numbers_and_bytes_of_all_ranks_are_known_to_each", |group| {
            let moved = no_grad(|| Tensor::from_slice(&[1.0, 2.0]) * rank_of(group));
            match group.rank {
                1 => group.send(&moved, 0).unwrap(),
                0 => group.receive(&moved, 1).unwrap(),
                _ => {}
            }
            assert!(group.rank > 0 || Vec::<f64>::try_from(&moved).unwrap() == [1.0, 2.0]);
            let mut numbers = [2.5, rank_of(group)];
            group.reduce_numbers(&mut numbers, ReduceOp::Sum).unwrap();
            assert_eq!(numbers, [7.5, 3.0]);
            let words = group.gather(&vec![b'x'; group.rank * 2]).unwrap();
            assert_eq!(words, [b"".to_vec(), b"xx".to_vec(), b"xxxx".to_vec()]);
            assert_eq!(group.gather(&[]).unwrap(), vec![Vec::<u8>::new(); 3]);
        });
    }

    #[test]
    #[ignore = "needs CUDA"]
    fn one_rank_of_nccl_keeps_its_values() {
        let device = crate::default_device();
        let address = StoreAddress { host: "127.0.0.1".into(), port: free_port(), prefix: "test".into() };
        let store = open(&address, true);
        let group = Group::open(&store, "gpu", &Backend::Nccl, (0, 1), SHORT).unwrap();
        let values = || no_grad(|| Tensor::from_slice(&[1.5_f32, -2.0]).to_device(device));
        let [sum, first, copied, part] = [(); 4].map(|()| values());
        let whole = no_grad(|| Tensor::zeros([2], (Kind::Float, device)));
        let pending = [
            group.all_reduce(&sum, ReduceOp::Sum).unwrap(),
            group.reduce(&first, 0).unwrap(),
            group.broadcast(&copied, 0).unwrap(),
            group.all_gather(&part, &whole, false).unwrap(),
        ];
        for pending in pending {
            pending.wait().unwrap();
        }
        for tensor in [sum, first, copied, whole] {
            assert_eq!(Vec::<f32>::try_from(&tensor.to_device(Device::Cpu)).unwrap(), [1.5, -2.0]);
        }
    }

    #[test]
    fn a_store_keeps_texts_and_counters() {
        let address = StoreAddress { host: "127.0.0.1".into(), port: free_port(), prefix: "test".into() };
        let server = open(&address, true);
        let client = open(&address, false);
        assert!(!client.has("cause").unwrap());
        server.set("cause", "rank 1: no memory").unwrap();
        assert_eq!(client.get("cause", SHORT).unwrap(), "rank 1: no memory");
        assert_eq!((client.add("beats", 2).unwrap(), server.add("beats", 3).unwrap()), (2, 5));
        let error = client.get("never", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, Error::Torch { .. }), "{error:?}");
    }
}
