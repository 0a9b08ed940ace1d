//! Training of the segmenters of an ablation.

use crate::data::manifest::Manifest;
use crate::event::{Event, Observer};
use crate::front::{Ask, Image, Model};
use crate::runtime::Runtime;
use crate::segment::{RunConfig, Training};
use crate::{Error, Result};
use image::DynamicImage;
use std::path::Path;
use std::sync::Arc;

/// A segmenter with the weights after the last step of its training.
pub(super) struct ArmSegmenter(Model);

impl ArmSegmenter {
    /// Trains a segmenter in the run folder `folder`. An interrupted training continues from its checkpoint, and a
    /// finished one is read.
    ///
    /// # Errors
    /// As [`Training::run`]; [`Error::Interrupted`].
    pub(super) fn train(config: RunConfig, manifest: Arc<Manifest>, folder: &Path, runtime: &Runtime) -> Result<Self> {
        let quiet = runtime.clone().with_observer(Arc::new(Quiet(Arc::clone(runtime.observer()))));
        let trained = Training::new(config, manifest, folder, &quiet)?.resume(true).run()?;
        if runtime.is_interrupted() { Err(Error::Interrupted) } else { Ok(Self(trained.into())) }
    }

    /// Mask probabilities at the size of the image, row by row.
    ///
    /// # Errors
    /// [`Error::NotFinite`]; typed errors of libtorch.
    pub(super) fn probabilities(&self, image: &DynamicImage, question: &str) -> Result<Vec<f32>> {
        // one token is enough: the mask depends on the question only, and answers are not scored here
        let ask = Ask { max_new_tokens: 1, ..Ask::new(question) };
        Ok(self.0.predict(&Image::Pixels(image), &ask)?.targets.swap_remove(0).probabilities)
    }
}

/// Forwards only progress, steps and warnings of a training.
struct Quiet(Arc<dyn Observer>);

impl Observer for Quiet {
    fn on(&self, event: &Event) {
        use Event::{Advanced, Finished, Started, Step, Warning};
        if matches!(event, Warning(_) | Started { .. } | Advanced { .. } | Finished | Step(_)) {
            self.0.on(event);
        }
    }
}
