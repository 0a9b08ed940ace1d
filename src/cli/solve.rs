//! `prsmed solve`: the largest value of one setting that fits, or the smallest card.

use super::Context;
use super::plan::{MachineArgs, SettingsArgs};
use super::report::Outcome;
use crate::config::RunConfig;
use crate::models::tiny_vit::STRIDE;
use crate::plan::cards::{self, Card};
use crate::plan::device_terms::Facts;
use crate::plan::rehearse::Job;
use crate::plan::report::{Machine, Plan};
use crate::plan::search::largest;
use crate::trainer::precision::Precision;
use serde_json::json;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Find the largest value that fits a card, or the smallest card
///
/// Everything else stays as the settings say. The next larger value does not fit (for picture sizes and texts a still
/// larger one may, where rounding helps it). Nothing of the card is left free.
///
/// Exit code 1 when not even the smallest value fits.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed solve --gpu 24gb --for micro-batch
  prsmed solve --gpu \"RTX 4090\" --for tokens --set train.checkpointing=full
  prsmed solve --for gpu --preset full")]
pub(super) struct Args {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// What to solve for
    #[arg(long = "for", value_enum, value_name = "WHAT")]
    unknown: Unknown,
}

/// What can be solved for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Unknown {
    /// Samples of a forward and backward pass
    MicroBatch,
    /// Side of the segmenter's picture, in steps of 16 pixels
    ImageSize,
    /// Rank of the adapters
    LoraRank,
    /// Longest text (`model.max_text_tokens`)
    Tokens,
    /// The smallest listed card
    Gpu,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let config = args.settings.resolve(Vec::new())?;
    if args.unknown == Unknown::Gpu {
        return smallest_card(&config, context);
    }
    let machine = args.machine.machine(context)?;
    let (key, first, last, unit) = match args.unknown {
        Unknown::MicroBatch => ("train.micro_batch", 1, 1024, 1),
        Unknown::ImageSize => ("model.image_size", 4, 512, usize::try_from(STRIDE)?),
        Unknown::LoraRank => ("lora.rank", 1, 4096, 1),
        Unknown::Tokens | Unknown::Gpu => ("model.max_text_tokens", 32, 8192, 1),
    };
    let mut best: Option<(usize, Plan)> = None;
    let found = largest(first..=last, |steps| {
        let value = steps * unit;
        let plan = with(&config, args.unknown, value).plan(Job::Train, &machine)?;
        let fits = plan.fits;
        if fits && best.as_ref().is_none_or(|(known, _)| *known < value) {
            best = Some((value, plan));
        }
        Ok(fits)
    })?;
    let offer = machine.offer();
    let Some((value, plan)) = best.filter(|_| found.is_some()) else {
        let least = first * unit;
        context.output.line(format!("not even {key}={least} fits {}; try `prsmed preset`", offer.device))?;
        context.output.record(&json!({ "kind": "solve", "key": key, "value": null, "budget": offer }))?;
        return Ok(Outcome::No);
    };
    let more = if found == Some(last) { " (the largest that was tried)" } else { "" };
    context.output.line(format!("{key}={value}{more}\n{}", plan.verdict()))?;
    context.output.record(&json!({ "kind": "solve", "key": key, "value": value, "plan": plan }))?;
    Ok(Outcome::Done)
}

fn with(config: &RunConfig, unknown: Unknown, value: usize) -> RunConfig {
    let mut config = config.clone();
    let number = i64::try_from(value).unwrap_or(i64::MAX);
    match unknown {
        Unknown::MicroBatch => config.train.micro_batch = value,
        Unknown::ImageSize => config.model.image_size = number,
        Unknown::LoraRank => config.lora.rank = number,
        Unknown::Tokens => config.model.max_text_tokens = value,
        Unknown::Gpu => {}
    }
    config
}

/// One rehearsal serves every card of an architecture: beyond it only the device's own terms differ.
fn smallest_card(config: &RunConfig, context: &Context) -> anyhow::Result<Outcome> {
    let needs_bf16 = config.train.precision == Precision::Bf16;
    let mut cards: Vec<&'static Card> =
        cards::all().iter().filter(|card| card.unsupported.is_none() && (card.bf16 || !needs_bf16)).collect();
    cards.sort_by_key(|card| (card.gb, card.total_bytes()));
    let mut rehearsals = HashMap::new();
    let mut least = None;
    for card in cards {
        let machine = Machine::Cuda(card.budget(card.memory_source.clone()), Facts::default());
        let rehearsed = match rehearsals.entry(card.capability) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                place.insert(config.rehearse(Job::Train, config.longest_example(), &machine, false)?)
            }
        };
        let plan = Plan::of(rehearsed, &machine);
        if plan.fits {
            context.output.line(format!("{} ({} GB)\n{}", card.name, card.gb, plan.verdict()))?;
            context.output.record(&json!({ "kind": "solve", "key": "gpu", "value": card.name, "plan": plan }))?;
            return Ok(Outcome::Done);
        }
        least = Some(plan);
    }
    let needs = least.map(|plan| plan.device_peak);
    let text = needs.map_or_else(String::new, |bytes| format!(": it needs {bytes}"));
    context.output.line(format!("no listed card is large enough{text}"))?;
    context.output.record(&json!({ "kind": "solve", "key": "gpu", "value": null, "device_peak": needs }))?;
    Ok(Outcome::No)
}
