//! Trains a tiny model on phantoms, then answers a question with it.
//!
//! ```text
//! cargo run --example train
//! ```
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::event::Silent;
use prsmed::prelude::*;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let phantoms = PhantomOptions { count: 12, image_size_px: 64, ..PhantomOptions::default() };
    phantom::generate(&data, &phantoms, &Silent)?;

    let runtime = Runtime::new();
    let config = RunConfig::preset_with(
        "tiny",
        &["model.image_size=64", "train.micro_batch=2", "train.max_steps=3", "data.max_val_rows=4"],
    )?;
    let manifest = Manifest::open(&data, None)?;
    let image = image::open(&manifest.rows[0].image_path)?;
    let run = Training::new(config, manifest, folder.path().join("run"), &runtime)?.run()?;
    println!("{} steps, best score {:?}", run.outcome.steps, run.outcome.best_score);

    let prediction = run.predict(&image, "Where is the lesion?")?;
    println!("answer: {}", prediction.answer);
    assert_eq!(prediction.mask.len(), 64 * 64);
    Ok(())
}
