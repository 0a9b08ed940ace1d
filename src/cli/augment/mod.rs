//! `prsmed augment`: fine-tune the generator, generate image+mask pairs, filter them, and test whether they help.

mod ablation;
pub(super) mod args;
mod filter;
mod finetune;
mod generate;

use super::context::Context;
use super::report::CommandResult;

/// Generate image+mask pairs with Stable Diffusion, filter them, test whether they help
///
/// The label of a pair is known because the lesion, or its mask, is a real one. Realistic images need not improve a
/// segmenter: run `augment ablation` before you train on pairs.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples, in order:
  prsmed augment finetune --data-root data --out runs/lora
  prsmed augment generate --data-root data --out pairs
  prsmed augment filter --data-root data --extra pairs --preset gpu-24gb
  prsmed augment ablation --data-root data --extra pairs --preset gpu-24gb
  prsmed train --data-root data --extra pairs --out runs/a")]
pub(super) enum Command {
    Finetune(Box<finetune::Args>),
    Generate(Box<generate::Args>),
    Filter(Box<filter::Args>),
    #[command(alias = "study")]
    Ablation(Box<ablation::Args>),
}

pub(super) fn run(command: &Command, context: &Context) -> CommandResult {
    match command {
        Command::Finetune(args) => {
            args.gpus.run(args.print_config, context, |ranks| finetune::run(args, ranks, context))
        }
        Command::Generate(args) => {
            args.gpus.run(args.print_config, context, |ranks| generate::run(args, ranks, context))
        }
        Command::Filter(args) => filter::run(args, context),
        Command::Ablation(args) => ablation::run(args, context),
    }
}
