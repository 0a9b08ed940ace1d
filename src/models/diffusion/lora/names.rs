//! Names of LoRA tensors: converts two naming schemes to the dotted module paths of diffusers.
//!
//! | scheme | example |
//! |---|---|
//! | PEFT | `unet.….attn1.to_q.lora_A.weight`, also after or before `base_model.model.` |
//! | diffusers | `unet.….attn1.to_q.lora.down.weight` |

use super::LoraNetwork;

/// Role of a tensor in an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
    (".alpha", LoraPart::Alpha),
];

/// Component, dotted module and part of the tensor `key`; `None` if the key does not belong to an adapter.
pub(super) fn read(key: &str) -> Option<(LoraNetwork, String, LoraPart)> {
    let (stem, part) = PARTS.iter().find_map(|(ending, part)| Some((key.strip_suffix(ending)?, *part)))?;
    let (component, module) = component_of(stem);
    Some((component, module.to_owned(), part))
}

/// True for a name of kohya's scripts: `lora_unet_…`, `lora_te_…`, `lora_te1_…`, `lora_te2_…`.
pub(super) fn is_kohya(key: &str) -> bool {
    key.starts_with("lora_unet_") || key.starts_with("lora_te")
}

/// Removes the component and PEFT's wrapper from a dotted path. A path without a component belongs to the UNet, unless
/// it starts like that of a text tower.
pub(super) fn component_of(path: &str) -> (LoraNetwork, &str) {
    const WRAPPER: &str = "base_model.model.";
    let path = path.strip_prefix(WRAPPER).unwrap_or(path);
    let named = LoraNetwork::ALL.iter().find_map(|c| Some((*c, path.strip_prefix(c.name())?.strip_prefix('.')?)));
    let (component, module) = named.unwrap_or_else(|| {
        let text = path.starts_with("text_model.") || path.starts_with("text_projection");
        (if text { LoraNetwork::TextEncoder } else { LoraNetwork::Unet }, path)
    });
    (component, module.strip_prefix(WRAPPER).unwrap_or(module))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_naming_schemes_of_a_module_are_read() {
        let unet = "down_blocks.1.attentions.0.transformer_blocks.0.attn1";
        for key in [
            format!("unet.{unet}.to_out.0.lora_B.weight"),
            format!("base_model.model.{unet}.to_out.0.lora_B.weight"),
            format!("base_model.model.unet.{unet}.to_out.0.lora_B.default.weight"),
            format!("unet.base_model.model.{unet}.to_out.0.lora_B.weight"),
            format!("unet.{unet}.to_out.0.lora.up.weight"),
        ] {
            assert_eq!(read(&key), Some((LoraNetwork::Unet, format!("{unet}.to_out.0"), LoraPart::Up)), "{key}");
        }
        let text = "text_model.encoder.layers.11.self_attn.out_proj";
        for (key, component) in [
            (format!("text_encoder.{text}.lora_A.weight"), LoraNetwork::TextEncoder),
            (format!("text_encoder_2.{text}.lora_linear_layer.down.weight"), LoraNetwork::TextEncoder2),
            (format!("base_model.model.{text}.lora_A.weight"), LoraNetwork::TextEncoder),
        ] {
            assert_eq!(read(&key), Some((component, text.to_owned(), LoraPart::Down)), "{key}");
        }
        assert_eq!(read("unet.conv_in.hada_w1_a"), None);
    }
}
