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

/// A file with pages of the same 800 pixels, the first of which has a description.
fn described(path: &Path, num_pages: usize, description: &str) {
    let mut encoder = TiffEncoder::new(File::create(path).expect("created")).expect("an encoder");
    for page in 0..num_pages {
        let mut image = encoder.new_image::<colortype::Gray8>(40, 20).expect("a page");
        if page == 0 {
            image.encoder().write_tag(Tag::ImageDescription, description).expect("written");
        }
        image.write_data(&[5; 800]).expect("written");
    }
}

#[test]
fn pages_of_imagej_and_ome_are_not_mixed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("stack.tif");
    let refusal = |path: &Path| open(path).expect_err("refused").to_string();
    described(&path, 6, "ImageJ=1.53\nimages=6\nchannels=2\nslices=3\nhyperstack=true\n");
    assert!(refusal(&path).contains("2 channels of 3 slices at 1 points in time"), "{}", refusal(&path));
    assert_eq!(open(Path::new(&format!("{}#4", path.display()))).expect("a page").grid.size, [40, 20, 1]);
    described(
        &path,
        6,
        "<?xml?><OME><Image><Pixels SizeX=\"3\" SizeY=\"2\" SizeZ=\"3\" SizeC=\"1\" SizeT=\"2\"/></Image></OME>",
    );
    assert!(refusal(&path).contains("1 channels of 3 slices at 2 points in time"), "{}", refusal(&path));
    for (description, note) in [
        ("ImageJ=1.53\nimages=6\nslices=6\n", None),
        ("ImageJ=1.53\nimages=6\nchannels=6\n", Some("calls its 6 pages channels")),
        ("ImageJ=1.53\nimages=6\nframes=6\n", Some("calls its 6 pages points in time")),
        ("anything", None),
    ] {
        described(&path, 6, description);
        let volume = open(&path).expect("a volume");
        let found = volume.notes.iter().any(|note| note.contains("its description calls"));
        assert_eq!((volume.grid.size, found), ([40, 20, 6], note.is_some()), "{:?}", volume.notes);
        assert!(note.is_none_or(|note| volume.notes.iter().any(|found| found.contains(note))), "{:?}", volume.notes);
    }
}

#[test]
fn images_of_imagej_without_a_page_are_not_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("stack.tif");
    let description = "ImageJ=1.53\nimages=4\nslices=4\n";
    described(&path, 1, description);
    // a page that was cut out of a stack
    assert!(!is_volume(&path).expect("readable") && crate::decode::image(&path).is_ok());
    let mut bytes = std::fs::read(&path).expect("read");
    bytes.extend([5; 2400]);
    std::fs::write(&path, bytes).expect("written");
    assert!(is_volume(&path).expect("readable"));
    let error = open(&path).expect_err("refused");
    assert!(error.to_string().contains("written 4 images into it, of which only the first one is listed"), "{error}");
    let error = crate::decode::image(&path).expect_err("refused");
    assert!(error.to_string().contains("has 4 pages instead of one"), "{error}");
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
