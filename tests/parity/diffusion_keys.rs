//! Parity of names and shapes of Stable Diffusion's networks at their published sizes, on the meta device.
//!
//! The hashes are those of the lists from diffusers and transformers (`scripts/fixtures/diffusion.py keys`).

use prsmed::models::diffusion::{controlnet, text, unet, vae};
use prsmed::tensor::store::{Role, Store, StoreOptions, VarPath};
use prsmed::tensor::{META, ledger, meta};
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Number of tensors, number of parameters, and hash of the sorted list.
fn summary(new: impl FnOnce(&VarPath)) -> (usize, usize, String) {
    ledger::install();
    meta::install().expect("a meta device");
    let store = Store::new(StoreOptions { device: META, initialise: false, ..StoreOptions::cpu() });
    new(&store.root(Role::Frozen));
    let mut entries = store.entries();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let parameters = entries.iter().map(|e| e.tensor.numel()).sum();
    let mut list = String::new();
    for entry in &entries {
        writeln!(list, "{} {:?}", entry.name, entry.tensor.size()).expect("a string takes all");
    }
    let mut hash = String::new();
    for byte in Sha256::digest(list.as_bytes()) {
        write!(hash, "{byte:02x}").expect("a string takes all");
    }
    (entries.len(), parameters, hash)
}

fn same(got: &(usize, usize, String), tensors: usize, parameters: usize, hash: &str) {
    assert_eq!((got.0, got.1), (tensors, parameters), "tensors and parameters");
    assert_eq!(got.2, hash, "names or shapes differ");
}

fn unet(config: &unet::Config) -> (usize, usize, String) {
    config.check().expect("a published config");
    summary(|scope| drop(unet::Unet::new(scope, config)))
}

fn controlnet(config: &controlnet::Config) -> (usize, usize, String) {
    config.check().expect("a published config");
    summary(|scope| drop(controlnet::ControlNet::new(scope, config)))
}

#[test]
fn unets_have_the_published_keys() {
    let (sd15, sd21, sdxl) = (unet::Config::sd15(), unet::Config::sd21(), unet::Config::sdxl());
    let hash = "77ebc1df4e20916ac2e4cf489483e15661fccfe020d57eb554ab4671224d5de1";
    same(&unet(&sd15), 686, 859_520_964, hash);
    let hash = "e1b6b20265b7d9d1d5860597d83fb88d34c545a8f97990087deb27c14c3a378e";
    same(&unet(&sd21), 686, 865_910_724, hash);
    let hash = "93a876608bc1ee82195e34e1eb1667784c548cc1af6deaf04d79692e6d36926f";
    same(&unet(&sdxl), 1680, 2_567_463_684, hash);
    let inpainting = |config: unet::Config| unet(&unet::Config { in_channels: 9, ..config });
    assert_eq!(inpainting(sd15).1, 859_535_364);
    assert_eq!(inpainting(sdxl).1, 2_567_478_084);
}

#[test]
fn controlnets_have_the_published_keys() {
    let hash = "e98d096ae52c42224bf5e57a45cd2d0b0c0273ffb3ccbbff3bbe8f28b3cd0908";
    same(&controlnet(&controlnet::Config::of(unet::Config::sd15())), 340, 361_279_120, hash);
    let sdxl = controlnet(&controlnet::Config::of(unet::Config::sdxl()));
    assert_eq!((sdxl.0, sdxl.1), (844, 1_251_014_160));
}

#[test]
fn the_autoencoder_has_the_published_keys() {
    let hash = "5a0ba4e758a914142de788cfdc978a9e45274c037ef49e4aeac28723907be7c6";
    for config in [vae::Config::sd(), vae::Config::sdxl()] {
        same(&summary(|scope| drop(vae::Vae::new(scope, &config))), 248, 83_653_863, hash);
    }
}

#[test]
fn text_towers_have_the_published_keys() {
    let tower = |config: &text::Config, projection| summary(|s| drop(text::TextTower::new(s, config, projection)));
    let hash = "2d6bd75085bd03af52a7719c719d4a51a986392b52812388305320cfb0500046";
    same(&tower(&text::Config::clip_l(), false), 196, 123_060_480, hash);
    let hash = "42ac16b3f9ae2999257e196151188497597d171289bb09e9131f49e737ed6f79";
    same(&tower(&text::Config::open_clip_h(), false), 372, 340_387_840, hash);
    let hash = "02cca0fa2d2af3b0af8f927b0cbb7c74b12486d02e3ff2bb155dc64a58578112";
    same(&tower(&text::Config::clip_big_g(), true), 517, 694_659_840, hash);
}
