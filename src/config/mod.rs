//! Presets and overrides.
