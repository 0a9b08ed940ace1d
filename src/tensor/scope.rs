//! The module scope of a thread (`llm.layers.7.self_attn`): names what allocates and computes, for plans and profiles.
//!
//! A node of the backward pass has the scope in which the forward pass made it, while a trace or a profile runs.

use super::{Device, native, synchronize};
use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Instant;

/// A scope's number; 0 is the outermost, without a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(pub u32);

#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<(u32, &'static str, i64), u32>,
    /// Whole paths; the first is that of scope 1.
    paths: Vec<String>,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// While it lives, its thread is in a scope.
#[derive(Debug)]
pub struct Entered {
    before: u32,
    /// When an outermost scope was entered under a [`Stopwatch`].
    since: Option<(&'static str, Instant)>,
    /// The scope is the thread's.
    stays: PhantomData<*const ()>,
}

/// Enters `name` below the current scope until the result is dropped.
#[must_use]
pub fn enter(name: &'static str) -> Entered {
    below(name, -1)
}

/// Enters `name.index` below the current scope.
#[must_use]
pub fn enter_at(name: &'static str, index: usize) -> Entered {
    below(name, i64::try_from(index).expect("few layers"))
}

fn below(name: &'static str, index: i64) -> Entered {
    // SAFETY: reads a thread-local integer.
    let parent = unsafe { native::prsmed_scope() };
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
    Entered { before: unsafe { native::prsmed_scope_set(number) }, since, stays: PhantomData }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local integer.
        unsafe { native::prsmed_scope_set(self.before) };
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

/// Seconds of outermost scopes, in the order they were first entered.
pub type Parts = Vec<(&'static str, f64)>;

thread_local! {
    static WATCHED: RefCell<Option<(Device, Parts)>> = const { RefCell::new(None) };
}

/// The time when the device has done everything so far; `None` when nobody measures.
fn now_watched() -> Option<Instant> {
    let device = WATCHED.with_borrow(|watched| watched.as_ref().map(|(device, _)| *device))?;
    synchronize(device);
    Some(Instant::now())
}

/// While it lives, its thread's outermost scopes are timed, and a card is waited for at each of their ends.
#[derive(Debug)]
pub struct Stopwatch {
    thread: PhantomData<*const ()>,
}

impl Stopwatch {
    /// Starts with no times; an earlier one of this thread ends.
    #[must_use]
    pub fn start(device: Device) -> Self {
        WATCHED.set(Some((device, Parts::new())));
        Self { thread: PhantomData }
    }

    /// The times since the start or the last call.
    pub fn take(&self) -> Parts {
        WATCHED.with_borrow_mut(|watched| watched.as_mut().map_or_else(Parts::new, |(_, parts)| std::mem::take(parts)))
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        WATCHED.set(None);
    }
}

/// While it lives, the nodes of this thread's backward passes have the scopes of their forward passes (CPU; on a card
/// another thread runs them).
#[derive(Debug)]
pub struct Followed {
    thread: PhantomData<*const ()>,
}

/// Follows the backward passes of this thread until the result is dropped. May be nested, also with a trace.
///
/// # Errors
/// [`crate::Error::Torch`] from libtorch.
pub fn follow_backward() -> crate::Result<Followed> {
    // SAFETY: starts thread-local bookkeeping.
    unsafe { native::check(native::prsmed_scope_follow())? };
    Ok(Followed { thread: PhantomData })
}

impl Followed {
    /// Forgets the graphs made so far, so that a long run's bookkeeping stays small. Call it between steps.
    pub fn forget(&self) {
        // SAFETY: shrinks thread-local bookkeeping.
        unsafe { native::prsmed_scope_forget() };
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        // SAFETY: ends thread-local bookkeeping; `self` is not `Send`.
        unsafe { native::prsmed_scope_unfollow() };
    }
}

fn path_in(table: &Table, scope: u32) -> String {
    match scope.checked_sub(1) {
        Some(index) => table.paths.get(index as usize).cloned().unwrap_or_default(),
        None => String::new(),
    }
}

/// The path of this thread's scope; empty for the outermost.
pub fn current() -> String {
    // SAFETY: reads a thread-local integer.
    path(Scope(unsafe { native::prsmed_scope() }))
}

/// The path of `scope`; empty for the outermost.
pub fn path(scope: Scope) -> String {
    path_in(&table(), scope.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::autograd::clear_grad;
    use crate::tensor::{Device, Kind, Tensor, ledger};

    #[test]
    fn scopes_nest_and_are_left() {
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
    fn outermost_scopes_are_timed_while_somebody_watches() {
        let nap = |name| {
            let _scope = enter(name);
            let _inner = enter("inner");
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        nap("unseen");
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
    fn a_block_of_the_backward_pass_has_the_scope_of_its_forward_pass() {
        ledger::install();
        // its gradient is the only block of 2 MiB made in this scope
        let weight = Tensor::ones([512, 1024], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let scope_of_gradient = || {
            let loss = {
                let _scope = enter("followed");
                weight.matmul(&Tensor::ones([1024, 3], (Kind::Float, Device::Cpu))).sum(Kind::Float)
            };
            clear_grad(&weight);
            loss.backward();
            let bytes = crate::units::Bytes(512 * 1024 * 4);
            let blocks = ledger::largest(1000).into_iter().filter(|block| block.bytes == bytes);
            blocks.map(|block| block.scope).filter(|scope| scope == "followed").count()
        };
        assert_eq!(scope_of_gradient(), 0, "nobody follows");
        let followed = follow_backward().unwrap();
        assert_eq!(scope_of_gradient(), 1);
        followed.forget();
        assert_eq!(scope_of_gradient(), 1, "a later graph is followed too");
        drop(followed);
        assert_eq!(scope_of_gradient(), 0);
    }
}
