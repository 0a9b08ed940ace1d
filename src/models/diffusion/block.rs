//! Residual blocks, transformer blocks and resampling that UNet, ControlNet and VAE share.
