use super::*;
use crate::nifti::tests::{Folder, file, put, put_floats};
use crate::{Volume, labels, open_chosen};

/// A file with these diagonals of sform and `pixdim`, and codes of qform and sform.
fn bytes(sform: [f32; 3], pixdim: [f32; 3], codes: [i16; 2]) -> Vec<u8> {
    file(2, &[1; 24], |bytes| {
        let [x, y, z] = sform;
        put_floats(bytes, 280, &[x, 0.0, 0.0, 0.0, 0.0, y, 0.0, 0.0, 0.0, 0.0, z, 0.0]);
        put_floats(bytes, 80, &pixdim);
        codes.iter().enumerate().for_each(|(index, code)| put(bytes, 252 + 2 * index, &code.to_le_bytes()));
    })
}

fn opened(bytes: &[u8], geometry: Option<Geometry>) -> Result<Volume> {
    open_chosen(&Folder::new().write("a.nii", bytes), None, geometry)
}

#[test]
fn two_voxel_sizes_are_refused_until_one_is_chosen() {
    let acdc = ([1.0; 3], [1.3157, 1.3157, 10.0]);
    for (sform, pixdim) in
        [acdc, ([2.0, 2.0, 2.0], [2.0, 2.0, 2.1]), ([0.5, 0.5, 5.0], [5.0, 0.5, 0.5]), ([1.05, 1.0, 1.0], [1.0; 3])]
    {
        let both = bytes(sform, pixdim, [1, 1]);
        let error = opened(&both, None).expect_err("two sizes");
        let text = error.to_string();
        for size in sform.iter().chain(&pixdim) {
            assert!(text.contains(&format!("{size:.4}")), "{text}");
        }
        assert!(
            error.hint().contains("argument `geometry=sform` or the argument `geometry=qform`"),
            "{}",
            error.hint()
        );
        let path = Folder::new();
        let path = path.write("labels.nii", &both);
        assert!(labels::open(&path).is_err());
        for (geometry, size) in [(Geometry::Sform, sform), (Geometry::Qform, pixdim)] {
            let volume = opened(&both, Some(geometry)).expect("a choice");
            assert_eq!(volume.grid.spacing(), size.map(f64::from), "{geometry}");
            assert!(volume.notes.len() == 1 && volume.notes[0].contains(&format!("those of the {geometry} are used")));
        }
        // without a qform there is none to choose
        let alone = bytes(sform, pixdim, [0, 1]);
        let error = opened(&alone, None).expect_err("two sizes");
        assert!(!error.hint().contains("geometry=qform") && error.hint().contains("geometry=sform"), "{error}");
        assert!(opened(&alone, Some(Geometry::Qform)).expect_err("none").to_string().contains("no valid qform"));
        assert_eq!(opened(&alone, Some(Geometry::Sform)).expect("a choice").grid.spacing(), sform.map(f64::from));
    }
}

#[test]
fn sizes_that_agree_need_no_choice() {
    for (sform, pixdim, codes) in [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1, 1]),
        ([-1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0, 1]),
        ([1.0, 2.0, 3.0], [1.01, 1.97, 3.05], [1, 1]),
        // 0 states nothing
        ([1.0, 2.0, 3.0], [0.0; 3], [0, 4]),
        ([9.0, 9.0, 9.0], [1.0, 2.0, 3.0], [1, 0]),
    ] {
        let file = bytes(sform, pixdim, codes);
        let volume = opened(&file, None).unwrap_or_else(|error| panic!("{sform:?}, {pixdim:?}: {error}"));
        let expected = if codes[1] > 0 { sform } else { pixdim };
        assert_eq!(volume.grid.spacing(), expected.map(|size| f64::from(size).abs()));
    }
    // slices that are sheared by 45 degrees: `pixdim` may have their distance or the length of the step
    for z in [1.0, 2.0_f32.sqrt()] {
        let sheared = file(2, &[1; 24], |bytes| {
            put_floats(bytes, 280, &[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
            put_floats(bytes, 88, &[z]);
        });
        assert!(opened(&sheared, None).expect("one size").notes.is_empty());
    }
}

#[test]
fn places_that_differ_are_noted_and_can_be_chosen() {
    let moved = file(2, &[1; 24], |bytes| {
        put(bytes, 252, &1_i16.to_le_bytes());
        put_floats(bytes, 268, &[16.6, 6.0, 7.0]);
    });
    for (geometry, x, note) in [
        (None, 5.0, "11.6 mm apart; the sform is used, as in nibabel"),
        (Some(Geometry::Sform), 5.0, "the sform is used (argument `geometry`)"),
        (Some(Geometry::Qform), f64::from(16.6_f32), "the qform is used (argument `geometry`)"),
    ] {
        let volume = opened(&moved, geometry).expect("readable");
        assert_eq!(volume.grid.affine.origin(), [x, 6.0, 7.0]);
        assert!(volume.notes.len() == 1 && volume.notes[0].contains(note), "{:?}", volume.notes);
    }
}

#[test]
fn label_maps_and_pairs_with_two_sizes_are_refused() {
    let folder = Folder::new();
    let whole = bytes([1.0; 3], [0.7, 0.7, 3.0], [0, 1]);
    let mut header = whole[..352].to_vec();
    put(&mut header, 344, b"ni1\0");
    put_floats(&mut header, 108, &[0.0]);
    let label_map = labels::open(&folder.write("labels.nii", &whole)).expect_err("two sizes");
    let pair = [folder.write("pair.hdr", &header), folder.write("pair.img", &[1; 24])];
    let [by_header, by_image] = pair.map(|path| open_chosen(&path, None, None).expect_err("two sizes"));
    for error in [label_map, by_header, by_image] {
        let sizes = "1.0000 x 1.0000 x 1.0000 mm by its sform, 0.7000 x 0.7000 x 3.0000 mm by its `pixdim`";
        assert!(error.to_string().contains(sizes), "{error}");
    }
}

#[test]
fn sizes_are_compared_in_the_unit_of_the_header() {
    for (unit, factor) in [(1, 0.001), (2, 1.0), (3, 1000.0)] {
        let with_pixdim = |z: f32| {
            let [sform, pixdim] = [[1.0, 2.0, 3.0], [1.0, 2.0, z]].map(|sizes| sizes.map(|mm| mm * factor));
            let mut file = bytes(sform, pixdim, [1, 1]);
            file[123] = unit;
            file
        };
        let spacing = opened(&with_pixdim(3.0), None).expect("one size").grid.spacing();
        assert!(spacing.iter().zip([1.0, 2.0, 3.0]).all(|(a, b)| (a - b).abs() < 1e-5), "{unit}: {spacing:?}");
        let error = opened(&with_pixdim(5.0), None).expect_err("two sizes").to_string();
        let sizes = "1.0000 x 2.0000 x 3.0000 mm by its sform, 1.0000 x 2.0000 x 5.0000 mm by its qform";
        assert!(error.contains(sizes), "{unit}: {error}");
    }
}

#[test]
fn voxels_that_are_too_large_for_a_patient_have_a_note() {
    for (sizes, unit, in_mm) in [
        ([0.7, 0.7, 3.0], 1, Some("700.0 x 700.0 x 3000.0 mm")),
        ([700.0, 700.0, 3.0], 2, Some("700.0 x 700.0 x 3.0 mm")),
        ([0.7, 0.7, 60.0], 2, None),
        ([10.0; 3], 2, None),
        ([0.0007, 0.0007, 0.003], 1, None),
    ] {
        let mut file = bytes(sizes, sizes, [0, 1]);
        file[123] = unit;
        let notes = opened(&file, None).expect("a volume").notes;
        let note = notes.iter().find(|note| note.contains("too large for an image of a patient"));
        assert_eq!(note.is_some(), in_mm.is_some(), "{notes:?}");
        assert!(note.zip(in_mm).is_none_or(|(note, in_mm)| note.contains(in_mm)), "{notes:?}");
    }
}
