//! Writes pairs as a data root.
