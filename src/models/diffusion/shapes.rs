//! Names and shapes of a network's tensors, from its code on the meta device.

use crate::error::Result;
use crate::tensor::store::{Role, Store, StoreOptions, VarPath};
use crate::tensor::{Kind, META, guard, meta, no_grad};
use std::collections::BTreeMap;

/// Shapes by name.
pub type Shapes = BTreeMap<String, Vec<i64>>;

/// Names and shapes of the tensors that `build` creates. Needs no memory for them.
///
/// # Errors
/// Typed errors of libtorch, for example for a size that is too large.
pub fn of(build: impl FnOnce(&VarPath)) -> Result<Shapes> {
    meta::install()?;
    let store = Store::new(StoreOptions { device: META, frozen_kind: Kind::Float, initialise: false });
    guard::guard(|| {
        no_grad(|| build(&store.root(Role::Frozen)));
        Ok(())
    })?;
    Ok(store.entries().into_iter().map(|entry| (entry.name, entry.tensor.size())).collect())
}
