//! `prsmed augment quality`.

use crate::augment::quality::{self, ByModality, FeatureSource, Images, QualityReport};
use crate::cli::args::RootArgs;
use crate::cli::context::Context;
use crate::cli::report::Outcome;
use crate::data::manifest::{Manifest, Row, Split};
use crate::hub::{Files, Need};
use crate::job::weight_files;
use crate::models::inception::{self, Inception};
use crate::segment::LoadedModel;
use crate::{Error, Result, tensor};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Measure how close synthetic images are to real ones: FID, KID, MMD
///
/// Compares the real training images of each class with the images of `--extra` and, as a reference, with the real
/// test images. KID is printed with its 95 % interval. FID is biased upwards below 2,048 images, and the table marks
/// that. InceptionV3's weights are downloaded, or read from `--inception`. With `--run` the features are those of a
/// trained segmenter's image encoder (KID and MMD, no FID). A small distance does not mean that pairs are useful: only
/// `prsmed augment ablation` tests that.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment quality --data-root data --extra pairs
  prsmed augment quality --data-root data --extra pairs --inception pt_inception.pth
  prsmed augment quality --data-root data --extra pairs --run runs/a")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic pairs
    #[arg(long, alias = "synthetic", value_name = "DIR")]
    extra: PathBuf,
    /// Weights of InceptionV3: a file or folder, or `hub:owner/name` [default: pytorch-fid's, from the hub]
    #[arg(long, value_name = "WHERE", conflicts_with = "run")]
    inception: Option<String>,
    /// Use the image encoder of this run instead of InceptionV3
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,
    /// Images per forward pass
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Seed of the subsets for KID and MMD
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// The network that computes the features.
enum Network {
    Inception(Box<Inception>),
    Encoder(Box<LoadedModel>),
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let real = args.data.open(context)?;
    let synthetic = Manifest::open(&args.extra, None)?;
    let network = match &args.run {
        Some(run) => Network::Encoder(Box::new(weight_files::open_run(run, &context.runtime)?)),
        None => Network::Inception(Box::new(inception(args, context)?)),
    };
    let source = match &network {
        Network::Inception(_) => FeatureSource::Inception,
        Network::Encoder(_) => FeatureSource::Encoder("segmenter".into()),
    };
    let train = features(args, &network, images(&real, |row| row.split == Split::Train), context)?;
    let mut report = QualityReport::default();
    let made = features(args, &network, images(&synthetic, |_| true), context)?;
    report.add(&source, &train, "synthetic", &made, args.seed)?;
    let held_out = images(&real, |row| row.split == Split::Test);
    if !held_out.is_empty() {
        let test = features(args, &network, held_out, context)?;
        report.add(&source, &train, "real test", &test, args.seed)?;
    }
    context.output.line(&report)?;
    context.output.record(&json!({ "kind": "result", "report": report }))?;
    Ok(Outcome::Done)
}

fn inception(args: &Args, context: &Context) -> Result<Inception> {
    let spec = args.inception.as_deref().unwrap_or(inception::WEIGHTS);
    if !spec.starts_with("hub:") && !Path::new(spec).exists() {
        let hint = "check the path, leave the flag out to download them, or use `--run` for a segmenter's features";
        return Err(Error::weights(spec, "there is no such file or folder", hint));
    }
    weight_files::check(
        vec![Need::new("--inception", spec, Files::Matching(&[inception::WEIGHTS_FILE]))],
        &context.runtime,
    )?;
    quality::open_inception(&context.locate(spec)?, tensor::default_device())
}

/// The images of each class, without repetition.
fn images(manifest: &Manifest, is_wanted: impl Fn(&Row) -> bool) -> BTreeMap<String, Vec<PathBuf>> {
    let mut found: BTreeMap<String, BTreeSet<&Path>> = BTreeMap::new();
    for row in manifest.rows.iter().filter(|row| is_wanted(row)) {
        found.entry(row.modality.clone()).or_default().insert(&row.image_path);
    }
    found.into_iter().map(|(class, files)| (class, files.into_iter().map(Path::to_path_buf).collect())).collect()
}

fn features(
    args: &Args,
    network: &Network,
    images: BTreeMap<String, Vec<PathBuf>>,
    context: &Context,
) -> Result<ByModality> {
    let of = |files: &[PathBuf]| {
        let images = Images {
            files,
            area: None,
            batch: usize::from(args.batch),
            observer: context.progress.as_ref(),
            interrupt: &context.interrupt,
        };
        match network {
            Network::Inception(network) => quality::inception_features(network, &images),
            Network::Encoder(loaded) => quality::encoder_features(loaded, &images),
        }
    };
    images.into_iter().map(|(class, files)| Ok((class, of(&files)?))).collect()
}
