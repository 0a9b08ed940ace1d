//! Generation without data: phases of a batch of full size, for planning memory and for measuring it.
//!
//! It runs the functions of [`super::pipeline`]; only the numbers in the batch mean nothing.

use super::blueprint::Blueprint;
use super::pipeline::{Batch, Generator, Place, PromptPair, bytes, encode_prompts};
use super::settings::{AugmentConfig, Mode};
use crate::Result;
use crate::data::text::clip_bpe::CONTEXT;
use crate::segment::rehearsal::Judging;
use crate::tensor::{Device, Kind, META, Tensor, guard, ledger, meta, no_grad};

/// Names of the phases, in order.
pub const PHASES: [&str; 5] = ["encode prompts", "load", "encode", "denoise", "decode"];
/// The phase after them, where judges filter the pairs.
pub const FILTER: &str = "filter";

/// Steps that a plan runs: the sampler's memory of earlier steps is full then, and every later step is like the last.
pub const SHOWN_STEPS: usize = 3;

/// What is rehearsed.
#[derive(Debug, Clone, Copy)]
pub struct Rehearsal<'a> {
    /// Settings; its `batch` pictures are made once.
    pub config: &'a AugmentConfig,
    /// Sizes.
    pub blueprint: &'a Blueprint,
    /// Different texts that are encoded.
    pub prompts: usize,
    /// Judges that filter the pairs when the generator is gone.
    pub judging: Option<&'a Judging>,
    /// Where.
    pub device: Device,
}

impl Rehearsal<'_> {
    /// Runs the phases; `begin` hears each one's name before it.
    ///
    /// # Errors
    /// What `begin` says; typed errors of libtorch.
    pub fn walk(&self, begin: &mut dyn FnMut(&'static str) -> Result<()>) -> Result<()> {
        let Self { config, blueprint, device, .. } = *self;
        let place = Place { device, kind: config.kind(), seed: 0 };
        begin(PHASES[0])?;
        let texts = self.prompts.max(1);
        let ids = vec![vec![vec![0; CONTEXT]; texts]; blueprint.texts.len()];
        let embeddings = encode_prompts(blueprint, place, &ids, &vec![false; texts], &[])?;
        begin(PHASES[1])?;
        let generator = Generator::load(blueprint, config, place, &[])?;
        begin(PHASES[2])?;
        guard::guard(|| {
            no_grad(|| {
                let batch = self.batch(&generator, embeddings.len());
                let start = generator.start(&batch);
                begin(PHASES[3])?;
                let latents = generator.denoise(&batch, start, &embeddings, &mut || ());
                begin(PHASES[4])?;
                let pixels = generator.decode(&latents)?;
                let pictures = bytes(&pixels);
                drop((pictures, pixels, latents, batch));
                Ok(())
            })
        })?;
        drop((generator, embeddings));
        if let Some(judging) = self.judging {
            begin(FILTER)?;
            judging.rehearse(device)?;
        }
        Ok(())
    }

    fn batch(&self, generator: &Generator, texts: usize) -> Batch {
        let _category = ledger::enter(ledger::Category::Inputs);
        let config = self.config;
        let (count, size) = (i64::try_from(config.batch).expect("a small batch"), config.image_size);
        let side = size / generator.cell_px();
        let blank = |shape: [i64; 4]| blank(shape, self.device);
        Batch {
            pixels: (config.mode != Mode::MaskToImage).then(|| blank([count, 3, size, size])),
            repaint: config.mode.holds().then(|| blank([count, 1, side, side])),
            control: self.blueprint.controlnet.as_ref().map(|_| blank([count, 3, size, size])),
            holds: config.mode.holds(),
            noise: generator.noise(&vec![0; config.batch]),
            prompts: vec![PromptPair { positive: 0, negative: texts - 1 }; config.batch],
        }
    }
}

fn blank(shape: [i64; 4], device: Device) -> Tensor {
    let tensor = Tensor::zeros(shape, (Kind::Float, if is_counted(device) { device } else { Device::Cpu }));
    tensor.to_device(device)
}

/// On the host of a rehearsed card nobody counts.
fn is_counted(device: Device) -> bool {
    device != META || meta::target() == meta::Target::Cpu
}
