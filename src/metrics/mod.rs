//! Pure functions on arrays.
