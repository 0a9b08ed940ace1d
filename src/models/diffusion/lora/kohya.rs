//! LoRA files as kohya's sd-scripts write and read them, and other programs that follow them: `lora_unet_…` with
//! underscores for dots, `lora_down`, `lora_up` and `alpha` for each module. For SDXL the blocks have the names of the
//! original checkpoint.

use super::Component;
use super::names::original_block;
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
    use crate::models::diffusion::lora;
    use crate::tensor::no_grad;
    use crate::tensor::weights::write_safetensors;
    use std::collections::BTreeMap;

    #[test]
    fn a_written_file_is_read_as_the_same_adapters() {
        let modules = [
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
            "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj",
            "mid_block.attentions.0.transformer_blocks.3.attn2.to_out.0",
            "up_blocks.0.attentions.2.proj_in",
            "up_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k",
        ];
        let value = |number: usize, shape: [i64; 2]| Tensor::full(shape, number as f64, (Kind::Float, Device::Cpu));
        let peft: Vec<(String, Tensor)> = modules
            .iter()
            .enumerate()
            .flat_map(|(number, module)| {
                let half = |half: &str, shape| (format!("unet.{module}.lora_{half}.weight"), value(number, shape));
                [half("A", [4, 8]), half("B", [6, 4])]
            })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        for (is_sdxl, first) in [
            (true, "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"),
            (false, "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"),
        ] {
            let tensors = no_grad(|| tensors(&peft, 2.0, is_sdxl));
            let names: Vec<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names[..3], ["alpha", "lora_down.weight", "lora_up.weight"].map(|end| format!("{first}.{end}")));
            assert_eq!(names.len(), 3 * modules.len());
            let path = folder.path().join("kohya.safetensors");
            let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            write_safetensors(&path, &named, &BTreeMap::new()).unwrap();
            let read = lora::read(&path).unwrap();
            assert_eq!(read.len(), modules.len());
            for adapter in read {
                let number = modules.iter().position(|module| *module == adapter.module).unwrap();
                assert!(adapter.component == Component::Unet && adapter.scale == 0.5, "{}", adapter.module);
                assert!(adapter.down.equal(&value(number, [4, 8])) && adapter.up.equal(&value(number, [6, 4])));
            }
        }
    }
}
