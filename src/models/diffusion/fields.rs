//! What diffusers' `config.json` files have in common: numbers that may be lists, and values of networks not built here.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// One number for all blocks, or one for each.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub enum PerBlock {
    /// The same everywhere.
    All(i64),
    /// By block, from the highest resolution to the lowest.
    Each(Vec<i64>),
}

impl PerBlock {
    /// The number of block `block`; a checked list is long enough.
    pub fn at(&self, block: usize) -> i64 {
        match self {
            Self::All(value) => *value,
            Self::Each(values) => values[block],
        }
    }

    /// # Errors
    /// [`Error::Config`] when a list has not `blocks` numbers or a number is below 1.
    pub fn check(&self, key: &str, blocks: usize) -> Result<()> {
        let values = match self {
            Self::All(value) => std::slice::from_ref(value),
            Self::Each(values) if values.len() == blocks => values,
            Self::Each(values) => {
                return refused(key, format!("has {} numbers for {blocks} blocks", values.len()));
            }
        };
        values.iter().try_for_each(|value| positive(key, *value))
    }
}

/// # Errors
/// [`Error::Config`] when `value` is below 1.
pub(super) fn positive(key: &str, value: i64) -> Result<()> {
    if value > 0 { Ok(()) } else { refused(key, format!("is {value}, expected 1 or more")) }
}

/// # Errors
/// [`Error::Config`] when `value` is not a multiple of `divisor`, or one of them is below 1.
pub(super) fn multiple(key: &str, value: i64, divisor: i64) -> Result<()> {
    positive(key, value)?;
    if divisor > 0 && value % divisor == 0 {
        Ok(())
    } else {
        refused(key, format!("has {value}, which {divisor} does not divide"))
    }
}

/// # Errors
/// [`Error::Config`] unless every type is in `known` and there are `blocks` of them.
pub(super) fn block_types(key: &str, types: &[String], known: &[&str], blocks: usize) -> Result<()> {
    if types.len() != blocks {
        return refused(key, format!("has {} types for {blocks} blocks", types.len()));
    }
    match types.iter().find(|t| !known.contains(&t.as_str())) {
        Some(other) => refused(key, format!("has `{other}`, supported are {}", known.join(", "))),
        None => Ok(()),
    }
}

/// # Errors
/// Always: [`Error::Config`] about `key`.
pub(super) fn refused<T>(key: &str, reason: impl Into<String>) -> Result<T> {
    Err(Error::config(key, reason, "use a model of the Stable Diffusion 1, 2 or SDXL family in the diffusers layout"))
}

/// Refuses fields whose values ask for a network that is not built here; fields of no effect stay out of the table.
///
/// # Errors
/// [`Error::Config`] naming `network.field`.
pub(super) fn check_others(network: &str, found: &Map<String, Value>, supported: &[(&str, Value)]) -> Result<()> {
    for (field, allowed) in supported {
        let Some(value) = found.get(*field) else { continue };
        let each = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let allowed = allowed.as_array().map_or(std::slice::from_ref(allowed), Vec::as_slice);
        if !each.iter().all(|value| allowed.iter().any(|a| same(a, value))) {
            let list = allowed.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ");
            return refused(&format!("{network}.{field}"), format!("is {value}, supported is {list}"));
        }
    }
    Ok(())
}

/// Equality in which 1 and 1.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() < f64::EPSILON,
        _ => a == b,
    }
}
