//! The denoising UNet.
