//! A new model that starts from the weights of a trained run (`model.init`), also for data with other classes.

use crate::Result;
use crate::data::identity::SeenImages;
use crate::models::prsmed::PrsMed;
use crate::nn::LoraConfig;
use crate::segment::config::ModelConfig;
use crate::segment::resume::DATA_FILE;
use crate::segment::run_folder::description::{check_adapters, check_sizes, verify};
use crate::segment::run_folder::loaded::{Build, Description, LoadedModel, RunOverrides, pixels};
use crate::segment::run_folder::parts::digests;
use crate::segment::run_folder::sizes::sizes_of_run;
use crate::segment::{needs, setup, weights};
use crate::tensor::{guard, rng};
use std::path::Path;
use std::sync::Arc;

/// A new model with the weights of the run in `run` (a run folder, a checkpoint or a published folder), and one
/// sentence about what was taken and what is new. The class head keeps the classes that the run knows.
///
/// # Errors
/// [`crate::Error::Weights`] if the folder is no run or incomplete; [`crate::Error::Config`] for settings that contradict
/// the run.
pub fn create(
    run: &Path,
    config: &ModelConfig,
    lora: LoraConfig,
    modalities: &[String],
    build: Build,
) -> Result<(LoadedModel, String)> {
    let folder = needs::checkpoint_of(run)?;
    verify(&folder)?;
    let trained = setup::described(&folder, &RunOverrides::default(), build)?;
    let sizes = sizes_of_run(&folder, &trained, config, lora, modalities.len())?;
    check_sizes(config, &sizes)?;
    check_adapters(config, &sizes)?;
    let mut warnings = setup::check_kernels(build.device)?;
    rng::seed(build.seed);
    let mut model = guard::guard(|| Ok(PrsMed::new(&sizes, build.options(config, true))))?;
    let named = Description { model: config.clone(), ..trained.clone() };
    warnings.extend(weights::load_run_without_classes(&folder, &named, &model, build)?);
    setup::divide(&mut model, config, build)?;
    let known = |name: &String| trained.modalities.iter().position(|known| known == name);
    let taken: Vec<Option<usize>> = modalities.iter().map(known).collect();
    weights::load_classes(&folder, &model, &taken)?;
    let takes_reader = model.reads_masks().then_some(trained.sizes.mask_reader.is_some());
    if takes_reader == Some(true) {
        weights::load_mask_reader(&folder, &model, build.allow_partial, &mut warnings)?;
    }
    let (base, tower) = weights::base_of(&folder, &named, build)?;
    let parts = [("base", Some(base.as_path())), ("vision_tower", tower.as_deref())];
    let is_own = base.starts_with(&folder);
    if let Some((part, path)) = trained.changed_part(&parts)?.filter(|_| !is_own) {
        let text = "has other weights than those that the run of the argument `init` was trained with: its adapters may not fit them";
        warnings.push(format!("`{part}`: `{}` {text}", path.display()));
    }
    let (tokenizer, of_tokenizer) = setup::tokenizer_of(&folder, &base, &trained)?;
    warnings.extend(of_tokenizer);
    let pixels = pixels(config, &sizes);
    let mut description = Description::new(config.clone(), sizes, modalities.to_vec(), pixels);
    description.prompt = trained.prompt.clone();
    description.sources = trained.sources.clone();
    description.digests = if is_own { trained.digests.clone() } else { digests(&parts)? };
    let note = note(&folder, modalities, &taken, takes_reader);
    let seen = Arc::new(SeenImages::of_checkpoint(&folder.join(DATA_FILE))?);
    Ok((LoadedModel { seen, ..LoadedModel::new(model, tokenizer, description, warnings) }, note))
}

/// Settings that a training takes from the run in the checkpoint folder `folder`: `key=value` as `--set` takes them.
///
/// # Errors
/// [`crate::Error::Weights`] if the folder is no run; [`crate::Error::Hub`] for the base of a published run.
pub fn settings(folder: &Path, build: Build) -> Result<Vec<String>> {
    let trained = setup::described(folder, &RunOverrides::default(), build)?;
    let table = toml::Table::try_from(&trained.model).expect("plain values serialise");
    let own = ["base", "vision_tower", "image_size", "train_base", "decoder", "decoder_positions"];
    // a published run names no encoder, and its sizes are those of TinySAM
    let encoder: &[&str] = if trained.model.sizes.is_some() { &["image_encoder", "sizes"] } else { &[] };
    let model = own.iter().chain(encoder).filter_map(|key| Some(format!("model.{key}={}", table.get(*key)?)));
    let LoraConfig { rank, alpha, .. } = trained.sizes.lora;
    Ok(model.chain([format!("lora.rank={rank}"), format!("lora.alpha={alpha:?}")]).collect())
}

/// `takes_reader` says whether the reader of masks is taken or new; `None` for a model without one.
fn note(folder: &Path, modalities: &[String], taken: &[Option<usize>], takes_reader: Option<bool>) -> String {
    const READER: &str = "the reader of masks (`model.answer_reads_mask`)";
    let named = |is_taken: bool| {
        let classes = modalities.iter().zip(taken).filter(|(_, row)| row.is_some() == is_taken);
        let classes: Vec<String> = classes.map(|(name, _)| format!("`{name}`")).collect();
        let head = (!classes.is_empty()).then(|| format!("class head of {}", classes.join(", ")));
        let reader = (takes_reader == Some(is_taken)).then(|| READER.to_owned());
        head.into_iter().chain(reader).collect::<Vec<_>>().join(", ")
    };
    let (parts, new) = (named(true), named(false));
    let parts = if parts.is_empty() { parts } else { format!(", {parts}") };
    let new = if new.is_empty() { "nothing" } else { &new };
    format!(
        "starting from `{}`: adapters, image encoder, mask decoder and tokenizer{parts} are taken; new: {new}",
        folder.display()
    )
}
