//! Shared ownership of values that contain tensors, for closures that libtorch's threads run and drop.

use std::ops::Deref;
use std::panic::RefUnwindSafe;
use std::sync::Arc;

/// As [`Arc`], for values that are not `Sync` only because they contain tensors.
///
/// The bounds of the implementations of `Send` and `Sync` are checked by the compiler: a value with an [`Rc`] is not
/// `Send`, and one with a [`Cell`] is not `RefUnwindSafe`.
///
/// [`Rc`]: std::rc::Rc
/// [`Cell`]: std::cell::Cell
#[derive(Debug, Default)]
pub struct Shared<T>(Arc<T>);

// SAFETY: owners are counted atomically, and any thread may drop the value, since `T` is `Send`. Threads that share the
// value share `&T`. `RefUnwindSafe` excludes interior mutability in Rust other than locks and atomics, so `&T` is only
// critical for tensors. libtorch counts the owners of a tensor atomically and allows reads by several threads. Threads
// must not write to one tensor at the same time; handles from `Tensor::shallow_clone`, which are `Send`, have the same
// rule.
unsafe impl<T: Send + RefUnwindSafe> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + RefUnwindSafe> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The first owner of `value`.
    pub fn new(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Kind, Tensor};

    #[test]
    fn the_last_owner_may_be_another_thread() {
        let tensor = Shared::new(Tensor::ones([3], (Kind::Float, Device::Cpu)));
        let other = tensor.clone();
        let sum = std::thread::spawn(move || other.sum(Kind::Float).double_value(&[]));
        drop(tensor);
        assert_eq!(sum.join().unwrap(), 3.0);
    }
}
