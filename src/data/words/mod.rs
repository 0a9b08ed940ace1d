//! Words about places: templates, their grammar, and whether they agree with a mask.

pub mod agreement;
pub mod geometry;
pub mod grammar;
pub mod numbers;
pub mod position;
pub mod relabel;
pub mod templates;
pub mod word_check;
