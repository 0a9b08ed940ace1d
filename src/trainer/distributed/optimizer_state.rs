//! The optimizer state of all ranks on the rank that writes checkpoints, so that a checkpoint does not depend on the
//! number of ranks.

use super::Ranks;
use crate::tensor::{Device, Kind, Tensor};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A tensor that a rank has.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    shape: Vec<i64>,
    is_u8: bool,
}

/// The tensors of all ranks by their names, each rank's own in `own`. Complete on rank 0; other ranks get their own.
///
/// # Errors
/// [`Error::Torch`] if another rank does not answer.
pub(crate) fn complete_state(own: Vec<(String, Tensor)>, ranks: Ranks) -> Result<Vec<(String, Tensor)>> {
    let Some(world) = ranks.world() else { return Ok(own) };
    let describe = |(name, tensor): &(String, Tensor)| Entry {
        name: name.clone(),
        shape: tensor.size(),
        is_u8: tensor.kind() == Kind::Uint8,
    };
    let entries: Vec<Entry> = own.iter().map(describe).collect();
    let mut all: BTreeMap<String, Tensor> = own.into_iter().collect();
    let own: Vec<String> = all.keys().cloned().collect();
    for (rank, entries) in ranks.gather_if_all(Ok(entries))?.into_iter().enumerate() {
        for Entry { name, shape, is_u8 } in entries.into_iter().filter(|_| rank > 0) {
            let kind = if is_u8 { Kind::Uint8 } else { Kind::Float };
            let tensor = match all.get(&name) {
                Some(tensor) if rank == ranks.rank() => tensor.to_device(Device::Cpu).contiguous(),
                _ => Tensor::empty(shape.as_slice(), (kind, Device::Cpu)),
            };
            if tensor.kind() != kind {
                return Err(Error::Torch { reason: format!("`{name}` has dtype {:?}", tensor.kind()) });
            }
            world.broadcast_on_host(&tensor, rank)?;
            if ranks.is_main() {
                all.insert(name, tensor);
            }
        }
    }
    if !ranks.is_main() {
        all.retain(|name, _| own.contains(name));
    }
    Ok(all.into_iter().collect())
}
