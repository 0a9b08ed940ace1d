//! The optimizer state of all ranks on the rank that writes checkpoints, so that a checkpoint does not depend on the
//! number of ranks.

use super::Ranks;
use prsmed_base::{Error, Result};
use prsmed_tensor::{Device, Kind, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A tensor that a rank has.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    shape: Vec<i64>,
    is_u8: bool,
}

impl Entry {
    fn kind(&self) -> Kind {
        if self.is_u8 { Kind::Uint8 } else { Kind::Float }
    }
}

/// The tensors of all ranks by their names. Each rank has others in `own`. Complete on rank 0; other ranks get their own.
///
/// # Errors
/// [`Error::Torch`] if another rank does not answer, or for another dtype than fp32 and u8.
pub(crate) fn complete_state(own: Vec<(String, Tensor)>, ranks: Ranks) -> Result<Vec<(String, Tensor)>> {
    let Some(world) = ranks.world() else { return Ok(own) };
    let describe = |(name, tensor): &(String, Tensor)| Entry {
        name: name.clone(),
        shape: tensor.size(),
        is_u8: tensor.kind() == Kind::Uint8,
    };
    let entries: Vec<Entry> = own.iter().map(describe).collect();
    let mut all: BTreeMap<String, Tensor> = own.into_iter().collect();
    for (rank, entries) in ranks.gather_if_all(Ok(entries))?.into_iter().enumerate().skip(1) {
        for entry in entries {
            let Entry { name, shape, .. } = &entry;
            if ranks.is_main() {
                let tensor = Tensor::empty(shape.as_slice(), (entry.kind(), Device::Cpu));
                world.collect_on_host(&tensor, rank)?;
                all.insert(entry.name, tensor);
            } else if rank == ranks.rank() {
                let tensor = all[name].to_device(Device::Cpu).contiguous();
                if tensor.kind() != entry.kind() {
                    return Err(Error::Torch { reason: format!("`{name}` has dtype {:?}", tensor.kind()) });
                }
                world.collect_on_host(&tensor, rank)?;
            }
        }
    }
    Ok(all.into_iter().collect())
}
