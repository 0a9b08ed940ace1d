//! Checks a whole data root and reports every bad row. Nothing is changed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use serde::Serialize;

use super::decode;
use super::manifest::{BadRow, Manifest, Problem, Row, Split};
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
}

impl CheckReport {
    /// Whether there is no bad row.
    pub fn is_good(&self) -> bool {
        self.bad.is_empty()
    }
}

/// Reads all rows and decodes every image and mask once, in parallel on the current rayon pool.
///
/// # Errors
/// As [`Manifest::read`], when the rows cannot be read at all. Bad rows are in the report.
pub fn check(root: &Path, annotations: Option<&Path>, observer: &dyn Observer) -> Result<CheckReport> {
    let (manifest, mut bad) = Manifest::read(root, annotations)?;
    let rows = manifest.rows.len() + bad.len();
    let mut pairs: BTreeMap<(&PathBuf, &PathBuf), Vec<usize>> = BTreeMap::new();
    for (index, row) in manifest.rows.iter().enumerate() {
        pairs.entry((&row.image_path, &row.mask_path)).or_default().push(index);
    }
    observer.on(&Event::Started { phase: "check".into(), total: pairs.len() as u64, unit: "images" });
    let done = Mutex::new(0_u64);
    let results: Vec<(Vec<usize>, PairCheck)> = pairs
        .into_par_iter()
        .map(|((image, mask), rows)| {
            let found = check_pair(image, mask);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += 1;
            observer.on(&Event::Advanced { done: *done });
            (rows, found)
        })
        .collect();
    observer.on(&Event::Finished);

    let mut good = vec![true; manifest.rows.len()];
    let mut by_content: HashMap<Content, Vec<usize>> = HashMap::new();
    for (indices, found) in results {
        match found {
            Ok(content) => by_content.entry(content).or_default().extend(indices),
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
    let images = manifest.rows.iter().map(|row| &row.image_path).collect::<BTreeSet<_>>().len();
    let usable = manifest.rows.iter().zip(&good).filter_map(|(row, good)| good.then_some(row));
    Ok(CheckReport {
        root: manifest.root.clone(),
        rows,
        images,
        counts: counts(usable),
        leaks: leaks(&manifest, by_content),
        bad,
    })
}

/// The content hash of the image, or what is wrong with the pair.
type PairCheck = Result<Content, (Problem, String)>;

/// Decodes an image and its mask.
fn check_pair(image: &Path, mask: &Path) -> PairCheck {
    let decoded = decode::image(image).map_err(|error| (Problem::UndecodableImage, describe(&error)))?;
    let pixels = decode::mask(mask).map_err(|error| (Problem::UndecodableMask, describe(&error)))?;
    let sizes = ((decoded.width(), decoded.height()), pixels.dimensions());
    if sizes.0 != sizes.1 {
        return Err((Problem::SizeMismatch, format!("{}: {}", mask.display(), size_mismatch(sizes.0, sizes.1))));
    }
    if pixels.iter().all(|&value| value == 0) {
        return Err((Problem::EmptyMask, format!("{}: the mask is empty", mask.display())));
    }
    content(image).map_err(|error| (Problem::UndecodableImage, describe(&error)))
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
        let report = check(root.path(), None, &Silent).expect("readable");
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
    fn the_real_data_set_has_no_bad_rows() {
        struct Last(AtomicU64);
        impl Observer for Last {
            fn on(&self, event: &Event) {
                if let Event::Advanced { done } = event {
                    assert_eq!(self.0.swap(*done, Ordering::Relaxed) + 1, *done, "progress advances by one");
                }
            }
        }
        let Some(folder) = shared("data/real") else { return };
        let observer = Last(AtomicU64::new(0));
        let report = check(&folder, None, &observer).expect("readable");
        assert_eq!(report.bad, []);
        assert_eq!((report.rows, report.images, report.counts.len()), (360, 180, 9));
        assert_eq!(observer.0.load(Ordering::Relaxed), 180);
        assert!(report.counts.iter().all(|count| count.train > 0 && count.test > 0));
    }
}
