//! Keys of Stability's layout, converted to the names of diffusers.
//!
//! | network | key | name |
//! |---|---|---|
//! | UNet | `input_blocks.4.0.in_layers.2.weight` | `down_blocks.1.resnets.0.conv1.weight` |
//! | UNet | `input_blocks.4.1.proj_in.weight` | `down_blocks.1.attentions.0.proj_in.weight` |
//! | autoencoder | `decoder.up.3.block.0.nin_shortcut.weight` | `decoder.up_blocks.0.resnets.0.conv_shortcut.weight` |
//! | CLIP | `text_model.…` | the same |
//! | OpenCLIP | `transformer.resblocks.0.attn.in_proj_weight` | `….self_attn.q_proj.weight` and those of k and v |

use super::layout::{Cut, Piece};

/// Modules of the UNet that are not in a block, with their names in diffusers.
pub(in crate::models::diffusion) const OUTSIDE: [(&str, &str); 7] = [
    ("time_embed.0", "time_embedding.linear_1"),
    ("time_embed.2", "time_embedding.linear_2"),
    ("label_emb.0.0", "add_embedding.linear_1"),
    ("label_emb.0.2", "add_embedding.linear_2"),
    ("input_blocks.0.0", "conv_in"),
    ("out.0", "conv_norm_out"),
    ("out.2", "conv_out"),
];

/// Parts of a residual block of the UNet.
pub(in crate::models::diffusion) const RESNET: [(&str, &str); 6] = [
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
];

/// Modules of the autoencoder's attention.
const VAE_ATTENTION: [(&str, &str); 5] =
    [("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")];

/// Modules of a layer of OpenCLIP's text tower.
const OPEN_CLIP: [(&str, &str); 5] = [
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
    ("attn.out_proj", "self_attn.out_proj"),
];

/// Looks `name` up in a table of renamed modules.
fn renamed(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|(original, _)| *original == name).map(|(_, own)| *own)
}

/// Splits `4.1.rest` into 4, 1 and `rest`.
fn numbered(rest: &str) -> Option<(usize, usize, &str)> {
    let (block, rest) = rest.split_once('.')?;
    let (inner, rest) = rest.split_once('.')?;
    Some((block.parse().ok()?, inner.parse().ok()?, rest))
}

/// A module of a block: those of residual block and transformer `layer`.
fn layer_of(inner: usize, layer: usize, rest: &str) -> Option<String> {
    match inner {
        0 => Some(format!("resnets.{layer}.{}", renamed(&RESNET, rest)?)),
        1 => Some(format!("attentions.{layer}.{rest}")),
        _ => None,
    }
}

/// Name in diffusers of the UNet's tensor `key` (without `model.diffusion_model.`). `num_layers` is the number of
/// residual blocks of a down block.
pub(super) fn unet(key: &str, num_layers: usize) -> Option<String> {
    let (module, tensor) = key.rsplit_once('.')?;
    let stride = num_layers + 1;
    let name = if let Some(name) = renamed(&OUTSIDE, module) {
        name.to_owned()
    } else if let Some(rest) = module.strip_prefix("input_blocks.") {
        let (i, inner, rest) = numbered(rest)?;
        let (block, layer) = (i.checked_sub(1)? / stride, (i - 1) % stride);
        match rest {
            "op" => format!("down_blocks.{block}.downsamplers.0.conv"),
            rest => format!("down_blocks.{block}.{}", layer_of(inner, layer, rest)?),
        }
    } else if let Some(rest) = module.strip_prefix("middle_block.") {
        let (i, rest) = rest.split_once('.')?;
        let (inner, layer) = match i {
            "0" => (0, 0),
            "1" => (1, 0),
            "2" => (0, 1),
            _ => return None,
        };
        format!("mid_block.{}", layer_of(inner, layer, rest)?)
    } else {
        let (i, inner, rest) = numbered(module.strip_prefix("output_blocks.")?)?;
        match rest {
            "conv" => format!("up_blocks.{}.upsamplers.0.conv", i / stride),
            rest => format!("up_blocks.{}.{}", i / stride, layer_of(inner, i % stride, rest)?),
        }
    };
    Some(format!("{name}.{tensor}"))
}

/// Name in diffusers of the autoencoder's tensor `key` (without `first_stage_model.`). `num_blocks` is the number of
/// resolutions.
pub(super) fn vae(key: &str, num_blocks: usize) -> Option<String> {
    let (module, tensor) = key.rsplit_once('.')?;
    if matches!(module, "quant_conv" | "post_quant_conv") {
        return Some(key.to_owned());
    }
    let (half, module) = module.split_once('.').filter(|(half, _)| matches!(*half, "encoder" | "decoder"))?;
    let resnet = |rest: &str| rest.replace("nin_shortcut", "conv_shortcut");
    let name = match module.split_once('.') {
        None if matches!(module, "conv_in" | "conv_out") => module.to_owned(),
        None if module == "norm_out" => "conv_norm_out".to_owned(),
        Some(("mid", rest)) => {
            let (block, rest) = rest.split_once('.')?;
            match block {
                "block_1" => format!("mid_block.resnets.0.{}", resnet(rest)),
                "block_2" => format!("mid_block.resnets.1.{}", resnet(rest)),
                "attn_1" => format!("mid_block.attentions.0.{}", renamed(&VAE_ATTENTION, rest)?),
                _ => return None,
            }
        }
        Some((direction, rest)) => {
            let (i, rest) = rest.split_once('.')?;
            let i: usize = i.parse().ok()?;
            // the decoder counts from the highest resolution, diffusers from the lowest
            let blocks = match (half, direction) {
                ("encoder", "down") => format!("down_blocks.{i}"),
                ("decoder", "up") => format!("up_blocks.{}", num_blocks.checked_sub(i + 1)?),
                _ => return None,
            };
            match rest {
                "downsample.conv" => format!("{blocks}.downsamplers.0.conv"),
                "upsample.conv" => format!("{blocks}.upsamplers.0.conv"),
                rest => format!("{blocks}.resnets.{}", resnet(rest.strip_prefix("block.")?)),
            }
        }
        None => return None,
    };
    Some(format!("{half}.{name}.{tensor}"))
}

/// Names in diffusers of OpenCLIP's tensor `key` (without `cond_stage_model.model.` or
/// `conditioner.embedders.1.model.`). It has the projections q, k and v in one tensor.
pub(super) fn open_clip(key: &str) -> Option<Vec<Piece>> {
    let whole = |name: &str| Some(vec![Piece { name: name.to_owned(), cut: Cut::Whole }]);
    match key {
        "positional_embedding" => return whole("text_model.embeddings.position_embedding.weight"),
        "token_embedding.weight" => return whole("text_model.embeddings.token_embedding.weight"),
        "ln_final.weight" => return whole("text_model.final_layer_norm.weight"),
        "ln_final.bias" => return whole("text_model.final_layer_norm.bias"),
        "text_projection" => {
            return Some(vec![Piece { name: "text_projection.weight".to_owned(), cut: Cut::Transposed }]);
        }
        // diffusers' converter for SDXL keeps the name and the layout of transformers
        "text_projection.weight" => return whole(key),
        _ => {}
    }
    let (layer, rest) = key.strip_prefix("transformer.resblocks.")?.split_once('.')?;
    let layer = format!("text_model.encoder.layers.{}", layer.parse::<usize>().ok()?);
    if let Some(tensor) = rest.strip_prefix("attn.in_proj_") {
        let piece = |(third, which): (usize, &str)| Piece {
            name: format!("{layer}.self_attn.{which}_proj.{tensor}"),
            cut: Cut::Third(third),
        };
        return Some([(0, "q"), (1, "k"), (2, "v")].map(piece).into());
    }
    let (module, tensor) = rest.rsplit_once('.')?;
    whole(&format!("{layer}.{}.{tensor}", renamed(&OPEN_CLIP, module)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_every_kind_are_renamed() {
        for (key, name) in [
            ("time_embed.2.bias", "time_embedding.linear_2.bias"),
            ("input_blocks.0.0.weight", "conv_in.weight"),
            ("input_blocks.3.0.op.weight", "down_blocks.0.downsamplers.0.conv.weight"),
            ("input_blocks.8.0.skip_connection.weight", "down_blocks.2.resnets.1.conv_shortcut.weight"),
            (
                "input_blocks.4.1.transformer_blocks.0.attn1.to_out.0.bias",
                "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0.bias",
            ),
            ("middle_block.2.out_layers.3.weight", "mid_block.resnets.1.conv2.weight"),
            ("output_blocks.2.1.conv.weight", "up_blocks.0.upsamplers.0.conv.weight"),
            ("output_blocks.5.2.conv.weight", "up_blocks.1.upsamplers.0.conv.weight"),
            ("output_blocks.11.0.emb_layers.1.weight", "up_blocks.3.resnets.2.time_emb_proj.weight"),
        ] {
            assert_eq!(unet(key, 2).as_deref(), Some(name), "{key}");
        }
        for wrong in
            ["input_blocks.1.3.proj_in.weight", "middle_block.3.proj_in.weight", "input_blocks.1.0.conv.weight"]
        {
            assert_eq!(unet(wrong, 2), None, "{wrong}");
        }
        for (key, name) in [
            ("encoder.norm_out.weight", "encoder.conv_norm_out.weight"),
            ("encoder.down.1.downsample.conv.bias", "encoder.down_blocks.1.downsamplers.0.conv.bias"),
            ("decoder.up.3.block.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),
            ("decoder.up.1.block.0.nin_shortcut.weight", "decoder.up_blocks.2.resnets.0.conv_shortcut.weight"),
            ("decoder.mid.attn_1.q.weight", "decoder.mid_block.attentions.0.to_q.weight"),
            ("post_quant_conv.bias", "post_quant_conv.bias"),
        ] {
            assert_eq!(vae(key, 4).as_deref(), Some(name), "{key}");
        }
        for wrong in ["decoder.up.4.block.0.conv1.weight", "encoder.mid.attn_2.q.weight", "loss.logvar.weight"] {
            assert_eq!(vae(wrong, 4), None, "{wrong}");
        }
        let fused = open_clip("transformer.resblocks.7.attn.in_proj_bias").unwrap();
        let names: Vec<(&str, Cut)> = fused.iter().map(|piece| (piece.name.as_str(), piece.cut)).collect();
        assert_eq!(names[1], ("text_model.encoder.layers.7.self_attn.k_proj.bias", Cut::Third(1)));
        assert_eq!(open_clip("text_projection").unwrap()[0].cut, Cut::Transposed);
        assert_eq!(open_clip("logit_scale"), None);
    }
}
