//! Family and sizes of a checkpoint, from its keys and shapes.

use super::layout::{CLIP, Family, OPEN_CLIP, SD2_BASE_STEP, SD2_LAYERS, SingleFile, UNET, VAE};
use crate::error::{Error, Result};
use crate::models::clip::Activation;
use crate::models::diffusion::sampler::PredictionType;
use crate::models::diffusion::{text, unet, vae};
use crate::tensor::Kind;
use crate::tensor::weights::Archive;
use unet::PerBlock;

/// Width of an attention head, but for the UNets of SD 1.x, which have 8 heads.
const HEAD: i64 = 64;
/// Width of the embedding of each of SDXL's sizes, if the file does not tell it.
const SIZE_EMBEDDING: i64 = 256;
/// Numbers that describe the sizes of an image to SDXL.
const NUM_SIZES: i64 = 6;
/// Limits for hostile files.
const MAX_WIDTH: i64 = 1 << 20;
/// See [`MAX_WIDTH`].
const MAX_COUNT: i64 = 200;
/// Key in the header of kohya's files.
const KOHYA_PREDICTION: &str = "modelspec.prediction_type";

/// Keys and shapes of a file.
struct Header<'a>(&'a Archive);

impl Header<'_> {
    fn shape(&self, key: &str) -> Option<&[i64]> {
        Some(self.0.info(key)?.shape.as_slice())
    }

    /// Dimension `dim` of the tensor `key`, which the file must have.
    fn dim(&self, key: &str, dim: usize) -> Result<i64> {
        let path = self.0.path();
        let hint = "use an unchanged Stable Diffusion 1.x, 2.x or SDXL base model, or download the file again";
        let Some(shape) = self.shape(key) else {
            return Err(Error::weights(path, format!("lacks the tensor `{key}`"), hint));
        };
        let size = shape.get(dim).copied().filter(|size| (1..=MAX_WIDTH).contains(size));
        size.ok_or_else(|| Error::weights(path, format!("`{key}` has the shape {shape:?}"), hint))
    }

    /// How many of `key(0)`, `key(1)`, ... the file has a tensor below.
    fn count(&self, key: impl Fn(i64) -> String) -> i64 {
        let has = |start: &str| self.0.names().iter().any(|name| name.starts_with(start));
        (0..MAX_COUNT).take_while(|number| has(&key(*number))).fold(0, |count, _| count + 1)
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains(key)
    }

    /// True if a tensor is below `start`.
    fn has_any(&self, start: &str) -> bool {
        self.0.names().iter().any(|name| name.starts_with(start))
    }
}

pub(super) fn read(archive: &Archive) -> Result<SingleFile> {
    let header = Header(archive);
    let (family, mut unet) = read_unet(&header)?;
    let vae = header.has_any(VAE).then(|| read_vae(&header, family)).transpose()?;
    let texts = read_texts(&header, family)?;
    if let Some(width) = unet.projection_class_embeddings_input_dim
        && let Some(Some(text)) = texts.get(1)
    {
        let sizes = width - text.projection_dim;
        if sizes > 0 && sizes % NUM_SIZES == 0 {
            unet.addition_time_embed_dim = Some(sizes / NUM_SIZES);
        }
    }
    let at = |error: Error| Error::weights(archive.path(), error.to_string(), error.hint());
    unet.check().map_err(at)?;
    vae.iter().try_for_each(vae::Config::check).map_err(at)?;
    texts.iter().flatten().try_for_each(text::Config::check).map_err(at)?;
    Ok(SingleFile { family, unet, vae, texts, prediction: prediction(&header)?, zero_snr: header.has("ztsnr") })
}

fn read_unet(header: &Header) -> Result<(Family, unet::Config)> {
    let key = |rest: &str| format!("{UNET}{rest}");
    let num_inputs = header.count(|i| key(&format!("input_blocks.{i}.")));
    // a down block has its layers and the step to the next resolution
    let steps: Vec<i64> =
        (1..num_inputs).filter(|i| header.has(&key(&format!("input_blocks.{i}.0.op.weight")))).collect();
    let stride = steps.first().copied().unwrap_or(num_inputs);
    if stride < 2 || num_inputs % stride != 0 {
        let reason = format!("its UNet has {num_inputs} input blocks, with a step to the next resolution at {steps:?}");
        let hint = "use an unchanged Stable Diffusion 1.x, 2.x or SDXL base model";
        return Err(Error::weights(header.0.path(), reason, hint));
    }
    let blocks: Vec<i64> = (0..num_inputs / stride).map(|block| 1 + block * stride).collect();
    let channels = |i: &i64| header.dim(&key(&format!("input_blocks.{i}.0.out_layers.3.weight")), 0);
    let block_out_channels = blocks.iter().map(channels).collect::<Result<Vec<i64>>>()?;
    let middle = "middle_block.1.";
    let depth = |at: &str| header.count(|i| key(&format!("{at}transformer_blocks.{i}.")));
    let attends: Vec<bool> = blocks.iter().map(|i| header.has_any(&key(&format!("input_blocks.{i}.1.")))).collect();
    let mut depths: Vec<i64> = blocks.iter().map(|i| depth(&format!("input_blocks.{i}.1.")).max(1)).collect();
    if let (Some(last), Some(false)) = (depths.last_mut(), attends.last()) {
        *last = depth(middle).max(1);
    }
    let proj_in = key(&format!("{middle}proj_in.weight"));
    let use_linear_projection = header.shape(&proj_in).is_some_and(|shape| shape.len() == 2);
    let cross_attention_dim = header.dim(&key(&format!("{middle}transformer_blocks.0.attn2.to_k.weight")), 1)?;
    let label = key("label_emb.0.0.weight");
    let family = if header.has(&label) {
        Family::Sdxl
    } else if use_linear_projection || cross_attention_dim == 1024 {
        Family::Sd2
    } else {
        Family::Sd1
    };
    let heads: Vec<i64> = block_out_channels.iter().map(|channels| (channels / HEAD).max(1)).collect();
    let (down, up) = (["DownBlock2D", "CrossAttnDownBlock2D"], ["UpBlock2D", "CrossAttnUpBlock2D"]);
    let is_sdxl = family == Family::Sdxl;
    let same = depths.iter().all(|depth| *depth == 1);
    let config = unet::Config {
        sample_size: Some(match family {
            Family::Sd1 => 64,
            Family::Sd2 => 96,
            Family::Sdxl => 128,
        }),
        in_channels: header.dim(&key("input_blocks.0.0.weight"), 1)?,
        out_channels: header.dim(&key("out.2.weight"), 0)?,
        down_block_types: attends.iter().map(|attends| down[usize::from(*attends)].to_owned()).collect(),
        up_block_types: attends.iter().rev().map(|attends| up[usize::from(*attends)].to_owned()).collect(),
        block_out_channels,
        layers_per_block: stride - 1,
        cross_attention_dim,
        transformer_layers_per_block: if same { PerBlock::All(1) } else { PerBlock::Each(depths) },
        attention_head_dim: if family == Family::Sd1 { PerBlock::All(8) } else { PerBlock::Each(heads) },
        use_linear_projection,
        upcast_attention: (family == Family::Sd2).then_some(true),
        addition_embed_type: is_sdxl.then(|| "text_time".to_owned()),
        addition_time_embed_dim: is_sdxl.then_some(SIZE_EMBEDDING),
        projection_class_embeddings_input_dim: if is_sdxl { Some(header.dim(&label, 1)?) } else { None },
        ..unet::Config::default()
    };
    Ok((family, config))
}

fn read_vae(header: &Header, family: Family) -> Result<vae::Config> {
    let key = |rest: &str| format!("{VAE}{rest}");
    let num_blocks = header.count(|i| key(&format!("encoder.down.{i}.")));
    let channels = |i: i64| header.dim(&key(&format!("encoder.down.{i}.block.0.conv1.weight")), 0);
    let block_out_channels = (0..num_blocks.max(1)).map(channels).collect::<Result<Vec<i64>>>()?;
    let published = if family == Family::Sdxl { vae::Config::sdxl() } else { vae::Config::sd() };
    Ok(vae::Config {
        in_channels: header.dim(&key("encoder.conv_in.weight"), 1)?,
        out_channels: header.dim(&key("decoder.conv_out.weight"), 0)?,
        down_block_types: vec!["DownEncoderBlock2D".to_owned(); block_out_channels.len()],
        up_block_types: vec!["UpDecoderBlock2D".to_owned(); block_out_channels.len()],
        block_out_channels,
        layers_per_block: header.count(|i| key(&format!("encoder.down.0.block.{i}."))),
        latent_channels: header.dim(&key("post_quant_conv.weight"), 0)?,
        ..published
    })
}

fn read_texts(header: &Header, family: Family) -> Result<Vec<Option<text::Config>>> {
    let clip = |prefix: &str| header.has_any(prefix).then(|| read_clip(header, prefix)).transpose();
    let open =
        |prefix: &str, limit: i64| header.has_any(prefix).then(|| read_open_clip(header, prefix, limit)).transpose();
    Ok(match family {
        Family::Sd1 => vec![clip(CLIP[0])?],
        Family::Sd2 => vec![open(OPEN_CLIP[0], SD2_LAYERS)?],
        Family::Sdxl => vec![clip(CLIP[1])?, open(OPEN_CLIP[1], i64::MAX)?],
    })
}

fn read_clip(header: &Header, prefix: &str) -> Result<text::Config> {
    // some tools omit `text_model.`
    let prefix = format!("{prefix}text_model.");
    let bare = prefix.trim_end_matches("text_model.").to_owned();
    let prefix = if header.has_any(&prefix) { prefix } else { bare };
    let key = |rest: &str| format!("{prefix}{rest}");
    let width = header.dim(&key("embeddings.token_embedding.weight"), 1)?;
    Ok(text::Config {
        vocab_size: header.dim(&key("embeddings.token_embedding.weight"), 0)?,
        hidden_size: width,
        intermediate_size: header.dim(&key("encoder.layers.0.mlp.fc1.weight"), 0)?,
        num_hidden_layers: header.count(|i| key(&format!("encoder.layers.{i}."))),
        num_attention_heads: (width / HEAD).max(1),
        max_position_embeddings: header.dim(&key("embeddings.position_embedding.weight"), 0)?,
        projection_dim: width,
        ..text::Config::clip_l()
    })
}

fn read_open_clip(header: &Header, prefix: &str, limit: i64) -> Result<text::Config> {
    let key = |rest: &str| format!("{prefix}{rest}");
    let width = header.dim(&key("token_embedding.weight"), 1)?;
    let projection = if header.has(&key("text_projection")) {
        header.dim(&key("text_projection"), 1)?
    } else if header.has(&key("text_projection.weight")) {
        header.dim(&key("text_projection.weight"), 0)?
    } else {
        width
    };
    Ok(text::Config {
        vocab_size: header.dim(&key("token_embedding.weight"), 0)?,
        hidden_size: width,
        intermediate_size: header.dim(&key("transformer.resblocks.0.mlp.c_fc.weight"), 0)?,
        num_hidden_layers: header.count(|i| key(&format!("transformer.resblocks.{i}."))).min(limit),
        num_attention_heads: (width / HEAD).max(1),
        max_position_embeddings: header.dim(&key("positional_embedding"), 0)?,
        hidden_act: Activation::Gelu,
        projection_dim: projection,
        ..text::Config::clip_l()
    })
}

/// What the file says about the UNet's output: kohya's header, a marker of SDXL models, or the step of SD 2.x base.
fn prediction(header: &Header) -> Result<Option<PredictionType>> {
    let archive = header.0;
    match archive.metadata().get(KOHYA_PREDICTION).map(String::as_str) {
        Some("epsilon") => return Ok(Some(PredictionType::Epsilon)),
        Some("v" | "v_prediction") => return Ok(Some(PredictionType::Velocity)),
        _ => {}
    }
    if header.has("v_pred") {
        return Ok(Some(PredictionType::Velocity));
    }
    if header.shape("global_step").is_none_or(|shape| shape.iter().any(|size| *size != 1)) {
        return Ok(None);
    }
    let step = archive.read("global_step")?;
    let is_base = step.to_kind(Kind::Int64).reshape([1]).int64_value(&[0]) == SD2_BASE_STEP;
    Ok(is_base.then_some(PredictionType::Epsilon))
}
