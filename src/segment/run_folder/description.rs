//! Reading of a checkpoint's description (`model.json`), and checks of sizes before a model is built from them.

use crate::models::limits::{self, MAX_SIDE, MAX_VOCABULARY, MAX_WIDTH, check_multiple};
use crate::models::prsmed;
use crate::nn::Quantization;
use crate::segment::config::{ModelConfig, RANDOM};
use crate::segment::run_folder::loaded::{DESCRIPTION, Description, FORMAT};
use crate::tensor::weights::{CHECKSUMS, verify_folder_without};
use crate::trainer::checkpoint::STATE;
use crate::{Error, Result, files};
use std::io::ErrorKind;
use std::path::Path;

/// Reads and checks `model.json`.
///
/// # Errors
/// [`Error::Weights`] when it is missing, unreadable or impossible.
pub fn describe(folder: &Path) -> Result<Description> {
    let path = folder.join(DESCRIPTION);
    let hint = "give a run folder made by `prsmed train`, its `last/` or `best/`, or a published PRS-Med folder";
    let text = files::read(&path, files::MAX_SETTINGS)
        .map_err(|e| Error::weights(folder, format!("not a checkpoint folder ({e})"), hint))?;
    let mut description: Description =
        serde_json::from_slice(&text).map_err(|e| Error::weights(&path, e.to_string(), hint))?;
    description.pixels.padding = description.sizes.tower.padding();
    description.pixels.fit = description.sizes.encoder.fit();
    check_description(&path, &description)?;
    Ok(description)
}

/// Verifies the checksums of a checkpoint folder, which may lack the state of the trainer: only `--resume` needs it.
/// Folders of the original code have no checksums.
///
/// # Errors
/// As [`verify_folder_without`].
pub fn verify(folder: &Path) -> Result<()> {
    let has = |name: &str| match folder.join(name).symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        found => found.map(|_| true).map_err(Error::io(folder.join(name), "read")),
    };
    if has(DESCRIPTION)? || has(CHECKSUMS)? { verify_folder_without(folder, &STATE) } else { Ok(()) }
}

/// Checks the description of the model in a checkpoint folder. `path` is the file that it was read from.
///
/// # Errors
/// [`Error::Weights`] for another format, sizes that are impossible or contradict each other, and another number of
/// classes than names.
pub(crate) fn check_description(path: &Path, description: &Description) -> Result<()> {
    let Description { format, model, sizes, modalities, pixels, .. } = description;
    let hint = "use another checkpoint of the run (`last` or `best`), or copy this one again";
    if *format != FORMAT {
        let reason = format!("has the format {format}, this version of prsmed reads {FORMAT}");
        return Err(Error::weights(path, reason, "use the version of prsmed that wrote it, or a newer one"));
    }
    let wrong = |reason: String| Err(Error::weights(path, reason, hint));
    if let Err(error) = check_sizes(model, sizes) {
        return wrong(error.to_string());
    }
    let pairs = [
        (
            "`modalities` and `sizes.num_classes`",
            i64::try_from(modalities.len()).unwrap_or(i64::MAX),
            sizes.num_classes,
        ),
        (
            "the sides of the vision tower's images in `pixels` and `sizes`",
            pixels.tower_size.into(),
            sizes.tower.image_size(),
        ),
        ("`pixels.sam_size` and `model.image_size`", pixels.sam_size.into(), model.image_size),
        ("`sizes.decoder.prompt_dim` and `sizes.llm.hidden_size`", sizes.decoder.prompt_dim(), sizes.llm.hidden_size),
        ("`sizes.decoder.image_dim` and `sizes.encoder.out_dim`", sizes.decoder.image_dim(), sizes.encoder.channels()),
    ];
    match pairs.into_iter().find(|(_, one, other)| one != other) {
        Some((what, one, other)) => wrong(format!("{what} must be equal, found {one} and {other}")),
        None => Ok(()),
    }
}

/// Checks that sizes are possible and fit together, before memory for them is asked for.
///
/// # Errors
/// [`Error::Config`].
pub(crate) fn check_sizes(config: &ModelConfig, sizes: &prsmed::Config) -> Result<()> {
    let prsmed::Config { tower, llm, lora, encoder, decoder, num_classes, mask_reader, .. } = sizes;
    tower.check()?;
    llm.check()?;
    let single = [
        ("model.image_size", config.image_size, MAX_SIDE),
        ("the number of modality classes", *num_classes, MAX_VOCABULARY),
    ];
    limits::check_ranges(&single)?;
    encoder.check()?;
    decoder.check()?;
    if let Some(reader) = mask_reader {
        reader.check(&sizes.fitting_reader())?;
    }
    // a merged model has rank 0
    if !(0..=MAX_WIDTH).contains(&lora.rank) {
        let reason = format!("must be from 1 to {MAX_WIDTH}, got {}", lora.rank);
        return Err(Error::config("lora.rank", reason, "use the rank of the adapters, usually 16"));
    }
    check_multiple("model.image_size", "pixels and the encoder's stride", config.image_size, sizes.encoder.stride())
}

/// Checks settings of the trained parts of a new model.
///
/// # Errors
/// [`Error::Config`].
pub(crate) fn check_adapters(config: &ModelConfig, sizes: &prsmed::Config) -> Result<()> {
    if sizes.lora.rank < 1 {
        return Err(Error::config(
            "lora.rank",
            format!("{} is not a rank", sizes.lora.rank),
            "use 1 or more, usually 16",
        ));
    }
    if config.train_base && config.base != RANDOM {
        let hint = "set `model.train_base=false`: LoRA adapts the base";
        return Err(Error::config("model.train_base", "the base has pretrained weights", hint));
    }
    check_host_layers(config)?;
    if config.train_base && config.quantization != Quantization::None {
        let reason = format!("`{}` weights are frozen, `model.train_base` trains them", config.quantization.name());
        let hint = "set `model.train_base=false`, or `model.quantization=none`";
        return Err(Error::config("model.quantization", reason, hint));
    }
    Ok(())
}

/// Layers in host memory must be frozen.
///
/// # Errors
/// [`Error::Config`].
pub fn check_host_layers(config: &ModelConfig) -> Result<()> {
    let streams = [
        ("stream_layers", config.stream_layers.count() > 0, "none"),
        ("stream_vision", config.stream_vision, "false"),
        ("divide_layers", config.divide_layers, "false"),
    ];
    if let Some((name, _, off)) = streams.into_iter().find(|(_, is_on, _)| config.train_base && *is_on) {
        let reason = "it is for frozen layers, and `model.train_base` trains them";
        let hint = format!("set `model.train_base=false`, or `model.{name}={off}`");
        return Err(Error::config(format!("model.{name}"), reason, hint));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// The error for a description in which the value at `pointer` is replaced.
    fn refused(pointer: &str, value: Value) -> String {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run/model.json");
        let mut description: Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let write = |description: &Value| std::fs::write(folder.path().join(DESCRIPTION), description.to_string());
        write(&description).unwrap();
        describe(folder.path()).unwrap();
        *description.pointer_mut(pointer).unwrap() = value;
        write(&description).unwrap();
        let error = describe(folder.path()).unwrap_err();
        assert!(!error.hint().is_empty(), "{error}");
        let text = error.to_string();
        assert!(text.contains("model.json: "), "{text}");
        text
    }

    #[test]
    fn a_description_of_another_format_is_refused() {
        assert!(refused("/format", json!(99)).contains("has the format 99"));
    }

    #[test]
    fn adapters_need_a_rank_and_only_a_random_dense_base_can_be_trained() {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let Description { model, sizes, .. } = describe(&fixture).unwrap();
        assert!(model.train_base && model.base == RANDOM);
        check_adapters(&model, &sizes).unwrap();
        let reason =
            |model: &ModelConfig, sizes: &prsmed::Config| check_adapters(model, sizes).unwrap_err().to_string();
        let mut merged = sizes.clone();
        merged.lora.rank = 0;
        assert_eq!(reason(&model, &merged), "`lora.rank`: 0 is not a rank");
        let loaded = ModelConfig { base: "models/llava".into(), ..model.clone() };
        assert_eq!(reason(&loaded, &sizes), "`model.train_base`: the base has pretrained weights");
        let quantized = ModelConfig { quantization: Quantization::Nf4, ..model.clone() };
        assert!(reason(&quantized, &sizes).starts_with("`model.quantization`: `nf4` weights are frozen"));
        check_adapters(&ModelConfig { train_base: false, ..loaded }, &sizes).unwrap();
        check_adapters(&ModelConfig { train_base: false, ..quantized }, &sizes).unwrap();
    }

    #[test]
    fn absurd_sizes_are_refused_before_memory_is_asked_for() {
        let large = 1_i64 << 40;
        for (pointer, value) in [
            ("/pixels/sam_size", json!(4_294_967_295_u32)),
            ("/pixels/clip_size", json!(0)),
            ("/model/image_size", json!(-16)),
            ("/sizes/clip/patch_size", json!(0)),
            ("/sizes/clip/num_hidden_layers", json!(large)),
            ("/sizes/clip/image_size", json!(large)),
            ("/sizes/llm/num_hidden_layers", json!(large)),
            ("/sizes/llm/hidden_size", json!(i64::MAX)),
            ("/sizes/llm/num_key_value_heads", json!(0)),
            ("/sizes/llm/vocab_size", json!(large)),
            ("/sizes/lora/rank", json!(large)),
            ("/sizes/lora/rank", json!(-1)),
            ("/sizes/encoder/depths", json!([1, 1, 1, large])),
            ("/sizes/encoder/window_sizes", json!([7, 0, 7, 7])),
            ("/sizes/encoder/window_sizes", json!([7, 4096, 14, 7])),
            ("/sizes/encoder/window_sizes", json!([7, 7, 64, 7])),
            ("/sizes/encoder/depths", json!([1, 1, 300, 1])),
            ("/sizes/decoder/hidden_dim", json!(large)),
            ("/sizes/decoder/cross_heads", json!(0)),
            ("/sizes/decoder/prompt_dim", json!(64)),
            ("/sizes/num_classes", json!(large)),
        ] {
            refused(pointer, value);
        }
    }

    #[test]
    fn another_number_of_classes_than_names_is_refused() {
        let text = refused("/modalities", json!(["a", "b"]));
        assert!(text.contains("`modalities` and `sizes.num_classes` must be equal, found 2 and 6"), "{text}");
        refused("/sizes/num_classes", json!(7));
    }

    #[test]
    fn a_checkpoint_of_this_program_needs_checksums() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("mask_decoder.pth"), "").unwrap();
        verify(folder.path()).expect("a folder of the original code");
        std::fs::write(folder.path().join(DESCRIPTION), "{}").unwrap();
        assert!(verify(folder.path()).unwrap_err().to_string().contains("has no `checksums.json`"));
    }
}
