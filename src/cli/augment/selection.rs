//! The choice of the best checkpoint of `prsmed augment finetune --select-by segmenter`.

use crate::augment::finetune::{SelectBy, Selection, SelectionReport};
use crate::augment::pipeline_config::PipelineConfig;
use crate::cli::context::Context;
use crate::cli::plan::training_machine;
use crate::config::{AugmentRun, FinetuneRun};
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::tensor::{self, memory};
use crate::{Error, Result};
use std::path::Path;

/// The choice by segmenter, if the settings ask for it. Refuses what cannot work.
pub(super) fn prepare<'a>(
    run: &FinetuneRun,
    manifest: &Manifest,
    out: &'a Path,
    context: &'a Context,
) -> Result<Option<Selection<'a>>> {
    let is_asked = run.finetune.select_by == SelectBy::Segmenter;
    is_asked.then(|| Selection::new(run, manifest, out, &context.runtime)).transpose()
}

/// Prints the memory plan of the pairs, and refuses pairs that cannot fit.
pub(super) fn plan_pairs(choice: &Selection, base: &PipelineConfig, context: &Context) -> Result<()> {
    let (machine, generator) = (training_machine(context)?, choice.planned_generator(base)?);
    let run = AugmentRun { augment: choice.pair_settings().clone(), ..AugmentRun::default() };
    let plan = match run.plan(&generator, &machine) {
        // the CPU's operators are tried one by one to learn what they need
        Err(error @ Error::OutOfMemory { .. }) => {
            context.progress.on(&Event::Warning(format!("no memory plan of the pairs: {error}")));
            return Ok(());
        }
        plan => plan?,
    };
    let batch = run.augment.batch;
    context.progress.on(&Event::Note(format!("memory plan of the pairs, {batch} at once\n{}", plan.table())));
    if plan.fits {
        return Ok(());
    }
    let fewer = if batch > 1 { "add `--set finetune.generation_batch_size=1`, or " } else { "" };
    let hint = format!("{fewer}leave out `--select-by segmenter`; `--no-plan` skips this check");
    Err(Error::config("finetune.select_by", format!("pairs of the candidates: {}", plan.summary()), hint))
}

/// Makes pairs, trains U-Nets and chooses, with the memory that the training has freed.
pub(super) fn run(choice: &Selection, base: &PipelineConfig) -> Result<SelectionReport> {
    memory::release_cache(tensor::default_device())?;
    choice.run(base)
}
