//! Shape destructuring that checks: `let [b, t, d] = dims(&xs)`.

use super::Tensor;

/// The sizes of `xs`, which must have exactly `N` dimensions.
///
/// # Panics
/// When the rank differs; [`super::guard`] turns that into [`prsmed_base::Error::Shape`].
pub fn dims<const N: usize>(xs: &Tensor) -> [i64; N] {
    let size = xs.size();
    let dims = <[i64; N]>::try_from(size.as_slice());
    dims.unwrap_or_else(|_| panic!("shape mismatch: expected {N} dimensions, got {size:?}"))
}
