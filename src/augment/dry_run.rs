//! Dry run of generation: the phases of one full-size batch without data, for planning and measuring memory.
//!
//! It calls the functions of [`super::pipeline`]. The values in the batch have no meaning.

use super::pipeline::{
    GenerationBatch, Generator, Placement, PromptPair, blank, bytes, encode_prompts, input_device, placed,
};
use super::pipeline_config::PipelineConfig;
use super::settings::{AugmentConfig, Mode};
use crate::Result;
use crate::data::text::clip_bpe::CONTEXT;
use crate::tensor::{Device, Kind, guard, ledger, no_grad};

/// Names of the phases, in order.
pub const PHASES: [&str; 5] = ["encode prompts", "load", "encode", "denoise", "decode"];

/// Denoising steps that a plan runs. By then the sampler has stored all the earlier steps that it uses, and every
/// later step needs the same memory.
pub const SHOWN_STEPS: usize = 3;

/// Settings of a dry run.
#[derive(Debug, Clone, Copy)]
pub struct GenerationDryRun<'a> {
    /// Generator settings; one batch of `batch` images is run.
    pub config: &'a AugmentConfig,
    /// Sizes of the networks.
    pub pipeline_config: &'a PipelineConfig,
    /// Number of different prompts to encode.
    pub prompts: usize,
    /// Device of all tensors, usually the meta device.
    pub device: Device,
}

impl GenerationDryRun<'_> {
    /// Runs the phases and calls `begin` with the name of each phase before it starts.
    ///
    /// # Errors
    /// Errors of `begin`; typed errors of libtorch.
    pub fn walk(&self, begin: &mut dyn FnMut(&'static str) -> Result<()>) -> Result<()> {
        let Self { config, pipeline_config, device, .. } = *self;
        let placement = Placement { device, kind: config.kind(), seed: 0 };
        begin(PHASES[0])?;
        let texts = self.prompts.max(1);
        let ids = vec![vec![vec![0; CONTEXT]; texts]; pipeline_config.texts.len()];
        let embeddings = encode_prompts(pipeline_config, placement, &ids, &vec![false; texts], &[])?;
        begin(PHASES[1])?;
        let generator = Generator::load(pipeline_config, config, placement, &[])?;
        begin(PHASES[2])?;
        guard::guard(|| {
            no_grad(|| {
                let batch = self.batch(&generator, embeddings.len());
                let start = generator.start(&batch);
                begin(PHASES[3])?;
                let latents = generator.denoise(&batch, start, &embeddings);
                begin(PHASES[4])?;
                let pixels = generator.decode(&latents)?;
                let images = bytes(&pixels);
                drop((images, pixels, latents, batch));
                Ok(())
            })
        })?;
        drop((generator, embeddings));
        Ok(())
    }

    fn batch(&self, generator: &Generator, texts: usize) -> GenerationBatch {
        let _category = ledger::enter(ledger::Category::Inputs);
        let config = self.config;
        let (count, size) = (i64::try_from(config.batch).expect("a small batch"), config.image_size);
        let side = size / generator.cell_px();
        let (device, host) = (self.device, input_device(self.device));
        let blank = |shape: [i64; 4]| placed(device, &blank(shape, Kind::Float, host));
        GenerationBatch {
            pixels: (config.mode != Mode::MaskToImage).then(|| blank([count, 3, size, size])),
            repaint: config.mode.holds().then(|| blank([count, 1, side, side])),
            control: self.pipeline_config.controlnet.as_ref().map(|_| blank([count, 3, size, size])),
            preserves: config.mode.holds(),
            noise: generator.noise(&vec![0; config.batch]),
            prompts: vec![PromptPair { positive: 0, negative: texts - 1 }; config.batch],
        }
    }
}
