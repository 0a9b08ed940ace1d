//! Checks that LoRA files fit a generator, before any weights are loaded.

use super::export::LoraUse;
use super::pipeline_config::PipelineConfig;
use crate::models::diffusion::lora::{self, Adapter, LoraNetwork};
use crate::models::diffusion::shapes;
use crate::models::diffusion::text::TextTower;
use crate::models::diffusion::unet::Unet;
use crate::{Error, Result};

/// Refuses adapters for modules that the generator lacks, and of other shapes. `files` are those of the adapters.
///
/// # Errors
/// [`Error::Weights`] naming the file and the first module; typed errors of libtorch.
pub fn check(pipeline_config: &PipelineConfig, adapters: &[(Vec<Adapter>, f64)], files: &[LoraUse]) -> Result<()> {
    for component in LoraNetwork::ALL {
        let mut shapes = None;
        for ((adapters, _), file) in adapters.iter().zip(files) {
            let own: Vec<&Adapter> = adapters.iter().filter(|adapter| adapter.component == component).collect();
            let Some(first) = own.first() else { continue };
            if shapes.is_none() {
                shapes = Some(shapes_of(pipeline_config, component)?);
            }
            let refused = |reason: String| Error::weights(&file.name, reason, lora::OTHER_MODEL);
            let Some(Some(shapes)) = &shapes else {
                let (module, family) = (&first.module, pipeline_config.family());
                let reason = format!("changes `{module}` of a second text encoder, which a {family} model lacks");
                return Err(refused(reason));
            };
            lora::targets(shapes, own).map_err(refused)?;
        }
    }
    Ok(())
}

/// Shapes of a network's tensors; `None` if the generator lacks it.
fn shapes_of(pipeline_config: &PipelineConfig, component: LoraNetwork) -> Result<Option<shapes::Shapes>> {
    let number = match component {
        LoraNetwork::Unet => return shapes::of(|scope| drop(Unet::new(scope, &pipeline_config.unet))).map(Some),
        LoraNetwork::TextEncoder => 0,
        LoraNetwork::TextEncoder2 => 1,
    };
    let Some(text) = pipeline_config.texts.get(number) else { return Ok(None) };
    shapes::of(|scope| drop(TextTower::new(scope, text, number == 1))).map(Some)
}
