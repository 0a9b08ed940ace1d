//! Regression tests against a reference trace: training steps of the original Python PRS-Med on given tensors.
//!
//! `trace.md` in the folder of the trace defines the tolerances. The trace and the published weights are not part of
//! the repository, so the tests are ignored by default; scripts/check runs them where the files exist.

#![expect(clippy::print_stderr, reason = "prints all distances")]

use super::layout::Layout;
use super::setup::{Build, RunOverrides};
use super::step::{self, Inputs, Pass};
use super::{LoadedModel, Semantics, setup, weights};
use crate::models::prsmed::PrsMed;
use crate::models::{decoder, image_encoder, mask_head};
use crate::nn::BatchStatistics;
use crate::tensor::store::Role;
use crate::tensor::weights::{Archive, Staged};
use crate::tensor::{Device, Kind, Tensor, guard, no_grad, rng};
use crate::trainer::step::StepMark;
use crate::trainer::{
    BatchSize, Batches, Loss, Parameter, Shard, StepInfo, StepResult, Stepper, Switch, Task, TrainConfig,
};
use crate::{Error, Result};
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// Reads the input tensors of a trace (`text_ids`, `text_mask`, `clip_image`, `sam_image_u8`, `mask_u8`, `class_label`,
/// optionally `answer_start`) for `model`.
fn read_inputs(path: &Path, semantics: Semantics, model: &PrsMed) -> Result<Inputs> {
    let archive = Archive::open(path)?;
    guard::guard(|| {
        let ids = matrix::<i64>(&archive.read("text_ids")?.to_kind(Kind::Int64))?;
        let mask = matrix::<bool>(&archive.read("text_mask")?.to_kind(Kind::Bool))?;
        let keep = |(ids, mask): (Vec<i64>, Vec<bool>)| ids.into_iter().zip(mask).filter(|(_, keep)| *keep);
        let texts = ids.into_iter().zip(mask).map(|row| keep(row).map(|(id, _)| id).collect());
        let texts: Vec<Vec<i64>> = texts.map(|ids| step::real_ids(ids, semantics)).collect();
        let groups = vec![1; texts.len()];
        let answer_start: Vec<usize> = if archive.contains("answer_start") {
            let starts = archive.read("answer_start")?.to_kind(Kind::Int64);
            Vec::<i64>::try_from(&starts)
                .map_err(|e| Error::Shape { reason: e.to_string() })?
                .into_iter()
                .map(|s| usize::try_from(s).unwrap_or(0))
                .collect()
        } else {
            // without `answer_start`, the second half of each text is used as the answer
            texts.iter().map(|text| text.len().div_ceil(2).max(2)).collect()
        };
        Ok(Inputs {
            layout: Layout::new(texts, &answer_start, &groups, semantics, model.spans(groups.len())),
            vision: archive.read("clip_image")?.to_kind(Kind::Float).into(),
            sam_image: archive.read("sam_image_u8")?,
            has_mask: None,
            geometry: None,
            mask: archive.read("mask_u8")?,
            class_label: archive.read("class_label")?.to_kind(Kind::Int64),
            rows: Vec::new(),
        })
    })
}

fn matrix<T>(tensor: &Tensor) -> Result<Vec<Vec<T>>>
where
    Vec<Vec<T>>: for<'a> TryFrom<&'a Tensor>,
{
    Vec::<Vec<T>>::try_from(tensor)
        .map_err(|_| Error::Shape { reason: format!("expected a matrix, got {:?}", tensor.size()) })
}

/// One training step in full and `steps` optimizer steps, by name: outputs, losses and `grad.FILE/KEY` of the first
/// step, then `steps.*` and `param_afterN.FILE/KEY`.
///
/// Train mode with every dropout at 0; batch normalisation uses batch statistics and updates the running ones.
fn run(loaded: &LoadedModel, inputs: Inputs, steps: usize, config: &TrainConfig) -> Result<Vec<(String, Tensor)>> {
    let config = TrainConfig { ema_decay: 0.0, step_in_backward: false, graph: Switch::Off, ..config.clone() };
    let task = TraceTask { loaded, first: RefCell::default() };
    let inputs = [inputs];
    let mut stepper = Stepper::new(&task, &config, false);
    let mut gradients = Vec::new();
    let mut results: Vec<StepResult> = Vec::new();
    for number in 1..=steps as u64 {
        let info = StepInfo { number, epoch: 0, learning_rate: config.learning_rate };
        results.push(stepper.step(&inputs, info, &mut |mark, params| {
            if (mark, number) == (StepMark::Gradients, 1) {
                let with_gradient = params.iter().filter(|param| param.tensor.grad().defined());
                let copy = |param: &Parameter| no_grad(|| param.tensor.grad().copy());
                gradients.extend(with_gradient.map(|param| (format!("grad.{}", param.name), copy(param))));
            }
            Ok(())
        })?);
    }
    let mut trace = task.first.take();
    let losses = |name: &str| results.iter().map(|result| loss(result, name)).collect::<Vec<_>>();
    for name in PARTS {
        trace.extend(losses(name).first().map(|value| (format!("loss.{name}"), scalar(*value))));
    }
    trace.extend(gradients);
    for name in PARTS {
        trace.push((format!("steps.loss.{name}"), series(&losses(name))));
    }
    let norms: Vec<f64> = results.iter().map(|result| result.grad_norm).collect();
    trace.push(("steps.grad_norm".to_owned(), series(&norms)));
    for param in parameters(loaded, |role| role != Role::Frozen) {
        trace.push((format!("param_after{steps}.{}", param.name), param.tensor.detach()));
    }
    Ok(trace)
}

/// Training task of a trace: every batch consists of the given tensors.
struct TraceTask<'a> {
    loaded: &'a LoadedModel,
    /// Outputs of the first pass.
    first: RefCell<Vec<(String, Tensor)>>,
}

impl Task for TraceTask<'_> {
    type Batch = Inputs;

    fn parameters(&self) -> Vec<Parameter> {
        parameters(self.loaded, |role| role == Role::Trainable)
    }

    fn steps_per_epoch(&self) -> u64 {
        1
    }

    fn batches(&self, _epoch: u64, _first: u64, _shard: Shard) -> Result<Batches<'_, Inputs>> {
        Ok(Box::new(std::iter::empty()))
    }

    fn batch_size(&self, batch: &Inputs) -> BatchSize {
        batch.batch_size()
    }

    fn loss(&self, inputs: &Inputs, effective_batch: BatchSize, _epoch: u64) -> Result<Loss> {
        let LoadedModel { model, description, .. } = self.loaded;
        let pass = Pass {
            llm: decoder::DecoderPass { train: false, checkpoint: 0 },
            encoder: image_encoder::EncoderPass { statistics: BatchStatistics::TRAIN, checkpoint: 0 },
            decoder: mask_head::HeadPass::default(),
        };
        let prepared = inputs.to_device(inputs.vision.resolve(model), effective_batch);
        let outputs = step::forward(model, &prepared, pass);
        let parts = step::losses(model, &prepared, &outputs);
        let mut first = self.first.borrow_mut();
        if first.is_empty() {
            first.push(("llm_last_hidden".to_owned(), outputs.states.detach()));
            first.push(("image_embedding".to_owned(), outputs.embedding.map.detach()));
            first.push(("mask_logits".to_owned(), outputs.mask_logits.detach()));
            first.push(("class_logits".to_owned(), outputs.class_logits.detach()));
        }
        let total = &parts.mask + &parts.class * description.model.class_loss_weight + &parts.text;
        let parts = [("text", parts.text), ("mask", parts.mask), ("class", parts.class)];
        Ok(Loss { total, parts: parts.map(|(name, value)| (name, value.detach())).into() })
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        weights::save(folder, self.loaded, &self.loaded.description)
    }

    fn load(&self, folder: &Path) -> Result<()> {
        weights::load_parts(folder, &self.loaded.model, false, &mut Vec::new())
    }
}

/// Tensors of the model with one of the given roles.
fn parameters(loaded: &LoadedModel, is_wanted: fn(Role) -> bool) -> Vec<Parameter> {
    let parts = loaded.model.stores().parts();
    let entries = parts.iter().flat_map(|(file, store)| store.entries().into_iter().map(move |e| (*file, e)));
    let wanted = entries.filter(|(_, entry)| is_wanted(entry.role));
    wanted.map(|(file, e)| Parameter::new(original_name(file, &e.name), e.tensor)).collect()
}

fn loss(result: &StepResult, name: &str) -> f64 {
    result.losses.iter().find(|(known, _)| *known == name).map_or(f64::NAN, |(_, value)| *value)
}

/// `FILE/KEY` with the key of the original's file, where the encoder's keys are prefixed.
fn original_name(file: &str, key: &str) -> String {
    if file == "image_encoder" { format!("{file}/image_encoder.{key}") } else { format!("{file}/{key}") }
}

const PARTS: [&str; 4] = ["text", "mask", "class", "total"];

fn scalar(value: f64) -> Tensor {
    Tensor::from(value).to_kind(Kind::Float)
}

fn series(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Float)
}

/// Folder of the reference trace and the real data.
fn shared() -> PathBuf {
    let folder =
        std::env::var_os("PRSMED_SHARED").map_or_else(|| crate::fixture::checkout().join("../shared"), PathBuf::from);
    let trace = folder.join("reference/oracle/expected.safetensors");
    assert!(trace.exists(), "`{}` does not exist (set PRSMED_SHARED)", trace.display());
    folder
}

fn recorded_optimizer() -> TrainConfig {
    let text = r#"{"micro_batch":2,"accumulation":1,"epochs":1,"max_steps":0,"checkpoint_every_steps":0,
        "validate_every_epochs":0,"patience":0,"learning_rate":1e-4,"min_learning_rate":0,"warmup_frac":0,
        "weight_decay":1e-5,"beta1":0.9,"beta2":0.999,"epsilon":1e-6,"clip_norm":1.0,"seed":0,"precision":"fp32",
        "checkpointing":"none","checkpoint_encoder":"none","checkpoint_decoder":false,"optimizer":"adamw",
        "offload_optimizer":false,"step_in_backward":false,"graph":"off","fused_kernels":"off","ema_decay":0}"#;
    serde_json::from_str(text).unwrap()
}

/// Outputs and losses of one pass without gradients, by name.
fn forward(loaded: &LoadedModel, inputs: &Inputs) -> Result<Vec<(String, Tensor)>> {
    let task = TraceTask { loaded, first: RefCell::default() };
    let loss = no_grad(|| task.loss(inputs, task.batch_size(inputs), 0))?;
    let mut trace = task.first.take();
    trace.extend(loss.parts.into_iter().map(|(name, value)| (format!("loss.{name}"), value)));
    Ok(trace)
}

/// The model of the reference run, and the inputs of its trace.
fn opened(semantics: Semantics) -> (LoadedModel, Inputs, PathBuf) {
    let oracle = shared().join("reference/oracle");
    let base = oracle.join("base");
    let overrides = RunOverrides {
        base: Some(base.join("llava-med-v1.5-mistral-7b").display().to_string()),
        vision_tower: Some(base.join("clip-vit-large-patch14-336").display().to_string()),
        semantics: Some(semantics),
        quantization: None,
        stream_layers: None,
        divide_layers: None,
        stream_vision: None,
    };
    let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
    let build = Build::new(Device::Cpu, Kind::Float, &locate);
    let loaded = setup::open(&oracle.join("run"), &overrides, build).unwrap();
    let inputs = read_inputs(&oracle.join("inputs.safetensors"), semantics, &loaded.model).unwrap();
    (loaded, inputs, oracle)
}

fn tolerance(name: &str) -> f64 {
    let rules = [
        ("llm_last_hidden", 2e-5),
        ("image_embedding", 5e-5),
        ("mask_logits", 1e-4),
        ("class_logits", 1e-5),
        ("loss.", 1e-5),
        ("steps.loss.", 1e-4),
        ("steps.grad_norm", 2e-3),
        ("grad.lora_adapter", 1e-4),
        ("grad.cls", 1e-5),
        ("grad.image_encoder", 5e-3),
        ("grad.mask_decoder", 5e-3),
        ("param_after3.lora_adapter", 2e-5),
        ("param_after3.", 1e-3),
    ];
    rules.iter().find(|(prefix, _)| name.starts_with(prefix)).unwrap_or_else(|| panic!("no tolerance: {name}")).1
}

/// Relative L2 distance between a tensor of the reference trace (every N-th element) and the computed one.
fn distance(got: &Tensor, want: &Tensor, stride: i64) -> f64 {
    let got = got.reshape([-1]).slice(0, 0, None, stride).to_kind(Kind::Double);
    let want = want.reshape([-1]).to_kind(Kind::Double);
    assert_eq!(got.size(), want.size());
    (got - &want).norm().double_value(&[]) / want.norm().double_value(&[]).max(1e-30)
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_reference_semantics_reproduce_the_reference_trace() {
    let _lock = rng::TEST_LOCK.lock();
    let (loaded, inputs, oracle) = opened(Semantics::Reference);
    let record = run(&loaded, inputs, 3, &recorded_optimizer()).unwrap();
    let expected = Archive::open(&oracle.join("expected.safetensors")).unwrap();
    let mut wrong = Vec::new();
    for name in expected.names() {
        let (plain, stride) = name.split_once("@stride:").map_or((name.as_str(), 1), |(n, s)| (n, s.parse().unwrap()));
        let Some((_, got)) = record.iter().find(|(n, _)| n == plain) else {
            wrong.push(format!("{plain}: missing"));
            continue;
        };
        let error = distance(got, &expected.read(name).unwrap(), stride);
        eprintln!("{error:.2e} (allowed {:.0e}) {plain}", tolerance(plain));
        if error.is_nan() || error > tolerance(plain) {
            wrong.push(format!("{plain}: {error:.3e} > {:.0e}", tolerance(plain)));
        }
    }
    assert!(expected.names().len() > 50, "only {} tensors in the reference trace", expected.names().len());
    assert!(wrong.is_empty(), "{} tensors differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_corrected_semantics_differ() {
    let _lock = rng::TEST_LOCK.lock();
    let (loaded, inputs, oracle) = opened(Semantics::Corrected);
    let record = forward(&loaded, &inputs).unwrap();
    let expected = Archive::open(&oracle.join("expected.safetensors")).unwrap();
    for name in ["mask_logits", "loss.text", "loss.mask"] {
        let stored = expected.names().iter().find(|n| n.split('@').next() == Some(name)).unwrap();
        let stride = stored.split_once("@stride:").map_or(1, |(_, s)| s.parse().unwrap());
        let got = &record.iter().find(|(n, _)| n == name).unwrap().1;
        let error = distance(got, &expected.read(stored).unwrap(), stride);
        assert!(error > 1e-3, "{name} does not differ: {error:.2e}");
    }
}
