//! The latent autoencoder.
