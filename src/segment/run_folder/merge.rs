//! Merges LoRA adapters into the weights of a run: `W + scale B A`, computed in fp32, for every adapted weight `W`.
//!
//! The result is a checkpoint folder whose description has rank 0. Its `base/` contains language model, projector and
//! vision tower with `config.json`, tokenizer and shards. Transformers reads it as a Mistral and ignores the other
//! keys. Tensors are read, changed and written one at a time.

use crate::data::familiarity::images::{IMAGES_FILE, KnownImages};
use crate::data::familiarity::questions::{KnownQuestions, QUESTIONS_FILE};
use crate::data::identity::DataIdentity;
use crate::data::text::TextTokenizer;
use crate::event::{Event, Observer};
use crate::models::base::Keys;
use crate::models::prsmed::{MASK_HEAD, MASK_READER};
use crate::nn::Quantization;
use crate::segment::needs;
use crate::segment::resume::DATA_FILE;
use crate::segment::run_folder::adapters::{ADAPTER, PREFIX, Scales};
use crate::segment::run_folder::loaded::DESCRIPTION;
use crate::segment::setup::{self, Build, Description, RunOverrides};
use crate::segment::weights::{base_config, base_of, is_tied, part_file};
use crate::tensor::weights::{Archive, Staged, TensorSpec};
use crate::tensor::{Device, Kind, Tensor, guard, no_grad};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

/// Options of a merge.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Other paths of base and vision tower than those that the run names.
    pub overrides: RunOverrides,
    /// Dtype of the written base; `None`: as each tensor is stored.
    pub kind: Option<Kind>,
    /// Largest size of a shard in bytes, unless one tensor is larger.
    pub shard_bytes: u64,
}

/// Summary of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Merged {
    /// Weights that had an adapter.
    pub adapters: usize,
    /// Files of the base.
    pub shards: usize,
    /// Bytes of the tensors in these files.
    pub bytes: u64,
}

/// Writes the run in `folder` without adapters to `out`, which must not exist.
///
/// # Errors
/// As [`Source::open`] and [`Source::write`].
pub fn merge(folder: &Path, out: &Path, settings: &Settings, build: Build, observer: &dyn Observer) -> Result<Merged> {
    Source::open(folder, &settings.overrides, build)?.write(out, settings, observer)
}

/// A run to merge. All of its files are open, so that a training that replaces the folder changes nothing.
pub struct Source {
    description: Description,
    base: Base,
    /// Image encoder, decoder and class head. Old published folders have no class head.
    parts: Vec<(&'static str, Option<Archive>)>,
    /// Name and content of each file of the tokenizer.
    tokenizer: [(&'static str, String); 3],
    questions: Option<KnownQuestions>,
    images: Option<KnownImages>,
    /// Rows, images and patients of its training.
    data: Option<DataIdentity>,
}

impl Source {
    /// Opens the run in `folder`.
    ///
    /// # Errors
    /// [`Error::Config`] if the run has no adapters; [`Error::Weights`] as [`setup::open`].
    pub fn open(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Self> {
        let description = setup::described(folder, overrides, build)?;
        if description.sizes.lora.rank == 0 {
            let hint = "use it unchanged with `prsmed predict` and `prsmed eval`";
            return Err(Error::config("RUN", "the run has no adapters: they are already merged", hint));
        }
        let base = Base::open(folder, &description, build)?;
        let tokenizer =
            TextTokenizer::open(&needs::tokenizer_folder(folder, base.archive.path()), &description.prompt)?.files()?;
        let mut parts = Vec::new();
        let reader = description.sizes.mask_reader.map(|_| MASK_READER);
        for part in ["image_encoder", MASK_HEAD, "cls"].into_iter().chain(reader) {
            let file = part_file(folder, part);
            let is_missing = part == "cls" && !file.exists();
            parts.push((part, if is_missing { None } else { Some(Archive::open(&file)?) }));
        }
        let data = folder.join(DATA_FILE);
        let data = data.exists().then(|| DataIdentity::read(&data)).transpose()?;
        Ok(Self {
            description,
            base,
            parts,
            tokenizer,
            questions: KnownQuestions::open(folder)?,
            images: KnownImages::open(folder)?,
            data,
        })
    }

    /// Writes the merged run to `out`, which must not exist. Nothing that exists is changed.
    ///
    /// # Errors
    /// [`Error::Config`] if `out` exists; [`Error::Weights`] for keys and shapes that do not fit, and for values that are
    /// not finite; [`Error::Io`].
    pub fn write(self, out: &Path, settings: &Settings, observer: &dyn Observer) -> Result<Merged> {
        refuse_existing(out)?;
        let mut staged = Staged::create(out)?;
        let merged = self.base.write(&mut staged, settings, observer)?;
        self.write_parts(&mut staged)?;
        let description = without_adapters(self.description);
        let mut config = base_config(&description);
        if let Some(name) = settings.kind.and_then(torch_name) {
            config["torch_dtype"] = name.into();
        }
        let json = |value: &serde_json::Value| serde_json::to_vec_pretty(value).expect("plain values serialise");
        staged.write_bytes("base/config.json", &json(&config))?;
        staged.write_bytes("base.json", &json(&config))?;
        staged.write_bytes(DESCRIPTION, &serde_json::to_vec_pretty(&description).expect("plain values serialise"))?;
        if let Some(questions) = self.questions {
            staged.write_bytes(QUESTIONS_FILE, questions.to_json().as_bytes())?;
        }
        if let Some(images) = self.images {
            staged.write_bytes(IMAGES_FILE, images.to_json().as_bytes())?;
        }
        if let Some(data) = self.data {
            staged.write_bytes(DATA_FILE, data.to_json().as_bytes())?;
        }
        for (name, text) in self.tokenizer {
            staged.write_bytes(&format!("tokenizer/{name}"), text.as_bytes())?;
            staged.write_bytes(&format!("base/{name}"), text.as_bytes())?;
        }
        staged.publish().or_else(|error| match &error {
            // another merge has written it meanwhile
            Error::Io { source, .. }
                if matches!(source.kind(), ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty) =>
            {
                refuse_existing(out).and(Err(error))
            }
            _ => Err(error),
        })?;
        Ok(merged)
    }

    /// Copies image encoder, decoder and class head. A missing class head becomes one of zeros.
    fn write_parts(&self, staged: &mut Staged) -> Result<()> {
        for (part, archive) in &self.parts {
            let target = format!("{part}.safetensors");
            let Some(archive) = archive else {
                let sizes = &self.description.sizes;
                let options = (Kind::Float, Device::Cpu);
                let weight = Tensor::zeros([sizes.num_classes, sizes.encoder.channels()], options);
                let bias = Tensor::zeros([sizes.num_classes], options);
                staged.write_tensors(&target, &[("2.weight", &weight), ("2.bias", &bias)], &BTreeMap::new())?;
                continue;
            };
            let spec = |name: &String| {
                let info = archive.info(name).expect("a listed name");
                TensorSpec { name: name.clone(), kind: info.kind, shape: info.shape.clone() }
            };
            let specs: Vec<TensorSpec> = archive.names().iter().map(spec).collect();
            staged.write_one_by_one(&target, &specs, &mut |name| archive.read(name))?;
        }
        Ok(())
    }
}

fn refuse_existing(out: &Path) -> Result<()> {
    if out.symlink_metadata().is_ok() {
        return Err(Error::config("OUT", format!("`{}` exists", out.display()), "choose another folder"));
    }
    Ok(())
}

fn without_adapters(mut description: Description) -> Description {
    description.sizes.lora.rank = 0;
    description.model.train_base = false;
    description.model.quantization = Quantization::None;
    description.model.vision_tower = String::new();
    description
}

/// Name of a dtype in transformers.
fn torch_name(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("float32"),
        Kind::BFloat16 => Some("bfloat16"),
        Kind::Half => Some("float16"),
        _ => None,
    }
}

/// The stored weights of a run's language model, projector and tower with the adapters that change them.
struct Base {
    keys: &'static Keys,
    archive: Archive,
    tower: Option<Archive>,
    adapters: Archive,
    scales: Scales,
    /// Whether the embedding is the head too. The merged model has both.
    is_tied: bool,
}

impl Base {
    fn open(folder: &Path, description: &Description, build: Build) -> Result<Self> {
        let (base, tower) = base_of(folder, description, build)?;
        let scales = Scales::open(folder, description.sizes.lora)?;
        let keys = &description.sizes.family.keys;
        let archive = keys.open(&base)?;
        if let Some(name) = archive.names().iter().find(|name| archive.is_quantized(name)) {
            let hint = "give the unquantized base with the argument `base=WHERE`";
            return Err(Error::weights(
                &base,
                format!("`{name}` has 4-bit weights, which adapters cannot be added to"),
                hint,
            ));
        }
        Ok(Self {
            keys,
            archive,
            tower: tower.map(|tower| Archive::open(&tower)).transpose()?,
            adapters: Archive::open(&folder.join(ADAPTER))?,
            scales,
            is_tied: is_tied(&base)?,
        })
    }

    /// The archive that `key` is read from, and its name there.
    fn place<'a>(&'a self, key: &'a str) -> (&'a Archive, &'a str) {
        match (&self.tower, key.strip_prefix(self.keys.tower)) {
            (Some(tower), Some(name)) => (tower, name),
            _ if self.is_tied && key == self.keys.head => (&self.archive, self.keys.embedding),
            _ => (&self.archive, key),
        }
    }

    /// All keys without those that may stay unused. A separate tower replaces the one inside the base.
    fn keys(&self) -> Vec<String> {
        let is_own = |name: &&String| {
            (self.tower.is_none() || !name.starts_with(self.keys.tower)) && !(self.is_tied && *name == self.keys.head)
        };
        let own = self.archive.names().iter().filter(is_own);
        let tower = self.tower.iter().flat_map(Archive::names).filter(|name| name.starts_with("vision_model."));
        let head = self.is_tied.then(|| self.keys.head.to_owned());
        let keys = own.cloned().chain(head).chain(tower.map(|name| format!("{}{name}", self.keys.tower)));
        keys.filter(|key| !self.keys.is_unused(key)).collect()
    }

    /// Names of the two factors of a weight's adapter.
    fn factors(&self, key: &str) -> Option<[String; 2]> {
        let layer = key.strip_suffix(".weight")?;
        let [a, b] = ["lora_A", "lora_B"].map(|part| format!("{PREFIX}{layer}.{part}.weight"));
        (self.adapters.contains(&a) && self.adapters.contains(&b)).then_some([a, b])
    }

    /// Reads the tensor of `key`, with its adapter added, in `kind`.
    fn read(&self, key: &str, kind: Kind) -> Result<Tensor> {
        let (archive, name) = self.place(key);
        let weight = archive.read(name)?;
        let merged = match self.factors(key) {
            None => guard::guard(|| Ok(weight.to_kind(kind)))?,
            Some([a, b]) => {
                let [a, b] =
                    [self.adapters.read(&a)?, self.adapters.read(&b)?].map(|factor| factor.to_kind(Kind::Float));
                self.check_factors(key, [&weight, &a, &b])?;
                let scale = self.scales.of(key.trim_end_matches(".weight"))?;
                guard::guard(|| Ok(no_grad(|| (weight.to_kind(Kind::Float) + b.matmul(&a) * scale).to_kind(kind))))?
            }
        };
        let is_finite = guard::guard(|| Ok(merged.isfinite().all().int64_value(&[]) == 1))?;
        if is_finite {
            return Ok(merged);
        }
        let reason = format!("`{name}` has values that are not finite after the merge, in the dtype {kind:?}");
        Err(Error::weights(
            archive.path(),
            reason,
            "merge with the argument `dtype=bf16` or the argument `dtype=fp32`, or another checkpoint",
        ))
    }

    /// Checks that the product of the factors has the shape of the weight.
    fn check_factors(&self, key: &str, [weight, a, b]: [&Tensor; 3]) -> Result<()> {
        if let ([rows, columns], [rank, inputs], [outputs, other]) = (&weight.size()[..], &a.size()[..], &b.size()[..])
            && (rows, columns, rank) == (outputs, inputs, other)
        {
            return Ok(());
        }
        let reason =
            format!("the adapter of `{key}` is {:?} times {:?}, the weight {:?}", b.size(), a.size(), weight.size());
        Err(Error::weights(self.adapters.path(), reason, "give the base that the run was trained on"))
    }

    fn specs(&self, kind: Option<Kind>) -> Result<Vec<TensorSpec>> {
        let spec = |key: String| {
            let (archive, name) = self.place(&key);
            let info = archive.info(name).ok_or_else(|| {
                Error::weights(archive.path(), format!("there is no tensor `{name}`"), "give the run's own base")
            })?;
            let stored = info.kind;
            let float = matches!(stored, Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double);
            let kind = kind.filter(|_| float).unwrap_or(stored);
            let shape = info.shape.clone();
            Ok(TensorSpec { name: key, kind, shape })
        };
        self.keys().into_iter().map(spec).collect()
    }

    /// Every adapter of the language model must have both factors, and change a weight.
    fn check_adapters(&self, adapted: usize) -> Result<()> {
        let names: BTreeSet<&str> = self.adapters.names().iter().map(String::as_str).collect();
        let other = |name: &&str| match name.strip_suffix("lora_A.weight") {
            Some(start) => Some(format!("{start}lora_B.weight")),
            None => Some(format!("{}lora_A.weight", name.strip_suffix("lora_B.weight")?)),
        };
        let missing: Vec<String> =
            names.iter().filter_map(other).filter(|name| !names.contains(name.as_str())).collect();
        if let Some(first) = missing.first() {
            let more = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
            let reason = format!("the file is incomplete: it has no `{first}`{more}");
            return Err(Error::weights(
                self.adapters.path(),
                reason,
                "copy it again, or use another checkpoint of the run",
            ));
        }
        let stored = |name: &&String| name.ends_with("lora_A.weight") && !name.contains(self.keys.unused_adapters);
        let stored = self.adapters.names().iter().filter(stored).count();
        if stored == adapted && stored > 0 {
            return Ok(());
        }
        let reason = format!("{adapted} of its {stored} adapters fit a weight of {}", self.archive.path().display());
        Err(Error::weights(self.adapters.path(), reason, "give the base that the run was trained on"))
    }

    fn write(&self, staged: &mut Staged, settings: &Settings, observer: &dyn Observer) -> Result<Merged> {
        let specs = self.specs(settings.kind)?;
        let adapters = specs.iter().filter(|spec| self.factors(&spec.name).is_some()).count();
        self.check_adapters(adapters)?;
        let bytes = specs.iter().map(TensorSpec::bytes).sum();
        let shards = shards(specs, settings.shard_bytes);
        observer.on(&Event::Started { phase: "merge".into(), total: bytes, unit: "bytes" });
        let mut done = 0;
        let mut files = BTreeMap::new();
        for (i, specs) in shards.iter().enumerate() {
            let file = match shards.len() {
                1 => "model.safetensors".to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            let of: BTreeMap<&str, &TensorSpec> = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
            staged.write_one_by_one(&format!("base/{file}"), specs, &mut |name| {
                let tensor = self.read(name, of[name].kind)?;
                done += of[name].bytes();
                observer.on(&Event::Advanced { done });
                Ok(tensor)
            })?;
            files.extend(specs.iter().map(|spec| (spec.name.clone(), file.clone())));
        }
        observer.on(&Event::Finished);
        if shards.len() > 1 {
            let index = serde_json::json!({ "metadata": { "total_size": bytes }, "weight_map": files });
            let index = serde_json::to_vec_pretty(&index).expect("plain values serialise");
            staged.write_bytes("base/model.safetensors.index.json", &index)?;
        }
        Ok(Merged { adapters, shards: shards.len(), bytes })
    }
}

/// Splits `specs` into shards of at most `most` bytes, in order.
fn shards(specs: Vec<TensorSpec>, most: u64) -> Vec<Vec<TensorSpec>> {
    let (mut shards, mut held) = (vec![Vec::new()], 0);
    for spec in specs {
        let bytes = spec.bytes();
        if held > 0 && held + bytes > most {
            shards.push(Vec::new());
            held = 0;
        }
        held += bytes;
        shards.last_mut().expect("at least one").push(spec);
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_small_and_complete() {
        let spec = |i: i64| TensorSpec { name: i.to_string(), kind: Kind::Half, shape: vec![i, 5] };
        let of = |most| shards((1..6).map(spec).collect(), most);
        let sizes =
            |most| of(most).iter().map(|shard| shard.iter().map(TensorSpec::bytes).sum::<u64>()).collect::<Vec<_>>();
        assert_eq!(sizes(1000), [150]);
        assert_eq!(sizes(60), [60, 40, 50]);
        assert_eq!(sizes(1), [10, 20, 30, 40, 50]);
    }
}
