//! Creates a missing `val` split from `train`, by image and not by row.
//!
//! Rows whose image files have the same bytes form a group, regardless of their names. Several targets of one image, or
//! copies of it, are therefore in the same split. So are images with the same pixels in other files, and the images of a
//! patient, if the rows name patients. Within each class the groups are ordered by a hash of seed and content, so the split does not depend on paths or on the order of
//! the rows.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::manifest::{Manifest, Split};
use super::marks::{ImageMarks, Mark, Marks};
use super::{decode, held_out};
use prsmed_base::error::{Error, Result};
use prsmed_base::event::Observer;

/// At most `limit` of `items`, evenly spread over them, in their order; all of them if `limit` is 0.
pub fn spread<T>(items: Vec<T>, limit: usize) -> Vec<T> {
    let (all, mut chosen) = (items.len(), 0);
    if limit == 0 || limit >= all {
        return items;
    }
    let is_chosen = |(i, item)| {
        let is_next = chosen < limit && i == chosen * all / limit;
        chosen += usize::from(is_next);
        is_next.then_some(item)
    };
    items.into_iter().enumerate().filter_map(is_chosen).collect()
}

/// At most `limit` of `items`, spread over their classes and evenly over each of them, in their order; all of them if
/// `limit` is 0. A class gets a share by its size, and at least one item if there are not more classes than `limit`.
pub fn spread_over_classes<T>(items: Vec<T>, limit: usize, class: impl Fn(&T) -> String) -> Vec<T> {
    let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, item) in items.iter().enumerate() {
        members.entry(class(item)).or_default().push(index);
    }
    let all = items.len();
    if limit == 0 || limit >= all || members.len() > limit {
        return spread(items, limit);
    }
    // largest remainders, after one for each class
    let mut shares: Vec<usize> = members.values().map(|own| (own.len() * limit / all).max(1)).collect();
    let missing =
        |shares: &[usize], (i, own): (usize, &Vec<usize>)| (own.len() * limit) as f64 / all as f64 - shares[i] as f64;
    while shares.iter().sum::<usize>() != limit {
        let is_short = shares.iter().sum::<usize>() < limit;
        let candidates = members
            .values()
            .enumerate()
            .filter(|(i, own)| if is_short { shares[*i] < own.len() } else { shares[*i] > 1 });
        let by_missing = candidates.map(|at| (missing(&shares, at), at.0));
        // of equal ones the first
        let chosen = if is_short {
            by_missing.rev().max_by(|a, b| a.0.total_cmp(&b.0))
        } else {
            by_missing.min_by(|a, b| a.0.total_cmp(&b.0))
        };
        let Some((_, chosen)) = chosen else { break };
        shares[chosen] = if is_short { shares[chosen] + 1 } else { shares[chosen] - 1 };
    }
    let chosen: HashSet<usize> =
        members.into_values().zip(shares).flat_map(|(own, share)| spread(own, share)).collect();
    items.into_iter().enumerate().filter_map(|(index, item)| chosen.contains(&index).then_some(item)).collect()
}

/// SHA-256 of an image file.
type Content = Mark;

pub(super) fn content(path: &Path) -> Result<Content> {
    Ok(Sha256::digest(decode::bytes_of(path)?).into())
}

/// Result of [`ensure_val`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ValSplit {
    /// Number of different training images before.
    pub images: usize,
    /// Number of different images moved to `val`.
    pub val_images: usize,
    /// Number of rows moved to `val`.
    pub val_rows: usize,
}

/// Moves about `fraction` of each class's training images (or patients) to `val`, at least one if a class has two.
/// `None` when the data set already has `val` rows; nothing is moved then. Rows of extra data roots are neither counted nor moved;
/// synthetic pairs made from images that are now `val` are left out. `marks` get those of the training images.
///
/// # Errors
/// [`Error::Config`] for a fraction outside 0..1 (both excluded), [`Error::Data`] when fewer than two training images
/// exist, [`Error::Io`] when an image cannot be read.
pub fn ensure_val(
    manifest: &mut Manifest,
    fraction: f64,
    seed: u64,
    marks: (&mut Marks, &dyn Observer),
) -> Result<Option<ValSplit>> {
    if manifest.rows.iter().any(|row| row.split == Split::Val) {
        return Ok(None);
    }
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(Error::config(
            "data.val_frac",
            format!("{fraction} is not between 0 and 1"),
            "use for example 0.1",
        ));
    }
    let train = manifest.rows_of(Split::Train);
    let groups = groups(manifest, &train, marks)?;
    let classes = ranked(manifest, &groups, seed);
    let mut chosen = Vec::new();
    for ranked in classes.values() {
        chosen.extend(ranked.iter().take(num_val(ranked.len(), fraction)).map(|(_, content)| *content));
    }
    if chosen.is_empty() {
        if groups.len() < 2 {
            let images: usize = groups.values().map(|group| group.images).sum();
            let of = if images > 1 { " of one patient" } else { "" };
            return Err(Error::data(
                &manifest.root,
                format!("{images} training image(s){of} are too few for a `val` split"),
                "add images, or rows with the split `val`",
            ));
        }
        // Every class has only one image: take the first of all by rank.
        chosen.extend(classes.values().flatten().min().map(|(_, content)| *content));
    }
    validate_on(manifest, &groups, &chosen).map(Some)
}

/// A part of the training and validation images on which one of several runs is validated (cross-validation).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Fold {
    /// Its number, from 0.
    pub number: usize,
    /// Number of folds.
    pub of: usize,
}

/// Makes the images of `fold` the `val` split, and all other training and validation images the `train` split. Folds depend on
/// the content of the images alone. Test rows and rows of extra data roots stay; synthetic pairs made from images of the
/// fold are left out. `marks` get those of the divided images.
///
/// # Errors
/// [`Error::Data`] for a fold without images; [`Error::Io`] when an image cannot be read.
pub fn validate_on_fold(manifest: &mut Manifest, fold: Fold, marks: (&mut Marks, &dyn Observer)) -> Result<ValSplit> {
    let mut rows = manifest.rows_of(Split::Train);
    rows.extend(manifest.rows_of(Split::Val));
    rows.sort_unstable();
    for &row in &rows {
        manifest.rows[row].split = Split::Train;
    }
    let groups = groups(manifest, &rows, marks)?;
    let classes = ranked(manifest, &groups, 0);
    let of_class = |ranked: &Vec<(Content, Content)>| {
        let own = ranked.iter().skip(fold.number).step_by(fold.of.max(1));
        own.map(|(_, content)| *content).collect::<Vec<_>>()
    };
    // a fold of every number has an image of the largest class, or none has as many
    let most = classes.values().map(Vec::len).max().unwrap_or(0);
    if most < fold.of {
        let reason = format!("{} folds need as many images or patients of a class, and there are {most}", fold.of);
        return Err(Error::data(&manifest.root, reason, "add images, or use fewer folds (`data.folds`)"));
    }
    let chosen: Vec<Content> = classes.values().flat_map(of_class).collect();
    validate_on(manifest, &groups, &chosen)
}

/// The groups of each class, in an order that a seed gives. A group in several classes belongs to the first one by name.
fn ranked<'m>(
    manifest: &'m Manifest,
    groups: &BTreeMap<Content, Group>,
    seed: u64,
) -> BTreeMap<&'m str, Vec<(Content, Content)>> {
    let mut classes: BTreeMap<&str, Vec<(Content, Content)>> = BTreeMap::new();
    for (content, group) in groups {
        let class = group.rows.iter().map(|&row| manifest.rows[row].modality.as_str()).min().unwrap_or_default();
        let mut rank = Sha256::new();
        rank.update(seed.to_le_bytes());
        rank.update(content);
        classes.entry(class).or_default().push((rank.finalize().into(), *content));
    }
    for ranked in classes.values_mut() {
        ranked.sort_unstable();
    }
    classes
}

/// Moves the rows of the chosen groups to `val`.
fn validate_on(manifest: &mut Manifest, groups: &BTreeMap<Content, Group>, chosen: &[Content]) -> Result<ValSplit> {
    let moved: Vec<usize> = chosen.iter().flat_map(|content| groups[content].rows.iter().copied()).collect();
    let val_images = chosen.iter().map(|content| groups[content].images).sum();
    for &row in &moved {
        manifest.rows[row].split = Split::Val;
    }
    held_out::drop_leaking_pairs(manifest)?;
    let images = groups.values().map(|group| group.images).sum();
    Ok(ValSplit { images, val_images, val_rows: moved.len() })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of a count, clamped to it")]
fn num_val(count: usize, fraction: f64) -> usize {
    if count < 2 { 0 } else { ((count as f64 * fraction).round() as usize).clamp(1, count - 1) }
}

/// Rows that must be in the same split.
#[derive(Debug, Default)]
struct Group {
    /// Number of different images.
    images: usize,
    rows: Vec<usize>,
}

/// Groups of rows, each by the smallest content of its images.
fn groups(
    manifest: &Manifest,
    rows: &[usize],
    (marks, observer): (&mut Marks, &dyn Observer),
) -> Result<BTreeMap<Content, Group>> {
    let mut by_path: BTreeMap<&PathBuf, Vec<usize>> = BTreeMap::new();
    for &row in rows {
        by_path.entry(&manifest.rows[row].image_path).or_default().push(row);
    }
    marks.add(by_path.keys().map(|path| path.as_path()), observer);
    let mut images: BTreeMap<Content, Image> = BTreeMap::new();
    for (path, rows) in by_path {
        // the error of a file that cannot be read
        let marks = match marks.get(path) {
            Some(marks) => marks,
            None => ImageMarks { file: content(path)?, pixels: None },
        };
        let image = images.entry(marks.file).or_default();
        image.pixels = marks.pixels;
        image.rows.extend(rows);
    }
    let first = first_contents(manifest, &images);
    let mut groups: BTreeMap<Content, Group> = BTreeMap::new();
    for ((content, image), first) in images.into_iter().zip(first) {
        let group = groups.entry(first.unwrap_or(content)).or_default();
        group.images += 1;
        group.rows.extend(image.rows);
    }
    Ok(groups)
}

/// The rows of one content.
#[derive(Debug, Default)]
struct Image {
    pixels: Option<Mark>,
    rows: Vec<usize>,
}

/// What images have in common that are in one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Common<'a> {
    Patient(&'a str),
    Pixels(Mark),
}

/// For each image the smallest content among all images that are connected to it by patients and equal pixels; `None` for
/// an image with neither.
fn first_contents(manifest: &Manifest, images: &BTreeMap<Content, Image>) -> Vec<Option<Content>> {
    let commons = |image: &Image| -> Vec<Common> {
        let patients = image.rows.iter().filter_map(|&row| manifest.rows[row].patient.as_deref());
        patients.map(Common::Patient).chain(image.pixels.map(Common::Pixels)).collect()
    };
    let mut first: BTreeMap<Common, Content> = BTreeMap::new();
    loop {
        let mut is_stable = true;
        for (content, image) in images {
            let of_image = commons(image);
            let Some(least) = of_image.iter().map(|common| *first.get(common).unwrap_or(content)).min() else {
                continue;
            };
            for common in of_image {
                is_stable &= first.insert(common, least) == Some(least);
            }
        }
        if is_stable {
            break;
        }
    }
    images.values().map(|image| commons(image).first().map(|common| first[common])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;
    use std::fs;

    use super::*;
    use crate::fixture::{Root, shared};
    use prsmed_base::event::Silent;

    /// Ten images of each of two classes with two rows each; `ct/0` exists again as `ct/copy`.
    fn root(reversed: bool) -> Root {
        let root = Root::new();
        let mut lines = Vec::new();
        for class in ["ct", "mr"] {
            for index in 0..10 {
                root.pair(class, "train", &index.to_string());
                for question in 0..2 {
                    lines.push(format!("{class}/train_masks/{index}.png,q{question},a,train"));
                }
            }
        }
        root.pair("ct", "train", "copy");
        fs::copy(root.file("ct/train_images/0.png"), root.file("ct/train_images/copy.png")).expect("copied");
        lines.push("ct/train_masks/copy.png,q,a,train".into());
        if reversed {
            lines.reverse();
        }
        let mut text = "image_path,question,answer,split\n".to_owned();
        for line in lines {
            writeln!(text, "{line}").expect("a string");
        }
        root.csv("a.csv", &text);
        root
    }

    fn val(root: &Root, seed: u64) -> (ValSplit, BTreeSet<(PathBuf, String)>) {
        let mut manifest = Manifest::open(root.path(), None).expect("good");
        let cut = ensure_val(&mut manifest, 0.2, seed, (&mut Marks::default(), &Silent))
            .expect("cut")
            .expect("no val of its own");
        let rows = manifest.rows_of(Split::Val).into_iter().map(|row| &manifest.rows[row]);
        (
            cut,
            rows.map(|row| {
                (row.target().mask_path.strip_prefix(root.path()).expect("inside").into(), row.question.clone())
            })
            .collect(),
        )
    }

    #[test]
    fn chosen_items_are_spread_over_all() {
        let numbers: Vec<usize> = (0..10).collect();
        assert_eq!(spread(numbers.clone(), 4), [0, 2, 5, 7]);
        assert_eq!(
            (spread(numbers.clone(), 1), spread(numbers.clone(), 9)),
            (vec![0], vec![0, 1, 2, 3, 4, 5, 6, 7, 8])
        );
        assert_eq!((spread(numbers.clone(), 0), spread(numbers.clone(), 12)), (numbers.clone(), numbers));
    }

    #[test]
    fn every_class_gets_a_share() {
        let chosen = |classes: &str, limit: usize| -> String {
            let of = |letter: &char| letter.to_string();
            spread_over_classes(classes.chars().collect(), limit, of).into_iter().collect()
        };
        for (classes, limit, expected) in [
            ("aaaaaaaabbc", 3, "abc"),
            ("abcabcabc", 3, "abc"),
            ("aaaabbbbcccc", 6, "aabbcc"),
            ("aaaaaaaaab", 9, "aaaaaaaab"),
            ("aaaaaaaaab", 2, "ab"),
            ("abcdef", 3, "ace"),
            ("aabb", 0, "aabb"),
            ("aabb", 7, "aabb"),
            ("aaaaaaaabbbbbbbbccd", 8, "aaabbbcd"),
            ("", 3, ""),
        ] {
            assert_eq!(chosen(classes, limit), expected, "{classes} {limit}");
        }
        // classes of one size, as the even spread over all
        let items: Vec<usize> = (0..60).collect();
        assert_eq!(spread_over_classes(items.clone(), 18, |i| (i / 10).to_string()), spread(items, 18));
    }

    #[test]
    fn the_split_depends_on_seed_and_content_only() {
        let (first, second) = (root(false), root(true));
        assert_eq!(val(&first, 1), val(&second, 1));
        assert!((2..6).any(|seed| val(&first, seed).1 != val(&first, 1).1));
        let (cut, rows) = val(&first, 1);
        assert_eq!((cut.images, cut.val_images, cut.val_rows), (20, 4, rows.len()));
        for class in ["ct", "mr"] {
            let images: BTreeSet<_> =
                rows.iter().map(|(mask, _)| mask).filter(|mask| mask.starts_with(class)).collect();
            assert!((2..=3).contains(&images.len()), "{class}: {images:?}");
        }
    }

    #[test]
    fn each_image_is_validated_in_one_fold_and_test_rows_in_none() {
        let root = root(false);
        let mut all = BTreeSet::new();
        let mut count = 0;
        for number in 0..5 {
            let mut manifest = Manifest::open(root.path(), None).expect("good");
            // a split of its own changes nothing
            manifest.rows[4 + number].split = Split::Val;
            manifest.rows[0].split = Split::Test;
            let cut =
                validate_on_fold(&mut manifest, Fold { number, of: 5 }, (&mut Marks::default(), &Silent)).expect("cut");
            assert!(manifest.rows[0].split == Split::Test && cut.val_images >= 4, "{cut:?}");
            let rows = manifest.rows_of(Split::Val);
            count += rows.len();
            all.extend(rows);
            assert_eq!(manifest.rows_of(Split::Train).len() + cut.val_rows + 1, manifest.rows.len());
        }
        assert_eq!((all.len(), count), (40, 40), "all 41 rows but the test row, each once");
        let mut manifest = Manifest::open(root.path(), None).expect("good");
        let (mut marks, observer) = (Marks::default(), &Silent);
        let fold = Fold { number: 30, of: 31 };
        let error = validate_on_fold(&mut manifest, fold, (&mut marks, observer)).expect_err("twenty images");
        let expected = "31 folds need as many images or patients of a class, and there are";
        assert!(error.to_string().contains(expected), "{error}");
        // also of a fold that would have images
        let first = Fold { number: 0, of: 31 };
        assert!(validate_on_fold(&mut manifest, first, (&mut marks, observer)).is_err());
    }

    #[test]
    fn copies_of_an_image_stay_in_the_same_split() {
        let root = root(false);
        // the same pixels in another file
        root.pair("ct", "train", "other");
        let image = ::image::open(root.file("ct/train_images/1.png")).expect("an image").to_rgba8();
        fs::remove_file(root.file("ct/train_images/other.png")).expect("removed");
        image.save(root.file("ct/train_images/other.tif")).expect("written");
        root.csv("b.csv", "image_path,question,answer,split\nct/train_masks/other.png,q,a,train\n");
        let mut moved = 0;
        for seed in 0..20 {
            let (_, rows) = val(&root, seed);
            let has = |name: &str| rows.iter().any(|(mask, _)| mask.ends_with(name));
            assert_eq!(has("ct/train_masks/0.png"), has("ct/train_masks/copy.png"), "seed {seed}");
            assert_eq!(has("ct/train_masks/1.png"), has("ct/train_masks/other.png"), "seed {seed}");
            moved += usize::from(has("copy.png"));
        }
        assert!(moved > 0, "no seed moved the copied image, so nothing was tested");
        for number in 0..5 {
            let mut manifest = Manifest::open(root.path(), None).expect("good");
            validate_on_fold(&mut manifest, Fold { number, of: 5 }, (&mut Marks::default(), &Silent)).expect("cut");
            let val = manifest.rows_of(Split::Val).into_iter().map(|row| &manifest.rows[row].target().mask_path);
            let val: BTreeSet<&PathBuf> = val.collect();
            for [a, b] in [["0.png", "copy.png"], ["1.png", "other.png"]] {
                let has = |name: &str| val.contains(&root.path().join("ct/train_masks").join(name));
                assert_eq!(has(a), has(b), "fold {number}");
            }
        }
    }

    #[test]
    fn images_of_a_patient_stay_in_the_same_split() {
        let root = Root::new();
        let mut text = "image_path,question,answer,split,patient\n".to_owned();
        for class in ["ct", "mr"] {
            for index in 0..12 {
                root.pair(class, "train", &format!("{class}{index}"));
                // patients 0 and 1 have images of both classes; the last image of each class names no patient
                let patient = if index < 11 { format!("p{}", index / 3) } else { String::new() };
                writeln!(text, "{class}/train_masks/{class}{index}.png,q,a,train,{patient}").expect("a string");
            }
        }
        root.csv("a.csv", &text);
        let mut sizes = BTreeSet::new();
        for seed in 0..20 {
            let mut manifest = Manifest::open(root.path(), None).expect("good");
            let cut = ensure_val(&mut manifest, 0.3, seed, (&mut Marks::default(), &Silent))
                .expect("cut")
                .expect("no val of its own");
            let splits = |split| -> BTreeSet<&str> {
                let rows = manifest.rows_of(split).into_iter();
                rows.filter_map(|row| manifest.rows[row].patient.as_deref()).collect()
            };
            assert!(splits(Split::Val).is_disjoint(&splits(Split::Train)), "seed {seed}");
            assert_eq!((cut.images, cut.val_images), (24, manifest.rows_of(Split::Val).len()));
            sizes.insert(cut.val_images);
        }
        assert!(sizes.iter().any(|size| *size >= 6), "no seed moved a patient with both classes: {sizes:?}");
    }

    #[test]
    fn patients_of_a_copied_image_and_equal_pixels_are_one_group() {
        let mut manifest = Manifest::open(root(false).path(), None);
        let manifest = manifest.as_mut().expect("good");
        let patients = ["b", "a", "c", "c", "d"];
        let of = |rows: &[usize], content: u8| ([content; 32], Image { pixels: None, rows: rows.to_vec() });
        for (row, patient) in manifest.rows.iter_mut().zip(patients) {
            row.patient = Some(patient.to_owned());
        }
        // a and b share image 9, b and c share image 5; row 5 has no patient
        manifest.rows[5].patient = None;
        let mut images = BTreeMap::from([of(&[1], 1), of(&[0, 2], 5), of(&[5], 6), of(&[4], 7), of(&[0, 1], 9)]);
        let first = |images: &BTreeMap<Content, Image>| -> Vec<Option<u8>> {
            first_contents(manifest, images).into_iter().map(|content| content.map(|content| content[0])).collect()
        };
        assert_eq!(first(&images), [Some(1), Some(1), None, Some(7), Some(1)]);
        for (content, pixels) in [(1, 20), (6, 20), (5, 30), (7, 40)] {
            images.get_mut(&[content; 32]).expect("an image").pixels = Some([pixels; 32]);
        }
        assert_eq!(first(&images), [Some(1), Some(1), Some(1), Some(7), Some(1)]);
    }

    #[test]
    fn an_existing_val_split_is_kept_and_invalid_requests_are_errors() {
        let root = root(false);
        let mut manifest = Manifest::open(root.path(), None).expect("good");
        let error = ensure_val(&mut manifest, 1.0, 0, (&mut Marks::default(), &Silent)).expect_err("everything");
        assert_eq!(error.to_string(), "`data.val_frac`: 1 is not between 0 and 1");
        manifest.rows[3].split = Split::Val;
        assert_eq!(ensure_val(&mut manifest, 0.2, 0, (&mut Marks::default(), &Silent)).expect("left alone"), None);
        assert_eq!(manifest.rows_of(Split::Val), [3]);
        manifest.rows.truncate(2);
        let error = ensure_val(&mut manifest, 0.2, 0, (&mut Marks::default(), &Silent)).expect_err("one image");
        assert!(error.to_string().ends_with("1 training image(s) are too few for a `val` split"), "{error}");
    }

    #[test]
    fn extra_rows_neither_change_the_split_nor_are_moved() {
        let (root, extra) = (root(false), root(true));
        let open = |root: &Root| Manifest::open(root.path(), None).expect("good");
        let mut alone = open(&root);
        let mut both = open(&root).with_extra(open(&extra)).expect("train rows");
        let cuts = [&mut alone, &mut both]
            .map(|manifest| ensure_val(manifest, 0.2, 3, (&mut Marks::default(), &Silent)).expect("cut"));
        assert_eq!(cuts[0], cuts[1]);
        assert_eq!(alone.rows_of(Split::Val), both.rows_of(Split::Val));
        assert!(both.rows.iter().all(|row| !row.synthetic || row.split == Split::Train));
    }

    #[test]
    #[ignore = "needs shared data"]
    fn shared_data_no_image_of_the_real_data_set_is_in_two_splits() {
        let folder = shared("data/real");
        let mut manifest = Manifest::open(&folder, None).expect("good");
        assert_eq!((manifest.rows.len(), manifest.modalities.len()), (360, 9));
        let train = manifest.rows_of(Split::Train).len();
        let cut = ensure_val(&mut manifest, 0.1, 0, (&mut Marks::default(), &Silent))
            .expect("cut")
            .expect("no val of its own");
        let sides = |split| -> BTreeSet<Content> {
            let rows = manifest.rows_of(split);
            rows.iter().map(|&row| content(&manifest.rows[row].image_path).expect("read")).collect()
        };
        assert!(sides(Split::Val).is_disjoint(&sides(Split::Train)));
        assert_eq!(sides(Split::Val).len(), cut.val_images);
        assert_eq!(manifest.rows_of(Split::Train).len() + cut.val_rows, train);
        assert!(cut.val_images >= 9, "every class has at least one: {cut:?}");
    }
}
