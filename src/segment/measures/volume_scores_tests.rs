use std::fs;

use super::*;
use crate::data::volume::{Affine, Grid, write};
use crate::event::Silent;
use crate::metrics::border::BorderDistances;

/// A box of voxels in a grid of 12x10x8 voxels of 0.5 x 0.8 x 3 mm, axes of which may be flipped.
fn grid(flipped: bool) -> Grid {
    let side = if flipped { -1.0 } else { 1.0 };
    let origin = if flipped { [0.5 * 11.0, 0.8 * 9.0, 0.0] } else { [0.0; 3] };
    let steps = [[0.5 * side, 0.0, 0.0], [0.0, 0.8 * side, 0.0], [0.0, 0.0, 3.0]];
    Grid { size: [12, 10, 8], affine: Affine::from_columns(steps, origin) }
}

/// Label `label` in the voxels from `first` to `last`.
fn cuboid(first: [usize; 3], last: [usize; 3], label: u8) -> Vec<u8> {
    let inside = |voxel: [usize; 3]| (0..3).all(|axis| (first[axis]..=last[axis]).contains(&voxel[axis]));
    (0..12 * 10 * 8).map(|at| if inside([at % 12, at / 12 % 10, at / 120]) { label } else { 0 }).collect()
}

fn options() -> CompareOptions {
    CompareOptions {
        truth_labels: Labels::NONE,
        predicted_labels: Labels::NONE,
        tolerance_mm: 2.0,
        resample: false,
        geometry: None,
    }
}

#[test]
fn distances_are_in_mm_along_each_axis() {
    let folder = tempfile::tempdir().unwrap();
    let [truth, prediction] = ["t.nii.gz", "p.nii.gz"].map(|name| folder.path().join(name));
    let (first, last) = ([2, 2, 1], [7, 6, 4]);
    write::nifti_labels(&truth, &cuboid(first, last, 7), &grid(false)).unwrap();
    // one voxel further along one axis: the planes at both ends are a voxel away
    for (axis, mm) in [(0, 0.5), (1, 0.8), (2, 3.0)] {
        let mut moved = (first, last);
        moved.0[axis] += 1;
        moved.1[axis] += 1;
        write::nifti_labels(&prediction, &cuboid(moved.0, moved.1, 1), &grid(false)).unwrap();
        let (found, _) = pairs(&prediction, &truth).unwrap();
        let found = compare(&found, options(), &Silent).unwrap();
        let score = &found.scores[0];
        let side = [6.0, 5.0, 4.0][axis];
        assert!((score.hd95.unwrap() - mm).abs() < 1e-5, "axis {axis}: {score:?}");
        assert!((score.dice.unwrap() - (side - 1.0) / side).abs() < 1e-9, "axis {axis}: {score:?}");
        assert!(
            (score.truth_ml - 120.0 * 0.5 * 0.8 * 3.0 / 1000.0).abs() < 1e-6 && score.volume_error_frac == Some(0.0)
        );
        assert_eq!((score.lesion_recall, score.has_mask), (Some(1.0), true));
    }
}

#[test]
fn grids_without_right_angles_have_no_distances() {
    /// Notes.
    struct Notes(std::sync::Mutex<Vec<String>>);

    impl Observer for Notes {
        fn on(&self, event: &Event) {
            if let Event::Note(text) = event {
                self.0.lock().unwrap().push(text.clone());
            }
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let [truth, prediction] = ["t.nii.gz", "p.nii.gz"].map(|name| folder.path().join(name));
    // the rows of a tilted gantry rise or fall; a volume that is turned as a whole has right angles
    let tilted = |degrees: f64| {
        let (sin, cos) = degrees.to_radians().sin_cos();
        [[0.5, 0.0, 0.0], [0.0, 0.8 * cos, -0.8 * sin], [0.0, 0.0, 3.0]]
    };
    let (sin, cos) = 20_f64.to_radians().sin_cos();
    let turned = [[0.5, 0.0, 0.0], [0.0, 0.8 * cos, -0.8 * sin], [0.0, 3.0 * sin, 3.0 * cos]];
    let in_plane = [[0.5, 0.1, 0.0], [0.0, 0.8, 0.0], [0.0, 0.0, 3.0]];
    for (steps, skew) in [
        (tilted(15.0), Some("15.0")),
        (tilted(-30.0), Some("30.0")),
        (in_plane, Some("11.3")),
        (tilted(0.3), None),
        (turned, None),
    ] {
        let grid = Grid { affine: Affine::from_columns(steps, [0.0; 3]), ..grid(false) };
        write::nifti_labels(&truth, &cuboid([2, 2, 1], [7, 6, 4], 1), &grid).unwrap();
        write::nifti_labels(&prediction, &cuboid([2, 3, 2], [7, 7, 5], 1), &grid).unwrap();
        let notes = Notes(std::sync::Mutex::default());
        let (found, _) = pairs(&prediction, &truth).unwrap();
        let summary = compare(&found, options(), &notes).unwrap();
        let score = &summary.scores[0];
        assert!((score.dice.unwrap() - 0.6).abs() < 1e-9 && score.lesion_recall == Some(1.0), "{score:?}");
        let distances = [score.hd95, score.hd, score.assd, score.surface_dice];
        assert!(distances.iter().all(|distance| distance.is_some() == skew.is_none()), "{skew:?}: {score:?}");
        assert_eq!(summary.estimates.contains_key("hd95"), skew.is_none());
        let notes = notes.0.lock().unwrap().join("\n");
        let expected =
            skew.map(|skew| format!("t.nii.gz: the axes of its voxels are {skew} degrees from a right angle"));
        assert!(expected.map_or(notes.is_empty(), |expected| notes.contains(&expected)), "{notes}");
    }
}

#[test]
fn a_prediction_with_flipped_axes_is_compared_by_position() {
    let folder = tempfile::tempdir().unwrap();
    let [truth, prediction] = ["t.nii.gz", "p.nii.gz"].map(|name| folder.path().join(name));
    let labels = cuboid([1, 2, 1], [4, 6, 4], 1);
    write::nifti_labels(&truth, &labels, &grid(false)).unwrap();
    let flipped = cuboid([11 - 4, 9 - 6, 1], [11 - 1, 9 - 2, 4], 1);
    write::nifti_labels(&prediction, &flipped, &grid(true)).unwrap();
    let (found, _) = pairs(&prediction, &truth).unwrap();
    let score = &compare(&found, options(), &Silent).unwrap().scores[0];
    assert_eq!((score.dice, score.hd), (Some(1.0), Some(0.0)));
    let other = Grid { size: [12, 10, 4], ..grid(false) };
    write::nifti_labels(&prediction, &vec![0; 480], &other).unwrap();
    let error = compare(&found, options(), &Silent).unwrap_err();
    assert!(error.to_string().contains("grid") && error.hint().contains("`resample`"), "{error}");
}

#[test]
fn volumes_without_a_target_count_for_false_masks_only() {
    let folder = tempfile::tempdir().unwrap();
    let [truths, predictions] = ["truths", "predictions"].map(|name| folder.path().join(name));
    for path in [&truths, &predictions] {
        fs::create_dir(path).unwrap();
    }
    let (empty, full) = (vec![0; 960], cuboid([2, 2, 2], [6, 6, 5], 1));
    let half = cuboid([2, 2, 2], [6, 6, 3], 1);
    let cases =
        [("a", &full, &full), ("b", &full, &half), ("c", &empty, &empty), ("d", &empty, &half), ("e", &full, &empty)];
    for (name, truth, prediction) in cases {
        write::nifti_labels(&truths.join(format!("{name}_label.nii.gz")), truth, &grid(false)).unwrap();
        write::nifti_labels(&predictions.join(format!("{name}.nii")), prediction, &grid(false)).unwrap();
    }
    write::nifti_labels(&truths.join("not_predicted.nii.gz"), &full, &grid(false)).unwrap();
    fs::write(predictions.join("a.json"), "{}").unwrap();
    let (found, missing) = pairs(&predictions, &truths).unwrap();
    assert_eq!((found.len(), missing.len()), (5, 1));
    let summary = compare(&found, options(), &Silent).unwrap();
    let mean = |name: &str| (summary.estimates[name].mean, summary.estimates[name].count);
    assert_eq!((summary.volumes, summary.present), (5, 3));
    let dice = 2.0 / 3.0;
    assert!((mean("dice").0 - (1.0 + dice + 0.0) / 3.0).abs() < 1e-9 && mean("dice").1 == 3);
    // a volume without a mask has no distance
    assert_eq!(mean("hd95").1, 2);
    assert_eq!((mean("target_sensitivity").0, mean("target_specificity")), (dice, (0.5, 2)));
    assert!(summary.to_string().contains("5 volumes, 3 of them with a target"), "{summary}");
    // the distance is that of the metric on the whole mask
    let bools = |mask: &[u8]| mask.iter().map(|value| *value > 0).collect::<Vec<_>>();
    let spacing = Spacing { slice: 3.0, row: 0.8, column: 0.5 };
    let border = BorderDistances::of(&bools(&half), &bools(&full), Size::volume(8, 10, 12), spacing).unwrap().unwrap();
    assert!((summary.scores[1].hd95.unwrap() - border.hd95).abs() < 1e-5);
    fs::write(predictions.join("f.nii"), "").unwrap();
    assert!(pairs(&predictions, &truths).unwrap_err().to_string().contains("no label map of this name"));
}

#[test]
fn several_labels_need_a_choice() {
    let folder = tempfile::tempdir().unwrap();
    let [truth, prediction] = ["t.nii.gz", "p.nii.gz"].map(|name| folder.path().join(name));
    let mut labels = cuboid([1, 1, 1], [4, 4, 4], 2);
    labels[0] = 5;
    write::nifti_labels(&truth, &labels, &grid(false)).unwrap();
    write::nifti_labels(&prediction, &cuboid([1, 1, 1], [4, 4, 4], 1), &grid(false)).unwrap();
    let (found, _) = pairs(&prediction, &truth).unwrap();
    let error = compare(&found, options(), &Silent).unwrap_err();
    assert!(
        error.to_string().contains("several labels: 2, 5") && error.hint().contains("argument `labels=2`"),
        "{error}"
    );
    let chosen = CompareOptions { truth_labels: Labels::new(&[2]).unwrap(), ..options() };
    assert_eq!(compare(&found, chosen, &Silent).unwrap().scores[0].dice, Some(1.0));
}

#[test]
fn labels_are_compared_after_the_slope_of_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let [truth, prediction] = ["t.nii", "p.nii"].map(|name| folder.path().join(name));
    write::nifti_labels(&truth, &cuboid([1, 2, 1], [4, 6, 4], 1), &grid(false)).unwrap();
    write::nifti_labels(&prediction, &cuboid([1, 2, 1], [4, 6, 4], 100), &grid(false)).unwrap();
    let scaled = |slope: f32| {
        let mut bytes = fs::read(&prediction).unwrap();
        bytes[112..116].copy_from_slice(&slope.to_le_bytes());
        fs::write(&prediction, bytes).unwrap();
        let (found, _) = pairs(&prediction, &truth).unwrap();
        compare(&found, CompareOptions { predicted_labels: Labels::new(&[1]).unwrap(), ..options() }, &Silent)
    };
    assert_eq!(scaled(0.01).unwrap().scores[0].dice, Some(1.0));
    assert_eq!(scaled(0.02).unwrap().scores[0].dice, Some(0.0));
    let error = scaled(0.005).unwrap_err().to_string();
    assert!(error.contains("p.nii") && error.contains("not whole numbers, such as 0."), "{error}");
}
