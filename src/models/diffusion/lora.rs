//! Low-rank adapters of diffusion models, read from files.
