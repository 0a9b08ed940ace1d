//! Device, cache folder, hub, observer and interrupt flag of a process that trains or predicts.

use crate::event::{Event, Observer, Silent};
use crate::hub::{self, Files, HubOptions, Located};
use crate::tensor::{self, Device, kernels, ledger, memory};
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Device, cache folder, hub, observer and interrupt flag of a run. Cheap to clone.
///
/// ```
/// use prsmed::prelude::*;
///
/// let cache = tempfile::tempdir()?;
/// let runtime = Runtime::new().on(Device::Cpu).with_threads(1).with_cache(cache.path());
/// assert!(!runtime.is_interrupted());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone)]
pub struct Runtime {
    device: Device,
    cache: Option<PathBuf>,
    hub: Option<HubOptions>,
    observer: Arc<dyn Observer>,
    interrupt: Arc<AtomicBool>,
    visible_gpus: Option<String>,
    local_rank: Option<usize>,
    /// Weight files found so far, by their spec.
    located: Arc<Mutex<HashMap<String, Located>>>,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("device", &self.device).field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Default for Runtime {
    fn default() -> Self {
        Self::new()
    }
}

/// How long a search lasts before a note says that it does.
const PATIENCE: Duration = Duration::from_secs(2);

impl Runtime {
    /// The first GPU, or the CPU; no cache folder, no hub, no observer.
    ///
    /// Prepares libtorch in this process: counts the bytes of tensors, chooses reproducible attention kernels, bounds
    /// kernel caches (only while the process has one thread, since that sets environment variables), and turns the
    /// signal of a file size limit into an error. Create the first runtime before the first tensor.
    pub fn new() -> Self {
        prepare_process();
        Self::guest()
    }

    /// As [`Self::new`], but changes nothing of the process: for a program with settings of its own for libtorch, signals and
    /// environment variables. Bytes of tensors are not counted.
    pub fn guest() -> Self {
        Self {
            device: tensor::default_device(),
            cache: None,
            hub: None,
            observer: Arc::new(Silent),
            interrupt: Arc::default(),
            visible_gpus: None,
            local_rank: None,
            located: Arc::default(),
        }
    }

    /// Sets the device.
    #[must_use]
    pub fn on(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Sets the number of threads of libtorch's CPU kernels, in the whole process.
    #[must_use]
    pub fn with_threads(self, threads: u16) -> Self {
        tensor::set_num_threads(i32::from(threads.max(1)));
        self
    }

    /// Sets the cache folder, for results that later runs can use again: compiled kernels, quantized weights, vision
    /// features.
    #[must_use]
    pub fn with_cache(mut self, folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        if self.device != Device::Cpu {
            kernels::set_folder(&folder.join("kernels"));
        }
        self.cache = Some(folder);
        self
    }

    /// Sets the hub for downloads of `hub:owner/name`.
    #[must_use]
    pub fn with_hub(mut self, hub: HubOptions) -> Self {
        self.hub = Some(hub);
        self
    }

    /// Sets the observer of all events.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Sets the flag that asks trainings to save and stop.
    #[must_use]
    pub fn with_interrupt(mut self, interrupt: Arc<AtomicBool>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// Sets the GPUs that this process can see, as `CUDA_VISIBLE_DEVICES` lists them; all without a list.
    #[must_use]
    pub fn with_visible_gpus(mut self, list: Option<String>) -> Self {
        self.visible_gpus = list;
        self
    }

    /// Sets the number of this process on its machine, if it is one of several that work together.
    #[must_use]
    pub fn with_local_rank(mut self, rank: usize) -> Self {
        self.local_rank = Some(rank);
        self
    }

    /// Device of all tensors.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The cache folder.
    pub fn cache(&self) -> Option<&Path> {
        self.cache.as_deref()
    }

    /// The list of GPUs that this process can see.
    pub fn visible_gpus(&self) -> Option<&str> {
        self.visible_gpus.as_deref()
    }

    /// The number of this process on its machine; `None` if it is alone.
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// Whether there is a hub for downloads.
    pub(crate) fn has_hub(&self) -> bool {
        self.hub.is_some()
    }

    /// The hub for downloads, with the cache folder of its files; without [`Self::with_hub`] the default one, of which
    /// [`Self::locate`] downloads nothing.
    pub(crate) fn hub(&self) -> &HubOptions {
        static DEFAULT: LazyLock<HubOptions> = LazyLock::new(|| HubOptions::from_vars(|_| None));
        self.hub.as_ref().unwrap_or(&DEFAULT)
    }

    /// Observer of all events.
    pub fn observer(&self) -> &Arc<dyn Observer> {
        &self.observer
    }

    /// Flag that asks trainings to save and stop.
    pub fn interrupt(&self) -> &Arc<AtomicBool> {
        &self.interrupt
    }

    /// True if work should stop.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::SeqCst)
    }

    /// Sends a note.
    pub fn note(&self, text: impl Into<String>) {
        self.observer.on(&Event::Note(text.into()));
    }

    /// Runs `work`, and sends a note if it takes more than two seconds.
    pub fn with_patience<T>(&self, note: &str, work: impl FnOnce() -> T) -> T {
        let observer = Arc::clone(&self.observer);
        let (working, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    observer.on(&Event::Note(note.to_owned()));
                }
            });
            let done = work();
            drop(working);
            done
        })
    }

    /// Sends a warning.
    pub fn warn(&self, text: impl Into<String>) {
        self.observer.on(&Event::Warning(text.into()));
    }

    fn located(&self) -> MutexGuard<'_, HashMap<String, Located>> {
        self.located.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the files of `spec` were found before.
    pub(crate) fn has_located(&self, spec: &str) -> bool {
        self.located().contains_key(spec)
    }

    /// Remembers files that were found, for [`Self::locate`].
    pub(crate) fn add_located(&self, found: impl IntoIterator<Item = (String, Located)>) {
        self.located().extend(found);
    }

    /// The local path of a file, a folder or a repository `hub:owner/name`, after downloading missing files.
    ///
    /// # Errors
    /// [`Error::Weights`] for a path that does not exist; [`Error::Hub`] from the download.
    pub fn locate(&self, spec: &str) -> Result<PathBuf> {
        let options = || {
            let hint = "give the runtime a hub with `Runtime::with_hub`, or use a local path";
            let none = || Error::config("hub", format!("`{spec}` needs a download, and there is no hub"), hint);
            self.hub.as_ref().ok_or_else(none)
        };
        let located = self.located().get(spec).cloned();
        if let Some(located) = located {
            return located.fetch(options()?, self.observer.as_ref());
        }
        if spec.starts_with("hub:") {
            return hub::resolve(spec, &Files::Checkpoint, options()?, self.observer.as_ref());
        }
        let path = PathBuf::from(spec);
        if path.exists() {
            return Ok(path);
        }
        let hint = "check the path, or write `hub:owner/name` for a repository";
        Err(Error::weights(path, "there is no such file or folder", hint))
    }
}

/// Sets up libtorch and signals, once.
fn prepare_process() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: ignoring a signal touches no memory.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        if num_process_threads() == Some(1) {
            // SAFETY: this is the only thread.
            unsafe { memory::bound_kernel_caches() };
        }
        ledger::install();
        tensor::use_flash_attention();
        tensor::allow_tf32(false);
    });
}

/// Number of threads of this process; `None` if the system does not report it.
fn num_process_threads() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp32_of_a_gpu_is_rounded_to_tf32_only_if_allowed() {
        prepare_process();
        assert!(tensor::is_ieee_fp32());
        {
            let _rounded = tensor::enter_tf32(true);
            assert!(!tensor::is_ieee_fp32());
        }
        assert!(tensor::is_ieee_fp32());
    }
}
