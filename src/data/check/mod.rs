//! Checks a whole data root and reports every bad row. Nothing is changed.

pub mod absent;
pub mod balance;
pub mod findings;
pub mod fingerprint;
pub mod given_away;
pub mod identity;
pub mod leaks;
pub mod marks;
pub mod targets;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use ::image::GrayImage;
use serde::Serialize;

use self::balance::Balance;
use self::findings::Findings;
use self::fingerprint::{Fingerprint, PairSummary};
use self::given_away::GivenAway;
use self::leaks::{Leak, Leaks, PatientLeak};
use self::marks::{ImageMarks, Mark, Marks, pixel_mark};
use self::targets::{MaskGrid, TargetSizes};
use super::bit_depth::DepthReport;
use super::decode::{self, MaskRefusal};
use super::image::foreground;
use super::labels::{self, Labels};
use super::manifest::{BadRow, Manifest, Presence, Problem, Row, Split};
use super::progress::in_parallel;
use super::sample::size_mismatch;
use super::split::content;
use super::word_check::{self, MaskWords, WordReport};
use prsmed_base::error::{Error, Result};
use prsmed_base::event::Observer;

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

/// Results of [`check`].
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Images in several splits: not bad rows.
    pub leaks: Vec<Leak>,
    /// Patients in several splits: not bad rows.
    pub patient_leaks: Vec<PatientLeak>,
    /// Texts about leaks from `train` into `test`.
    pub leaks_into_test: Vec<String>,
    /// Texts about other leaks: warnings.
    pub other_leaks: Vec<String>,
    /// What removes the leaks into `test`.
    #[serde(skip)]
    pub remedy: String,
    /// Patients with several spellings, in one sentence.
    pub spellings: Option<String>,
    /// Number of rows of extra data roots, good and bad.
    pub extra_rows: usize,
    /// Synthetic rows that a training leaves out, because their sources are `val` or `test` images.
    pub left_out: usize,
    /// Number of image files with the pixels of another image file, in any format. An image with several targets has such
    /// copies; images of one single colour are none.
    pub copies: usize,
    /// Sizes, spacings, intensities, labels and foreground of the good rows, by class.
    pub fingerprint: Vec<Fingerprint>,
    /// Splits that some classes have no rows of: warnings, not bad rows.
    pub uncovered: Vec<Uncovered>,
    /// 16-bit images, and those that use a small part of the range: warnings, not bad rows.
    pub depth: DepthReport,
    /// Words that differ from the masks of their rows: warnings, not bad rows.
    pub words: WordReport,
    /// Choices that were made to read the files, and masks and images that are probably not meant so: warnings.
    pub findings: Findings,
    /// Parts of classes and patients, and what the numbers allow.
    pub balance: Balance,
    /// Targets that are small for the model, or that touch the border of their image: warnings.
    pub target_sizes: TargetSizes,
    /// Questions that give their answers away: warnings.
    pub given_away: GivenAway,
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
    check_with_extra((root, annotations), &[], labels, None, observer)
}

/// As [`check()`], with the rows of extra data roots. The fingerprint and the counts are those of the data root alone. With
/// a `grid`, targets that are small for it are named.
///
/// # Errors
/// As [`check()`] and [`Manifest::with_extra`].
pub fn check_with_extra(
    (root, annotations): (&Path, Option<&Path>),
    extra: &[PathBuf],
    labels: Labels,
    grid: Option<MaskGrid>,
    observer: &dyn Observer,
) -> Result<CheckReport> {
    let (mut manifest, mut bad) = Manifest::read(root, annotations)?;
    let own_rows = manifest.rows.len() + bad.len();
    for root in extra {
        let (of_extra, more) = Manifest::read(root, None)?;
        bad.extend(more);
        manifest = manifest.with_extra(of_extra)?;
    }
    let rows = manifest.rows.len() + bad.len();
    let mut found = Checked { good: vec![true; manifest.rows.len()], bad, ..Checked::default() };
    for (indices, pair) in check_pairs(&manifest, labels, observer) {
        found.add(&manifest, indices, pair);
    }
    let Checked { good, by_pixels, marks, ranges, summaries, mut findings, words, mut bad } = found;
    absent::add(&manifest, &mut findings);
    bad.sort_by(|a, b| (&a.csv, a.line).cmp(&(&b.csv, b.line)));
    let mut depth = DepthReport::default();
    for (path, range) in ranges {
        depth.add(path, range);
    }
    let images = manifest.rows.iter().map(|row| &row.image_path).collect::<BTreeSet<_>>().len();
    let usable = || manifest.rows.iter().zip(&good).filter_map(|(row, good)| (*good && !row.synthetic).then_some(row));
    let leaks = Leaks::find(&manifest, &marks);
    Ok(CheckReport {
        root: manifest.root.clone(),
        rows,
        images,
        counts: counts(usable()),
        balance: balance::balance(usable()),
        target_sizes: targets::sizes(&summaries, grid),
        given_away: given_away::given_away(&manifest),
        copies: copies(&manifest, &by_pixels),
        leaks_into_test: leaks.errors(),
        other_leaks: leaks.warnings(),
        remedy: leaks.remedy(),
        leaks: leaks.images,
        patient_leaks: leaks.patients,
        spellings: manifest.spellings.warning(),
        extra_rows: rows - own_rows,
        left_out: manifest.num_leaking,
        fingerprint: fingerprint::fingerprints(summaries),
        uncovered: uncovered(&manifest),
        depth,
        words: word_check::report(&manifest, words),
        findings,
        bad,
    })
}

/// Decodes each image with its mask, and gives the numbers of its rows.
fn check_pairs(manifest: &Manifest, labels: Labels, observer: &dyn Observer) -> Vec<(Vec<usize>, PairCheck)> {
    let mut pairs: BTreeMap<(&PathBuf, &PathBuf, Presence), Vec<usize>> = BTreeMap::new();
    for (index, row) in manifest.rows.iter().enumerate() {
        pairs.entry((&row.image_path, &row.target().mask_path, row.target().presence)).or_default().push(index);
    }
    let check = |((image, mask, target), rows): ((&PathBuf, &PathBuf, Presence), Vec<usize>)| {
        let found = check_pair(image, mask, target, labels, |mask| word_check::compare(manifest, &rows, mask));
        (rows, found)
    };
    in_parallel(pairs.into_iter().collect(), ("check", "images"), observer, check)
}

fn uncovered(manifest: &Manifest) -> Vec<Uncovered> {
    let of =
        |split| Uncovered { split, classes: manifest.classes_without(split).into_iter().map(str::to_owned).collect() };
    Split::ALL.into_iter().map(of).filter(|uncovered| !uncovered.classes.is_empty()).collect()
}

/// Results of the pairs that were checked.
#[derive(Default)]
struct Checked<'a> {
    /// True for each row whose pair can be used.
    good: Vec<bool>,
    by_pixels: HashMap<Mark, Vec<usize>>,
    marks: Marks,
    ranges: BTreeMap<&'a PathBuf, Option<[u16; 2]>>,
    /// Real rows of each pair.
    summaries: Vec<(Vec<&'a Row>, PairSummary)>,
    findings: Findings,
    words: Vec<MaskWords>,
    bad: Vec<BadRow>,
}

impl<'a> Checked<'a> {
    /// Adds the pair of the rows `indices`.
    fn add(&mut self, manifest: &'a Manifest, indices: Vec<usize>, pair: PairCheck) {
        match pair {
            Ok(GoodPair { marks, range, summary, findings, mask }) => {
                self.findings.merge(findings);
                self.words.extend(mask);
                let rows = || indices.iter().map(|&index| &manifest.rows[index]);
                self.ranges.extend(rows().next().map(|row| (&row.image_path, range)));
                rows().take(1).for_each(|row| self.marks.insert(row.image_path.clone(), marks));
                let own: Vec<&Row> = rows().filter(|row| !row.synthetic).collect();
                self.summaries.extend((!own.is_empty()).then_some((own, summary)));
                if let Some(pixels) = marks.pixels {
                    self.by_pixels.entry(pixels).or_default().extend(indices);
                }
            }
            Err((problem, reason)) => {
                for index in indices {
                    self.good[index] = false;
                    let Row { csv, line, .. } = &manifest.rows[index];
                    self.bad.push(BadRow { csv: csv.clone(), line: *line, problem, reason: reason.clone() });
                }
            }
        }
    }
}

/// An image and a mask that can be used.
struct GoodPair {
    marks: ImageMarks,
    /// Range of values of a 16-bit image.
    range: Option<[u16; 2]>,
    summary: PairSummary,
    findings: Findings,
    /// What the texts of its rows say, for a target that is in the image.
    mask: Option<MaskWords>,
}

/// What is known of a pair, or what is wrong with it.
type PairCheck = Result<GoodPair, (Problem, String)>;

/// Decodes an image and its mask. `compare` compares the mask with the texts of its rows.
fn check_pair(
    image: &Path,
    mask: &Path,
    target: Presence,
    labels: Labels,
    compare: impl FnOnce(&GrayImage) -> MaskWords,
) -> PairCheck {
    let undecodable = |error: Error| (Problem::UndecodableImage, describe(&error));
    let file = decode::image_file(image).map_err(undecodable)?;
    let mut findings = Findings::default();
    findings.add_image(image, &file);
    let (decoded, range) = (file.pixels, file.range);
    let good = |set: Option<&GrayImage>, labels: Vec<u16>, findings: Findings, mask: Option<MaskWords>| {
        let summary = PairSummary {
            size_px: (decoded.width(), decoded.height()),
            levels: fingerprint::levels(&decoded),
            num_foreground: set.map_or(0, |set| set.iter().filter(|&&value| value > 0).count()),
            labels,
            is_at_border: set.is_some_and(targets::is_at_border),
        };
        let file = content(image).map_err(undecodable)?;
        Ok(GoodPair { marks: ImageMarks { file, pixels: pixel_mark(&decoded) }, range, summary, findings, mask })
    };
    if target != Presence::Present && !mask.exists() {
        return good(None, Vec::new(), findings, None);
    }
    let stored = decode::stored_mask(mask).map_err(|error| (Problem::UndecodableMask, describe(&error)))?;
    findings.add_stored(mask, &stored);
    let found = stored.labels();
    let pixels = stored.target(labels).map_err(|refusal| {
        let is_no_mask = matches!(refusal, MaskRefusal::Photograph(_) | MaskRefusal::Probabilities(_));
        let problem = if is_no_mask { Problem::NotAMask } else { Problem::SeveralLabels };
        (problem, format!("{}: {refusal}; {}", mask.display(), refusal.hint()))
    })?;
    let sizes = ((decoded.width(), decoded.height()), pixels.dimensions());
    if sizes.0 != sizes.1 {
        return Err((Problem::SizeMismatch, format!("{}: {}", mask.display(), size_mismatch(sizes.0, sizes.1))));
    }
    let set = foreground(&pixels);
    check_presence(&set, target, (labels, &found))
        .map_err(|(problem, what)| (problem, format!("{}: the mask {what}", mask.display())))?;
    let mut words = None;
    if target == Presence::Present {
        findings.add_mask(mask, &set);
        words = Some(compare(&set));
    }
    good(Some(&set), found.into_iter().map(|(label, _)| label).collect(), findings, words)
}

/// Compares the foreground of a mask, of these labels among those that were found, with what its rows say.
fn check_presence(
    set: &GrayImage,
    target: Presence,
    (labels, found): (Labels, &[(u16, u64)]),
) -> Result<(), (Problem, String)> {
    let num_foreground = set.iter().filter(|&&value| value > 0).count();
    let why = match (target, num_foreground) {
        (Presence::Present, 0) if found.is_empty() => return Err((Problem::EmptyMask, "is empty".to_owned())),
        (Presence::Present, 0) => {
            let what = format!("has no pixel of the labels {labels}; it has {}", labels::describe(found));
            return Err((Problem::EmptyMask, what));
        }
        (Presence::Present, _) | (_, 0) => return Ok(()),
        (Presence::Absent, _) => "its target is not in the image",
        (Presence::Unknown, _) => "its mask is unknown",
    };
    Err((Problem::NotEmpty, format!("has {num_foreground} pixels of foreground, but the row says that {why}")))
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

/// Image files whose pixels another image file has too, without one of each.
fn copies(manifest: &Manifest, by_pixels: &HashMap<Mark, Vec<usize>>) -> usize {
    let files = |rows: &Vec<usize>| rows.iter().map(|&row| &manifest.rows[row].image_path).collect::<BTreeSet<_>>();
    by_pixels.values().map(|rows| files(rows).len() - 1).sum()
}

#[cfg(test)]
mod tests;
