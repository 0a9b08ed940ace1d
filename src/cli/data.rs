//! `prsmed data`: check, make or import data roots.

use super::Context;
use super::report::Outcome;
use crate::data::phantom::{self, PhantomOptions};
use std::path::PathBuf;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Make a data root of synthetic pictures with lesions, questions and answers
    Phantom(PhantomArgs),
}

pub(super) fn run(command: &Command, context: &Context) -> anyhow::Result<Outcome> {
    match command {
        Command::Phantom(args) => make_phantoms(args, context),
    }
}

/// Makes synthetic CT-, MRI-, X-ray-, ultrasound-, endoscopy- and skin-like pictures with one or two lesions. The same
/// seed gives the same bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed data phantom phantoms --count 600 --seed 1")]
pub(super) struct PhantomArgs {
    /// Folder to make
    out: PathBuf,
    /// Different pictures
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().count)]
    count: usize,
    /// Seed of everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Side of the pictures in pixels
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().image_size_px)]
    image_size: u32,
    /// Part of the pictures with two lesions, 0..1
    #[arg(long, value_name = "F", default_value_t = PhantomOptions::default().two_lesion_frac)]
    two_lesions: f64,
    /// Questions for each lesion, 1 to 4
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().rows_per_lesion)]
    questions: usize,
}

fn make_phantoms(args: &PhantomArgs, context: &Context) -> anyhow::Result<Outcome> {
    let options = PhantomOptions {
        count: args.count,
        seed: args.seed,
        image_size_px: args.image_size,
        two_lesion_frac: args.two_lesions,
        rows_per_lesion: args.questions,
        ..PhantomOptions::default()
    };
    let report = phantom::generate(&args.out, &options, context.progress.as_ref())?;
    context.output.line(format!(
        "{} pictures ({} with two lesions), {} questions in {}",
        report.images,
        report.two_lesion_images,
        report.rows,
        args.out.display()
    ))?;
    context.output.record(&report)?;
    Ok(Outcome::Done)
}
