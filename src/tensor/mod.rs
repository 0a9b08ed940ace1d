//! The only door to `tch`, libtorch and our C++.

pub use tch::{Device, Kind, Tensor, no_grad};
pub mod weights;
