//! The training engine; knows only the `Task` trait.
