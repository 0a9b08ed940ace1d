//! Parity of Stable Diffusion's networks with diffusers and transformers, in fp64, with weights from a formula.

use crate::fixture::Fixture;
use prsmed::models::diffusion::controlnet::{self, ControlNet};
use prsmed::models::diffusion::text::{self, TextTower};
use prsmed::models::diffusion::unet::{self, Added, Conditioning, Unet};
use prsmed::models::diffusion::vae::{self, Vae};
use prsmed::tensor::store::{Role, Store, StoreOptions, VarPath};
use prsmed::tensor::{Device, Kind, Tensor, no_grad};

const PLACE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn flat_indices(shape: &[i64]) -> Tensor {
    Tensor::arange(shape.iter().product::<i64>(), PLACE)
}

/// `sin(frequency i)` over the flattened tensor.
pub(crate) fn wave(shape: &[i64], frequency: f64) -> Tensor {
    (flat_indices(shape) * frequency).sin().reshape(shape)
}

/// [`wave`] as a leaf tensor with gradient.
fn leaf(shape: &[i64], frequency: f64) -> Tensor {
    wave(shape, frequency).set_requires_grad(true)
}

/// Formula of the weights.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Style {
    /// The formula of the published example values. Its matrices have rank 2, so they hide many errors.
    Smooth,
    /// Matrices of quadratic residues.
    Rough,
    /// Rough, with small layers before norms, so that the epsilons of norms matter.
    Quiet,
}

/// Fills the weights by the index of their names and their flat indices.
pub(crate) fn fill(store: &Store, style: Style) {
    let mut entries = store.entries();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    for (n, entry) in (0_u32..).zip(&entries) {
        let (n, size) = (f64::from(n), entry.tensor.size());
        let i = flat_indices(&size);
        let fan_in = size
            .iter()
            .skip(1)
            .fold(1.0, |product, side| product * f64::from(i32::try_from(*side).expect("a small side")));
        let mut flat = if size.len() > 1 && style == Style::Smooth {
            (i * 0.9 + 0.1 * n).sin() * (1.5 / fan_in.sqrt())
        } else if size.len() > 1 {
            // integers below 2^53, so exact
            ((&i * &i * 31.0 + &i * 7919.0 + n * 1009.0).remainder(10_007.0) / 10_007.0 - 0.5) * (3.0 / fan_in.sqrt())
        } else if entry.name.ends_with("weight") {
            (i * 0.7 + 0.3 * n).sin() * 0.1 + 1.0
        } else {
            (i * 0.5 + 0.2 * n).sin() * 0.05
        };
        let before_a_norm = ["conv", "proj_in"].iter().any(|part| entry.name.contains(part));
        if style == Style::Quiet && before_a_norm && !entry.name.contains("norm") {
            flat /= 64.0;
        }
        no_grad(|| entry.tensor.shallow_clone().copy_(&flat.reshape(&size)));
    }
}

/// A network in fp64. Its numbers of tensors and parameters must be those of the fixture.
fn build<T>(fixture: &Fixture, name: &str, new: impl FnOnce(&VarPath) -> T) -> (Store, T) {
    let options = StoreOptions { frozen_kind: Kind::Double, initialise: false, ..StoreOptions::cpu() };
    let store = Store::new(options);
    let network = new(&store.root(Role::Frozen));
    fill(&store, Style::Smooth);
    let entries = store.entries();
    let parameters: usize = entries.iter().map(|e| e.tensor.numel()).sum();
    assert_eq!(fixture.meta["sizes"][name], serde_json::json!([entries.len(), parameters]), "{name}");
    (store, network)
}

/// The config file of the Python library.
fn config<T: serde::de::DeserializeOwned>(fixture: &Fixture, name: &str) -> T {
    serde_json::from_value(fixture.meta["config"][name].clone()).expect("the config of a supported network")
}

/// Weights of `store` as leaf tensors.
fn weights<'a>(store: &Store, names: &[&'a str]) -> Vec<(&'a str, Tensor)> {
    let found = names.iter().map(|name| (*name, store.get(name).unwrap_or_else(|| panic!("no {name}"))));
    found.map(|(name, tensor)| (name, tensor.set_requires_grad(true))).collect()
}

/// Gradients of `sum(output * wave(0.37))`.
fn backward(output: &Tensor) {
    (output * wave(&output.size(), 0.37)).sum(Kind::Double).backward();
}

/// Checks published example values: the first elements, the last two, mean and mean magnitude.
fn printed(what: &str, got: &Tensor, first: &[f64], last: &[f64], means: &[f64]) {
    let flat = got.detach().reshape([-1]);
    let (count, end) = (flat.size()[0], i64::try_from(last.len()).expect("few numbers"));
    let all = (0..).zip(first).chain((count - end..).zip(last));
    let near = |what: &str, got: f64, want: f64| assert!((got - want).abs() < 1e-5, "{what}: {got}, printed {want}");
    for (i, want) in all {
        near(&format!("{what}[{i}]"), flat.double_value(&[i]), *want);
    }
    let own = [flat.mean(Kind::Double).double_value(&[]), flat.abs().mean(Kind::Double).double_value(&[])];
    for (got, want) in own.into_iter().zip(means) {
        near(&format!("{what} mean"), got, *want);
    }
}

fn times() -> Tensor {
    Tensor::from_slice(&[500.0_f32, 20.0])
}

#[test]
fn sdxl_agrees() {
    let fixture = Fixture::open("diffusion");
    let config: unet::Config = config(&fixture, "sdxl");
    config.check().unwrap();
    assert!(config.is_sdxl());
    let (store, net) = build(&fixture, "sdxl", |scope| Unet::new(scope, &config));
    let leaves = weights(
        &store,
        &[
            "conv_in.weight",
            "time_embedding.linear_1.weight",
            "add_embedding.linear_2.bias",
            "down_blocks.0.downsamplers.0.conv.weight",
            "down_blocks.1.attentions.1.proj_in.weight",
            "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k.weight",
            "mid_block.attentions.0.norm.weight",
            "mid_block.resnets.1.time_emb_proj.weight",
            "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.0.proj.weight",
            "up_blocks.0.upsamplers.0.conv.weight",
            "up_blocks.1.resnets.2.conv_shortcut.weight",
            "conv_norm_out.bias",
        ],
    );
    let (sample, text, pooled) = (leaf(&[2, 4, 16, 16], 0.31), leaf(&[2, 77, 64], 0.17), leaf(&[2, 32], 0.23));
    let ids = [512.0_f32, 512.0, 0.0, 0.0, 512.0, 512.0, 640.0, 480.0, 16.0, 8.0, 512.0, 512.0];
    let time_ids = Tensor::from_slice(&ids).view([2, 6]);
    let added = Some(Added { pooled: pooled.shallow_clone(), time_ids: time_ids.shallow_clone() });
    let conditioning = Conditioning { context: text.shallow_clone(), added };
    let run = || net.forward(&sample, &times(), &conditioning, None, unet::Pass::default());
    let mut case = fixture.case("sdxl");
    let out = run();
    let first = [0.295_455, 0.433_779, 0.379_969, 0.320_764];
    printed("SDXL", &out, &first, &[-0.290_393, -0.137_696], &[0.029_864, 0.129_713]);
    case.check("smooth", &out);
    fill(&store, Style::Rough);
    let out = run();
    case.check("out", &out);
    backward(&out);
    for (name, leaf) in [("sample", &sample), ("text", &text), ("pooled", &pooled)] {
        case.check(&format!("grad.{name}"), &leaf.grad());
    }
    for (name, leaf) in &leaves {
        case.check(&format!("grad.{name}"), &leaf.grad());
    }
    no_grad(|| {
        let added = Some(Added { pooled: pooled.narrow(0, 0, 1), time_ids: time_ids.narrow(0, 0, 1) });
        let one = Conditioning { context: text.narrow(0, 0, 1), added };
        case.check(
            "odd",
            &net.forward(&wave(&[1, 4, 9, 14], 0.31), &times().narrow(0, 0, 1), &one, None, unet::Pass::default()),
        );
        fill(&store, Style::Quiet);
        case.check("quiet", &run());
    });
    case.finish();
}

#[test]
#[expect(clippy::too_many_lines, reason = "one fixture, compared step by step")]
fn sd15_and_its_controlnet_agree() {
    let fixture = Fixture::open("diffusion");
    let unet_config: unet::Config = config(&fixture, "sd15");
    let control_config: controlnet::Config = config(&fixture, "controlnet");
    unet_config.check().unwrap();
    control_config.check().unwrap();
    let (store, net) = build(&fixture, "sd15", |scope| Unet::new(scope, &unet_config));
    let (control_store, control) = build(&fixture, "controlnet", |scope| ControlNet::new(scope, &control_config));
    let leaves = weights(
        &store,
        &[
            "down_blocks.0.attentions.1.proj_in.weight",
            "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight",
            "up_blocks.1.attentions.0.proj_out.weight",
            "up_blocks.1.attentions.2.transformer_blocks.0.norm3.weight",
            "conv_out.weight",
        ],
    );
    let (sample, text) = (leaf(&[2, 4, 16, 16], 0.31), leaf(&[2, 77, 32], 0.17));
    let conditioning = Conditioning { context: text.shallow_clone(), added: None };
    let image = ((wave(&[2, 3, 32, 32], 0.41) + 1.0) / 2.0).set_requires_grad(true);
    let (mut plain, mut steered) = (fixture.case("sd15"), fixture.case("controlnet"));
    let controlled = |sample: &Tensor| {
        let residuals = control.forward(sample, &times(), &conditioning, (&image, 0.7), unet::Pass::default());
        let out = net.forward(sample, &times(), &conditioning, Some(&residuals), unet::Pass::default());
        (residuals, out)
    };
    no_grad(|| {
        let out = net.forward(&sample, &times(), &conditioning, None, unet::Pass::default());
        let first = [0.387_251, 0.567_351, 0.574_479, 0.563_408];
        printed("SD 1.5", &out, &first, &[-0.301_685, -0.103_646], &[0.042_441, 0.164_555]);
        plain.check("smooth", &out);
        let (residuals, out) = controlled(&sample);
        let first = [2.109_073, 2.182_027, 1.915_450, 0.072_818];
        printed("mid", &residuals.mid, &first, &[-2.229_861, -2.218_350], &[0.004_416, 1.340_869]);
        printed("down 0", &residuals.down[0], &[1.517_780, 1.164_716, 1.827_713, 2.320_437], &[], &[]);
        let first = [0.360_046, 0.530_408, 0.536_925, 0.538_003];
        printed("SD 1.5 with ControlNet", &out, &first, &[-0.282_205, -0.071_985], &[0.042_456, 0.167_333]);
        for (i, value) in residuals.down.iter().enumerate() {
            steered.check(&format!("smooth.down.{i}"), value);
        }
        steered.check("smooth.mid", &residuals.mid);
        steered.check("smooth.out", &out);
    });
    fill(&store, Style::Rough);
    fill(&control_store, Style::Rough);
    let out = net.forward(&sample, &times(), &conditioning, None, unet::Pass::default());
    plain.check("out", &out);
    backward(&out);
    plain.check("grad.sample", &sample.grad());
    plain.check("grad.text", &text.grad());
    for (name, leaf) in &leaves {
        plain.check(&format!("grad.{name}"), &leaf.grad());
    }
    plain.finish();

    let leaves = weights(
        &control_store,
        &[
            "controlnet_cond_embedding.blocks.1.weight",
            "controlnet_down_blocks.3.weight",
            "controlnet_mid_block.bias",
            "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2.weight",
        ],
    );
    let sample = leaf(&[2, 4, 16, 16], 0.31);
    let (residuals, out) = controlled(&sample);
    steered.check("mid", &residuals.mid);
    steered.check("out", &out);
    backward(&out);
    steered.check("grad.sample", &sample.grad());
    steered.check("grad.image", &image.grad());
    for (name, leaf) in &leaves {
        steered.check(&format!("grad.{name}"), &leaf.grad());
    }
    steered.finish();
}

#[test]
fn the_autoencoder_agrees_for_images_and_tiles() {
    let fixture = Fixture::open("diffusion");
    let config: vae::Config = config(&fixture, "vae");
    config.check().unwrap();
    let (store, net) = build(&fixture, "vae", |scope| Vae::new(scope, &config));
    let (mid, norm) = ("encoder.mid_block.attentions.0.to_v.weight", "decoder.conv_norm_out.weight");
    let leaves = weights(&store, &[mid, norm]);
    let (pixels, latents) = (leaf(&[1, 3, 32, 32], 0.13), leaf(&[1, 4, 16, 16], 0.29));
    let (moments, image) = (net.encode(&pixels), net.decode(&latents));
    let first = [-0.126_919, 0.012_318, 0.025_395, -0.014_298];
    printed("mean", &moments.mean, &first, &[-0.077_478, -0.064_357], &[0.036_005, 0.163_219]);
    printed("logvar", &moments.logvar, &[0.137_223, -0.007_106, 0.022_357, 0.056_861], &[], &[]);
    let first = [0.430_103, 0.005_360, -0.248_237, -0.486_655];
    printed("decoded", &image, &first, &[0.211_744, 0.100_812], &[0.044_918, 0.547_931]);
    let mut case = fixture.case("vae");
    case.check("smooth.mean", &moments.mean);
    case.check("smooth.logvar", &moments.logvar);
    case.check("smooth.out", &image);
    fill(&store, Style::Rough);
    let (moments, image) = (net.encode(&pixels), net.decode(&latents));
    backward(&moments.mean);
    backward(&image);
    case.check("mean", &moments.mean);
    case.check("logvar", &moments.logvar);
    case.check("out", &image);
    case.check("encode.grad.pixels", &pixels.grad());
    case.check("encode.grad.mid", &leaves[0].1.grad());
    case.check("decode.grad.latents", &latents.grad());
    case.check("decode.grad.norm", &leaves[1].1.grad());
    no_grad(|| {
        let (latents, pixels) = (wave(&[2, 4, 40, 27], 0.29), wave(&[2, 3, 80, 54], 0.13));
        case.check("tiled.out", &net.decode_tiled(&latents, 32));
        case.check("tiled.mean", &net.encode_tiled(&pixels, 32).mean);
        let difference = (net.decode_sliced(&latents) - net.decode(&latents)).abs().max().double_value(&[]);
        assert!(difference < 1e-12, "single images differ from the batch by {difference}");
        let difference = (net.decode_tiled(&latents, 80) - net.decode(&latents)).abs().max().double_value(&[]);
        assert!(difference < 1e-12, "one tile differs from the whole by {difference}");
        fill(&store, Style::Quiet);
        case.check("quiet", &net.decode(&wave(&[1, 4, 16, 16], 0.29)));
    });
    case.finish();
}

#[test]
fn the_text_towers_agree() {
    let fixture = Fixture::open("diffusion");
    let ids = fixture.input("clip.ids");
    let tower = |name: &str, projection: bool| {
        let config: text::Config = config(&fixture, name);
        config.check().unwrap();
        build(&fixture, name, |scope| TextTower::new(scope, &config, projection))
    };
    let (store, quick) = tower("clip_quick", false);
    let names = ["text_model.embeddings.token_embedding.weight", "text_model.encoder.layers.1.self_attn.k_proj.weight"];
    let leaves = weights(&store, &names);
    let out = quick.forward(&ids);
    assert!(out.pooled.is_none());
    let first = [-0.946_142, 0.668_069, 0.187_682, 2.217_212];
    printed("last", &out.last, &first, &[-1.034_194, 0.800_447], &[0.004_653, 0.856_773]);
    printed("hidden -2", &out.penultimate, &[-0.099_505, 0.329_363, 0.076_702, 0.548_103], &[], &[]);
    let mut case = fixture.case("clip_quick");
    case.check("smooth.last", &out.last);
    case.check("smooth.penultimate", &out.penultimate);
    fill(&store, Style::Rough);
    let out = quick.forward(&ids);
    backward(&out.last);
    case.check("last", &out.last);
    case.check("penultimate", &out.penultimate);
    for (name, leaf) in &leaves {
        case.check(&format!("grad.{name}"), &leaf.grad());
    }
    case.finish();

    let (store, projected) = tower("clip_projection", true);
    let out = projected.forward(&ids);
    let pooled = out.pooled.as_ref().unwrap();
    let first = [0.133_496, -0.032_336, -0.077_555, 0.166_506];
    printed("pooled", pooled, &first, &[3.248_461, -2.810_166], &[-0.019_017, 1.149_613]);
    printed("hidden -2", &out.penultimate, &[-0.099_217, 0.333_994, 0.090_413, 0.549_117], &[], &[]);
    let mut case = fixture.case("clip_projection");
    case.check("smooth.pooled", pooled);
    case.check("smooth.penultimate", &out.penultimate);
    fill(&store, Style::Rough);
    let out = projected.forward(&ids);
    case.check("pooled", &out.pooled.unwrap());
    case.check("penultimate", &out.penultimate);
    case.finish();
}
