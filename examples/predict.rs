//! Opens a run folder and answers a question about an image with a mask and a text.
//!
//! ```text
//! cargo run --example predict -- runs/a scan.png "Where is the lesion?"
//! ```
//!
//! Without arguments, it trains a tiny model for two steps first.
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::event::Silent;
use prsmed::prelude::*;
use std::path::{Path, PathBuf};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let runtime = Runtime::new();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (run, image, question) = match arguments.as_slice() {
        [run, image, question] if !run.starts_with('-') => (run.into(), image.into(), question.clone()),
        _ => tiny_run(folder.path(), &runtime)?,
    };
    let model = Model::open(&run, &OpenOptions::default(), &runtime)?;
    let prediction = model.predict(&Image::File(image), &Ask::new(&question))?;
    let mask = prediction.target();
    println!("answer: {}", prediction.answer);
    println!("mask: {} of {} pixels", mask.num_foreground(), mask.probabilities.len());
    Ok(())
}

/// A run folder, an image and a question to try the example with.
pub(crate) fn tiny_run(folder: &Path, runtime: &Runtime) -> prsmed::Result<(PathBuf, PathBuf, String)> {
    let data = folder.join("data");
    let phantoms = PhantomOptions { count: 12, image_size_px: 64, ..PhantomOptions::default() };
    phantom::generate(&data, &phantoms, &Silent)?;
    let sets = ["model.image_size=64", "train.micro_batch=2", "train.max_steps=2"];
    let settings = Sources::preset("tiny", &sets).resolve()?;
    let how = How::new(folder.join("run"), runtime)?;
    let trained = job::run(&how, |how| SegmenterTraining::new(settings, &Rows::of(&data), how))?;
    let image = Manifest::open(&data, None)?.rows[0].image_path.clone();
    Ok((trained.run.folder, image, "Where is the lesion?".to_owned()))
}
