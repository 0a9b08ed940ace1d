//! Module path of a thread (`llm.layers.7.self_attn`): names the module that allocates and computes, for plans and
//! profiles.
//!
//! While a trace or a profile runs, a node of the backward pass has the module path of its forward pass.

pub use prsmed_replay::trace::ModuleId;

use super::{Device, native, synchronize};
use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Instant;

#[derive(Debug, Default)]
struct Paths {
    numbers: HashMap<(u32, &'static str, i64), u32>,
    /// Whole paths. The first belongs to number 1.
    paths: Vec<String>,
}

static TABLE: LazyLock<Mutex<Paths>> = LazyLock::new(Mutex::default);

fn table() -> MutexGuard<'static, Paths> {
    TABLE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Keeps its thread in a module until it is dropped.
#[derive(Debug)]
pub struct ModuleGuard {
    before: u32,
    /// Start time, if a [`Stopwatch`] runs and the module is directly below the root.
    since: Option<(&'static str, Instant)>,
    /// The module path is thread-local, so this is not `Send`.
    stays: PhantomData<*const ()>,
}

/// Enters `name` below the current module until the result is dropped.
#[must_use]
pub fn enter(name: &'static str) -> ModuleGuard {
    below(name, -1)
}

/// Enters `name.index` below the current module until the result is dropped.
#[must_use]
pub fn enter_at(name: &'static str, index: usize) -> ModuleGuard {
    below(name, i64::try_from(index).expect("few layers"))
}

fn below(name: &'static str, index: i64) -> ModuleGuard {
    // SAFETY: reads a thread-local integer.
    let parent = unsafe { native::prsmed_module() };
    let mut table = table();
    let known = table.numbers.get(&(parent, name, index)).copied();
    let number = known.unwrap_or_else(|| {
        let mut path = path_in(&table, parent);
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(name);
        if index >= 0 {
            path = format!("{path}.{index}");
        }
        table.paths.push(path);
        let number = u32::try_from(table.paths.len()).expect("few modules");
        table.numbers.insert((parent, name, index), number);
        number
    });
    drop(table);
    let since = if parent == 0 { now_watched().map(|now| (name, now)) } else { None };
    // SAFETY: sets a thread-local integer.
    ModuleGuard { before: unsafe { native::prsmed_module_set(number) }, since, stays: PhantomData }
}

impl Drop for ModuleGuard {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local integer.
        unsafe { native::prsmed_module_set(self.before) };
        if let Some((name, since)) = self.since
            && let Some(now) = now_watched()
        {
            WATCHED.with_borrow_mut(|watched| {
                let Some((_, parts)) = watched else { return };
                let seconds = (now - since).as_secs_f64();
                match parts.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, sum)) => *sum += seconds,
                    None => parts.push((name, seconds)),
                }
            });
        }
    }
}

/// Seconds of each top-level module, in the order in which they were first entered.
pub type ModuleTimes = Vec<(&'static str, f64)>;

thread_local! {
    static WATCHED: RefCell<Option<(Device, ModuleTimes)>> = const { RefCell::new(None) };
}

/// The time after the device has completed all queued work; `None` if no [`Stopwatch`] runs.
fn now_watched() -> Option<Instant> {
    let device = WATCHED.with_borrow(|watched| watched.as_ref().map(|(device, _)| *device))?;
    synchronize(device);
    Some(Instant::now())
}

/// Times the top-level modules of its thread until it is dropped. It waits for the GPU at each end of a module.
#[derive(Debug)]
pub struct Stopwatch {
    thread: PhantomData<*const ()>,
}

impl Stopwatch {
    /// Starts with no times. It replaces an earlier stopwatch of this thread.
    #[must_use]
    pub fn start(device: Device) -> Self {
        WATCHED.set(Some((device, ModuleTimes::new())));
        Self { thread: PhantomData }
    }

    /// The times since the start or the last call of this function.
    pub fn take(&self) -> ModuleTimes {
        WATCHED.with_borrow_mut(|watched| {
            watched.as_mut().map_or_else(ModuleTimes::new, |(_, parts)| std::mem::take(parts))
        })
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        WATCHED.set(None);
    }
}

/// Gives the nodes of this thread's backward passes the module paths of their forward passes, until it is dropped. CPU
/// only: on a GPU another thread runs the nodes.
#[derive(Debug)]
pub struct FollowGuard {
    thread: PhantomData<*const ()>,
}

/// Follows the backward passes of this thread until the result is dropped. Calls may be nested, also with a trace.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn follow_backward() -> prsmed_base::Result<FollowGuard> {
    // SAFETY: starts thread-local bookkeeping.
    unsafe { native::check(native::prsmed_module_follow())? };
    Ok(FollowGuard { thread: PhantomData })
}

impl FollowGuard {
    /// Forgets the graphs made so far, which limits the memory of a long run. Call it between steps.
    pub fn forget(&self) {
        // SAFETY: shrinks thread-local bookkeeping.
        unsafe { native::prsmed_module_forget() };
    }
}

impl Drop for FollowGuard {
    fn drop(&mut self) {
        // SAFETY: ends thread-local bookkeeping; `self` is not `Send`.
        unsafe { native::prsmed_module_unfollow() };
    }
}

fn path_in(table: &Paths, module: u32) -> String {
    module.checked_sub(1).and_then(|index| table.paths.get(index as usize).cloned()).unwrap_or_default()
}

/// The module path of this thread; empty at the root.
pub fn current() -> String {
    // SAFETY: reads a thread-local integer.
    path(ModuleId(unsafe { native::prsmed_module() }))
}

/// The id of this thread's module path.
pub fn current_id() -> ModuleId {
    // SAFETY: reads a thread-local integer.
    ModuleId(unsafe { native::prsmed_module() })
}

/// The text of a module path; empty for the root.
pub fn path(module: ModuleId) -> String {
    path_in(&table(), module.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::clear_grad;
    use crate::{Device, Kind, Tensor, ledger};

    #[test]
    fn module_paths_nest() {
        let now = current;
        {
            let _llm = enter("llm");
            for _ in 0..2 {
                let _layer = enter_at("layers", 7);
                assert_eq!(now(), "llm.layers.7");
                let _attention = enter("self_attn");
                assert_eq!(now(), "llm.layers.7.self_attn");
            }
            assert_eq!(now(), "llm");
        }
        assert_eq!(now(), "");
    }

    #[test]
    fn a_stopwatch_times_top_level_modules() {
        let nap = |name| {
            let _module = enter(name);
            let _inner = enter("inner");
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        nap("not timed");
        let watch = Stopwatch::start(Device::Cpu);
        ["one", "two", "one"].into_iter().for_each(nap);
        let parts = watch.take();
        assert_eq!(parts.iter().map(|part| part.0).collect::<Vec<_>>(), ["one", "two"]);
        assert!(parts[0].1 >= 0.004 && parts[1].1 >= 0.002, "{parts:?}");
        assert!(watch.take().is_empty());
        let late = enter("late");
        drop(watch);
        drop(late);
        assert!(Stopwatch::start(Device::Cpu).take().is_empty());
    }

    #[test]
    fn a_gradient_has_the_module_path_of_its_forward_pass() {
        ledger::install();
        // the gradient is the only block of 2 MiB made in this module
        let weight = Tensor::ones([512, 1024], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let gradients_in_module = || {
            let loss = {
                let _module = enter("followed");
                weight.matmul(&Tensor::ones([1024, 3], (Kind::Float, Device::Cpu))).sum(Kind::Float)
            };
            clear_grad(&weight);
            loss.backward();
            let bytes = prsmed_base::units::Bytes(512 * 1024 * 4);
            let blocks = ledger::largest(1000).into_iter().filter(|block| block.bytes == bytes);
            blocks.map(|block| block.module).filter(|module| module == "followed").count()
        };
        assert_eq!(gradients_in_module(), 0, "the backward pass is not followed yet");
        let followed = follow_backward().unwrap();
        assert_eq!(gradients_in_module(), 1);
        followed.forget();
        assert_eq!(gradients_in_module(), 1, "a later graph is followed too");
        drop(followed);
        assert_eq!(gradients_in_module(), 0);
    }
}
