//! Checks for diffusers' `config.json` files: numbers that may be lists, and options that are not supported.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// One number for all blocks, or one per block.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub enum PerBlock {
    /// The same number for all blocks.
    All(i64),
    /// One number per block, from the highest resolution to the lowest.
    Each(Vec<i64>),
}

impl PerBlock {
    /// The number of block `block`. [`Self::check`] has checked the length.
    pub fn at(&self, block: usize) -> i64 {
        match self {
            Self::All(value) => *value,
            Self::Each(values) => values[block],
        }
    }

    /// # Errors
    /// [`Error::Config`] if a list does not have `blocks` numbers, or a number is below 1.
    pub fn check(&self, key: &str, blocks: usize) -> Result<()> {
        let values = match self {
            Self::All(value) => std::slice::from_ref(value),
            Self::Each(values) if values.len() == blocks => values,
            Self::Each(values) => {
                return unsupported(key, format!("has {} numbers for {blocks} blocks", values.len()));
            }
        };
        values.iter().try_for_each(|value| positive(key, *value))
    }
}

/// # Errors
/// [`Error::Config`] if `value` is below 1.
pub(super) fn positive(key: &str, value: i64) -> Result<()> {
    if value > 0 { Ok(()) } else { unsupported(key, format!("is {value}, expected 1 or more")) }
}

/// # Errors
/// [`Error::Config`] if `value` is not a multiple of `divisor`, or either is below 1.
pub(super) fn multiple(key: &str, value: i64, divisor: i64) -> Result<()> {
    positive(key, value)?;
    if divisor > 0 && value % divisor == 0 {
        Ok(())
    } else {
        unsupported(key, format!("has {value}, which is not a multiple of {divisor}"))
    }
}

/// # Errors
/// [`Error::Config`] unless there are `blocks` types and all are in `known`.
pub(super) fn block_types(key: &str, types: &[String], known: &[&str], blocks: usize) -> Result<()> {
    if types.len() != blocks {
        return unsupported(key, format!("has {} types for {blocks} blocks", types.len()));
    }
    match types.iter().find(|t| !known.contains(&t.as_str())) {
        Some(other) => unsupported(key, format!("has `{other}`, supported are {}", known.join(", "))),
        None => Ok(()),
    }
}

/// # Errors
/// Always [`Error::Config`] about `key`.
pub(super) fn unsupported<T>(key: &str, reason: impl Into<String>) -> Result<T> {
    Err(Error::config(key, reason, "use a model of the Stable Diffusion 1, 2 or SDXL family in the diffusers layout"))
}

/// Checks that the fields of `found` have supported values. Fields without effect are not in the table.
///
/// # Errors
/// [`Error::Config`] with `network.field`.
pub(super) fn check_others(network: &str, found: &Map<String, Value>, supported: &[(&str, Value)]) -> Result<()> {
    for (field, allowed) in supported {
        let Some(value) = found.get(*field) else { continue };
        let each = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let allowed = allowed.as_array().map_or(std::slice::from_ref(allowed), Vec::as_slice);
        if !each.iter().all(|value| allowed.iter().any(|a| same(a, value))) {
            let list = allowed.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ");
            return unsupported(&format!("{network}.{field}"), format!("is {value}, supported is {list}"));
        }
    }
    Ok(())
}

/// Equality, with 1 equal to 1.0.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() < f64::EPSILON,
        _ => a == b,
    }
}
