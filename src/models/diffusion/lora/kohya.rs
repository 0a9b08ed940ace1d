//! LoRA files for kohya's sd-scripts and other programs that follow them: `lora_unet_…` with
//! underscores for dots, `lora_down`, `lora_up` and `alpha` for each module. For SDXL the blocks have the names of the
//! original checkpoint.

use super::Component;
use crate::tensor::{Device, Kind, Tensor};

/// Prefix of a component's modules.
fn prefix(component: Component, has_two_texts: bool) -> &'static str {
    match (component, has_two_texts) {
        (Component::Unet, _) => "lora_unet_",
        (Component::TextEncoder, false) => "lora_te_",
        (Component::TextEncoder, true) => "lora_te1_",
        (Component::TextEncoder2, _) => "lora_te2_",
    }
}

/// Blocks per resolution in the original checkpoint: two layers, and the step to the next resolution.
const STRIDE: usize = 3;

/// Name in the original checkpoint of a module of a transformer, `None` for other modules.
fn original_block(module: &str) -> Option<String> {
    let (block, rest) = module.split_once(".attentions.")?;
    let (layer, rest) = rest.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    if block == "mid_block" {
        return Some(format!("middle_block.{}.{rest}", layer + 1));
    }
    let (direction, number) = block.split_once('.')?;
    let first = number.parse::<usize>().ok()? * STRIDE + layer;
    match direction {
        "down_blocks" => Some(format!("input_blocks.{}.1.{rest}", first + 1)),
        "up_blocks" => Some(format!("output_blocks.{first}.1.{rest}")),
        _ => None,
    }
}

/// The tensors of adapters in kohya's layout, from those of PEFT's (`unet.….lora_A.weight`, `unet.….lora_B.weight`). The
/// matrices are shared, not copied.
pub fn tensors(peft: &[(String, Tensor)], alpha: f64, is_sdxl: bool) -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    for (name, tensor) in peft {
        let found = Component::ALL.into_iter().find_map(|component| {
            let module = name.strip_prefix(component.name())?.strip_prefix('.')?;
            let down = module.strip_suffix(".lora_A.weight").map(|module| (module, "lora_down"));
            let half = down.or_else(|| Some((module.strip_suffix(".lora_B.weight")?, "lora_up")));
            half.map(|(module, half)| (component, module, half))
        });
        let Some((component, module, half)) = found else { continue };
        let original = if is_sdxl && component == Component::Unet { original_block(module) } else { None };
        let flat = original.unwrap_or_else(|| module.to_owned()).replace('.', "_");
        let stem = format!("{}{flat}", prefix(component, is_sdxl));
        if half == "lora_down" {
            all.push((format!("{stem}.alpha"), Tensor::full([0_i64; 0], alpha, (Kind::Float, Device::Cpu))));
        }
        all.push((format!("{stem}.{half}.weight"), tensor.shallow_clone()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_the_names_of_the_original_checkpoint() {
        let names = |module: &str, is_sdxl: bool| {
            let half = |half: &str| {
                let tensor = Tensor::full([2_i64, 2], 3.0, (Kind::Float, Device::Cpu));
                (format!("{module}.lora_{half}.weight"), tensor)
            };
            let all = tensors(&[half("A"), half("B")], 2.0, is_sdxl);
            assert_eq!(all[0].1.double_value(&[]), 2.0);
            assert!(all[1].1.equal(&half("A").1) && all[2].1.equal(&half("B").1));
            all.into_iter().map(|(name, _)| name).collect::<Vec<String>>()
        };
        let inner = "transformer_blocks.0.attn1.to_q";
        for (module, original, plain) in [
            ("down_blocks.1.attentions.0", "input_blocks_4_1", "down_blocks_1_attentions_0"),
            ("down_blocks.2.attentions.1", "input_blocks_8_1", "down_blocks_2_attentions_1"),
            ("mid_block.attentions.0", "middle_block_1", "mid_block_attentions_0"),
            ("up_blocks.1.attentions.2", "output_blocks_5_1", "up_blocks_1_attentions_2"),
        ] {
            for (is_sdxl, block) in [(true, original), (false, plain)] {
                let stem = format!("lora_unet_{block}_transformer_blocks_0_attn1_to_q");
                let wanted = ["alpha", "lora_down.weight", "lora_up.weight"].map(|end| format!("{stem}.{end}"));
                assert_eq!(names(&format!("unet.{module}.{inner}"), is_sdxl), wanted);
            }
        }
        assert_eq!(names("text_encoder.text_model.fc1", true)[0], "lora_te1_text_model_fc1.alpha");
        assert_eq!(names("text_encoder.text_model.fc1", false)[0], "lora_te_text_model_fc1.alpha");
        assert_eq!(names("text_encoder_2.text_model.fc1", true)[0], "lora_te2_text_model_fc1.alpha");
    }
}
