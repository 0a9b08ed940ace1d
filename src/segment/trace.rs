//! `trace`: deterministic steps on given tensors, everything recorded. It is how two machines, versions or
//! implementations are compared.

use super::layout::Layout;
use super::step::{self, Inputs, Pass};
use super::{Assembly, Semantics};
use crate::models::{mask_decoder, mistral, tiny_vit};
use crate::nn::BatchStatistics;
use crate::tensor::store::Role;
use crate::tensor::weights::Archive;
use crate::tensor::{Kind, Tensor, guard, no_grad};
use crate::trainer::optimizer::AdamW;
use crate::trainer::{Parameter, TrainConfig};
use crate::{Error, Result};
use std::path::Path;

/// Reads the input tensors of a trace (`text_ids`, `text_mask`, `clip_image`, `sam_image_u8`, `mask_u8`, `class_label`,
/// optionally `answer_start`); a picture becomes `image_tokens` tokens.
///
/// # Errors
/// [`Error::Weights`] for a missing tensor.
pub fn read_inputs(path: &Path, semantics: Semantics, image_tokens: i64) -> Result<Inputs> {
    let archive = Archive::open(path)?;
    guard::guard(|| {
        let ids = matrix::<i64>(&archive.read("text_ids")?.to_kind(Kind::Int64))?;
        let mask = matrix::<bool>(&archive.read("text_mask")?.to_kind(Kind::Bool))?;
        let texts = step::real_ids(&ids, &mask, semantics);
        let groups = vec![1; texts.len()];
        let answer_start: Vec<usize> = if archive.contains("answer_start") {
            let starts = archive.read("answer_start")?.to_kind(Kind::Int64);
            Vec::<i64>::try_from(&starts)
                .map_err(|e| Error::Shape { reason: e.to_string() })?
                .into_iter()
                .map(|s| usize::try_from(s).unwrap_or(0))
                .collect()
        } else {
            // without a mark, the second half of each text stands in for the answer
            texts.iter().map(|text| text.len().div_ceil(2).max(2)).collect()
        };
        Ok(Inputs {
            layout: Layout::new(texts, &answer_start, &groups, semantics, image_tokens),
            sight: archive.read("clip_image")?.to_kind(Kind::Float).into(),
            sam_image: archive.read("sam_image_u8")?,
            mask: archive.read("mask_u8")?,
            class_label: archive.read("class_label")?.to_kind(Kind::Int64),
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

/// One recorded training step and `steps` optimizer steps, by name: see the command's help for the list.
///
/// Train mode with every dropout at 0; batch normalisation uses batch statistics and moves the running ones.
///
/// # Errors
/// Typed errors of libtorch.
pub fn run(assembly: &Assembly, inputs: &Inputs, steps: usize, config: &TrainConfig) -> Result<Vec<(String, Tensor)>> {
    let model = &assembly.model;
    let pass = Pass {
        llm: mistral::Pass { train: false, checkpoint: 0 },
        encoder: tiny_vit::Pass { statistics: BatchStatistics::Batch { momentum: 0.1 }, checkpoint: 0 },
        decoder: mask_decoder::Pass::default(),
    };
    let named = |role: fn(Role) -> bool| -> Vec<Parameter> {
        model
            .stores()
            .parts()
            .iter()
            .flat_map(|(file, store)| store.entries().into_iter().map(move |e| (*file, e)))
            .filter(|(_, e)| role(e.role))
            .map(|(file, e)| Parameter { name: recorded_name(file, &e.name), tensor: e.tensor })
            .collect()
    };
    let mut optimizer = AdamW::new(named(|role| role == Role::Trainable), config);
    let mut record = Vec::new();
    let mut losses: Vec<[f64; 4]> = Vec::new();
    let mut norms = Vec::new();
    for number in 0..steps {
        let prepared = inputs.to_device(model, inputs.weight());
        let outputs = guard::guard(|| Ok(step::forward(model, &prepared, pass)))?;
        let parts = step::losses(model, &prepared, &outputs);
        let total = &parts.mask + &parts.class * assembly.description.model.class_loss_weight + &parts.text;
        guard::guard(|| {
            total.backward();
            Ok(())
        })?;
        let values = [&parts.text, &parts.mask, &parts.class, &total].map(|t| t.double_value(&[]));
        let gradients = optimizer.measure(1.0)?;
        if number == 0 {
            record.push(("llm_last_hidden".to_owned(), outputs.states.detach()));
            record.push(("image_embedding".to_owned(), outputs.embedding.detach()));
            record.push(("mask_logits".to_owned(), outputs.mask_logits.detach()));
            record.push(("class_logits".to_owned(), outputs.class_logits.detach()));
            for (name, value) in PARTS.iter().zip(values) {
                record.push((format!("loss.{name}"), scalar(value)));
            }
            for param in optimizer.params() {
                let grad = param.tensor.grad();
                if grad.defined() {
                    record.push((format!("grad.{}", param.name), no_grad(|| grad.copy())));
                }
            }
        }
        losses.push(values);
        norms.push(gradients.norm());
        optimizer.step(config.learning_rate, &gradients)?;
    }
    for (i, name) in PARTS.iter().enumerate() {
        record.push((format!("steps.loss.{name}"), series(losses.iter().map(|step| step[i]))));
    }
    record.push(("steps.grad_norm".to_owned(), series(norms.iter().copied())));
    for param in named(|role| role != Role::Frozen) {
        record.push((format!("param_after{steps}.{}", param.name), param.tensor.detach()));
    }
    Ok(record)
}

/// `FILE/KEY` with the key of the original's file, where the encoder's keys are prefixed.
fn recorded_name(file: &str, key: &str) -> String {
    if file == "image_encoder" { format!("{file}/image_encoder.{key}") } else { format!("{file}/{key}") }
}

const PARTS: [&str; 4] = ["text", "mask", "class", "total"];

fn scalar(value: f64) -> Tensor {
    Tensor::from(value).to_kind(Kind::Float)
}

fn series(values: impl Iterator<Item = f64>) -> Tensor {
    Tensor::from_slice(&values.collect::<Vec<_>>()).to_kind(Kind::Float)
}
