//! Tests of the preparation on folders made for them.

use std::fs;

use image::{ColorType, GrayImage, ImageBuffer, Luma, imageops};

use super::location::describe;
use super::*;
use crate::check;
use crate::decode::StoredMask;
use crate::labels::Labels;
use crate::manifest::{Manifest, Presence, Row};
use crate::position::Zones;
use prsmed_base::event::{Event, Silent};
use prsmed_base::location::first_location;

pub(super) struct Folders {
    _keep: tempfile::TempDir,
    pub(super) images: PathBuf,
    pub(super) masks: PathBuf,
    pub(super) out: PathBuf,
}

pub(super) fn folders() -> Folders {
    let keep = tempfile::tempdir().unwrap();
    let [images, masks, out] = ["images", "masks", "out"].map(|name| keep.path().join(name));
    fs::create_dir(&images).unwrap();
    fs::create_dir(&masks).unwrap();
    Folders { _keep: keep, images, masks, out }
}

impl Folders {
    pub(super) fn image(&self, name: &str) {
        GrayImage::from_pixel(60, 40, Luma([90])).save(self.images.join(name)).unwrap();
    }

    /// A mask with boxes (left, top, right, bottom) of `value`.
    pub(super) fn mask(&self, name: &str, value: u8, boxes: &[(u32, u32, u32, u32)]) {
        mask(value, boxes).save(self.masks.join(name)).unwrap();
    }

    pub(super) fn options(&self) -> PrepareOptions {
        PrepareOptions::new(&self.images, &self.masks, "lung_CT", &self.out)
    }

    fn rows(&self) -> Vec<[String; 5]> {
        let mut csv = csv::Reader::from_path(self.out.join("annotations/lung_CT.csv")).unwrap();
        csv.records().map(|row| [0, 1, 2, 3, 4].map(|i| row.as_ref().unwrap()[i].to_owned())).collect()
    }
}

pub(super) fn mask(value: u8, boxes: &[(u32, u32, u32, u32)]) -> GrayImage {
    GrayImage::from_fn(60, 40, |x, y| {
        let inside = boxes.iter().any(|&(l, t, r, b)| (l..=r).contains(&x) && (t..=b).contains(&y));
        Luma([if inside { value } else { 0 }])
    })
}

#[test]
fn pairs_are_matched_by_stem_and_other_files_are_listed() {
    let f = folders();
    for name in ["a.png", "b.jpg", "c.tif", "alone.png", "empty.png", "small.png", "truncated.png", "kept_seg.png"] {
        f.image(name);
    }
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    f.mask("b_mask.png", 1, &[(50, 30, 58, 38)]);
    f.mask("c_Segmentation.png", 255, &[(28, 18, 32, 22)]);
    f.mask("kept_seg.png", 255, &[(28, 2, 32, 6)]);
    f.mask("empty_seg.png", 255, &[]);
    f.mask("nobody.png", 255, &[(1, 1, 2, 2)]);
    f.mask("truncated.png", 255, &[(1, 1, 2, 2)]);
    GrayImage::from_pixel(30, 40, Luma([255])).save(f.masks.join("small.png")).unwrap();
    let truncated = fs::read(f.images.join("truncated.png")).unwrap();
    fs::write(f.images.join("truncated.png"), &truncated[..truncated.len() / 2]).unwrap();
    fs::write(f.images.join("notes.txt"), "x").unwrap();
    let report = prepare(&f.options(), &Silent).unwrap();
    assert_eq!((report.images, report.rows), (4, 8));
    let reason = |name: &str| {
        let skip = report.skipped.iter().find(|skip| skip.path.ends_with(name));
        skip.map(|skip| skip.reason.as_str()).unwrap_or_default()
    };
    assert_eq!(report.skipped.len(), 6);
    assert_eq!(reason("images/alone.png"), "no mask with this stem");
    assert_eq!(reason("masks/nobody.png"), "no image with this stem");
    assert_eq!(reason("masks/empty_seg.png"), "the mask is empty");
    assert_eq!(reason("masks/small.png"), "is 30 x 40 pixels, its image 60 x 40");
    assert!(reason("images/truncated.png").starts_with("cannot be read"));
    assert_eq!(reason("images/notes.txt"), "not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM file");
    let locations: BTreeMap<_, _> = f.rows().into_iter().map(|[path, _, _, location, _]| (path, location)).collect();
    let location =
        |stem: &str| locations.iter().find(|(path, _)| path.ends_with(&format!("/{stem}.png"))).unwrap().1.as_str();
    assert_eq!(
        [location("a"), location("b"), location("c"), location("kept_seg")],
        ["upper left", "lower right", "center", "upper center"]
    );
    for [path, question, answer, location, split] in f.rows() {
        assert!(!question.contains('{') && first_location(&answer).unwrap().to_string() == location, "{answer}");
        let mask = image::open(f.out.join(&path)).unwrap();
        assert_eq!(mask.color(), ColorType::L8);
        assert!(mask.to_luma8().as_raw().iter().all(|&value| value == 0 || value == 255));
        assert!(path.starts_with(&format!("lung_CT/{split}_masks/")));
    }
    let copied = fs::read_dir(f.out.join("lung_CT/train_images")).unwrap().map(|entry| entry.unwrap().path());
    for copy in copied.collect::<Vec<_>>() {
        assert_eq!(fs::read(&copy).unwrap(), fs::read(f.images.join(copy.file_name().unwrap())).unwrap());
    }
}

#[test]
fn progress_counts_every_pair() {
    #[derive(Default)]
    struct Read(std::sync::Mutex<Vec<u64>>);
    impl Observer for Read {
        fn on(&self, event: &Event) {
            let mut found = self.0.lock().unwrap();
            match event {
                Event::Started { phase, total, .. } if phase == "read masks" => *found = vec![*total],
                Event::Advanced { done } if found.len() <= 3 => found.push(*done),
                _ => {}
            }
        }
    }
    let f = folders();
    for name in ["a.png", "b.png", "c.png"] {
        f.image(name);
        f.mask(name, 255, &[(2, 2, 9, 9)]);
    }
    let observer = Read::default();
    prepare(&f.options(), &observer).unwrap();
    let mut found = observer.0.into_inner().unwrap();
    found[1..].sort_unstable();
    assert_eq!(found, [3, 1, 2, 3], "the number of pairs, and how many are done");
}

#[test]
fn existing_files_are_not_overwritten() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    prepare(&f.options(), &Silent).unwrap();
    let again = prepare(&f.options(), &Silent).unwrap_err();
    assert!(again.to_string().contains("already exists; nothing was written"), "{again}");
    let other = PrepareOptions { modality: "brain".into(), ..f.options() };
    assert_eq!(prepare(&other, &Silent).unwrap().images, 1);
    fs::remove_file(f.out.join("annotations/lung_CT.csv")).unwrap();
    let stopped = prepare(&f.options(), &Silent).unwrap_err();
    assert!(stopped.to_string().contains("as a preparation that was stopped leaves it"), "{stopped}");
    let goes_on = PrepareOptions { append: true, ..f.options() };
    assert_eq!(prepare(&goes_on, &Silent).unwrap().images, 1);
}

#[test]
fn nothing_is_written_through_links() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    let (elsewhere, annotations) = (f.images.with_file_name("elsewhere"), f.out.join("annotations"));
    fs::create_dir_all(&elsewhere).unwrap();
    fs::create_dir_all(&annotations).unwrap();
    let prepare = || prepare(&f.options(), &Silent).unwrap_err().to_string();
    std::os::unix::fs::symlink(elsewhere.join("lung_CT.csv"), annotations.join("lung_CT.csv")).unwrap();
    assert!(prepare().contains("already exists"));
    fs::remove_dir_all(&annotations).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &annotations).unwrap();
    assert!(prepare().ends_with("annotations: cannot create"));
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    assert!(!f.out.join("lung_CT").exists(), "refused before the first file");
}

#[test]
fn images_and_masks_may_share_a_folder_if_masks_have_a_suffix() {
    let f = folders();
    f.image("a.png");
    f.image("b.png");
    mask(255, &[(2, 2, 9, 9)]).save(f.images.join("a_mask.png")).unwrap();
    mask(255, &[(2, 2, 9, 9)]).save(f.images.join("b_mask.png")).unwrap();
    let report = prepare(&PrepareOptions { masks: vec![f.images.clone()], ..f.options() }, &Silent).unwrap();
    assert_eq!((report.images, report.skipped.len()), (2, 0));
}

#[test]
fn masks_that_show_nothing_or_everything_are_told() {
    let f = folders();
    for name in ["a.png", "b.png"] {
        f.image(name);
        mask(255, &[(0, 0, 60, 40)]).save(f.masks.join(name)).unwrap();
    }
    let whole = prepare(&f.options(), &Silent).unwrap_err();
    assert!(whole.to_string().contains("every mask is foreground only; nothing was written"), "{whole}");
    assert!(!f.out.exists(), "nothing was written");
    let same = prepare(&PrepareOptions { masks: vec![f.images.clone()], ..f.options() }, &Silent).unwrap_err();
    assert!(same.hint().contains("images and masks are the same folder"), "{}", same.hint());
    f.mask("a.png", 255, &[]);
    f.mask("b.png", 255, &[]);
    let empty = prepare(&f.options(), &Silent).unwrap_err();
    assert!(empty.hint().contains("their export failed; the argument `negatives` keeps"), "{}", empty.hint());
    let negatives = PrepareOptions { negatives: Negatives::Usual, ..f.options() };
    let report = prepare(&negatives, &Silent).unwrap();
    assert!(report.notes.iter().any(|note| note.starts_with("no image shows its target")), "{:?}", report.notes);
}

#[test]
fn ambiguous_stems_and_folders_without_pairs_are_errors() {
    let f = folders();
    let nothing = prepare(&f.options(), &Silent).unwrap_err();
    assert!(nothing.to_string().contains("no usable pair") && nothing.hint().contains("_segmentation"), "{nothing}");
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    f.mask("a_mask.png", 255, &[(2, 2, 9, 9)]);
    let twice = prepare(&f.options(), &Silent).unwrap_err();
    assert!(twice.to_string().contains("second mask for the stem `a`"), "{twice}");
    f.image("a.jpg");
    let twice = prepare(&f.options(), &Silent).unwrap_err();
    assert!(twice.to_string().contains("second image for the stem `a`"), "{twice}");
    let missing = prepare(&PrepareOptions { masks: vec![f.out.join("no")], ..f.options() }, &Silent).unwrap_err();
    assert!(missing.to_string().contains("cannot read"), "{missing}");
    assert!(!f.out.exists());
}

#[test]
fn options_out_of_range_are_named() {
    let f = folders();
    let refuse = |change: &dyn Fn(&mut PrepareOptions)| {
        let mut options = f.options();
        change(&mut options);
        prepare(&options, &Silent).unwrap_err().to_string()
    };
    for name in [
        "", "a/b", "..", "annotations", "Annotation", "masks", "train_masks", "images", "test_Images", "a:b", "ct ",
        "ct.", "-ct", "nul", "COM1", "aux.ct", "l\u{e9}sion", "a\\b",
    ] {
        let text = refuse(&|o| o.modality = name.into());
        assert!(text.contains("`modality`") && text.contains("is not a folder name"), "{text}");
    }
    assert!(refuse(&|o| o.modality = "x".repeat(101)).contains("101 letters; 100 are the limit"));
    for name in ["masks_CT", "my-images2", "v1.2_CT", "common", "com10"] {
        assert!(!refuse(&|o| o.modality = name.into()).contains("`modality`"), "{name}");
    }
    assert!(refuse(&|o| o.val_frac = 0.95).contains("`val_frac, test_frac`"));
    assert!(refuse(&|o| o.rows_per_image = 0).contains("`rows_per_image`"));
    assert!(refuse(&|o| o.target = "upper left lobe".into()).contains("`target`"));
    assert!(refuse(&|o| o.templates = Some(f.out.join("no.toml"))).contains("cannot read"));
}

#[test]
fn several_regions_are_described_together_or_as_two() {
    let both = mask(255, &[(2, 2, 12, 12), (45, 28, 55, 38)]);
    let location = |zones, several| describe(&both, zones, several).unwrap();
    let together = location(Zones::Grid, Several::Together);
    assert_eq!((together.zone.as_str(), together.count), ("center", 2));
    let two = location(Zones::Grid, Several::Regions);
    assert_eq!((two.zone.as_str(), two.second_zone.as_deref()), ("upper left", Some("lower right")));
    let two = location(Zones::Quadrants, Several::Regions);
    assert_eq!((two.zone.as_str(), two.second_zone.as_deref()), ("top left", Some("bottom right")));
    assert_eq!(location(Zones::Quadrants, Several::Together).zone, "center");
    let mut speckled = mask(255, &[(2, 2, 21, 21)]);
    speckled.put_pixel(50, 35, Luma([255]));
    let one = describe(&speckled, Zones::Quadrants, Several::Regions).unwrap();
    assert_eq!((one.count, one.second_zone), (1, None));
    assert_eq!(describe(&mask(255, &[]), Zones::Grid, Several::Together), None);
}

#[test]
fn quadrant_answers_mention_the_distance_to_the_centre() {
    let f = folders();
    for (stem, bounds) in [("far", (2, 2, 6, 6)), ("near", (22, 14, 27, 18)), ("mid", (25, 15, 35, 25))] {
        f.image(&format!("{stem}.png"));
        f.mask(&format!("{stem}.png"), 255, &[bounds]);
    }
    let options = PrepareOptions { zones: Zones::Quadrants, rows_per_image: 1, ..f.options() };
    prepare(&options, &Silent).unwrap();
    let rows = f.rows();
    let answer = |stem: &str| rows.iter().find(|row| row[0].contains(stem)).map(|row| row[2].as_str()).unwrap();
    assert!(answer("far").contains("top left") && answer("far").contains("far from the middle"));
    assert!(answer("near").contains("top left") && answer("near").contains("close to the middle"));
    assert!(answer("mid").contains("center") && !answer("mid").contains("middle"));
}

#[test]
fn answer_and_position_name_both_zones() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 12, 12), (45, 28, 55, 38)]);
    prepare(&PrepareOptions { several: Several::Regions, ..f.options() }, &Silent).unwrap();
    for [_, _, answer, location, _] in f.rows() {
        assert_eq!(location, "upper left and lower right");
        assert!(answer.contains("upper left") && answer.contains("lower right"), "{answer}");
    }
}

#[test]
fn masks_of_any_depth_become_binary() {
    let deep =
        |values: [u16; 3]| StoredMask::from(ImageBuffer::<Luma<u16>, _>::from_raw(3, 1, values.to_vec()).unwrap());
    assert_eq!(deep([0, 1, 2]).binary().into_raw(), [0, 255, 255]);
    assert_eq!(deep([0, 30_000, 65_535]).binary().into_raw(), [0, 0, 255]);
    let shallow = |values: [u8; 3]| StoredMask::from(GrayImage::from_raw(3, 1, values.to_vec()).unwrap());
    assert_eq!(shallow([0, 1, 1]).binary().into_raw(), [0, 255, 255]);
    assert_eq!(shallow([3, 120, 250]).binary().into_raw(), [0, 0, 255]);
}

#[test]
fn the_same_seed_gives_the_same_root() {
    let f = folders();
    for number in 0..20 {
        f.image(&format!("{number}.png"));
        f.mask(&format!("{number}.png"), 255, &[(number, 2, number + 9, 9)]);
    }
    let csv = |out: &str, seed| {
        let options = PrepareOptions { out: f.out.join(out), seed, ..f.options() };
        let report = prepare(&options, &Silent).unwrap();
        assert_eq!(
            report.images_by_split,
            BTreeMap::from([("test".into(), 2), ("train".into(), 16), ("val".into(), 2)])
        );
        fs::read_to_string(f.out.join(out).join("annotations/lung_CT.csv")).unwrap()
    };
    let first = csv("a", 5);
    assert_eq!(first, csv("b", 5));
    assert_ne!(first, csv("c", 6));
}

#[test]
fn label_maps_need_a_choice_and_narrow_images_are_named() {
    let f = folders();
    ImageBuffer::<Luma<u16>, _>::from_fn(60, 40, |x, _| Luma([u16::from(x > 9) * 4095]))
        .save(f.images.join("a.png"))
        .unwrap();
    f.image("b.png");
    let mut map = mask(5, &[(2, 2, 9, 9)]);
    imageops::replace(&mut map, &GrayImage::from_pixel(10, 10, Luma([20])), 45, 25);
    map.save(f.masks.join("a.png")).unwrap();
    f.mask("b.png", 255, &[(2, 2, 9, 9)]);
    let report = prepare(&f.options(), &Silent).unwrap();
    assert_eq!((report.images, report.skipped.len()), (1, 1));
    let expected = "the mask has several labels: 5 (64 pixels), 20 (100 pixels); choose with the argument `labels`";
    assert_eq!(report.skipped[0].reason, expected);

    let chosen = PrepareOptions { labels: "20".parse().unwrap(), modality: "chosen".into(), ..f.options() };
    let report = prepare(&chosen, &Silent).unwrap();
    assert_eq!((report.images, report.skipped[0].reason.as_str()), (1, "the mask is empty"), "b.png has no label 20");
    assert_eq!(report.depth.narrow.len(), 1);
    let csv = fs::read_to_string(f.out.join("annotations/chosen.csv")).unwrap();
    assert!(csv.contains("lower right") && !csv.contains("upper left"), "{csv}");
}

/// Splits of the patients of all rows.
fn patient_splits(out: &Path) -> BTreeMap<String, BTreeSet<Split>> {
    let mut splits = BTreeMap::<String, BTreeSet<Split>>::new();
    for row in Manifest::open(out, None).unwrap().rows {
        splits.entry(row.patient.unwrap()).or_default().insert(row.split);
    }
    splits
}

#[test]
fn images_of_a_patient_are_in_one_split() {
    let f = folders();
    for number in 0..30 {
        let name = format!("P{}_{number}.png", number / 3);
        f.image(&name);
        f.mask(&name, 255, &[(number, 2, number + 9, 9)]);
    }
    f.image("scout.png");
    f.mask("scout.png", 255, &[(2, 2, 9, 9)]);
    let options = PrepareOptions { patients: Patients::Pattern("^P([0-9]+)_".into()), ..f.options() };
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.images, report.patients), (31, Some(11)));
    assert_eq!(report.own_patients, [f.images.join("scout.png")]);
    let splits = patient_splits(&f.out);
    assert_eq!(splits.len(), 11);
    assert!(splits.contains_key("7") && splits.contains_key("scout"));
    assert!(splits.values().all(|splits| splits.len() == 1), "{splits:?}");
    let of = |split| splits.values().filter(|splits| splits.contains(&split)).count();
    assert_eq!([of(Split::Train), of(Split::Val), of(Split::Test)], [9, 1, 1]);
}

#[test]
fn new_files_are_added_and_nothing_else_changes() {
    let f = folders();
    let add = |patient: usize, number: usize| {
        let name = format!("P{patient}_{number}.png");
        let left = u32::try_from(number).unwrap();
        f.image(&name);
        f.mask(&name, 255, &[(left, 2, left + 9, 9)]);
    };
    (0..12).for_each(|number| add(number / 2, number));
    let options = PrepareOptions { patients: Patients::Pattern("^(P[0-9]+)_".into()), ..f.options() };
    prepare(&options, &Silent).unwrap();
    let files = || -> BTreeMap<PathBuf, Vec<u8>> {
        let folders = ["annotations", "lung_CT/train_images", "lung_CT/train_masks", "lung_CT/test_masks"];
        let entries = folders.iter().flat_map(|folder| fs::read_dir(f.out.join(folder)).unwrap());
        entries.map(|entry| entry.unwrap().path()).map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    };
    let (before, splits) = (files(), patient_splits(&f.out));
    let refused = prepare(&options, &Silent).unwrap_err();
    assert!(refused.hint().contains("argument `append`"), "{refused}");
    let append = PrepareOptions { append: true, ..options };
    let nothing = prepare(&append, &Silent).unwrap();
    assert_eq!((nothing.images, nothing.known), (0, 12));
    // every known patient and four new ones get an image; a known file has changed
    (0..10).for_each(|patient| add(patient, 20 + patient));
    GrayImage::from_pixel(60, 40, Luma([91])).save(f.images.join("P0_0.png")).unwrap();
    let report = prepare(&append, &Silent).unwrap();
    assert_eq!((report.images, report.known, report.skipped.len()), (10, 11, 1));
    assert!(report.skipped[0].reason.contains("has another image of this name"), "{:?}", report.skipped);
    let after = files();
    assert!(before.iter().all(|(path, bytes)| after[path] == *bytes), "existing files and rows stay");
    assert!(after.contains_key(&f.out.join("annotations/lung_CT.2.csv")));
    let all = patient_splits(&f.out);
    assert_eq!(all.len(), 10);
    assert!(splits.iter().all(|(patient, split)| all[patient] == *split), "{splits:?} {all:?}");
    assert_eq!(check::check(&f.out, None, Labels::NONE, &Silent).unwrap().bad, []);
}

#[test]
fn an_interrupted_addition_continues_but_other_files_stay() {
    let f = folders();
    for name in ["a.png", "b.png"] {
        f.image(name);
        f.mask(name, 255, &[(2, 2, 9, 9)]);
    }
    let append = PrepareOptions { append: true, val_frac: 0.0, test_frac: 0.0, ..f.options() };
    fs::create_dir_all(f.out.join("lung_CT/train_images")).unwrap();
    fs::copy(f.images.join("a.png"), f.out.join("lung_CT/train_images/a.png")).unwrap();
    fs::write(f.out.join("lung_CT/train_images/b.png"), "something else").unwrap();
    let refused = prepare(&append, &Silent).unwrap_err();
    assert!(refused.to_string().contains("b.png: exists with another content"), "{refused}");
    fs::remove_file(f.out.join("lung_CT/train_images/b.png")).unwrap();
    assert_eq!(prepare(&append, &Silent).unwrap().images, 2);
}

#[test]
fn an_addition_that_was_killed_while_it_wrote_a_file_continues() {
    let f = folders();
    for name in ["a.png", "b.png", "c.png"] {
        f.image(name);
        f.mask(name, 255, &[(2, 2, 9, 9)]);
    }
    let append = PrepareOptions { append: true, val_frac: 0.0, test_frac: 0.0, ..f.options() };
    fs::create_dir_all(f.out.join("lung_CT/train_images")).unwrap();
    fs::create_dir_all(f.out.join("annotations")).unwrap();
    let image = fs::read(f.images.join("a.png")).unwrap();
    fs::write(f.out.join("lung_CT/train_images/a.png"), &image[..image.len() / 2]).unwrap();
    fs::write(f.out.join("lung_CT/train_images/b.png"), "").unwrap();
    let leftover = f.out.join("annotations/.lung_CT.csv.prsmed-tmp-aB3dE6");
    fs::write(&leftover, "image_path,question").unwrap();
    assert_eq!(prepare(&append, &Silent).unwrap().images, 3);
    for name in ["a.png", "b.png", "c.png"] {
        let copied = fs::read(f.out.join("lung_CT/train_images").join(name)).unwrap();
        assert_eq!(copied, fs::read(f.images.join(name)).unwrap(), "{name}");
    }
    assert!(!leftover.exists());
    assert_eq!(f.rows().len(), 6);
    assert_eq!(check::check(&f.out, None, Labels::NONE, &Silent).unwrap().bad, []);
}

#[test]
fn two_additions_to_one_class_never_write_at_once() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    let append = PrepareOptions { append: true, val_frac: 0.0, test_frac: 0.0, ..f.options() };
    fs::create_dir_all(f.out.join("lung_CT")).unwrap();
    let other = fs::File::open(f.out.join("lung_CT")).unwrap();
    other.try_lock().unwrap();
    let refused = prepare(&append, &Silent).unwrap_err();
    assert!(refused.to_string().contains("another process is adding files to this class"), "{refused}");
    assert!(!f.out.join("annotations/lung_CT.csv").exists() && !f.out.join("lung_CT/train_images/a.png").exists());
    drop(other);
    assert_eq!(prepare(&append, &Silent).unwrap().images, 1);

    // the other one has ended between the reading of the rows and the lock
    let read = Existing::read(&append).unwrap();
    assert_eq!(read.free_annotation_path().unwrap(), f.out.join("annotations/lung_CT.2.csv"));
    fs::write(f.out.join("annotations/lung_CT.2.csv"), "").unwrap();
    let refused = read.free_annotation_path().unwrap_err();
    assert!(refused.to_string().contains("another process has added files to this class meanwhile"), "{refused}");
    assert!(refused.hint().contains("argument `append`"), "{refused}");
}

#[test]
fn a_known_patient_keeps_its_split_in_another_modality() {
    let f = folders();
    for number in 0..10 {
        let name = format!("P{number}_x.png");
        f.image(&name);
        f.mask(&name, 255, &[(2, 2, 9, 9)]);
    }
    let options = PrepareOptions { patients: Patients::Pattern("^(P[0-9]+)_".into()), ..f.options() };
    prepare(&options, &Silent).unwrap();
    let other = PrepareOptions { modality: "lung_MR".into(), seed: 9, ..options };
    prepare(&other, &Silent).unwrap();
    assert!(patient_splits(&f.out).values().all(|splits| splits.len() == 1));
}

#[test]
fn empty_masks_become_rows_about_an_absent_target() {
    let f = folders();
    for number in 0..9 {
        let name = format!("{number}.png");
        f.image(&name);
        f.mask(&name, 255, if number < 3 { &[(2, 2, 9, 9)] } else { &[] });
    }
    let of = |modality: &str, negatives| {
        let options = PrepareOptions { modality: modality.into(), negatives, ..f.options() };
        prepare(&options, &Silent).unwrap()
    };
    let (none, all) = (of("none", Negatives::Skipped), of("all", Negatives::Usual));
    assert_eq!((none.images, none.absent, none.skipped.len()), (3, 0, 6));
    assert_eq!((all.images, all.absent, all.rows, all.skipped.len()), (9, 6, 18, 0));
    let some = of("some", Negatives::PerPositive(1.0));
    assert_eq!((some.images, some.absent, some.absent_left_out), (6, 3, 3));
    let report = check::check(&f.out, None, Labels::NONE, &Silent).unwrap();
    assert_eq!(report.bad, []);
    let absent: Vec<_> = report.fingerprint.iter().map(|class| (class.modality.as_str(), class.absent)).collect();
    assert_eq!(absent, [("all", 12), ("none", 0), ("some", 6)]);
    for row in Manifest::open(&f.out, None).unwrap().rows {
        let says_none = row.answer.contains("no lesion") || row.answer.contains("No lesion");
        assert_eq!(
            (row.target().presence == Presence::Absent, row.position.is_none()),
            (says_none, says_none),
            "{}",
            row.answer
        );
    }
    let csv = fs::read_to_string(f.out.join("annotations/none.csv")).unwrap();
    assert!(csv.starts_with("image_path,question,answer,position,split\n"), "no column is added without need");
    let refused = |negatives| {
        let options = PrepareOptions { modality: "bad".into(), negatives, ..f.options() };
        prepare(&options, &Silent).unwrap_err().to_string()
    };
    assert!(refused(Negatives::PerPositive(0.0)).contains("argument `negatives`"));
}

#[test]
fn each_named_label_is_a_target_of_its_own() {
    let f = folders();
    for (name, second) in [("a.png", true), ("b.png", false)] {
        f.image(name);
        let mut map = mask(1, &[(2, 2, 9, 9)]);
        if second {
            imageops::replace(&mut map, &GrayImage::from_pixel(10, 10, Luma([2])), 45, 25);
        }
        map.save(f.masks.join(name)).unwrap();
    }
    let options = PrepareOptions {
        named_labels: "1=liver,2=tumour".parse().unwrap(),
        negatives: Negatives::Usual,
        val_frac: 0.5,
        ..f.options()
    };
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.images, report.rows, report.absent), (2, 8, 1));
    let manifest = Manifest::open(&f.out, None).unwrap();
    let of = |stem: &str| {
        let ends = |row: &&Row| row.target().mask_path.file_stem().unwrap() == stem;
        manifest.rows.iter().find(ends).unwrap()
    };
    assert_eq!(of("a_liver").position.as_deref(), Some("upper left"));
    assert_eq!(of("a_tumour").position.as_deref(), Some("lower right"));
    assert_eq!(
        (of("b_liver").target().presence, of("b_tumour").target().presence),
        (Presence::Present, Presence::Absent)
    );
    assert!(of("a_tumour").question.contains("tumour"));
    assert_eq!(of("a_liver").split, of("a_tumour").split, "one image is in one split");
    assert_eq!(check::check(&f.out, None, Labels::NONE, &Silent).unwrap().bad, []);
    let again = prepare(&PrepareOptions { append: true, ..options }, &Silent).unwrap();
    assert_eq!((again.known, again.images), (2, 0));
}

#[test]
fn toy_layout_goes_through_prepare() {
    let f = folders();
    fs::create_dir(f.images.join("toy")).unwrap();
    let files = [("P1", "train", "a"), ("P1", "train", "b"), ("P2", "val", "c"), ("P3", "test", "d")];
    for (patient, split, name) in files {
        let folder = f.images.join(patient).join(split);
        fs::create_dir_all(&folder).unwrap();
        GrayImage::new(60, 40).save(folder.join(format!("{name}.scan.png"))).unwrap();
        mask(255, &[(2, 2, 9, 9)]).save(folder.join(format!("{name}.spot.png"))).unwrap();
    }
    let scanned = scan(&f.images, &ScanOptions::default(), &Silent).unwrap();
    assert_eq!(scanned.layouts[0].name, "toy");
    let report = prepare_pairs(scanned.into_table().unwrap(), &f.options(), &Silent).unwrap();
    assert_eq!((report.images, report.patients, report.skipped), (4, Some(3), Vec::new()));
    let manifest = Manifest::open(&f.out, None).unwrap();
    for (patient, split, name) in files {
        let stem = format!("{name}_spot");
        let row = manifest.rows.iter().find(|row| row.target().mask_path.file_stem() == Some(stem.as_ref())).unwrap();
        assert_eq!((row.patient.as_deref(), row.split.name()), (Some(patient), split));
        assert!(row.question.contains("spot"), "{}", row.question);
    }
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let f = folders();
    f.image("a.png");
    f.mask("a.png", 255, &[(2, 2, 9, 9)]);
    let pair = Pair::new("a", f.images.join("a.png"), f.masks.join("a.png"));
    let refused = |rows: Vec<Pair>| {
        let table = PairTable { rows, ..PairTable::default() };
        prepare_pairs(table, &f.options(), &Silent).unwrap_err().to_string()
    };
    assert!(refused(vec![Pair { masks: Vec::new(), ..pair.clone() }]).contains("has no mask in the table"));
    assert!(refused(vec![pair.clone(), pair.clone()]).contains("is a second image of the name `a`"));
    let text = |target: Option<&str>, question: &str| PairText {
        target: target.map(str::to_owned),
        question: question.into(),
        answer: "There.".into(),
    };
    let texts =
        vec![text(None, "Where is it?"), text(Some("lesion"), "And the lesion?"), text(Some("cyst"), "The cyst?")];
    let table = PairTable { rows: vec![Pair { texts, ..pair }], ..PairTable::default() };
    assert_eq!(prepare_pairs(table, &f.options(), &Silent).unwrap().rows, 2);
    assert_eq!(f.rows()[0][1..3], ["Where is it?", "There."].map(str::to_owned));
    assert_eq!(f.rows()[1][1], "And the lesion?");
}
