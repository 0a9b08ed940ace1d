//! `prsmed trace`.

use super::Context;
use super::predict::RunArgs;
use super::report::Outcome;
use crate::config::Sources;
use crate::segment::trace;
use crate::tensor::Tensor;
use crate::tensor::weights::write_safetensors;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Record deterministic training steps on given tensors
///
/// To compare machines, versions or implementations.
///
/// Inputs (safetensors): `text_ids [b, l]` (-200 marks the image), `text_mask [b, l]`, `clip_image [b, 3, c, c]`
/// (normalised), `sam_image_u8 [b, 3, s, s]`, `mask_u8 [b, 1, s, s]`, `class_label [b]`, and optionally `answer_start [b]`.
///
/// Outputs: `llm_last_hidden`, `image_embedding`, `mask_logits`, `class_logits`, `loss.*`, `grad.FILE/KEY` of the first
/// step; `steps.loss.*`, `steps.grad_norm` and `param_afterN.FILE/KEY` after N steps of AdamW (learning rate 1e-4, weight
/// decay 1e-5, epsilon 1e-6, gradient norm clipped to 1). Train mode, every dropout 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed trace runs/a --inputs inputs.safetensors --out trace.safetensors")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// The input tensors
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// Where to write what was recorded (safetensors)
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: usize,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let assembly = args.run.open(context)?;
    let (semantics, image_tokens) = (assembly.description.model.semantics, assembly.model.num_image_tokens());
    let inputs = trace::read_inputs(&args.inputs, semantics, image_tokens)?;
    let mut config = Sources { preset: Some("full".into()), ..Sources::default() }.resolve()?.config.train;
    (config.learning_rate, config.weight_decay, config.epsilon, config.clip_norm) = (1e-4, 1e-5, 1e-6, 1.0);
    let record = trace::run(&assembly, &inputs, args.steps, &config)?;
    let named: Vec<(&str, &Tensor)> = record.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&args.out, &named, &BTreeMap::new())?;
    context.output.line(format!("{} tensors in {}", named.len(), args.out.display()))?;
    for (name, tensor) in record.iter().filter(|(name, _)| name.starts_with("loss.")) {
        context.output.line(format!("{name} {:.6}", tensor.double_value(&[])))?;
    }
    let losses: BTreeMap<&str, f64> = record
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("loss.")?, tensor.double_value(&[]))))
        .collect();
    context.output.record(&json!({ "kind": "result", "out": args.out, "tensors": named.len(), "losses": losses }))?;
    Ok(Outcome::Done)
}
