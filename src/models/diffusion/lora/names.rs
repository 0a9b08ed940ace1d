//! Names of LoRA tensors: converts four naming schemes to the dotted module paths of diffusers.
//!
//! | scheme | example |
//! |---|---|
//! | PEFT | `unet.….attn1.to_q.lora_A.weight`, also after or before `base_model.model.` |
//! | older diffusers | `unet.….attn1.to_q.lora.down.weight`, `unet.….attn1.processor.to_q_lora.down.weight` |
//! | kohya | `lora_unet_…_attn1_to_q.lora_down.weight`, `lora_te1_text_model_…`, underscores for dots, with `.alpha` |
//! | kohya, SDXL | like kohya, with the blocks of the original checkpoint: `lora_unet_input_blocks_4_1_…` |

use super::Component;
use crate::models::diffusion::single_file::{OUTSIDE, RESNET};

/// Role of a tensor in an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoraPart {
    /// The first factor, `[rank, in]`.
    Down,
    /// The second factor, `[out, rank]`.
    Up,
    /// The scale times the rank.
    Alpha,
}

/// Suffixes of keys, longer ones first if one ends with another.
const PARTS: &[(&str, LoraPart)] = &[
    (".lora_A.weight", LoraPart::Down),
    (".lora_B.weight", LoraPart::Up),
    (".lora_A.default.weight", LoraPart::Down),
    (".lora_B.default.weight", LoraPart::Up),
    (".lora_linear_layer.down.weight", LoraPart::Down),
    (".lora_linear_layer.up.weight", LoraPart::Up),
    (".lora.down.weight", LoraPart::Down),
    (".lora.up.weight", LoraPart::Up),
    (".lora_down.weight", LoraPart::Down),
    (".lora_up.weight", LoraPart::Up),
    ("_lora.down.weight", LoraPart::Down),
    ("_lora.up.weight", LoraPart::Up),
    (".alpha", LoraPart::Alpha),
];

/// Path components that contain underscores.
const COMPOUND: &[&str] = &[
    "down_blocks", "mid_block", "up_blocks", "transformer_blocks", "time_embedding", "add_embedding", "linear_1",
    "linear_2", "time_emb_proj", "conv_in", "conv_out", "conv_shortcut", "conv_norm_out", "proj_in", "proj_out",
    "to_q", "to_k", "to_v", "to_out", "text_model", "text_projection", "final_layer_norm", "layer_norm1",
    "layer_norm2", "self_attn", "q_proj", "k_proj", "v_proj", "out_proj", "token_embedding", "position_embedding",
];

/// Blocks per resolution in the original checkpoint: two layers, and the step to the next resolution.
const SGM_STRIDE: usize = 3;

/// Component, dotted module and part of the tensor `key`; `None` if the key does not belong to an adapter.
pub(super) fn read(key: &str) -> Option<(Component, String, LoraPart)> {
    let (stem, part) = PARTS.iter().find_map(|(ending, part)| Some((key.strip_suffix(ending)?, *part)))?;
    for (prefix, component) in [
        ("lora_unet_", Component::Unet),
        ("lora_te_", Component::TextEncoder),
        ("lora_te1_", Component::TextEncoder),
        ("lora_te2_", Component::TextEncoder2),
    ] {
        if let Some(flat) = stem.strip_prefix(prefix) {
            return Some((component, dotted(flat)?, part));
        }
    }
    let (component, module) = component_of(stem);
    Some((component, processor_free(module), part))
}

/// Removes the component and PEFT's wrapper from a dotted path. A path without a component belongs to the UNet, unless
/// it starts like that of a text tower.
pub(super) fn component_of(path: &str) -> (Component, &str) {
    const WRAPPER: &str = "base_model.model.";
    let path = path.strip_prefix(WRAPPER).unwrap_or(path);
    let named = Component::ALL.iter().find_map(|c| Some((*c, path.strip_prefix(c.name())?.strip_prefix('.')?)));
    let (component, module) = named.unwrap_or_else(|| {
        let text = path.starts_with("text_model.") || path.starts_with("text_projection");
        (if text { Component::TextEncoder } else { Component::Unet }, path)
    });
    (component, module.strip_prefix(WRAPPER).unwrap_or(module))
}

/// Old processor names: `attn1.processor.to_q` is `attn1.to_q`, and `self_attn.to_q` of a text tower is
/// `self_attn.q_proj`.
fn processor_free(module: &str) -> String {
    let module = module.replace(".processor.", ".");
    if let Some(stem) = module.strip_suffix(".to_out") {
        let inside_text = stem.ends_with("self_attn");
        return format!("{stem}.{}", if inside_text { "out_proj" } else { "to_out.0" });
    }
    match module.rsplit_once(".self_attn.to_") {
        Some((stem, which)) => format!("{stem}.self_attn.{which}_proj"),
        None => module,
    }
}

/// The dotted path of a name with underscores; `None` for a block that no model of the family has.
fn dotted(flat: &str) -> Option<String> {
    if let Some((_, module)) = OUTSIDE.iter().find(|(name, _)| name.replace('.', "_") == flat) {
        return Some((*module).to_owned());
    }
    let flat = match sgm_block(flat) {
        Sgm::Block(flat) => flat,
        Sgm::Invalid => return None,
        Sgm::No => flat.to_owned(),
    };
    let (mut rest, mut path) = (flat.as_str(), Vec::new());
    while !rest.is_empty() {
        let whole =
            |word: &&&str| rest.strip_prefix(**word).is_some_and(|after| after.is_empty() || after.starts_with('_'));
        let word = COMPOUND.iter().find(whole).map_or_else(|| rest.split('_').next().unwrap_or(rest), |word| *word);
        path.push(word);
        rest = rest[word.len()..].trim_start_matches('_');
    }
    Some(path.join("."))
}

/// Result of matching a name with underscores to the blocks of the original checkpoint.
enum Sgm {
    /// A block of the original checkpoint, with its name in diffusers.
    Block(String),
    /// Looks like one, but there is no such block.
    Invalid,
    /// A name of diffusers.
    No,
}

fn sgm_block(flat: &str) -> Sgm {
    let found = if let Some(rest) = flat.strip_prefix("input_blocks_") {
        input_block(rest)
    } else if let Some(rest) = flat.strip_prefix("middle_block_") {
        middle_block(rest)
    } else if let Some(rest) = flat.strip_prefix("output_blocks_") {
        output_block(rest)
    } else {
        return Sgm::No;
    };
    found.map_or(Sgm::Invalid, Sgm::Block)
}

/// Splits `4_1_rest` into 4, 1 and `rest`.
fn numbered(rest: &str) -> Option<(usize, usize, &str)> {
    let (block, rest) = rest.split_once('_')?;
    let (inner, rest) = rest.split_once('_')?;
    Some((block.parse().ok()?, inner.parse().ok()?, rest))
}

fn input_block(rest: &str) -> Option<String> {
    let (i, inner, rest) = numbered(rest)?;
    let (block, layer) = (i.checked_sub(1)? / SGM_STRIDE, (i - 1) % SGM_STRIDE);
    if rest == "op" {
        return Some(format!("down_blocks_{block}_downsamplers_0_conv"));
    }
    Some(format!("down_blocks_{block}_{}", layer_of(inner, layer, rest)?))
}

fn middle_block(rest: &str) -> Option<String> {
    let (i, rest) = rest.split_once('_')?;
    let (inner, layer) = match i {
        "0" => (0, 0),
        "1" => (1, 0),
        "2" => (0, 1),
        _ => return None,
    };
    Some(format!("mid_block_{}", layer_of(inner, layer, rest)?))
}

fn output_block(rest: &str) -> Option<String> {
    let (i, inner, rest) = numbered(rest)?;
    let (block, layer) = (i / SGM_STRIDE, i % SGM_STRIDE);
    if rest == "conv" {
        return Some(format!("up_blocks_{block}_upsamplers_0_conv"));
    }
    Some(format!("up_blocks_{block}_{}", layer_of(inner, layer, rest)?))
}

/// Name in the original checkpoint of a module of a transformer, `None` for other modules.
pub(super) fn original_block(module: &str) -> Option<String> {
    let (block, rest) = module.split_once(".attentions.")?;
    let (layer, rest) = rest.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    if block == "mid_block" {
        return Some(format!("middle_block.{}.{rest}", layer + 1));
    }
    let (direction, number) = block.split_once('.')?;
    let first = number.parse::<usize>().ok()? * SGM_STRIDE + layer;
    match direction {
        "down_blocks" => Some(format!("input_blocks.{}.1.{rest}", first + 1)),
        "up_blocks" => Some(format!("output_blocks.{first}.1.{rest}")),
        _ => None,
    }
}

/// The first module of a block is its residual block, the second its attention.
fn layer_of(inner: usize, layer: usize, rest: &str) -> Option<String> {
    match inner {
        0 => {
            let (_, name) = RESNET.iter().find(|(original, _)| original.replace('.', "_") == rest)?;
            Some(format!("resnets_{layer}_{name}"))
        }
        1 => Some(format!("attentions_{layer}_{rest}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attention modules of SDXL's UNet: name in diffusers, and name in the original checkpoint.
    fn sdxl_attention() -> Vec<(String, String)> {
        let mut pairs = Vec::new();
        let mut block = |ours: String, original: String, depth: usize| {
            for (mine, theirs) in [("proj_in", "proj_in"), ("proj_out", "proj_out")] {
                pairs.push((format!("{ours}.{mine}"), format!("{original}_{theirs}")));
            }
            for k in 0..depth {
                let ends = ["to_q", "to_k", "to_v", "to_out.0"];
                let attention = ["attn1", "attn2"].iter().flat_map(|a| ends.map(|end| format!("{a}.{end}")));
                for end in attention.chain(["ff.net.0.proj".into(), "ff.net.2".into()]) {
                    let flat = end.replace('.', "_");
                    pairs.push((
                        format!("{ours}.transformer_blocks.{k}.{end}"),
                        format!("{original}_transformer_blocks_{k}_{flat}"),
                    ));
                }
            }
        };
        for (i, (b, layer, depth)) in [(4, (1, 0, 2)), (5, (1, 1, 2)), (7, (2, 0, 10)), (8, (2, 1, 10))] {
            block(format!("down_blocks.{b}.attentions.{layer}"), format!("input_blocks_{i}_1"), depth);
        }
        block("mid_block.attentions.0".into(), "middle_block_1".into(), 10);
        for i in 0..6 {
            let depth = if i < 3 { 10 } else { 2 };
            block(format!("up_blocks.{}.attentions.{}", i / 3, i % 3), format!("output_blocks_{i}_1"), depth);
        }
        pairs
    }

    #[test]
    fn sdxl_blocks_of_the_original_checkpoint() {
        let pairs = sdxl_attention();
        // of the 722 modules with attention, feed-forward and projections: 700 in transformer blocks, 22 projections
        assert_eq!(pairs.len(), 722);
        for (ours, original) in &pairs {
            assert_eq!(dotted(original).as_ref(), Some(ours), "{original}");
            assert_eq!(dotted(&ours.replace('.', "_")).as_ref(), Some(ours), "the same with diffusers' name");
            assert_eq!(original_block(ours).map(|name| name.replace('.', "_")).as_ref(), Some(original));
        }
        for (original, ours) in [
            ("input_blocks_0_0", "conv_in"),
            ("input_blocks_1_0_in_layers_2", "down_blocks.0.resnets.0.conv1"),
            ("input_blocks_3_0_op", "down_blocks.0.downsamplers.0.conv"),
            ("input_blocks_4_0_skip_connection", "down_blocks.1.resnets.0.conv_shortcut"),
            ("input_blocks_8_0_emb_layers_1", "down_blocks.2.resnets.1.time_emb_proj"),
            ("middle_block_2_out_layers_3", "mid_block.resnets.1.conv2"),
            ("output_blocks_2_2_conv", "up_blocks.0.upsamplers.0.conv"),
            ("output_blocks_8_0_in_layers_2", "up_blocks.2.resnets.2.conv1"),
            ("time_embed_2", "time_embedding.linear_2"),
            ("label_emb_0_0", "add_embedding.linear_1"),
            ("out_2", "conv_out"),
        ] {
            assert_eq!(dotted(original).as_deref(), Some(ours));
        }
        for wrong in ["input_blocks_0_1_proj_in", "middle_block_3_proj_in", "output_blocks_x_1_proj_in"] {
            assert_eq!(dotted(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn all_naming_schemes_of_a_module_are_read() {
        let unet = "down_blocks.1.attentions.0.transformer_blocks.0.attn1";
        let flat = unet.replace('.', "_");
        for key in [
            format!("unet.{unet}.to_out.0.lora_B.weight"),
            format!("base_model.model.{unet}.to_out.0.lora_B.weight"),
            format!("base_model.model.unet.{unet}.to_out.0.lora_B.default.weight"),
            format!("unet.base_model.model.{unet}.to_out.0.lora_B.weight"),
            format!("unet.{unet}.to_out.0.lora.up.weight"),
            format!("unet.{unet}.processor.to_out_lora.up.weight"),
            format!("lora_unet_{flat}_to_out_0.lora_up.weight"),
            "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_out_0.lora_up.weight".into(),
        ] {
            assert_eq!(read(&key), Some((Component::Unet, format!("{unet}.to_out.0"), LoraPart::Up)), "{key}");
        }
        let text = "text_model.encoder.layers.11.self_attn.out_proj";
        for (key, component) in [
            (format!("text_encoder.{text}.lora_A.weight"), Component::TextEncoder),
            (format!("text_encoder_2.{text}.lora_linear_layer.down.weight"), Component::TextEncoder2),
            (
                "text_encoder.text_model.encoder.layers.11.self_attn.to_out_lora.down.weight".into(),
                Component::TextEncoder,
            ),
            (format!("base_model.model.{text}.lora_A.weight"), Component::TextEncoder),
            (format!("lora_te_{}.lora_down.weight", text.replace('.', "_")), Component::TextEncoder),
            (format!("lora_te1_{}.lora_down.weight", text.replace('.', "_")), Component::TextEncoder),
            (format!("lora_te2_{}.lora_down.weight", text.replace('.', "_")), Component::TextEncoder2),
        ] {
            assert_eq!(read(&key), Some((component, text.to_owned(), LoraPart::Down)), "{key}");
        }
        let mlp = "lora_te2_text_model_encoder_layers_31_mlp_fc1.alpha";
        assert_eq!(read(mlp).unwrap().1, "text_model.encoder.layers.31.mlp.fc1");
        let old = "text_encoder.text_model.encoder.layers.2.self_attn.to_q_lora.up.weight";
        assert_eq!(read(old).unwrap().1, "text_model.encoder.layers.2.self_attn.q_proj");
        assert_eq!(read("lora_unet_conv_in.hada_w1_a"), None);
    }
}
