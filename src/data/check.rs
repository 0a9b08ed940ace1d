//! Reads a whole data set and reports every bad row; changes nothing.

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

/// Usable rows of one class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// The class folder.
    pub modality: String,
    /// Rows of `train`.
    pub train: usize,
    /// Rows of `val`.
    pub val: usize,
    /// Rows of `test`.
    pub test: usize,
}

/// A picture that occurs in several splits: a result on it is not a result on unseen data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leak {
    /// The splits it occurs in.
    pub splits: Vec<Split>,
    /// The image files with these same bytes.
    pub images: Vec<PathBuf>,
}

/// What [`check`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The data root.
    pub root: PathBuf,
    /// Rows read, bad ones included.
    pub rows: usize,
    /// Image files of the rows whose files were found.
    pub images: usize,
    /// Usable rows by class and split.
    pub counts: Vec<Count>,
    /// Every bad row, by file and line.
    pub bad: Vec<BadRow>,
    /// Pictures in several splits; a warning, not a bad row.
    pub leaks: Vec<Leak>,
}

impl Report {
    /// Whether every row can be used.
    pub fn is_good(&self) -> bool {
        self.bad.is_empty()
    }
}

/// Reads all rows, decodes every image and mask once (in parallel on the current rayon pool) and reports.
///
/// # Errors
/// As [`Manifest::read`]: only what keeps the rows from being read at all. Bad rows are in the report.
pub fn check(root: &Path, annotations: Option<&Path>, observer: &dyn Observer) -> Result<Report> {
    let (manifest, mut bad) = Manifest::read(root, annotations)?;
    let rows = manifest.rows.len() + bad.len();
    let mut pairs: BTreeMap<(&PathBuf, &PathBuf), Vec<usize>> = BTreeMap::new();
    for (index, row) in manifest.rows.iter().enumerate() {
        pairs.entry((&row.image_path, &row.mask_path)).or_default().push(index);
    }
    observer.on(&Event::Started { phase: "check".into(), total: pairs.len() as u64, unit: "images" });
    let done = Mutex::new(0_u64);
    let looked_at: Vec<(Vec<usize>, Look)> = pairs
        .into_par_iter()
        .map(|((image, mask), rows)| {
            let found = look(image, mask);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += 1;
            observer.on(&Event::Advanced { done: *done });
            (rows, found)
        })
        .collect();
    observer.on(&Event::Finished);

    let mut good = vec![true; manifest.rows.len()];
    let mut pictures: HashMap<Content, Vec<usize>> = HashMap::new();
    for (indices, found) in looked_at {
        match found {
            Ok(content) => pictures.entry(content).or_default().extend(indices),
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
    Ok(Report {
        root: manifest.root.clone(),
        rows,
        images,
        counts: counts(usable),
        leaks: leaks(&manifest, pictures),
        bad,
    })
}

/// The content of the image, or what is wrong with the pair.
type Look = Result<Content, (Problem, String)>;

/// Decodes a pair of files.
fn look(image: &Path, mask: &Path) -> Look {
    let picture = decode::picture(image).map_err(|error| (Problem::UndecodableImage, told(&error)))?;
    let pixels = decode::mask(mask).map_err(|error| (Problem::UndecodableMask, told(&error)))?;
    let sizes = ((picture.width(), picture.height()), pixels.dimensions());
    if sizes.0 != sizes.1 {
        return Err((Problem::SizeMismatch, format!("{}: {}", mask.display(), size_mismatch(sizes.0, sizes.1))));
    }
    if pixels.iter().all(|&value| value == 0) {
        return Err((Problem::EmptyMask, format!("{}: no pixel of the mask is set", mask.display())));
    }
    content(image).map_err(|error| (Problem::UndecodableImage, told(&error)))
}

fn told(error: &Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

fn counts<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<Count> {
    let mut counts: BTreeMap<&str, Count> = BTreeMap::new();
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

fn leaks(manifest: &Manifest, pictures: HashMap<Content, Vec<usize>>) -> Vec<Leak> {
    let mut leaks: Vec<Leak> = (pictures.into_values())
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
        assert!(report.bad[2].reason.ends_with("empty.png: no pixel of the mask is set"));
        assert_eq!(report.counts, [Count { modality: "ct".into(), train: 1, val: 0, test: 1 }]);
        assert_eq!((report.rows, report.images, report.is_good()), (10, 4, false));
        let leak = &report.leaks[0];
        assert_eq!((leak.splits.as_slice(), leak.images.len()), ([Split::Train, Split::Test].as_slice(), 1));
        let json = serde_json::to_value(&report).expect("serializable");
        assert_eq!(json["bad"][0]["problem"], "undecodable_image");
        assert_eq!(json["counts"][0]["train"], 1);
    }

    #[test]
    fn the_real_set_is_good() {
        struct Last(AtomicU64);
        impl Observer for Last {
            fn on(&self, event: &Event) {
                if let Event::Advanced { done } = event {
                    assert_eq!(self.0.swap(*done, Ordering::Relaxed) + 1, *done, "progress goes one by one");
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
