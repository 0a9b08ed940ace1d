//! `prsmed augment quality`.

use crate::augment::quality::{self, ByModality, Pictures, Report, Source};
use crate::cli::Context;
use crate::cli::data::RootArgs;
use crate::cli::predict;
use crate::cli::report::Outcome;
use crate::data::manifest::{Manifest, Row, Split};
use crate::hub::Files;
use crate::models::inception::{self, Inception};
use crate::segment::Assembly;
use crate::{Error, Result, tensor};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Measure how near synthetic pictures are to real ones: FID, KID, MMD
///
/// By class: the real training pictures against the pictures of `--synthetic` and, as the yardstick, against the real test
/// pictures, which no generator made. KID comes with its 95 % interval; FID is biased upwards below 2,048 pictures, and
/// says so. InceptionV3's weights are downloaded, or read from `--inception`; with `--run` the features are those of a
/// trained segmenter's own image encoder (KID and MMD, no FID). Near is not useful: only `prsmed augment study` tells
/// whether pairs help.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment quality --data-root data --synthetic pairs
  prsmed augment quality --data-root data --synthetic pairs --inception pt_inception.pth
  prsmed augment quality --data-root data --synthetic pairs --run runs/a")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic pairs
    #[arg(long, value_name = "DIR")]
    synthetic: PathBuf,
    /// Weights of InceptionV3: a file or folder, or `hub:owner/name` [default: pytorch-fid's, from the hub]
    #[arg(long, value_name = "WHERE", conflicts_with = "run")]
    inception: Option<String>,
    /// Use the image encoder of this run instead of InceptionV3
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,
    /// Pictures in one pass
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Seed of subsets
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// What makes features.
enum Network {
    Inception(Box<Inception>),
    Encoder(Box<Assembly>),
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let real = args.data.open()?;
    let synthetic = Manifest::open(&args.synthetic, None)?;
    let network = match &args.run {
        Some(run) => Network::Encoder(Box::new(predict::open_run(run, context)?)),
        None => Network::Inception(Box::new(inception(args, context)?)),
    };
    let source = match &network {
        Network::Inception(_) => Source::Inception,
        Network::Encoder(_) => Source::Encoder("segmenter".into()),
    };
    let train = features(args, &network, pictures(&real, |row| row.split == Split::Train), context)?;
    let mut report = Report::default();
    let made = features(args, &network, pictures(&synthetic, |_| true), context)?;
    report.add(&source, &train, ("synthetic", &made), args.seed)?;
    let held_out = pictures(&real, |row| row.split == Split::Test);
    if !held_out.is_empty() {
        let test = features(args, &network, held_out, context)?;
        report.add(&source, &train, ("real test", &test), args.seed)?;
    }
    context.output.line(&report)?;
    context.output.record(&json!({ "kind": "result", "report": report }))?;
    Ok(Outcome::Done)
}

fn inception(args: &Args, context: &Context) -> Result<Inception> {
    let spec = args.inception.as_deref().unwrap_or(inception::WEIGHTS);
    let path = if spec.starts_with("hub:") {
        let files = [inception::WEIGHTS_FILE];
        crate::hub::resolve(spec, &Files::Matching(&files), &context.env.hub, context.progress.as_ref())?
    } else {
        let path = PathBuf::from(spec);
        if !path.exists() {
            let hint = "check the path, leave the flag out to download them, or use `--run` for a segmenter's features";
            return Err(Error::weights(path, "there is no such file or folder", hint));
        }
        path
    };
    quality::open_inception(&path, tensor::default_device())
}

/// Pictures of each class, each once.
fn pictures(manifest: &Manifest, is_wanted: impl Fn(&Row) -> bool) -> BTreeMap<String, Vec<PathBuf>> {
    let mut found: BTreeMap<String, BTreeSet<&Path>> = BTreeMap::new();
    for row in manifest.rows.iter().filter(|row| is_wanted(row)) {
        found.entry(row.modality.clone()).or_default().insert(&row.image_path);
    }
    found.into_iter().map(|(class, files)| (class, files.into_iter().map(Path::to_path_buf).collect())).collect()
}

fn features(
    args: &Args,
    network: &Network,
    pictures: BTreeMap<String, Vec<PathBuf>>,
    context: &Context,
) -> Result<ByModality> {
    let of = |files: &[PathBuf]| {
        let pictures = Pictures {
            files,
            area: None,
            batch: usize::from(args.batch),
            observer: context.progress.as_ref(),
            interrupt: &context.interrupt,
        };
        match network {
            Network::Inception(network) => quality::inception_features(network, &pictures),
            Network::Encoder(assembly) => quality::encoder_features(assembly, &pictures),
        }
    };
    pictures.into_iter().map(|(class, files)| Ok((class, of(&files)?))).collect()
}
