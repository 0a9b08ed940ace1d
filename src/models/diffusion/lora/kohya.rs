//! LoRA files for kohya's sd-scripts and other programs that follow them: `lora_unet_…` with
//! underscores for dots, `lora_down`, `lora_up` and `alpha` for each module. For SDXL the blocks have the names of the
//! original checkpoint.

use crate::tensor::{Device, Kind, Tensor};

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

/// The tensors of adapters of a UNet in kohya's layout, from those of PEFT's (`unet.….lora_A.weight`, `unet.….lora_B.weight`). The
/// matrices are shared, not copied.
pub fn tensors(peft: &[(String, Tensor)], alpha: f64, is_sdxl: bool) -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    for (name, tensor) in peft {
        let Some(module) = name.strip_prefix("unet.") else { continue };
        let down = module.strip_suffix(".lora_A.weight").map(|module| (module, "lora_down"));
        let half = down.or_else(|| Some((module.strip_suffix(".lora_B.weight")?, "lora_up")));
        let Some((module, half)) = half else { continue };
        let original = if is_sdxl { original_block(module) } else { None };
        let stem = format!("lora_unet_{}", original.unwrap_or_else(|| module.to_owned()).replace('.', "_"));
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
    }
}
