//! ControlNet (Zhang et al. 2023).
