//! Tests of masks in files made for them.

use std::fs;
use std::sync::Mutex;

use super::*;
use crate::data::volume::{Affine, Grid, write};

/// Keeps the notes.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Observer for Notes {
    fn on(&self, event: &Event) {
        if let Event::Note(text) = event {
            self.0.lock().unwrap().push(text.clone());
        }
    }
}

/// A NIfTI file of one slice of 4x3 pixels whose centre is at `x` mm.
fn slice(path: &Path, labels: [u8; 12], x: f64) {
    let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 5.0]], [x, 0.0, 0.0]);
    write::nifti_labels(path, &labels, &Grid { size: [4, 3, 1], affine }).unwrap();
}

#[test]
fn a_mask_whose_affines_differ_has_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let [image, mask] = ["image.nii", "mask.nii"].map(|name| folder.path().join(name));
    slice(&image, [9; 12], 0.0);
    let labels = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    slice(&mask, labels, 0.0);
    let read = || {
        let notes = Notes::default();
        let found = ImageReading::default().mask(&mask, &image, Labels::NONE, &notes).unwrap();
        (found.iter().filter(|value| **value > 0).count(), notes.0.into_inner().unwrap())
    };
    assert_eq!(read(), (2, Vec::new()));
    // the x of the qform's origin
    let mut bytes = fs::read(&mask).unwrap();
    bytes[268..272].copy_from_slice(&50_f32.to_le_bytes());
    fs::write(&mask, bytes).unwrap();
    let (num_pixels, notes) = read();
    assert!(num_pixels == 2 && notes.len() == 1, "{notes:?}");
    assert!(notes[0].contains("mask.nii: ") && notes[0].contains("sform"), "{notes:?}");
}

#[test]
fn remedies_for_a_mask_are_possible_for_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let [image, apart, two, flat] =
        ["image.nii", "apart.nii", "two.nii", "two.png"].map(|name| folder.path().join(name));
    slice(&image, [9; 12], 0.0);
    slice(&apart, [1; 12], 20.0);
    slice(&two, [0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0], 0.0);
    GrayImage::from_fn(4, 3, |x, _| image::Luma([u8::try_from(x).unwrap()])).save(&flat).unwrap();
    for (mask, expected) in [
        (apart, "its grid is not that of the volume"),
        (two, "the mask has the labels 1, 2"),
        (flat, "the mask has several labels"),
        (folder.path().to_owned(), "it is a folder"),
        (folder.path().join("none.png"), "the file is missing"),
    ] {
        let error = ImageReading::default().mask(&mask, &image, Labels::NONE, &Silent).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        let hint = error.hint();
        assert!(!hint.is_empty() && !["argument", "row", "resampl"].iter().any(|word| hint.contains(word)), "{hint}");
    }
}
