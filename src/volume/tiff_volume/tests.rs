use tiff::encoder::{TiffEncoder, colortype};

use super::*;
use crate::{Window, is_volume, labels, open};

/// A file with a page for each `first`, whose six pixels count from it.
fn pages_of(path: &Path, firsts: &[u16]) {
    let mut encoder = TiffEncoder::new(File::create(path).expect("created")).expect("an encoder");
    for first in firsts {
        let pixels: Vec<u16> = (*first..first + 6).collect();
        encoder.write_image::<colortype::Gray16>(3, 2, &pixels).expect("written");
    }
}

#[test]
fn pages_are_slices_or_chosen() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("stack.tif");
    pages_of(&path, &[0, 100, 40000]);
    assert!(is_volume(&path).expect("readable"));
    let volume = open(&path).expect("a volume");
    assert_eq!(
        (volume.grid.size, volume.voxels.get(8), volume.voxels.get(17)),
        ([3, 2, 3], Some(102.0), Some(40005.0))
    );
    assert!(volume.notes.iter().any(|note| note.contains("assumed to be left, posterior")), "{:?}", volume.notes);
    let shown = path.display().to_string();
    let page = labels::open(Path::new(&format!("{shown}#1"))).expect("labels");
    assert_eq!((page.grid.size, page.values), ([3, 2, 1], (100..106).collect()));
    let error = open(Path::new(&format!("{shown}#3"))).expect_err("three pages");
    assert!(error.hint().contains("from 0 to 2"), "{error}");
    pages_of(&path, &[5]);
    assert!(!is_volume(&path).expect("readable"), "one page of 16 bits is a flat image");
    let mut encoder = TiffEncoder::new(File::create(&path).expect("created")).expect("an encoder");
    encoder.write_image::<colortype::Gray8>(3, 2, &[0; 6]).expect("written");
    encoder.write_image::<colortype::Gray8>(2, 2, &[0; 4]).expect("written");
    drop(encoder);
    let error = open(&path).expect_err("two sizes");
    assert!(error.to_string().contains("page 1 has another size or type than page 0"), "{error}");
    assert_eq!(open(Path::new(&format!("{shown}#1"))).expect("a page").grid.size, [2, 2, 1]);
}

#[test]
fn measurements_get_a_window() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("float.tif");
    let mut encoder = TiffEncoder::new(File::create(&path).expect("created")).expect("an encoder");
    encoder.write_image::<colortype::Gray32Float>(2, 2, &[-1000.0, 0.5, 40.0, 3000.0]).expect("written");
    drop(encoder);
    let volume = open(&path).expect("a volume");
    let levels = "400/40".parse::<Window>().expect("a window").levels(&volume).expect("levels");
    let grey = volume.slice(&volume.plane(crate::Axis::Axial), 0, &levels).expect("a slice");
    assert_eq!(grey.as_raw(), &[0, levels.apply(0.5), levels.apply(40.0), 255]);
    let error = labels::open(&path).expect_err("no labels");
    assert!(error.to_string().contains("not whole numbers, such as 0.5"), "{error}");
    let mut encoder = TiffEncoder::new(File::create(&path).expect("created")).expect("an encoder");
    encoder.write_image::<colortype::Gray32Float>(2, 1, &[f32::NAN, 0.5]).expect("written");
    drop(encoder);
    assert!(open(&path).expect_err("NaN").to_string().contains("1 of 2 voxels are NaN"));
}
