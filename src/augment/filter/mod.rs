//! Which pairs are good enough to train on.
