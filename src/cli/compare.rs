//! `prsmed data compare`: scores masks of volumes against label maps.

use super::args::{GeometryArgs, labels_of};
use super::context::Context;
use super::report::CommandResult;
use crate::Error;
use crate::data::familiarity::add_fields;
use crate::segment::volume_scores::{self, CompareOptions};
use serde_json::json;
use std::path::PathBuf;

/// Score masks of volumes against label maps, in three dimensions and in mm
///
/// Compares two files, or the files of two folders by name (a name may end in `_mask`, `_seg`, `_labels` or
/// `_segmentation`): NIfTI files of whole numbers or DICOM SEG, for example the masks of `prsmed predict`. Prints
/// Dice, surface Dice, HD95 and ASSD of each volume, then the means over volumes with 95 % intervals. Volumes without
/// the target in the label map count for false masks only, and a mask without foreground has no distances.
///
/// `prsmed eval` scores slices one by one; these scores are those of whole volumes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data compare masks labels
  prsmed data compare P001_liver.nii.gz labels/P001.nii.gz --labels 5
  prsmed data compare masks labels --json | jq '.estimates.hd95'")]
pub(super) struct CompareArgs {
    /// Mask, or folder of masks
    #[arg(value_name = "MASKS")]
    predictions: PathBuf,
    /// Label map, or folder of label maps
    #[arg(value_name = "LABELS")]
    truths: PathBuf,
    /// Labels of the label maps that are the target, for example `1,3` [default: the only label]
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    labels: String,
    /// Labels of the masks that are the target [default: the only label]
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    predicted_labels: String,
    /// Tolerance of the surface Dice in mm
    #[arg(long, value_name = "MM", default_value_t = 2.0)]
    tolerance_mm: f64,
    /// Compare a mask on another grid than its label map, by the nearest voxel
    #[arg(long)]
    resample: bool,
    #[command(flatten)]
    geometry: GeometryArgs,
}

pub(super) fn compare_masks(args: &CompareArgs, context: &Context) -> CommandResult {
    if !(args.tolerance_mm.is_finite() && args.tolerance_mm >= 0.0) {
        let reason = format!("{} is no distance", args.tolerance_mm);
        return Err(Error::config("--tolerance-mm", reason, "use 0 or more, for example 2").into());
    }
    let options = CompareOptions {
        truth_labels: labels_of("--labels", &args.labels)?,
        predicted_labels: labels_of("--predicted-labels", &args.predicted_labels)?,
        tolerance_mm: args.tolerance_mm,
        resample: args.resample,
        geometry: args.geometry.geometry,
    };
    let (pairs, missing) = volume_scores::pairs(&args.predictions, &args.truths)?;
    if !missing.is_empty() {
        context.runtime.warn(format!("{} label maps have no mask and are not scored", missing.len()));
    }
    let summary = volume_scores::compare(&pairs, options, context.progress.as_ref())?;
    let mut record = json!({ "kind": "result", "num_not_predicted": missing.len() });
    add_fields(&mut record, &summary);
    context.done(&summary, &record)
}
