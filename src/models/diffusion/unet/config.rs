//! Sizes and options of the UNet, as in diffusers' `unet/config.json`, and checks of them.

use crate::error::Result;
use crate::models::diffusion::block::{Norm, TransformerConfig};
use crate::models::diffusion::fields::{PerBlock, block_types, check_others, multiple, positive, unsupported};
use serde_json::{Map, Value, json};

/// Sizes of the network, with the names and defaults of diffusers' `unet/config.json`. Lists go from the highest
/// resolution to the lowest.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Size of the latents that the model was trained on.
    pub sample_size: Option<i64>,
    /// Channels of the input: 4, or 9 with mask and masked latents.
    pub in_channels: i64,
    /// Channels of the prediction.
    pub out_channels: i64,
    /// `CrossAttnDownBlock2D` or `DownBlock2D`.
    pub down_block_types: Vec<String>,
    /// `UpBlock2D` or `CrossAttnUpBlock2D`, from the lowest resolution to the highest.
    pub up_block_types: Vec<String>,
    /// Channels per resolution. The first is also the width of the time's sinusoidal embedding.
    pub block_out_channels: Vec<i64>,
    /// Number of residual blocks per down block; an up block has one more.
    pub layers_per_block: i64,
    /// Number of groups of the group norms.
    pub norm_num_groups: i64,
    /// Epsilon of the group norms outside transformers.
    pub norm_eps: f64,
    /// Width of the text embedding.
    pub cross_attention_dim: i64,
    /// Number of layers of each transformer.
    pub transformer_layers_per_block: PerBlock,
    /// Number of heads (despite its name), unless `num_attention_heads` is given.
    pub attention_head_dim: PerBlock,
    /// Number of heads.
    pub num_attention_heads: Option<PerBlock>,
    /// Use linear layers instead of 1x1 convolutions before and after transformer blocks.
    pub use_linear_projection: bool,
    /// Compute attention in fp32 if the rest is fp16.
    pub upcast_attention: Option<bool>,
    /// `text_time` for SDXL: a pooled text embedding and sizes are added to the time embedding.
    pub addition_embed_type: Option<String>,
    /// Width of the sinusoidal embedding of each size.
    pub addition_time_embed_dim: Option<i64>,
    /// Width of the pooled text embedding and the embeddings of all sizes together.
    pub projection_class_embeddings_input_dim: Option<i64>,
    /// All other fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sample_size: None,
            in_channels: 4,
            out_channels: 4,
            down_block_types: types(&[CROSS_DOWN, CROSS_DOWN, CROSS_DOWN, DOWN]),
            up_block_types: types(&[UP, CROSS_UP, CROSS_UP, CROSS_UP]),
            block_out_channels: vec![320, 640, 1280, 1280],
            layers_per_block: 2,
            norm_num_groups: 32,
            norm_eps: 1e-5,
            cross_attention_dim: 1280,
            transformer_layers_per_block: PerBlock::All(1),
            attention_head_dim: PerBlock::All(8),
            num_attention_heads: None,
            use_linear_projection: false,
            upcast_attention: None,
            addition_embed_type: None,
            addition_time_embed_dim: None,
            projection_class_embeddings_input_dim: None,
            other: Map::new(),
        }
    }
}

pub(super) const CROSS_DOWN: &str = "CrossAttnDownBlock2D";
const DOWN: &str = "DownBlock2D";
pub(super) const CROSS_UP: &str = "CrossAttnUpBlock2D";
const UP: &str = "UpBlock2D";
const TEXT_TIME: &str = "text_time";

fn types(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

impl Config {
    /// Width of SDXL's pooled text embedding; `None` for other families.
    pub fn pooled_dim(&self) -> Option<i64> {
        let whole = self.projection_class_embeddings_input_dim.filter(|_| self.is_sdxl())?;
        Some(whole - 6 * self.addition_time_embed_dim.unwrap_or(0))
    }

    /// Stable Diffusion 1.5.
    pub fn sd15() -> Self {
        Self { sample_size: Some(64), cross_attention_dim: 768, ..Self::default() }
    }

    /// Stable Diffusion 2.1, 768 pixels.
    pub fn sd21() -> Self {
        Self {
            sample_size: Some(96),
            cross_attention_dim: 1024,
            attention_head_dim: PerBlock::Each(vec![5, 10, 20, 20]),
            use_linear_projection: true,
            upcast_attention: Some(true),
            ..Self::default()
        }
    }

    /// SDXL base.
    pub fn sdxl() -> Self {
        Self {
            sample_size: Some(128),
            down_block_types: types(&[DOWN, CROSS_DOWN, CROSS_DOWN]),
            up_block_types: types(&[CROSS_UP, CROSS_UP, UP]),
            block_out_channels: vec![320, 640, 1280],
            cross_attention_dim: 2048,
            transformer_layers_per_block: PerBlock::Each(vec![1, 2, 10]),
            attention_head_dim: PerBlock::Each(vec![5, 10, 20]),
            use_linear_projection: true,
            addition_embed_type: Some(TEXT_TIME.into()),
            addition_time_embed_dim: Some(256),
            projection_class_embeddings_input_dim: Some(2816),
            ..Self::default()
        }
    }

    /// About a million parameters, for tests.
    pub fn tiny() -> Self {
        Self {
            sample_size: Some(16),
            down_block_types: types(&[CROSS_DOWN, DOWN]),
            up_block_types: types(&[UP, CROSS_UP]),
            block_out_channels: vec![32, 64],
            norm_num_groups: 8,
            cross_attention_dim: 32,
            ..Self::default()
        }
    }

    /// True if the network needs [`super::Conditioning::added`].
    pub fn is_sdxl(&self) -> bool {
        self.addition_embed_type.as_deref() == Some(TEXT_TIME)
    }

    /// # Errors
    /// [`crate::Error::Config`] with the field (`unet.…`) whose option is not supported, or whose size is wrong.
    pub fn check(&self) -> Result<()> {
        self.check_trunk("unet")?;
        positive("unet.out_channels", self.out_channels)?;
        block_types("unet.up_block_types", &self.up_block_types, &[CROSS_UP, UP], self.block_out_channels.len())
    }

    /// [`Config::check`] for the options that a ControlNet has too.
    pub(in crate::models::diffusion) fn check_trunk(&self, network: &str) -> Result<()> {
        let key = |field: &str| format!("{network}.{field}");
        let blocks = self.block_out_channels.len();
        check_others(network, &self.other, &supported())?;
        if blocks == 0 {
            return unsupported(&key("block_out_channels"), "is empty");
        }
        block_types(&key("down_block_types"), &self.down_block_types, &[CROSS_DOWN, DOWN], blocks)?;
        for (field, value) in [
            ("in_channels", self.in_channels),
            ("layers_per_block", self.layers_per_block),
            ("cross_attention_dim", self.cross_attention_dim),
        ] {
            positive(&key(field), value)?;
        }
        self.transformer_layers_per_block.check(&key("transformer_layers_per_block"), blocks)?;
        let field = if self.num_attention_heads.is_some() { "num_attention_heads" } else { "attention_head_dim" };
        self.heads().check(&key(field), blocks)?;
        for (i, channels) in self.block_out_channels.iter().enumerate() {
            multiple(&key("block_out_channels"), *channels, self.norm_num_groups)?;
            if i + 1 == blocks || self.down_block_types[i] == CROSS_DOWN {
                multiple(&key("block_out_channels"), *channels, self.heads().at(i))?;
            }
        }
        multiple(&key("block_out_channels"), self.block_out_channels[0], 2)?;
        self.check_added(network)
    }

    fn check_added(&self, network: &str) -> Result<()> {
        let key = |field: &str| format!("{network}.{field}");
        match self.addition_embed_type.as_deref() {
            None => Ok(()),
            Some(TEXT_TIME) => {
                multiple(&key("addition_time_embed_dim"), self.addition_time_embed_dim.unwrap_or(0), 2)?;
                let width = self.projection_class_embeddings_input_dim.unwrap_or(0);
                positive(&key("projection_class_embeddings_input_dim"), width)
            }
            Some(other) => {
                unsupported(&key("addition_embed_type"), format!("is `{other}`, supported is `{TEXT_TIME}`"))
            }
        }
    }

    fn heads(&self) -> &PerBlock {
        self.num_attention_heads.as_ref().unwrap_or(&self.attention_head_dim)
    }

    pub(super) fn time_dim(&self) -> i64 {
        4 * self.block_out_channels[0]
    }

    /// Residual blocks of a down block.
    pub(super) fn num_layers(&self) -> usize {
        usize::try_from(self.layers_per_block).expect("a checked number of layers")
    }

    pub(super) fn norm(&self) -> Norm {
        Norm { groups: self.norm_num_groups, eps: self.norm_eps }
    }

    /// Sizes of the transformers at resolution `block`.
    pub(super) fn transformer(&self, block: usize) -> TransformerConfig {
        TransformerConfig {
            dim: self.block_out_channels[block],
            num_heads: self.heads().at(block),
            num_layers: self.transformer_layers_per_block.at(block),
            context_dim: self.cross_attention_dim,
            groups: self.norm_num_groups,
            linear: self.use_linear_projection,
            upcast: self.upcast_attention == Some(true),
        }
    }
}

/// Supported values of all other fields. A list contains alternatives.
fn supported() -> Vec<(&'static str, Value)> {
    const NULL: &str = "class_embed_type cross_attention_norm encoder_hid_dim encoder_hid_dim_type num_class_embeds \
                     reverse_transformer_layers_per_block time_cond_proj_dim time_embedding_act_fn \
                     time_embedding_dim timestep_post_act";
    const OFF: &str = "center_input_sample class_embeddings_concat dual_cross_attention global_pool_conditions \
                     mid_block_only_cross_attention only_cross_attention resnet_skip_time_act";
    let mut fields = vec![
        ("act_fn", json!(["silu", "swish"])),
        ("attention_type", json!("default")),
        ("conv_in_kernel", json!(3)),
        ("conv_out_kernel", json!(3)),
        ("downsample_padding", json!(1)),
        ("flip_sin_to_cos", json!(true)),
        ("freq_shift", json!(0)),
        ("mid_block_scale_factor", json!(1)),
        ("mid_block_type", json!("UNetMidBlock2DCrossAttn")),
        ("resnet_out_scale_factor", json!(1)),
        ("resnet_time_scale_shift", json!("default")),
        ("time_embedding_type", json!("positional")),
    ];
    fields.extend(NULL.split(' ').map(|field| (field, json!([null]))));
    fields.extend(OFF.split(' ').map(|field| (field, json!([null, false]))));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The relevant fields of `stabilityai/stable-diffusion-xl-base-1.0`.
    const SDXL: &str = r#"{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256, "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280],
        "center_input_sample": false, "class_embed_type": null, "cross_attention_dim": 2048,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "flip_sin_to_cos": true,
        "freq_shift": 0, "in_channels": 4, "mid_block_scale_factor": 1, "mid_block_type": "UNetMidBlock2DCrossAttn",
        "norm_eps": 1e-05, "num_attention_heads": null, "only_cross_attention": false,
        "projection_class_embeddings_input_dim": 2816, "resnet_out_scale_factor": 1.0, "sample_size": 128,
        "transformer_layers_per_block": [1, 2, 10], "upcast_attention": null, "use_linear_projection": true,
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]}"#;

    fn parsed(text: &str) -> Config {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_published_config_is_read() {
        let config = parsed(SDXL);
        config.check().unwrap();
        assert!(config.is_sdxl() && !Config::sd15().is_sdxl());
        assert_eq!(Config { other: Map::new(), ..config }, Config::sdxl());
        // an old file without most fields
        assert_eq!(parsed(r#"{"cross_attention_dim": 768, "sample_size": 64}"#), Config::sd15());
        for config in [Config::sd15(), Config::sd21(), Config::sdxl(), Config::tiny()] {
            config.check().unwrap();
        }
    }

    #[test]
    fn an_unsupported_option_is_an_error_with_its_field() {
        for (field, value) in [
            ("only_cross_attention", "true"),
            ("only_cross_attention", "[false, true, false]"),
            ("dual_cross_attention", "true"),
            ("class_embed_type", "\"timestep\""),
            ("mid_block_type", "\"UNetMidBlock2D\""),
            ("time_cond_proj_dim", "256"),
            ("encoder_hid_dim_type", "\"text_proj\""),
            ("addition_embed_type", "\"image\""),
            ("norm_num_groups", "33"),
            ("norm_num_groups", "0"),
            ("attention_head_dim", "[8]"),
            ("attention_head_dim", "7"),
            ("num_attention_heads", "[8, 8]"),
            ("block_out_channels", "[]"),
            ("down_block_types", "[\"DownBlock2D\", \"AttnDownBlock2D\", \"DownBlock2D\", \"DownBlock2D\"]"),
            ("up_block_types", "[\"UpBlock2D\"]"),
            ("transformer_layers_per_block", "[1, 0, 1, 1]"),
            ("layers_per_block", "-1"),
        ] {
            let error = parsed(&format!("{{\"{field}\": {value}}}")).check().unwrap_err().to_string();
            let key = match (field, value) {
                // the error names the channels that they do not divide
                ("norm_num_groups", _) | ("attention_head_dim", "7") => "block_out_channels",
                _ => field,
            };
            assert!(error.starts_with(&format!("`unet.{key}`")), "{field} = {value}: {error}");
        }
        parsed(r#"{"only_cross_attention": [false, false, false, false], "resnet_out_scale_factor": 1}"#)
            .check()
            .unwrap();
    }
}
