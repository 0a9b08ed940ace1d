use super::*;
use crate::data::volume::nifti::geometry::Forms;
use crate::data::volume::{Geometry, Voxels, open_chosen};

/// Voxels from left to right, posterior to anterior, and inferior to superior.
const SIZE: [usize; 3] = [12, 9, 6];
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

fn volume_of(grid: Grid) -> Volume {
    let source = VolumeSource::Nifti(Forms::of_grid(&grid));
    Volume::new(Voxels::I16(vec![0; grid.num_voxels()]), grid, source)
}

/// A volume of voxels of 10 x 10 x 10 mm (1 ml) whose axis number `n` runs along the patient axis `order[n]`, backwards
/// where `flips` has its bit; and a mask of the boxes, which are in the patient.
fn made(order: [usize; 3], flips: usize, boxes: &[[[usize; 3]; 2]]) -> (Volume, Vec<u8>) {
    let (mut steps, mut origin) = ([[0.0; 3]; 3], [0.0; 3]);
    for (axis, patient) in order.into_iter().enumerate() {
        let is_flipped = flips >> axis & 1 == 1;
        steps[axis][patient] = if is_flipped { -10.0 } else { 10.0 };
        origin[patient] = if is_flipped { 10.0 * (SIZE[patient] as f64 - 1.0) } else { 0.0 };
    }
    let grid = Grid { size: order.map(|patient| SIZE[patient]), affine: Affine::from_columns(steps, origin) };
    let mask = masked(&grid, |place| {
        let is_in = |[low, high]: &[[usize; 3]; 2]| {
            let near = |axis: usize| 10.0 * low[axis] as f64 - 1.0..10.0 * high[axis] as f64 + 1.0;
            (0..3).all(|axis| near(axis).contains(&place[axis]))
        };
        boxes.iter().any(is_in)
    });
    (volume_of(grid), mask)
}

/// A mask of the voxels whose places in mm are chosen.
fn masked(grid: &Grid, is_in: impl Fn([f64; 3]) -> bool) -> Vec<u8> {
    let place = |index| grid.affine.apply(position(index, grid.size).map(|voxel| voxel as f64));
    (0..grid.num_voxels()).map(|index| u8::from(is_in(place(index)))).collect()
}

/// The description along an axis of a mask whose slices are all segmented.
fn described(volume: &Volume, mask: &[u8], axis: Axis) -> TargetDescription {
    let coverage = Coverage { axis, num_segmented: volume.plane(axis).num_slices, has_no_gaps: true, raw_ml: 0.0 };
    covered(volume, mask, &coverage)
}

fn covered(volume: &Volume, mask: &[u8], coverage: &Coverage) -> TargetDescription {
    let plane = volume.plane(coverage.axis);
    let has_mask = |slice: &usize| plane.values(mask, *slice).unwrap().contains(&1);
    let slices: Vec<usize> = (0..plane.num_slices).filter(has_mask).collect();
    let range = slices.first().map(|first| [*first, *slices.last().unwrap()]);
    TargetDescription::of(volume, mask, range.zip(plane.largest_slice(mask).unwrap()), coverage).unwrap()
}

#[test]
fn words_follow_the_patient_and_not_the_array() {
    for (low, high, axis, text) in [
        (
            [0, 7, 4],
            [2, 8, 5],
            Axis::Axial,
            "The target has a volume of 12.00 ml. It lies in axial slices 4 to 5 (of slices 0 to 5) and has its largest area \
             in slice 4. Within the volume, its centre lies in the left third (left of the patient), the anterior third and \
             the upper third (towards the head).",
        ),
        (
            [10, 0, 0],
            [11, 1, 0],
            Axis::Axial,
            "The target has a volume of 4.00 ml. It lies in axial slice 0 (of slices 0 to 5). Within the volume, its centre \
             lies in the right third (right of the patient), the posterior third and the lower third (towards the feet).",
        ),
        (
            [10, 3, 2],
            [11, 5, 3],
            Axis::Sagittal,
            "The target has a volume of 12.00 ml. It lies in sagittal slices 10 to 11 (of slices 0 to 11) and has its largest \
             area in slice 10. Within the volume, its centre lies in the right third (right of the patient), the middle third \
             from front to back and the middle third from foot to head.",
        ),
        (
            [4, 0, 5],
            [7, 0, 5],
            Axis::Coronal,
            "The target has a volume of 4.00 ml. It lies in coronal slice 0 (of slices 0 to 8). Within the volume, its centre \
             lies in the middle third from left to right, the posterior third and the upper third (towards the head).",
        ),
    ] {
        for order in ORDERS {
            for flips in 0..8 {
                let (volume, mask) = made(order, flips, &[[low, high]]);
                let found = described(&volume, &mask, axis);
                assert_eq!(found.text, text, "{}", volume.grid.affine.orientation());
                assert_eq!(found.facts.unwrap().directions, Directions::Patient);
            }
        }
    }
}

#[test]
fn sides_of_oblique_volumes_are_those_of_the_patient() {
    // columns are tilted by 40 degrees from right to the back
    let (sin, cos) = 40.0_f64.to_radians().sin_cos();
    let steps = [[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]];
    let grid = Grid { size: [30, 30, 4], affine: Affine::from_columns(steps, [0.0; 3]) };
    let centre = grid.affine.apply([14.5, 14.5, 1.5]);
    for (place, sides) in [([14.0, 0.0], ["right", "middle"]), ([0.0, -14.0], ["middle", "posterior"])] {
        let near = |at: [f64; 3]| (0..2).all(|axis| (at[axis] - centre[axis] - place[axis]).abs() < 1.5);
        let volume = volume_of(grid.clone());
        let facts = described(&volume, &masked(&grid, near), Axis::Axial).facts.unwrap();
        assert_eq!([facts.thirds["left_right"], facts.thirds["front_back"]], sides);
    }
}

#[test]
fn without_a_known_orientation_sides_are_those_of_the_image() {
    // the image shows the patient's right on its left, as the affine says
    for (order, flips) in [([0, 1, 2], 0), ([2, 0, 1], 5)] {
        let (mut volume, mask) = made(order, flips, &[[[10, 7, 0], [11, 8, 1]]]);
        volume.notes.push("the voxel axes are assumed, as in nibabel".to_owned());
        assert_eq!(
            described(&volume, &mask, Axis::Axial).text,
            "The target has a volume of 8.00 ml. It lies in slices 0 to 1 (of slices 0 to 5) and has its largest area in \
             slice 0. As the slices are shown, its centre lies in the left third of the image, the upper third of the image \
             and the first third of the slices. Left and right are those of the image: the file does not say for certain how \
             the patient lies."
        );
        let facts = described(&volume, &mask, Axis::Sagittal).facts.unwrap();
        assert_eq!(facts.directions, Directions::Image);
        let thirds: Vec<(&str, &str)> = facts.thirds.into_iter().collect();
        assert_eq!(thirds, [("columns", "left"), ("rows", "lower"), ("slices", "last")]);
    }
}

#[test]
fn files_say_whether_their_orientation_is_known() {
    let folder = crate::fixture::checkout().join("tests/fixtures/volumes");
    for (name, geometry, is_known) in [
        ("ras_i16.nii.gz", None, true),
        ("permuted_f32.nii.gz", None, true),
        ("qform.nii", None, true),
        ("metres.nii", None, true),
        ("no_form.nii", None, false),
        // its two affines differ
        ("disagree.nii", None, false),
        ("disagree.nii", Some(Geometry::Sform), true),
        ("axial.zip", None, true),
        ("oblique.zip", None, true),
        ("explicit_le.dcm", None, true),
        // frames and colour images without a position
        ("cine.dcm#2", None, false),
        ("rgb.dcm", None, false),
    ] {
        let volume = open_chosen(&folder.join(name), None, geometry).expect("a fixture");
        assert_eq!(is_orientation_known(&volume), is_known, "{name} {:?}", volume.notes);
    }
}

#[test]
fn the_place_is_that_of_the_largest_of_several_parts() {
    let boxes = [[[0, 0, 0], [1, 1, 1]], [[9, 7, 4], [11, 8, 5]], [[6, 4, 0], [6, 4, 0]]];
    let (volume, mask) = made([0, 1, 2], 1, &boxes);
    let found = described(&volume, &mask, Axis::Axial);
    assert_eq!(
        found.text,
        "The target has a volume of 21.00 ml. It has 3 separate parts; the largest has 12.00 ml. It lies in axial slices 0 to \
         5 (of slices 0 to 5) and has its largest area in slice 4. Within the volume, the centre of the largest part lies in the \
         right third (right of the patient), the anterior third and the upper third (towards the head)."
    );
    let facts = found.facts.unwrap();
    assert_eq!((facts.num_parts, facts.volume_ml, facts.largest_part_ml), (Some(3), 21.0, 12.0));
    // slices that are left out do not make parts
    let coverage = Coverage { axis: Axis::Axial, num_segmented: 3, has_no_gaps: false, raw_ml: 0.0 };
    let found = covered(&volume, &mask, &coverage);
    assert!(found.text.contains(" Only 3 of 6 slices were segmented, and the slices between them count as empty."));
    assert_eq!(found.facts.unwrap().num_parts, None);
}

#[test]
fn empty_masks_and_single_slices_are_described() {
    let (volume, mask) = made([0, 1, 2], 0, &[]);
    for (num_segmented, raw_ml, text) in [
        (6, 0.0, "The mask is empty: no target was found in the 6 slices that were segmented."),
        (1, 0.0, "The mask is empty: no target was found in the slice that was segmented."),
        (6, 0.001, "The mask is empty: the clean-up removed all of it (less than 0.01 ml)."),
        (6, 2.0, "The mask is empty: the clean-up removed all of it (2.00 ml)."),
    ] {
        let found = covered(&volume, &mask, &Coverage { axis: Axis::Axial, num_segmented, has_no_gaps: true, raw_ml });
        assert_eq!((found.text.as_str(), found.facts), (text, None));
    }
    let wrong = Coverage { axis: Axis::Axial, num_segmented: 6, has_no_gaps: true, raw_ml: 0.0 };
    assert!(TargetDescription::of(&volume, &[1], Some(([0, 0], 0)), &wrong).is_err());

    let affine = Affine::from_columns([[0.1, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.1]], [0.0; 3]);
    let slice = volume_of(Grid { size: [3, 3, 1], affine });
    assert_eq!(
        described(&slice, &[0, 0, 0, 0, 0, 0, 1, 0, 0], Axis::Axial).text,
        "The target has a volume of less than 0.01 ml. It lies in the only axial slice. Within the volume, its centre lies in \
         the left third (left of the patient) and the anterior third."
    );
    let voxel = volume_of(Grid { size: [1, 1, 1], affine });
    assert!(described(&voxel, &[1], Axis::Axial).text.ends_with("It lies in the only axial slice."));
}

#[test]
fn the_fields_say_that_a_template_answered() {
    let (volume, mask) = made([0, 1, 2], 0, &[[[0, 0, 0], [1, 1, 1]]]);
    let found = described(&volume, &mask, Axis::Axial);
    assert!(found.line().starts_with("answer (by a template, from the mask): The target has"), "{}", found.line());
    let fields = serde_json::to_value(&found).unwrap();
    assert_eq!((&fields["answer"], &fields["answer_source"]), (&found.text.into(), &"template".into()));
    let thirds = serde_json::json!({ "left_right": "left", "front_back": "posterior", "foot_head": "lower" });
    let facts = &fields["answer_facts"];
    assert_eq!((&facts["directions"], &facts["thirds"]), (&"patient".into(), &thirds));
}
