//! Tests of images with several mask files, and of folders whose pairs cannot be used.

use std::fs;

use image::codecs::png::PngEncoder;
use image::{GrayImage, ImageEncoder, Luma};

use super::super::item::{NO_IMAGE, NO_MASK};
use super::super::layouts::without_number;
use super::super::tests::{Folders, folders, mask};
use super::super::{PrepareOptions, PrepareReport, by_kind, prepare};
use super::*;
use crate::check;
use crate::labels::Labels;
use prsmed_base::event::Silent;

const FIRST: (u32, u32, u32, u32) = (2, 2, 11, 11);
const SECOND: (u32, u32, u32, u32) = (40, 20, 49, 29);

/// All images are in the training split.
fn run(f: &Folders) -> Result<PrepareReport> {
    prepare(&PrepareOptions { val_frac: 0.0, test_frac: 0.0, ..f.options() }, &Silent)
}

fn refused(f: &Folders) -> (String, String) {
    let error = run(f).unwrap_err();
    assert!(!f.out.exists(), "nothing is written");
    (error.to_string(), error.hint())
}

/// Number of foreground pixels of a written mask.
fn written(f: &Folders, stem: &str) -> usize {
    let mask = image::open(f.out.join(format!("lung_CT/train_masks/{stem}.png"))).unwrap().into_luma8();
    mask.pixels().filter(|pixel| pixel.0 == [255]).count()
}

/// Noise.
fn photograph(width: u32, height: u32) -> GrayImage {
    GrayImage::from_fn(width, height, |x, y| Luma([u8::try_from((x * 7919 + y * 104_729) % 251).unwrap()]))
}

#[test]
fn numbered_masks_of_an_image_are_joined() {
    for second in ["_mask_1", "_mask1", "_mask-02", "_mask(1)", "_mask (1)", "_seg_3"] {
        for shared in [true, false] {
            let mut f = folders();
            if shared {
                f.masks = f.images.clone();
            }
            for name in ["benign (1)", "other"] {
                f.image(&format!("{name}.png"));
                f.mask(&format!("{name}_mask.png"), 255, &[FIRST]);
            }
            f.mask(&format!("benign (1){second}.png"), 255, &[SECOND]);
            let report = run(&f).unwrap();
            assert_eq!((report.images, report.skipped.as_slice()), (2, [].as_slice()), "{second}");
            assert_eq!((written(&f, "benign (1)"), written(&f, "other")), (200, 100), "{second}");
            let texts = report.findings.texts();
            let text = texts.iter().find(|text| text.contains("which were joined")).unwrap();
            assert!(
                text.starts_with("images with 2 mask files, which were joined: 1 (") && text.contains("benign (1).png")
            );
        }
    }
}

#[test]
fn three_masks_that_overlap_are_one_and_need_no_unnumbered_one() {
    let f = folders();
    f.image("a.png");
    for (number, bounds) in [FIRST, (7, 2, 16, 11), SECOND].into_iter().enumerate() {
        f.mask(&format!("a_mask_{number}.png"), if number == 1 { 240 } else { 255 }, &[bounds]);
    }
    let report = run(&f).unwrap();
    assert_eq!((report.images, written(&f, "a")), (1, 250));
    assert!(report.findings.texts().iter().any(|text| text.starts_with("images with 3 mask files")));
}

#[test]
fn a_numbered_mask_is_never_an_image_without_a_mask() {
    let mut f = folders();
    f.masks = f.images.clone();
    f.image("a.png");
    f.mask("a_mask.png", 255, &[FIRST]);
    for name in ["b_mask_1.png", "c_mask2.png", "d_seg (3).png"] {
        f.mask(name, 255, &[SECOND]);
    }
    let report = run(&f).unwrap();
    assert_eq!((report.images, report.skipped.len()), (1, 3));
    assert!(report.skipped.iter().all(|skipped| skipped.reason == NO_IMAGE), "{:?}", report.skipped);
    // a name that is an image's own
    let f = folders();
    for name in ["a_seg_1.png", "a_seg_2.png"] {
        f.image(name);
        f.mask(name, 255, &[FIRST]);
    }
    assert_eq!((run(&f).unwrap().images, written(&f, "a_seg_2")), (2, 100));
    assert_eq!([without_number("a_mask_1234"), without_number("1_mask"), without_number("a_1")], [None; 3]);
}

#[test]
fn second_masks_that_do_not_fit_are_refused_by_name() {
    let f = folders();
    for name in ["a", "b", "c", "d"] {
        f.image(&format!("{name}.png"));
        f.mask(&format!("{name}_mask.png"), 1, &[FIRST]);
    }
    f.mask("a_mask_1.png", 2, &[SECOND]);
    GrayImage::from_pixel(30, 40, Luma([1])).save(f.masks.join("b_mask_1.png")).unwrap();
    f.mask("c_mask_1.png", 0, &[]);
    let report = run(&f).unwrap();
    assert_eq!(report.images, 2);
    let reasons: Vec<&str> = report.skipped.iter().map(|skipped| skipped.reason.as_str()).collect();
    assert!(reasons[0].starts_with("has the label 2, but another mask of its image, `"), "{reasons:?}");
    assert!(reasons[0].ends_with("a_mask.png`, has 1; choose with the argument `labels`"), "{reasons:?}");
    assert_eq!(reasons[1], "is 30 x 40 pixels, its image 60 x 40");
    assert_eq!((written(&f, "c"), written(&f, "d")), (100, 100), "an empty second mask adds nothing");
}

#[test]
fn more_bad_pairs_than_good_ones_end_the_preparation() {
    let f = folders();
    for name in ["a.png", "b.png", "c.png", "d.png", "e.png"] {
        f.image(name);
        GrayImage::from_pixel(40, 60, Luma([255])).save(f.masks.join(name)).unwrap();
    }
    f.mask("a.png", 255, &[FIRST]);
    let (reason, hint) = refused(&f);
    assert!(reason.contains("4 of 5 pairs of image and mask cannot be used; nothing was written"), "{reason}");
    assert_eq!(reason.matches("is 40 x 60 pixels, its image 60 x 40; one of them is turned by 90 degrees").count(), 3);
    assert!(
        hint.starts_with("save each mask at the size of its image") && hint.contains("argument `skip_bad_pairs`"),
        "{hint}"
    );
    let report = prepare(&PrepareOptions { skip_bad_pairs: true, ..f.options() }, &Silent).unwrap();
    assert_eq!((report.images, report.skipped.len()), (1, 4));
    assert_eq!(by_kind(&report.skipped).len(), 1);

    // empty masks are left out by default, and half may be bad
    let f = folders();
    for name in ["a.png", "b.png", "c.png", "d.png"] {
        f.image(name);
        f.mask(name, 255, if name < "b" { &[FIRST] } else { &[] });
    }
    assert_eq!(run(&f).unwrap().images, 1);
}

#[test]
fn hints_fit_the_reason() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[]);
    assert!(refused(&f).1.contains("argument `negatives`"));
    GrayImage::from_pixel(30, 40, Luma([255])).save(f.masks.join("a.png")).unwrap();
    assert!(refused(&f).1.contains("the size of its image"));
    fs::rename(f.masks.join("a.png"), f.masks.join("b.png")).unwrap();
    assert!(refused(&f).1.contains("its image's stem"));
    // swapped folders
    let f = folders();
    for number in 0..8 {
        photograph(60, 40).save(f.masks.join(format!("{number}.png"))).unwrap();
        mask(255, &[FIRST]).save(f.images.join(format!("{number}.png"))).unwrap();
    }
    let (reason, _) = refused(&f);
    assert!(reason.contains("grey levels that fill no area, like a photograph"), "{reason}");
    assert!(reason.contains("were the images and the masks swapped?"), "{reason}");
    // the parent of both folders
    let parent = f.images.parent().unwrap().to_owned();
    let error = prepare(&PrepareOptions { images: vec![parent], ..f.options() }, &Silent).unwrap_err();
    assert!(error.hint().contains("images`") && error.hint().contains("masks`"), "{}", error.hint());
}

#[test]
fn masks_that_are_probably_wrong_and_images_of_one_grey_level_are_named() {
    let f = folders();
    for (number, value) in [(0, 90), (1, 0), (2, 255), (3, 90), (4, 90)] {
        GrayImage::from_pixel(60, 40, Luma([value])).save(f.images.join(format!("{number}.png"))).unwrap();
        // inverted: the lesion is black
        GrayImage::from_fn(60, 40, |x, y| Luma([255 - mask(255, &[FIRST]).get_pixel(x, y).0[0]]))
            .save(f.masks.join(format!("{number}.png")))
            .unwrap();
    }
    photograph(60, 40).save(f.images.join("5.png")).unwrap();
    f.mask("5.png", 255, &[FIRST]);
    let report = run(&f).unwrap();
    let checked = check::check(&f.out, None, Labels::NONE, &Silent).unwrap();
    assert_eq!(checked.bad, []);
    for texts in [report.findings.texts(), checked.findings.texts()] {
        let starts = |start: &str| texts.iter().find(|text| text.starts_with(start)).cloned().unwrap_or_default();
        let full = starts("masks that cover at least 95 % of their image: 5 (");
        assert!(full.contains("0.png, ") && full.contains("2.png and 2 more)"), "{texts:?}");
        assert!(starts("images of one grey level or colour: 5 (").contains("; they show nothing"), "{texts:?}");
        let border = starts("masks with most of the border of the image as foreground: 5 (");
        assert!(border.ends_with("masks may be inverted: foreground must be white (255) and background black (0)"));
    }
    // one mask of many that reaches the border is usual
    let f = folders();
    for number in 0..4 {
        photograph(60, 40).save(f.images.join(format!("{number}.png"))).unwrap();
        f.mask(&format!("{number}.png"), 255, if number == 0 { &[(0, 0, 59, 35)] } else { &[FIRST] });
    }
    assert_eq!(run(&f).unwrap().findings.texts(), Vec::<String>::new());
}

#[test]
fn what_was_decided_to_read_a_mask_is_said() {
    let f = folders();
    photograph(60, 40).save(f.images.join("a.png")).unwrap();
    let clear = image::RgbaImage::from_fn(60, 40, |x, y| {
        image::Rgba([255, 255, 255, mask(255, &[FIRST]).get_pixel(x, y).0[0]])
    });
    clear.save(f.masks.join("a.png")).unwrap();
    let report = run(&f).unwrap();
    assert_eq!((report.images, written(&f, "a")), (1, 100));
    let texts = report.findings.texts();
    assert!(texts[0].starts_with("masks of one colour, whose opaque pixels are the target: 1 ("), "{texts:?}");
}

/// A PNG whose EXIF block says that it is upside down.
fn save_turned(pixels: &GrayImage, path: &Path) {
    let exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0\0\0\0\0";
    let mut encoder = PngEncoder::new(fs::File::create(path).unwrap());
    encoder.set_exif_metadata(exif.to_vec()).unwrap();
    encoder.write_image(pixels.as_raw(), pixels.width(), pixels.height(), image::ExtendedColorType::L8).unwrap();
}

#[test]
fn files_with_an_orientation_are_named_and_turned() {
    let f = folders();
    save_turned(&photograph(60, 40), &f.images.join("a.png"));
    photograph(60, 40).save(f.images.join("b.png")).unwrap();
    f.mask("a.png", 255, &[FIRST]);
    save_turned(&mask(255, &[FIRST]), &f.masks.join("b.png"));
    let report = run(&f).unwrap();
    let checked = check::check(&f.out, None, Labels::NONE, &Silent).unwrap();
    // the written masks are upright
    for (texts, count) in [(report.findings.texts(), 2), (checked.findings.texts(), 1)] {
        let start = format!("files with an EXIF orientation, which was applied: {count} (");
        assert!(texts.iter().any(|text| text.starts_with(&start)), "{texts:?}");
    }
    for (stem, corners) in [("a", [255, 0]), ("b", [0, 255])] {
        let mask = image::open(f.out.join(format!("lung_CT/train_masks/{stem}.png"))).unwrap().into_luma8();
        assert_eq!([mask.get_pixel(2, 2).0[0], mask.get_pixel(57, 37).0[0]], corners, "{stem}");
    }
}

/// The reasons of skipped files by their names.
fn reasons(report: &PrepareReport) -> Vec<(String, &str)> {
    let name = |skip: &Skipped| skip.path.file_name().unwrap().to_string_lossy().into_owned();
    report.skipped.iter().map(|skip| (name(skip), skip.reason.as_str())).collect()
}

#[test]
fn masks_that_may_belong_to_a_used_image_are_named() {
    const OF_A: &str = "may be a second mask of `a.png`, which is used without it";
    for (second, shared, expected) in [
        ("a_mask_b.png", false, OF_A),
        ("a_mask_b.png", true, OF_A),
        ("a_2.png", false, OF_A),
        ("a_mask - Copy.png", false, OF_A),
        ("A_MASK_left.png", false, OF_A),
        ("A-left.png", false, OF_A),
        // another image
        ("ab_mask.png", false, NO_IMAGE),
        ("a2.png", false, NO_IMAGE),
        ("c_mask.png", false, NO_IMAGE),
        ("a_2.png", true, NO_MASK),
        // the image with the longest name, which has no mask
        ("a_left_x.png", false, "no image with this stem; it may be a mask of `a_left.png`"),
    ] {
        let mut f = folders();
        if shared {
            f.masks = f.images.clone();
        }
        for name in ["a", "b"] {
            f.image(&format!("{name}.png"));
            f.mask(&format!("{name}_mask.png"), 255, &[FIRST]);
        }
        f.image("a_left.png");
        f.mask(second, 255, &[SECOND]);
        let report = run(&f).unwrap();
        assert_eq!((report.images, written(&f, "a")), (2, 100), "{second}");
        assert_eq!(reasons(&report).iter().find(|(name, _)| name == second).unwrap().1, expected, "{second}");
    }
    // numbers that continue
    let f = folders();
    for number in 1..=9 {
        f.image(&format!("{number}.png"));
        f.mask(&format!("{number}.png"), 255, &[FIRST]);
    }
    f.mask("10.png", 255, &[FIRST]);
    assert_eq!(reasons(&run(&f).unwrap()), [("10.png".to_owned(), NO_IMAGE)]);
}

#[test]
fn images_whose_names_end_like_masks_have_masks_in_the_same_folder() {
    let mut f = folders();
    f.masks = f.images.clone();
    for name in ["case_seg_1", "case_seg", "x_label", "y_gt", "plain", "p"] {
        f.image(&format!("{name}.png"));
        f.mask(&format!("{name}_mask.png"), 255, &[FIRST]);
    }
    // a mask of `p`, not an image with the mask `p_seg_mask`
    f.mask("p_seg_1.png", 255, &[SECOND]);
    let report = run(&f).unwrap();
    assert_eq!((report.images, report.skipped.as_slice()), (6, [].as_slice()));
    let pixels = ["case_seg_1", "case_seg", "x_label", "y_gt", "plain", "p"].map(|name| written(&f, name));
    assert_eq!(pixels, [100, 100, 100, 100, 100, 200]);
}

#[test]
fn names_with_dots_and_names_that_begin_with_another_keep_their_masks() {
    let f = folders();
    let names = ["1.3.6.1.71_42", "1.3.6.1.72_42", "1.3.6.1.71_42.1", "1", "11", "1_1", "1.png", "a", "a.b", "a.c"];
    for (index, name) in names.iter().enumerate() {
        let right = 2 + u32::try_from(index).unwrap();
        f.image(&format!("{name}.png"));
        f.mask(&format!("{name}.png"), 255, &[(2, 2, right, 11)]);
    }
    let report = run(&f).unwrap();
    assert_eq!((report.images, report.skipped.as_slice()), (names.len(), [].as_slice()));
    for (index, name) in names.iter().enumerate() {
        assert_eq!(written(&f, name), 10 * (index + 1), "{name}");
    }
}

#[test]
fn notes_of_other_systems_are_no_images() {
    const NOTE: &[u8] = b"\0\x05\x16\x07\0\x02\0\0Mac OS X        ";
    for is_one_folder in [false, true] {
        let mut f = folders();
        if is_one_folder {
            f.masks = f.images.clone();
        }
        for name in ["a", "b"] {
            f.image(&format!("{name}.png"));
            f.mask(&format!("{name}_mask.png"), 255, &[FIRST]);
        }
        // more notes than images: these would be pairs that cannot be used
        for note in ["a.png", "b.png", "c.png", "a_mask.png", "b_mask.png", "c_mask.png"] {
            for folder in [&f.images, &f.masks] {
                fs::write(folder.join(format!("._{note}")), NOTE).unwrap();
            }
        }
        fs::write(f.images.join(".DS_Store"), "x").unwrap();
        fs::write(f.masks.join(".a.tif"), "x").unwrap();
        let report = run(&f).unwrap();
        assert_eq!((report.images, report.skipped.as_slice()), (2, [].as_slice()), "{is_one_folder}");
    }
}

#[test]
fn files_in_other_formats_have_a_remedy() {
    for ending in ["jp2", "HEIC", "avif"] {
        for of_images in [false, true] {
            let f = folders();
            for name in ["a", "b"] {
                f.image(&format!("{name}.png"));
                f.mask(&format!("{name}.png"), 255, &[FIRST]);
                let folder = if of_images { &f.images } else { &f.masks };
                fs::rename(folder.join(format!("{name}.png")), folder.join(format!("{name}.{ending}"))).unwrap();
            }
            assert_eq!(refused(&f).1, "convert the images and masks to PNG", "{ending}");
        }
    }
    let f = folders();
    f.image("a.png");
    fs::write(f.masks.join("notes.txt"), "x").unwrap();
    assert!(refused(&f).1.contains("its image's stem"));
}

#[test]
fn reasons_of_files_that_cannot_be_read_have_a_remedy() {
    let f = folders();
    for name in ["a", "b", "c", "d"] {
        f.image(&format!("{name}.png"));
        f.mask(&format!("{name}.tif"), 255, &[FIRST]);
    }
    let patch = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = f.masks.join(name);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    };
    // the compression LZMA
    patch("a.tif", &|bytes| {
        let entry = [3, 1, 3, 0, 1, 0, 0, 0];
        let at = bytes.windows(8).position(|part| part == entry).expect("a compression") + 8;
        bytes[at..at + 2].copy_from_slice(&34_925_u16.to_le_bytes());
    });
    patch("b.tif", &|bytes| bytes.truncate(bytes.len() / 2));
    let report = run(&f).unwrap();
    let found = reasons(&report);
    assert_eq!((report.images, found.len()), (2, 2), "{found:?}");
    assert!(found[0].1.starts_with("cannot be read: is not supported: "), "{found:?}");
    assert!(found[0].1.contains(" (save it as a PNG of 8 or 16 bits; "), "{found:?}");
    assert!(found[1].1.starts_with("cannot be read: cannot be decoded: ") && !found[1].1.contains("row"), "{found:?}");
}

#[test]
fn names_match_without_case_unicode_form_and_blanks() {
    for (image, mask) in [
        ("case0.JPG", "CASE0_MASK.PNG"),
        ("case 1.png", "case 1 Segmentation.png"),
        ("case 2.png", "Case 2-mask.png"),
        ("case 3.png", "case 3 _seg.png"),
        ("l\u{e9}sion.png", "le\u{301}sion_mask.png"),
        ("le\u{301}sion.png", "L\u{c9}SION.png"),
        ("a.png", "A\u{a0}mask.png"),
        ("T1_mask.png", "t1_MASK.png"),
    ] {
        let f = folders();
        f.image("other.png");
        f.mask("other.png", 255, &[FIRST]);
        f.image(image);
        f.mask(mask, 255, &[SECOND]);
        let report = run(&f).unwrap();
        assert_eq!((report.images, report.skipped.as_slice()), (2, [].as_slice()), "{image} {mask}");
        let stem = Path::new(image).file_stem().unwrap().to_str().unwrap();
        assert_eq!(written(&f, stem), 100, "{image} {mask}");
        let bad = check::check(&f.out, None, Labels::NONE, &Silent).unwrap();
        assert!(bad.bad.is_empty(), "{image}: {:?}", bad.bad);
    }
}

#[test]
fn masks_that_differ_in_case_only_are_refused_by_both_names() {
    for (masks, words) in [
        (["a.png", "A.png"], "upper and lower case"),
        (["a_mask.png", "A_mask.png"], "upper and lower case"),
        (["A.png", "a\u{a0}.png"], "blanks or invisible letters"),
    ] {
        let f = folders();
        f.image("a.png");
        for name in masks {
            f.mask(name, 255, &[FIRST]);
        }
        let (text, _) = refused(&f);
        assert!(masks.iter().all(|name| text.contains(name)) && text.contains(words), "{text}");
    }
}

#[test]
fn images_without_masks_stop_the_command_when_they_are_more_than_half() {
    let f = folders();
    for name in ["a.png", "b.png", "c.png", "d.png", "e.png"] {
        f.image(name);
    }
    f.mask("a.png", 255, &[FIRST]);
    f.mask("b.png", 255, &[FIRST]);
    f.mask("third.png", 255, &[FIRST]);
    let (text, hint) = refused(&f);
    let expected = "3 of 5 images cannot be used (3 have no mask of their name); nothing was written; ";
    assert!(text.contains(expected) && text.contains("c.png: no mask with this stem"), "{text}");
    assert!(hint.contains("argument `skip_bad_pairs`"), "{hint}");
    let skipping = PrepareOptions { skip_bad_pairs: true, ..f.options() };
    assert_eq!(prepare(&skipping, &Silent).unwrap().images, 2);
    // images that the data root has count as used
    let append = PrepareOptions { append: true, ..f.options() };
    f.mask("c.png", 255, &[FIRST]);
    assert_eq!(prepare(&append, &Silent).unwrap().images, 1);
    // half is not more than half
    let half = folders();
    half.image("a.png");
    half.image("b.png");
    half.mask("a.png", 255, &[FIRST]);
    assert_eq!(run(&half).unwrap().images, 1);
}

#[test]
fn files_of_annotation_programs_are_named_and_the_remedy_is_to_export_masks() {
    for (name, content, kind) in [
        ("a.json", r#"{"a.png": {"regions": [{"shape_attributes": {}}]}}"#, "a VGG Image Annotator file"),
        ("a.xml", "<annotation><object/></annotation>", "a Pascal VOC file"),
        ("a.geojson", r#"{"geometry": {"coordinates": [[1, 2]]}}"#, "a GeoJSON file"),
        ("a.nrrd", "NRRD0004\n", "an NRRD file"),
    ] {
        let f = folders();
        f.image("a.png");
        fs::write(f.masks.join(name), content).unwrap();
        let folder = refused(&f);
        let file = prepare(&PrepareOptions { masks: vec![f.masks.join(name)], ..f.options() }, &Silent).unwrap_err();
        for (text, hint) in [folder, (file.to_string(), file.hint())] {
            assert!(text.contains(name) && text.contains(kind), "{text}");
            assert!(hint.starts_with("export the masks as images") && !hint.contains("stem"), "{hint}");
        }
    }
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[FIRST]);
    let file = prepare(&PrepareOptions { masks: vec![f.masks.join("a.png")], ..f.options() }, &Silent).unwrap_err();
    assert!(file.to_string().contains("is a file, and the images are in a folder"), "{file}");
}

#[test]
fn images_in_folders_of_patients_are_read_as_they_are() {
    let f = folders();
    for patient in ["P1", "P2", "P3"] {
        fs::create_dir(f.images.join(patient)).unwrap();
        f.image(&format!("{patient}/image.png"));
        mask(255, &[FIRST]).save(f.images.join(patient).join("mask.png")).unwrap();
    }
    let both = PrepareOptions { masks: vec![f.images.clone()], ..f.options() };
    let error = prepare(&both, &Silent).unwrap_err();
    assert!(error.hint().contains("such a folder is read as it is: `prsmed data scan '"), "{}", error.hint());
    let listed: Vec<PathBuf> = ["P1", "P2"].map(|name| f.images.join(name)).to_vec();
    let error = prepare(&PrepareOptions { images: listed.clone(), masks: listed, ..f.options() }, &Silent).unwrap_err();
    assert!(
        error.to_string().contains("is the first of 2 folders of images") && error.hint().contains("read as it is"),
        "{error}"
    );
    // one folder after the other, with equal names
    let one = |name: &str| PrepareOptions {
        images: vec![f.images.join(name)],
        masks: vec![f.images.join(name)],
        append: true,
        skip_bad_pairs: true,
        ..f.options()
    };
    for name in ["P1", "P2"] {
        fs::rename(f.images.join(name).join("mask.png"), f.images.join(name).join("image_mask.png")).unwrap();
    }
    GrayImage::from_pixel(60, 40, Luma([91])).save(f.images.join("P2/image.png")).unwrap();
    prepare(&one("P1"), &Silent).unwrap();
    let report = prepare(&one("P2"), &Silent);
    let text =
        report.map_or_else(|error| format!("{error} {}", error.hint()), |report| format!("{:?}", report.skipped));
    assert!(text.contains("another image of this name") && !text.contains("are the same folder"), "{text}");
}

#[test]
fn a_class_that_differs_from_another_in_case_only_is_refused() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[FIRST]);
    run(&f).unwrap();
    for name in ["LUNG_CT", "lung_ct"] {
        let error = prepare(&PrepareOptions { modality: name.into(), ..f.options() }, &Silent).unwrap_err();
        assert!(
            error.to_string().contains("`lung_CT`, and `") && error.hint().contains("argument `append`"),
            "{error}"
        );
        assert!(!f.out.join(name).exists());
    }
}

/// Stem, question, answer and position of each row.
fn table(f: &Folders) -> Vec<[String; 4]> {
    let mut csv = csv::Reader::from_path(f.out.join("annotations/lung_CT.csv")).unwrap();
    let row = |row: csv::StringRecord| {
        let stem = row[0].rsplit_once('/').unwrap().1.trim_end_matches(".png").to_owned();
        [stem, row[1].to_owned(), row[2].to_owned(), row[3].to_owned()]
    };
    csv.records().map(|record| row(record.unwrap())).collect()
}

#[test]
fn instances_are_rows_with_their_own_location() {
    let f = folders();
    f.image("two.png");
    f.mask("two.png", 255, &[FIRST, (40, 25, 45, 30)]);
    f.image("three.png");
    f.mask("three.png", 255, &[FIRST, (40, 25, 45, 30), (25, 18, 33, 22)]);
    f.image("one.png");
    // 4 pixels are no instance
    f.mask("one.png", 255, &[FIRST, (40, 25, 41, 26)]);
    let all = PrepareOptions { instances: true, val_frac: 0.0, test_frac: 0.0, rows_per_image: 3, ..f.options() };
    let report = prepare(&all, &Silent).unwrap();
    assert_eq!((report.images, report.rows), (3, 3 * (1 + 3 + 3)));
    let rows = table(&f);
    let of = |stem: &str| -> Vec<&[String; 4]> { rows.iter().filter(|row| row[0] == stem).collect() };
    for (stem, which, position, area) in [
        ("two_larger", "larger", "upper left", 100),
        ("two_smaller", "smaller", "lower right", 36),
        ("three_largest", "largest", "upper left", 100),
        ("three_smallest", "smallest", "lower right", 36),
    ] {
        let found = of(stem);
        assert_eq!((found.len(), written(&f, stem)), (3, area), "{stem}");
        for [_, question, answer, own] in found {
            assert!(question.contains(&format!("the {which} lesion")), "{question}");
            assert!(answer.contains(position) && own == position, "{answer}");
        }
    }
    assert_eq!((of("two").len(), of("two")[0][1].contains("larger")), (3, false));
    assert_eq!((of("one").len(), written(&f, "one")), (3, 104), "the whole target keeps all of its pixels");
    let checked = check::check(&f.out, None, Labels::NONE, &Silent).unwrap();
    assert_eq!((checked.bad, checked.words.wrong), (vec![], vec![]));
}

#[test]
fn all_masks_and_labels_of_an_image_are_joined_to_one_target() {
    let f = folders();
    f.image("a.png");
    f.mask("a_mask_1.png", 1, &[FIRST]);
    // two labels, of which one is another than that of the first file
    let mut second = mask(2, &[SECOND]);
    second.put_pixel(0, 0, Luma([3]));
    second.save(f.masks.join("a_mask_2.png")).unwrap();
    assert!(run(&f).is_err(), "without a name, labels that differ are refused");
    let join = |labels: &str| {
        let named_labels = labels.parse().unwrap();
        let join = Some("finding".to_owned());
        PrepareOptions { join, named_labels, val_frac: 0.0, test_frac: 0.0, ..f.options() }
    };
    let report = prepare(&join(""), &Silent).unwrap();
    assert_eq!((report.images, written(&f, "a")), (1, 201));
    assert!(table(&f).iter().all(|row| row[1].contains("finding")), "{:?}", table(&f));
    // names of labels say what belongs to it
    fs::remove_dir_all(&f.out).unwrap();
    prepare(&join("1=liver,2=tumour,3=background"), &Silent).unwrap();
    assert_eq!((written(&f, "a"), table(&f).len()), (200, 2));
    fs::remove_dir_all(&f.out).unwrap();
    let error =
        prepare(&PrepareOptions { join: Some("mass in the upper left part".into()), ..join("") }, &Silent).unwrap_err();
    assert!(error.to_string().contains("mass in the upper left part"), "{error}");
}
