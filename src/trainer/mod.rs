//! The training engine; knows only the `Task` trait.

pub mod records;
