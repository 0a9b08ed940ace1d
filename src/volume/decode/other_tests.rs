//! BMP, GIF, WebP, PGM and PPM files of `scripts/fixtures/itk_volumes.py`, as Pillow reads them.

use std::path::PathBuf;

use serde::Deserialize;

use super::*;
use crate::fixture::checkout;

/// What Pillow reads of an image of 12x9 pixels.
#[derive(Deserialize)]
struct Expected {
    path: String,
    rgb: Vec<u8>,
    /// The stored labels, of a mask.
    labels: Option<Vec<u16>>,
}

fn fixture(name: &str) -> PathBuf {
    checkout().join("tests/fixtures/volumes").join(name)
}

#[test]
fn images_and_labels_are_those_of_pillow() {
    let text = std::fs::read_to_string(fixture("itk/flat.json")).expect("read");
    let all: Vec<Expected> = serde_json::from_str(&text).expect("JSON");
    assert!(all.len() > 10, "only {} images", all.len());
    for Expected { path, rgb, labels } in all {
        let file = fixture(&path);
        let found = image(&file).unwrap_or_else(|error| panic!("{error}")).into_rgb8();
        assert_eq!((found.dimensions(), dimensions(&file).expect("a size")), ((12, 9), (12, 9)), "{path}");
        let apart = found.as_raw().iter().zip(&rgb).map(|(a, b)| a.abs_diff(*b)).max();
        // Pillow truncates where 16 bits become 8
        assert!(apart <= Some(u8::from(path.contains("deep"))), "{path}: {apart:?} levels apart");
        let Some(labels) = labels else { continue };
        let stored = stored_mask(&file).unwrap_or_else(|error| panic!("{error}"));
        for label in labels.iter().copied().filter(|label| *label > 0) {
            let mask = stored
                .clone()
                .target(Labels::new(&[label]).expect("a label"))
                .unwrap_or_else(|refusal| panic!("{path}: {refusal}"));
            let wanted: Vec<bool> = labels.iter().map(|other| *other == label).collect();
            let found: Vec<bool> = mask.as_raw().iter().map(|value| *value > 0).collect();
            assert_eq!(found, wanted, "{path}, label {label}");
        }
    }
}

#[test]
fn images_of_several_frames_are_refused_and_lossy_masks_have_noise() {
    for (name, part) in [("frames.gif", "has 2 pages instead of one"), ("frames.webp", "is an animation")] {
        let error = image(&fixture("itk").join(name)).expect_err(name);
        assert!(error.to_string().contains(part) && error.hint().contains("PNG"), "{error}");
    }
    let file = fixture("itk/lossy.webp");
    assert!(decode(&file, Palette::Keep).is_ok_and(|decoded| decoded.noise > 0));
    assert!(decode(&fixture("itk/colours.webp"), Palette::Keep).is_ok_and(|decoded| decoded.noise == 0));
}

/// Every prefix in steps, and single changed bytes, give an image or an error.
#[test]
fn damaged_files_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["palette.bmp", "palette.gif", "colours.webp", "lossy.webp", "deep.pgm", "four.pgm"] {
        let bytes = std::fs::read(fixture("itk").join(name)).expect("read");
        let path = folder.path().join(name);
        for at in (0..bytes.len()).step_by(1 + bytes.len() / 40) {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            for bytes in [&bytes[..at], &changed] {
                std::fs::write(&path, bytes).expect("written");
                for error in [image(&path).err(), stored_mask(&path).err()].into_iter().flatten() {
                    assert!(error.to_string().contains(name), "{error}");
                }
            }
        }
        std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("written");
        assert!(image(&path).is_err(), "half of {name}");
    }
}
