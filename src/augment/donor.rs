//! Masks of other pictures, moved to a new place.
