//! Files that are no checkpoint of the supported families, with what they are and what to do with them.

use super::layout::{CLIP, OPEN_CLIP, UNET, VAE};
use crate::error::{Error, Result};
use crate::tensor::weights::Archive;

/// Other kinds of files: a part of a key, what the file is, and the remedy.
const OTHERS: [(&str, &str, &str); 9] = [
    ("lora_", "a LoRA file", "give it with `--lora`, and the model that it belongs to as the model"),
    (".lora_A.", "a LoRA file", "give it with `--lora`, and the model that it belongs to as the model"),
    ("control_model.", "a ControlNet in Stability's layout", "use its folder in diffusers' layout as `controlnet`"),
    ("joint_blocks.", "a Stable Diffusion 3 model", FAMILIES),
    ("double_blocks.", "a Flux model", FAMILIES),
    ("conditioner.embedders.0.model.", "an SDXL refiner", "use the SDXL base model"),
    ("label_emb.weight", "an upscaler", FAMILIES),
    ("edm_mean", "a Playground 2.5 model", FAMILIES),
    ("down_blocks.", "one network in diffusers' layout", "give the folder that contains `model_index.json`"),
];
const FAMILIES: &str = "use a Stable Diffusion 1.x, 2.x or SDXL base model";

/// Starts of keys that are not used: averaged weights, and buffers of the noise schedule.
const UNUSED: [&str; 3] = ["model_ema.", "denoiser.", "first_stage_model.loss."];
/// Other keys that are not used.
const BUFFERS: [&str; 18] = [
    "alphas_cumprod",
    "alphas_cumprod_prev",
    "betas",
    "cond_stage_model.logit_scale",
    "global_step",
    "log_one_minus_alphas_cumprod",
    "logvar",
    "lvlb_weights",
    "model_ema.decay",
    "posterior_log_variance_clipped",
    "posterior_mean_coef1",
    "posterior_mean_coef2",
    "posterior_variance",
    "scale_factor",
    "sqrt_alphas_cumprod",
    "sqrt_one_minus_alphas_cumprod",
    "v_pred",
    "ztsnr",
];
/// Buffers with a common start: `sqrt_recip_alphas_cumprod`, `sqrt_recipm1_alphas_cumprod`.
const RECIPROCALS: &str = "sqrt_recip";

/// True for a key of a published checkpoint that is not used.
pub(super) fn is_unused(key: &str) -> bool {
    BUFFERS.contains(&key) || key.starts_with(RECIPROCALS) || UNUSED.iter().any(|start| key.starts_with(start))
}

/// Refuses files of other kinds.
pub(super) fn check(archive: &Archive) -> Result<()> {
    let other = archive.names().iter().find_map(|key| {
        let (_, kind, hint) = OTHERS.iter().find(|(part, _, _)| key.contains(part))?;
        Some((key, kind, hint))
    });
    if let Some((key, kind, hint)) = other {
        return Err(Error::weights(archive.path(), format!("is {kind} (it has `{key}`)"), *hint));
    }
    let Some(first) = archive.names().first() else {
        return Err(Error::weights(archive.path(), "has no tensors", FAMILIES));
    };
    if archive.names().iter().any(|key| key.starts_with(UNET)) {
        return Ok(());
    }
    let is_part = |key: &str| [VAE].iter().chain(&CLIP).chain(&OPEN_CLIP).any(|start| key.starts_with(start));
    let reason = if archive.names().iter().any(|key| is_part(key)) {
        format!("has no UNet (`{UNET}…`); its first key is `{first}`")
    } else {
        format!("has none of the keys of a checkpoint (`{UNET}…`); its first key is `{first}`")
    };
    Err(Error::weights(archive.path(), reason, FAMILIES))
}

/// The error for the unknown key `first`.
pub(super) fn unknown(archive: &Archive, first: &str, is_unknown: &dyn Fn(&str) -> bool) -> Error {
    let count = archive.names().iter().filter(|key| !is_unused(key) && is_unknown(key)).count().max(1);
    let more = if count > 1 { format!(" ({count} such tensors)") } else { String::new() };
    let reason = format!("`{first}` belongs to no layer of the model{more}");
    Error::weights(archive.path(), reason, "use an unchanged Stable Diffusion 1.x, 2.x or SDXL base model")
}
