//! Checks a whole data root and reports every bad row. Nothing is changed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use serde::Serialize;

use super::bit_depth::DepthReport;
use super::decode;
use super::labels::{self, Labels};
use super::manifest::{BadRow, Manifest, Problem, Row, Split, Target};
use super::sample::size_mismatch;
use super::split::{Content, content};
use crate::error::{Error, Result};
use crate::event::{Event, Observer};

/// Number of good rows of one class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ModalityCounts {
    /// Class folder.
    pub modality: String,
    /// Number of `train` rows.
    pub train: usize,
    /// Number of `val` rows.
    pub val: usize,
    /// Number of `test` rows.
    pub test: usize,
}

/// An image that occurs in several splits. A score on it is not a score on unseen data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leak {
    /// The splits with this image.
    pub splits: Vec<Split>,
    /// The image files with equal bytes.
    pub images: Vec<PathBuf>,
}

/// Results of [`check`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// The data root.
    pub root: PathBuf,
    /// Number of rows, good and bad.
    pub rows: usize,
    /// Number of image files of all rows whose files exist.
    pub images: usize,
    /// Good rows by class and split.
    pub counts: Vec<ModalityCounts>,
    /// All bad rows, by file and line.
    pub bad: Vec<BadRow>,
    /// Images in several splits: warnings, not bad rows.
    pub leaks: Vec<Leak>,
    /// Splits that some classes have no rows of: warnings, not bad rows.
    pub uncovered: Vec<Uncovered>,
    /// 16-bit images, and those that use a small part of the range: warnings, not bad rows.
    pub depth: DepthReport,
}

/// Classes without rows of a split that other classes have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Uncovered {
    /// The split.
    pub split: Split,
    /// The classes.
    pub classes: Vec<String>,
}

impl CheckReport {
    /// Whether there is no bad row.
    pub fn is_good(&self) -> bool {
        self.bad.is_empty()
    }
}

/// Reads all rows and decodes every image and mask once, in parallel on the current rayon pool. `labels` are the labels
/// of masks that are foreground; empty for masks of one label.
///
/// # Errors
/// As [`Manifest::read`], when the rows cannot be read at all. Bad rows are in the report.
pub fn check(root: &Path, annotations: Option<&Path>, labels: Labels, observer: &dyn Observer) -> Result<CheckReport> {
    let (manifest, mut bad) = Manifest::read(root, annotations)?;
    let rows = manifest.rows.len() + bad.len();
    let mut pairs: BTreeMap<(&PathBuf, &PathBuf, Target), Vec<usize>> = BTreeMap::new();
    for (index, row) in manifest.rows.iter().enumerate() {
        pairs.entry((&row.image_path, &row.mask_path, row.target)).or_default().push(index);
    }
    observer.on(&Event::Started { phase: "check".into(), total: pairs.len() as u64, unit: "images" });
    let done = Mutex::new(0_u64);
    let results: Vec<(Vec<usize>, PairCheck)> = pairs
        .into_par_iter()
        .map(|((image, mask, target), rows)| {
            let found = check_pair(image, mask, target, labels);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += 1;
            observer.on(&Event::Advanced { done: *done });
            (rows, found)
        })
        .collect();
    observer.on(&Event::Finished);

    let mut good = vec![true; manifest.rows.len()];
    let mut by_content: HashMap<Content, Vec<usize>> = HashMap::new();
    let mut ranges = BTreeMap::new();
    for (indices, found) in results {
        match found {
            Ok((content, range)) => {
                ranges.extend(indices.first().map(|&index| (&manifest.rows[index].image_path, range)));
                by_content.entry(content).or_default().extend(indices);
            }
            Err((problem, reason)) => {
                for index in indices {
                    good[index] = false;
                    let Row { csv, line, .. } = &manifest.rows[index];
                    bad.push(BadRow { csv: csv.clone(), line: *line, problem, reason: reason.clone() });
                }
            }
        }
    }
    bad.sort_by(|a, b| (&a.csv, a.line).cmp(&(&b.csv, b.line)));
    let mut depth = DepthReport::default();
    for (path, range) in ranges {
        depth.add(path, range);
    }
    let images = manifest.rows.iter().map(|row| &row.image_path).collect::<BTreeSet<_>>().len();
    let usable = manifest.rows.iter().zip(&good).filter_map(|(row, good)| good.then_some(row));
    Ok(CheckReport {
        root: manifest.root.clone(),
        rows,
        images,
        counts: counts(usable),
        leaks: leaks(&manifest, by_content),
        uncovered: uncovered(&manifest),
        depth,
        bad,
    })
}

fn uncovered(manifest: &Manifest) -> Vec<Uncovered> {
    let of =
        |split| Uncovered { split, classes: manifest.classes_without(split).into_iter().map(str::to_owned).collect() };
    Split::ALL.into_iter().map(of).filter(|uncovered| !uncovered.classes.is_empty()).collect()
}

/// The content hash of the image and its range of values if it has 16 bits, or what is wrong with the pair.
type PairCheck = Result<(Content, Option<[u16; 2]>), (Problem, String)>;

/// Decodes an image and its mask.
fn check_pair(image: &Path, mask: &Path, target: Target, labels: Labels) -> PairCheck {
    let (decoded, range) =
        decode::image_with_range(image).map_err(|error| (Problem::UndecodableImage, describe(&error)))?;
    let content = || content(image).map_err(|error| (Problem::UndecodableImage, describe(&error)));
    if target != Target::Present && !mask.exists() {
        return Ok((content()?, range));
    }
    let stored = decode::stored_mask(mask).map_err(|error| (Problem::UndecodableMask, describe(&error)))?;
    let found = stored.labels();
    if labels.is_empty() && found.len() > 1 {
        let found = labels::describe(&found);
        let reason = format!("{}: the mask has several labels: {found}; {}", mask.display(), decode::CHOOSE_LABELS);
        return Err((Problem::SeveralLabels, reason));
    }
    let pixels = if labels.is_empty() { stored.into_grey() } else { stored.select(labels) };
    let sizes = ((decoded.width(), decoded.height()), pixels.dimensions());
    if sizes.0 != sizes.1 {
        return Err((Problem::SizeMismatch, format!("{}: {}", mask.display(), size_mismatch(sizes.0, sizes.1))));
    }
    let num_foreground = pixels.iter().filter(|&&value| value > 0).count();
    if target != Target::Present {
        return if num_foreground == 0 {
            Ok((content()?, range))
        } else {
            let reason = format!(
                "{}: the mask has {num_foreground} pixels of foreground, but the row says that there is no such target",
                mask.display()
            );
            Err((Problem::NotEmpty, reason))
        };
    }
    if num_foreground == 0 {
        let what = if found.is_empty() {
            "the mask is empty".to_owned()
        } else {
            format!("the mask has no pixel of the labels {labels}; it has {}", labels::describe(&found))
        };
        return Err((Problem::EmptyMask, format!("{}: {what}", mask.display())));
    }
    Ok((content()?, range))
}

fn describe(error: &Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

fn counts<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<ModalityCounts> {
    let mut counts: BTreeMap<&str, ModalityCounts> = BTreeMap::new();
    for row in rows {
        let count = counts.entry(&row.modality).or_default();
        row.modality.clone_into(&mut count.modality);
        match row.split {
            Split::Train => count.train += 1,
            Split::Val => count.val += 1,
            Split::Test => count.test += 1,
        }
    }
    counts.into_values().collect()
}

fn leaks(manifest: &Manifest, by_content: HashMap<Content, Vec<usize>>) -> Vec<Leak> {
    let mut leaks: Vec<Leak> = (by_content.into_values())
        .filter_map(|rows| {
            let rows = rows.iter().map(|&row| &manifest.rows[row]);
            let splits: BTreeSet<Split> = rows.clone().map(|row| row.split).collect();
            let images: BTreeSet<&PathBuf> = rows.map(|row| &row.image_path).collect();
            (splits.len() > 1)
                .then(|| Leak { splits: splits.into_iter().collect(), images: images.into_iter().cloned().collect() })
        })
        .collect();
    leaks.sort_by(|a, b| a.images.cmp(&b.images));
    leaks
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::data::fixture::{Root, shared};
    use crate::event::Silent;

    #[test]
    fn every_bad_row_is_reported_with_file_line_and_reason() {
        let root = Root::new();
        for name in ["good", "corrupt", "size", "empty"] {
            root.pair("ct", "train", name);
        }
        fs::write(root.file("ct/train_images/corrupt.png"), b"\x89PNG\r\n\x1a\nnothing").expect("written");
        root.mask("ct/train_masks/size.png", 11, 8, |_, _| 255);
        root.mask("ct/train_masks/empty.png", 12, 8, |_, _| 0);
        root.csv(
            "a.csv",
            "image_path,question,answer,split\n\
             ct/train_masks/good.png,q,a,train\n\
             ct/train_masks/corrupt.png,q,a,train\n\
             ct/train_masks/size.png,q,a,train\n\
             ct/train_masks/empty.png,q1,a,train\n\
             ct/train_masks/empty.png,q2,a,train\n\
             ct/train_masks/none.png,q,a,train\n\
             ct/train_masks/good.png,q,a,nothing\n\
             ct/train_masks/good.png,q2,a,test\n\
             ct/train_masks/good.png,,a,train\n\
             ct/train_masks/good.png,q,a,train\n",
        );
        let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
        let found: Vec<(u64, Problem)> = report.bad.iter().map(|bad| (bad.line, bad.problem)).collect();
        assert_eq!(
            found,
            [
                (3, Problem::UndecodableImage),
                (4, Problem::SizeMismatch),
                (5, Problem::EmptyMask),
                (6, Problem::EmptyMask),
                (7, Problem::MissingMask),
                (8, Problem::UnknownSplit),
                (10, Problem::EmptyCell),
                (11, Problem::Duplicate),
            ]
        );
        assert!(report.bad[0].reason.contains("corrupt.png: cannot be decoded: "), "{}", report.bad[0].reason);
        assert!(report.bad[1].reason.ends_with("size.png: the mask is 11x8 pixels but its image is 12x8"));
        assert!(report.bad[2].reason.ends_with("empty.png: the mask is empty"));
        assert_eq!(report.counts, [ModalityCounts { modality: "ct".into(), train: 1, val: 0, test: 1 }]);
        assert_eq!((report.rows, report.images, report.is_good()), (10, 4, false));
        let leak = &report.leaks[0];
        assert_eq!((leak.splits.as_slice(), leak.images.len()), ([Split::Train, Split::Test].as_slice(), 1));
        let json = serde_json::to_value(&report).expect("serializable");
        assert_eq!(json["bad"][0]["problem"], "undecodable_image");
        assert_eq!(json["counts"][0]["train"], 1);
    }

    #[test]
    fn label_maps_narrow_images_and_missing_splits_are_reported() {
        let root = Root::new();
        for name in ["one", "map", "narrow"] {
            root.pair("ct", "train", name);
        }
        root.pair("mr", "train", "a");
        root.mask("ct/train_masks/map.png", 12, 8, |x, _| [0, 5, 20][x as usize / 4]);
        ::image::ImageBuffer::<::image::Luma<u16>, _>::from_fn(12, 8, |x, _| ::image::Luma([u16::from(x > 3) * 4095]))
            .save(root.file("ct/train_images/narrow.png"))
            .expect("written");
        root.csv(
            "a.csv",
            "image_path,question,answer,split\n\
             ct/train_masks/one.png,q,a,train\n\
             ct/train_masks/map.png,q,a,test\n\
             ct/train_masks/narrow.png,q,a,val\n\
             mr/train_masks/a.png,q,a,train\n",
        );
        let check =
            |labels: &[u16]| check(root.path(), None, Labels::new(labels).expect("labels"), &Silent).expect("readable");
        let report = check(&[]);
        assert_eq!((report.bad.len(), report.bad[0].line, report.bad[0].problem), (1, 3, Problem::SeveralLabels));
        let reason = &report.bad[0].reason;
        assert!(reason.contains("map.png: the mask has several labels: 5 (32 pixels), 20 (32 pixels); "), "{reason}");
        assert!(reason.contains("`--labels 1,3`"), "{reason}");
        assert_eq!((report.depth.num_decoded, report.depth.narrow[0].max), (1, 4095));
        let uncovered: Vec<_> = report.uncovered.iter().map(|u| (u.split, u.classes.join(","))).collect();
        assert_eq!(uncovered, [(Split::Val, "mr".to_owned()), (Split::Test, "mr".to_owned())]);
        let report = check(&[5, 255]);
        assert_eq!(report.bad, []);
        let report = check(&[20]);
        assert_eq!(report.bad.iter().map(|bad| bad.line).collect::<Vec<_>>(), [2, 4, 5]);
        assert!(
            report.bad[0].reason.ends_with("one.png: the mask has no pixel of the labels 20; it has 255 (15 pixels)")
        );
    }

    #[test]
    fn images_in_several_splits_are_reported_in_the_order_of_their_paths() {
        let root = Root::new();
        let rows = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| {
            root.pair("ct", "train", name);
            format!("ct/train_masks/{name}.png,q,a,train\nct/train_masks/{name}.png,q2,a,test\n")
        });
        root.csv("a.csv", &format!("image_path,question,answer,split\n{}", rows.concat()));
        let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
        let images: Vec<&PathBuf> = report.leaks.iter().flat_map(|leak| &leak.images).collect();
        assert_eq!((images.len(), report.leaks.len()), (8, 8));
        assert!(images.is_sorted(), "{images:?}");
    }

    #[test]
    #[ignore = "needs shared data"]
    fn shared_data_the_real_data_set_has_no_bad_rows() {
        struct Last(AtomicU64);
        impl Observer for Last {
            fn on(&self, event: &Event) {
                if let Event::Advanced { done } = event {
                    assert_eq!(self.0.swap(*done, Ordering::Relaxed) + 1, *done, "progress advances by one");
                }
            }
        }
        let folder = shared("data/real");
        let observer = Last(AtomicU64::new(0));
        let report = check(&folder, None, Labels::NONE, &observer).expect("readable");
        assert_eq!(report.bad, []);
        assert_eq!((report.rows, report.images, report.counts.len()), (360, 180, 9));
        assert_eq!(observer.0.load(Ordering::Relaxed), 180);
        assert!(report.counts.iter().all(|count| count.train > 0 && count.test > 0));
    }
}
