//! One file for each published model.
