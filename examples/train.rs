//! Trains a tiny model on phantoms as `prsmed train` does, with its lock, memory plan and report, then answers a question
//! with it.
//!
//! ```text
//! cargo run --example train
//! ```
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::console::{DataOutput, ProgressDisplay, Style};
use prsmed::event::Silent;
use prsmed::prelude::*;
use std::sync::Arc;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let phantoms = PhantomOptions { count: 12, image_size_px: 64, ..PhantomOptions::default() };
    phantom::generate(&data, &phantoms, &Silent)?;

    let style = Style { is_terminal: false, color: false, every_steps: 1 };
    let progress = ProgressDisplay::new(style, Arc::new(DataOutput::stdout(false)));
    let runtime = Runtime::new().with_observer(Arc::new(progress));
    let how = How::new(folder.path().join("run"), &runtime)?;
    let sets = ["model.image_size=64", "train.micro_batch=2", "train.max_steps=3", "data.max_val_rows=4"];
    let settings = Sources::preset("tiny", &sets).resolve()?;
    let trained = job::run(&how, |how| SegmenterTraining::new(settings, &Rows::of(&data), how))?;
    let run = trained.run;
    println!("{} steps, best score {:?}", run.outcome.steps, run.outcome.best_score);
    println!("planned peak of tensors: {:?}", trained.plan.as_ref().map(|plan| plan.allocated_peak));
    assert!(trained.plan.is_some_and(|plan| plan.fits) && how.out.join("report.html").is_file());

    let image = Image::File(Manifest::open(&data, None)?.rows[0].image_path.clone());
    let prediction = Model::from(run).predict(&image, &Ask::new("Where is the lesion?"))?;
    println!("answer: {}", prediction.answer);
    assert_eq!(prediction.size, (64, 64));
    Ok(())
}
