//! Noise schedule and samplers as pure functions.
