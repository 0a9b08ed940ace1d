//! Manifest: the rows of a data root in PRS-Med's layout, checked without decoding images.
//!
//! ```text
//! ROOT/CLASS/{train,val,test}_{images,masks}/NAME.EXT    ROOT/annotations/*.csv (or `annotation/`, or another folder)
//! ```
//!
//! Deviations from the original loader: `val` rows are kept; the class is the first folder of the path and not a
//! substring of it; a row with an empty cell is an error (or skipped on request) and is never dropped silently.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::patient::Spellings;
use crate::{annotation, held_out};
use prsmed_base::error::{Error, Result};
use prsmed_base::shell::ShellCommand;

/// Classes of the published six-class checkpoints, in the order of their class head. See [`Manifest::with_modalities`].
pub const REFERENCE_CLASSES: [&str; 6] =
    ["brain_tumors_ct_scan", "breast_tumors_ct_scan", "lung_CT", "lung_Xray", "skin_rgbimage", "polyp_endoscopy"];

/// Use of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Training.
    Train,
    /// Validation: selects the best checkpoint.
    Val,
    /// Final evaluation only.
    Test,
}

impl Split {
    /// All splits, in printing order.
    pub const ALL: [Self; 3] = [Self::Train, Self::Val, Self::Test];

    /// Name in CSV files and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
            Self::Test => "test",
        }
    }

    /// The split with this name; surrounding spaces and case are ignored.
    pub fn parse(word: &str) -> Option<Self> {
        let word = word.trim();
        Self::ALL.into_iter().find(|split| word.eq_ignore_ascii_case(split.name()))
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a target is in the image: the column `present` of the CSV file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// `1`, or no such column: the target is in the image, and the mask shows it.
    #[default]
    Present,
    /// `0`: the target is not in the image. The mask is empty, and its file may be missing.
    Absent,
    /// `unknown`: there is no mask; the row has an answer only.
    Unknown,
}

impl Presence {
    /// The value of a cell; an empty cell means [`Presence::Present`].
    pub fn parse(cell: &str) -> Option<Self> {
        match cell.trim().to_ascii_lowercase().as_str() {
            "" | "1" | "1.0" | "true" | "yes" => Some(Self::Present),
            "0" | "0.0" | "false" | "no" => Some(Self::Absent),
            "unknown" => Some(Self::Unknown),
            _ => None,
        }
    }
}

/// A target of a question, and its mask.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Its name; empty for the only target of a row.
    pub name: String,
    /// Absolute or root-joined path of the mask.
    pub mask_path: PathBuf,
    /// Whether the target is in the image.
    pub presence: Presence,
}

impl Target {
    /// The only target of a row.
    pub fn only(mask_path: PathBuf, presence: Presence) -> Vec<Self> {
        vec![Self { name: String::new(), mask_path, presence }]
    }

    /// Whether it has no mask file and needs none.
    pub fn lacks_mask(&self) -> bool {
        self.presence != Presence::Present && !self.mask_path.exists()
    }
}

/// One question and answer about targets in one image.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// CSV file of the row.
    pub csv: PathBuf,
    /// 1-based line of `csv` where the row starts.
    pub line: u64,
    /// Class folder: the first folder of the mask path.
    pub modality: String,
    /// The targets, at least one. The CSV file has one.
    pub targets: Vec<Target>,
    /// The image that belongs to the masks.
    pub image_path: PathBuf,
    /// Question, verbatim.
    pub question: String,
    /// Answer, verbatim.
    pub answer: String,
    /// Position label (`upper left`, a sentence, ...) if the CSV file has that column.
    pub position: Option<String>,
    /// Patient, or another group of images that must be in one split, if the CSV file has the column `patient`. Rows of one
    /// [`Manifest`] have the same spelling of a patient.
    pub patient: Option<String>,
    /// Size of a pixel in mm, across and down, if the CSV file has the columns `spacing_x_mm` and `spacing_y_mm`.
    pub spacing_mm: Option<[f64; 2]>,
    /// Use of the row.
    pub split: Split,
    /// True if the row comes from an extra data root; such rows are used for training only.
    pub synthetic: bool,
}

impl Row {
    /// The first target: that of rows with one.
    ///
    /// # Panics
    /// Without a target.
    pub fn target(&self) -> &Target {
        self.targets.first().expect("a row has a target")
    }

    /// Paths of the masks.
    pub fn mask_paths(&self) -> impl Iterator<Item = &Path> {
        self.targets.iter().map(|target| target.mask_path.as_path())
    }

    /// Whether the mask shows the target. The mask of other rows is empty or not known, and its file may be missing.
    pub fn is_present(&self) -> bool {
        self.target().presence == Presence::Present
    }
}

/// Kind of problem of a bad row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// More or fewer cells than the header.
    ColumnCount,
    /// A cell is not UTF-8.
    NotUtf8,
    /// A double quote is open at the end of the file.
    UnclosedQuote,
    /// A cell contains the following rows, because of a stray double quote.
    SwallowedRows,
    /// A cell is longer than any text.
    CellTooLong,
    /// A required cell is empty or only spaces.
    EmptyCell,
    /// The split is not one of `train`, `val`, `test`.
    UnknownSplit,
    /// The column `present` is not one of `1`, `0`, `unknown`.
    BadPresent,
    /// The patient is not what was typed: a spreadsheet program has rounded it.
    BadPatient,
    /// A spacing is not a positive number, or only one of the two is given.
    BadSpacing,
    /// The mask path has no class folder, no `*_masks` folder, or leaves the data root.
    BadPath,
    /// The mask file does not exist.
    MissingMask,
    /// No image file belongs to the mask.
    MissingImage,
    /// The image or the mask is a folder, pipe or device.
    NotAFile,
    /// An earlier row has the same mask, question and answer.
    Duplicate,
    /// The image cannot be decoded.
    UndecodableImage,
    /// The mask cannot be decoded.
    UndecodableMask,
    /// Image and mask differ in size.
    SizeMismatch,
    /// The mask has no foreground.
    EmptyMask,
    /// The mask has foreground, but the row says that the target is absent.
    NotEmpty,
    /// The mask has several labels, and none was chosen.
    SeveralLabels,
    /// The mask looks like a photograph.
    NotAMask,
}

/// A bad row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BadRow {
    /// The CSV file.
    pub csv: PathBuf,
    /// 1-based line of `csv`.
    pub line: u64,
    /// Kind of problem.
    pub problem: Problem,
    /// Description, with the file or value at fault.
    pub reason: String,
}

/// Treatment of bad rows by [`Manifest::open_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Skip bad rows, as the original loader does, instead of returning an error.
    pub skip_bad: bool,
}

/// The good rows of a data root.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// Folder of the class folders.
    pub root: PathBuf,
    /// The rows, ordered by CSV file name and line.
    pub rows: Vec<Row>,
    /// The classes; the index is the class label. Sorted by name unless [`Manifest::with_modalities`] set them.
    pub modalities: Vec<String>,
    /// Synthetic rows that were left out because their sources are `val` or `test` images.
    pub num_leaking: usize,
    /// Bad rows that were skipped.
    pub skipped: Vec<BadRow>,
    /// Spellings of the patients in the CSV files. The rows have the first one.
    pub spellings: Spellings,
}

impl Manifest {
    /// Reads all rows. `annotations` is a folder of CSV files or one CSV file; the default is `annotations/` or
    /// `annotation/` in `root`.
    ///
    /// # Errors
    /// [`Error::Data`] for a missing folder or column, and for the first bad row, with the number of bad rows;
    /// [`Error::Io`] when a file cannot be read.
    pub fn open(root: &Path, annotations: Option<&Path>) -> Result<Self> {
        Self::open_with(root, annotations, OpenOptions::default())
    }

    /// As [`Manifest::open`], with options for bad rows.
    ///
    /// # Errors
    /// As [`Manifest::open`]. With `skip_bad`, bad rows are an error only if there is no good row.
    pub fn open_with(root: &Path, annotations: Option<&Path>, options: OpenOptions) -> Result<Self> {
        let (mut manifest, bad) = Self::read(root, annotations)?;
        let Some(first) = bad.first() else { return Ok(manifest) };
        if options.skip_bad && !manifest.rows.is_empty() {
            manifest.skipped = bad;
            return Ok(manifest);
        }
        let count = match bad.len() {
            1 => "the only bad row".to_owned(),
            n => format!("the first of {n} bad rows"),
        };
        let check = ShellCommand::new("prsmed data check").path(root).flag("--annotations", annotations);
        Err(Error::data_line(
            &first.csv,
            first.line,
            format!("{} ({count})", first.reason),
            format!("list all of them with `{check}`, then repair or remove the rows"),
        ))
    }

    /// Reads the good and the bad rows without decoding images.
    ///
    /// # Errors
    /// [`Error::Data`] for a missing folder or column, or when there is no row; [`Error::Io`].
    pub fn read(root: &Path, annotations: Option<&Path>) -> Result<(Self, Vec<BadRow>)> {
        let files = annotation::files(root, annotations)?;
        let (mut rows, bad) = annotation::read(root, &files)?;
        if rows.is_empty() && bad.is_empty() {
            return Err(Error::data(
                files.first().map_or(root, PathBuf::as_path),
                "there are no rows below the header",
                "add one line for each question: `CLASS/train_masks/NAME.png,question,answer,train`",
            ));
        }
        let classes: BTreeSet<&str> = rows.iter().map(|row| row.modality.as_str()).collect();
        let modalities = classes.into_iter().map(str::to_owned).collect();
        let mut spellings = Spellings::default();
        settle_patients(&mut rows, &mut spellings);
        let root = root.to_path_buf();
        Ok((Self { root, rows, modalities, num_leaking: 0, skipped: Vec::new(), spellings }, bad))
    }

    /// Replaces the class labels by those of a trained run (or [`REFERENCE_CLASSES`]).
    ///
    /// # Errors
    /// [`Error::Data`] when a row's class is not among `modalities`.
    pub fn with_modalities(mut self, modalities: Vec<String>) -> Result<Self> {
        if let Some(row) = self.rows.iter().find(|row| !modalities.contains(&row.modality)) {
            return Err(Error::data_line(
                &row.csv,
                row.line,
                format!("class `{}` is unknown; the classes are `{}`", row.modality, modalities.join("`, `")),
                "use a data root with the classes of the run, or train a run that knows this class",
            ));
        }
        self.modalities = modalities;
        Ok(self)
    }

    /// One sentence about the skipped rows, which names the first of them; `None` if there are none.
    pub fn skipped_note(&self) -> Option<String> {
        const SHOWN: usize = 3;
        let rows = self.skipped.iter().take(SHOWN);
        let rows: Vec<String> = rows.map(|bad| format!("{}:{}: {}", bad.csv.display(), bad.line, bad.reason)).collect();
        let more = self.skipped.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!("; and {more} more (`prsmed data check` lists them)") } else { String::new() };
        (!rows.is_empty()).then(|| format!("{} bad rows are left out: {}{more}", self.skipped.len(), rows.join("; ")))
    }

    /// Whether some rows have an answer only. Their masks do not count in losses and scores.
    pub fn has_unknown_masks(&self) -> bool {
        self.rows.iter().any(|row| row.targets.len() != 1 || row.target().presence == Presence::Unknown)
    }

    /// The classes without a real row of `split`, if other classes have some.
    pub fn classes_without(&self, split: Split) -> Vec<&str> {
        let rows = || self.rows.iter().filter(|row| !row.synthetic);
        let with: BTreeSet<&str> = rows().filter(|row| row.split == split).map(|row| row.modality.as_str()).collect();
        let all: BTreeSet<&str> = rows().map(|row| row.modality.as_str()).collect();
        if with.is_empty() { Vec::new() } else { all.difference(&with).copied().collect() }
    }

    /// The class label of a class folder.
    pub fn label(&self, modality: &str) -> Option<usize> {
        self.modalities.iter().position(|name| name == modality)
    }

    /// Indices of the real rows of one split, ascending.
    pub fn rows_of(&self, split: Split) -> Vec<usize> {
        (0..self.rows.len()).filter(|&index| self.rows[index].split == split && !self.rows[index].synthetic).collect()
    }

    /// Indices of the rows from extra data roots, ascending. They are not part of [`Manifest::rows_of`].
    pub fn synthetic_rows(&self) -> Vec<usize> {
        (0..self.rows.len()).filter(|&index| self.rows[index].synthetic).collect()
    }

    /// Appends the rows of `extra`, marked as synthetic. Classes and indices of the existing rows do not change. Pairs
    /// made from a `val` or `test` image of these rows are left out.
    ///
    /// # Errors
    /// [`Error::Data`] for the first row of `extra` that is not a `train` row or has an unknown class, and for a
    /// damaged journal of pairs; [`Error::Io`].
    pub fn with_extra(mut self, extra: Self) -> Result<Self> {
        if let Some(row) = extra.rows.iter().find(|row| row.split != Split::Train) {
            return Err(Error::data_line(
                &row.csv,
                row.line,
                format!("split `{}` in an extra data root, which may contain `train` rows only", row.split),
                "give the root with real `val` and `test` rows as the argument `data_root`, or remove these rows",
            ));
        }
        let mut extra = extra.with_modalities(self.modalities.clone())?;
        settle_patients(&mut extra.rows, &mut self.spellings);
        self.skipped.extend(extra.skipped);
        self.rows.extend(extra.rows.into_iter().map(|row| Row { synthetic: true, ..row }));
        held_out::drop_leaking_pairs(&mut self)?;
        Ok(self)
    }
}

/// Gives all rows of a patient the first spelling, and rows without one none.
fn settle_patients(rows: &mut [Row], spellings: &mut Spellings) {
    for row in rows {
        row.patient = row.patient.take().and_then(|patient| spellings.settle(&patient));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Root, shared};

    fn reason(root: &Root) -> String {
        Manifest::open(root.path(), None).expect_err("a bad row").to_string()
    }

    #[test]
    fn pairs_without_rows_are_not_called_a_wrong_folder() {
        let root = Root::new();
        std::fs::create_dir_all(root.file("annotations")).expect("created");
        assert!(reason(&root).contains("there is no CSV file in this folder"));
        std::fs::write(root.file("manifest.jsonl"), "{}\n").expect("written");
        assert!(reason(&root).contains("there are no accepted pairs"));
    }

    #[test]
    fn one_row_is_read_with_its_image_class_and_line() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv(
            "a.csv",
            "split,extra,answer,image_path,question\ntrain,x,\"up, left\",ct\\train_masks\\a.png,where?\n",
        );
        let manifest = Manifest::open(root.path(), None).expect("good");
        let row = &manifest.rows[0];
        assert_eq!((row.line, row.split, row.modality.as_str()), (2, Split::Train, "ct"));
        assert_eq!(row.answer, "up, left");
        assert_eq!(row.position, None);
        assert_eq!(row.image_path, root.path().join("ct/train_images/a.png"));
        assert_eq!(manifest.modalities, ["ct"]);
    }

    #[test]
    fn bom_crlf_and_multi_line_cells_are_read() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv(
            "a.csv",
            "\u{feff}image_path,question,answer,position,split\r\n\
             ct/train_masks/a.png,\"q\r\nq\",a,left,train\r\nct/train_masks/a.png,q2,a,left,test\r\n",
        );
        let manifest = Manifest::open(root.path(), None).expect("good");
        assert_eq!(manifest.rows.iter().map(|row| row.line).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(manifest.rows[0].question, "q\r\nq");
        assert_eq!(manifest.rows[1].position.as_deref(), Some("left"));
    }

    #[test]
    fn a_missing_column_names_the_file_and_the_header_found() {
        let root = Root::new();
        root.csv("b.csv", "image_path,question,reply,split\n");
        let error = Manifest::open(root.path(), None).expect_err("no answer column");
        assert!(
            error
                .to_string()
                .ends_with("b.csv:1: column `answer` is missing; the header is `image_path,question,reply,split`"),
            "{error}"
        );
        assert!(error.hint().contains("`image_path`, `question`, `answer` and `split`"), "{}", error.hint());
        root.csv("b.csv", "image_path|question|answer|split\n");
        assert!(Manifest::open(root.path(), None).expect_err("bars").hint().contains("commas"));
        root.csv("b.csv", "image_path;question;reply;split\n");
        let error = Manifest::open(root.path(), None).expect_err("no answer column").to_string();
        assert!(
            error.contains("column `answer` is missing; the header is `image_path,question,reply,split`"),
            "{error}"
        );
    }

    #[test]
    fn hidden_files_and_other_files_are_not_read() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv("a.csv", "image_path,question,answer,split\nct/train_masks/a.png,q,a,train\n");
        for name in [".a.csv", "._a.csv", "notes.txt"] {
            root.csv(name, "no annotations");
        }
        assert_eq!(Manifest::open(root.path(), None).expect("good").rows.len(), 1);
    }

    #[test]
    fn bad_rows_are_counted_and_the_first_is_named() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv(
            "a.csv",
            "image_path,question,answer,split\nct/train_masks/a.png,q, ,train\n\
             ct/train_masks/a.png,q,a,training\nct/train_masks/a.png,q,a,train\n",
        );
        let text = reason(&root);
        assert!(text.ends_with("a.csv:2: column `answer` is empty (the first of 2 bad rows)"), "{text}");
        let manifest =
            Manifest::open_with(root.path(), None, OpenOptions { skip_bad: true }).expect("one good row is left");
        assert_eq!(manifest.rows.len(), 1);
    }

    #[test]
    fn every_kind_of_bad_row_has_its_reason() {
        let cases = [
            ("ct/train_masks/a.png,q,a,training", Problem::UnknownSplit, "split `training` is not one of"),
            ("ct/train_masks/none.png,q,a,train", Problem::MissingMask, "mask `ct/train_masks/none.png` is missing"),
            (
                "ct/train_masks/lonely.png,q,a,train",
                Problem::MissingImage,
                "no image `lonely` (png, jpg, jpeg, tif, tiff, bmp, gif, webp, pgm, ppm) in `ct/train_images`",
            ),
            (
                "ct/train_masks/A.PNG,q,a,train",
                Problem::MissingMask,
                "is missing; `a.png` differs from it in upper and lower case",
            ),
            (
                "ct/train_masks/Lonely2.png,q,a,train",
                Problem::MissingImage,
                "in `ct/train_images`; `lonely2.png` differs from it in upper and lower case",
            ),
            ("../ct/train_masks/a.png,q,a,train", Problem::BadPath, "leaves the data root"),
            ("train_masks/a.png,q,a,train", Problem::BadPath, "has no class folder"),
            ("ct/other/a.png,q,a,train", Problem::BadPath, "has no `*_masks` folder"),
            ("ct/train_masks/a.png,q,a", Problem::ColumnCount, "3 cells, but the header has 4; add the"),
            ("ct/train_masks/a.png,q,a,b,c,train", Problem::ColumnCount, "6 cells, but the header has 4; put a text"),
            ("ct/train_masks/pipe.png,q,a,train", Problem::NotAFile, "mask `ct/train_masks/pipe.png` is not a regular"),
            (
                "ct/train_masks/bent.png,q,a,train",
                Problem::NotAFile,
                "image `ct/train_images/bent.png` is not a regular",
            ),
            ("ct/train_masks/a.png,q0,a,test", Problem::Duplicate, "repeats the row in line 2 of `a.csv`"),
        ];
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.mask("ct/train_masks/lonely.png", 8, 8, |_, _| 255);
        root.mask("ct/train_masks/bent.png", 8, 8, |_, _| 255);
        root.mask("ct/train_masks/Lonely2.png", 8, 8, |_, _| 255);
        root.image("ct/train_images/lonely2.png", 8, 8);
        for name in ["ct/train_masks/pipe.png", "ct/train_images/bent.png"] {
            let name = std::ffi::CString::new(root.file(name).to_str().expect("a path")).expect("no NUL");
            // SAFETY: a NUL-terminated path.
            assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        }
        for (line, problem, words) in cases {
            root.csv("a.csv", &format!("image_path,question,answer,split\nct/train_masks/a.png,q0,a,train\n{line}\n"));
            let (_, bad) = Manifest::read(root.path(), None).expect("readable");
            assert_eq!(bad.len(), 1, "{line}: {bad:?}");
            assert_eq!((bad[0].problem, bad[0].line), (problem, 3), "{line}");
            assert!(bad[0].reason.contains(words), "{line}: {}", bad[0].reason);
        }
    }

    #[test]
    fn invisible_letters_and_numbers_of_spreadsheets_are_read() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv(
            "a.csv",
            "\u{feff}\u{feff}image_path,Question\u{200b},\u{a0}answer,split,present,patient\n\
             ct/train_masks/a.png,q,a,train\u{a0},1.0,\u{200b}P1\u{a0}\nct/train_masks/a.png,q2,a,Train,0.0,\u{feff}\n",
        );
        let rows = Manifest::open(root.path(), None).expect("good").rows;
        assert_eq!((rows[0].target().presence, rows[0].patient.as_deref()), (Presence::Present, Some("P1")));
        assert_eq!((rows[1].target().presence, rows[1].patient.as_deref()), (Presence::Absent, None));
    }

    #[test]
    fn a_stray_quote_is_a_bad_row_and_hides_no_other_row() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        let bad = |text: &str| {
            root.csv("a.csv", &format!("image_path,question,answer,split\nct/train_masks/a.png,q0,a,train\n{text}"));
            let (manifest, bad) = Manifest::read(root.path(), None).expect("readable");
            (manifest.rows.len(), bad)
        };
        let row = |question: &str| format!("ct/train_masks/a.png,{question},a,train\n");
        // an open quote in a cell of the middle and in the last cell
        for open in [row("\"where?") + &row("q2") + &row("q3"), row("q2") + "ct/train_masks/a.png,q3,a,\"train\n"] {
            let (good, bad) = bad(&open);
            let line = if open.contains("q2,a,train\nct/train_masks/a.png,q3,a,\"") { 4 } else { 3 };
            assert_eq!((bad.len(), bad[0].problem, bad[0].line), (1, Problem::UnclosedQuote, line), "{bad:?}");
            assert!(bad[0].reason.contains("a double quote that is never closed"), "{}", bad[0].reason);
            assert_eq!(good as u64, line - 2);
        }
        // a later quote closes it
        let (_, found) = bad(&(row("\"where?") + &row("q2") + &row("here\"") + &row("q4")));
        assert_eq!((found.len(), found[0].problem, found[0].line), (1, Problem::SwallowedRows, 3), "{found:?}");
        assert!(found[0].reason.starts_with("column `question` contains the next 2 rows of the file"), "{found:?}");
        let (_, found) = bad(&row(&"long ".repeat(4000)));
        assert_eq!((found.len(), found[0].problem), (1, Problem::CellTooLong));
        // quotes as they should be
        for fine in [row("\"a \"\"quoted\"\" word\""), row("a 5\" scar"), row("\"two\nlines\"").trim_end().to_owned()] {
            assert_eq!(bad(&fine), (2, Vec::new()), "{fine}");
        }
        assert_eq!(bad("ct/train_masks/a.png,q,a,\"train\""), (2, Vec::new()), "a quote at the end of the file");
    }

    #[test]
    fn skipped_rows_and_classes_without_a_split_are_named() {
        let root = Root::new();
        for class in ["ct", "mr"] {
            root.pair(class, "train", "a");
        }
        let bad =
            ["q0", "q1", "q2", "q3", "q4"].map(|question| format!("ct/train_masks/none.png,{question},a,train\n"));
        let bad = bad.concat();
        let good = "ct/train_masks/a.png,q,a,train\nmr/train_masks/a.png,q,a,val\n";
        root.csv("a.csv", &format!("image_path,question,answer,split\n{bad}{good}"));
        let manifest = Manifest::open_with(root.path(), None, OpenOptions { skip_bad: true }).expect("two good rows");
        let note = manifest.skipped_note().expect("five bad rows");
        assert!(note.starts_with("5 bad rows are left out: "), "{note}");
        assert!(note.contains("a.csv:4: mask `ct/train_masks/none.png` is missing; and 2 more"), "{note}");
        assert_eq!(manifest.classes_without(Split::Val), ["ct"]);
        assert_eq!(manifest.classes_without(Split::Test), [""; 0], "no class has test rows");
    }

    #[test]
    fn errors_name_missing_folders_and_empty_files() {
        let root = Root::new();
        let error = Manifest::open(root.path(), None).expect_err("no annotations");
        assert!(error.to_string().contains("contains neither `annotations` nor `annotation`"), "{error}");
        assert!(error.hint().contains("`prsmed data prepare`"), "{}", error.hint());
        std::fs::create_dir_all(root.path().join("annotations")).expect("a folder");
        std::fs::create_dir_all(root.path().join("ct")).expect("a folder");
        let error = Manifest::open(&root.path().join("ct"), None).expect_err("the folder of a class");
        let hint = format!("this is the folder of a class: give the data root `{}`", root.path().display());
        assert_eq!(error.hint(), hint);
        let error = Manifest::open(Path::new("/nowhere"), None).expect_err("no root");
        assert_eq!(error.to_string(), "/nowhere: the data root is not a folder");
        root.csv("a.csv", "image_path,question,answer,split\n");
        let error = Manifest::open(root.path(), None).expect_err("no rows");
        assert!(error.to_string().contains("there are no rows below the header"), "{error}");
    }

    #[test]
    fn isic_names_and_other_extensions_find_their_image() {
        let root = Root::new();
        root.mask("skin/test_masks/ISIC_1_Segmentation.png", 8, 8, |_, _| 255);
        root.image("skin/test_images/ISIC_1.JPG", 8, 8);
        root.csv("a.csv", "image_path,question,answer,split\nskin/test_masks/ISIC_1_Segmentation.png,q,a,test\n");
        let manifest = Manifest::open(root.path(), None).expect("good");
        assert_eq!(manifest.rows[0].image_path, root.path().join("skin/test_images/ISIC_1.JPG"));
    }

    #[test]
    fn classes_that_a_run_does_not_know_are_rejected() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        root.csv("a.csv", "image_path,question,answer,split\nct/train_masks/a.png,q,a,train\n");
        let manifest = Manifest::open(root.path(), None).expect("good");
        let known = manifest.clone().with_modalities(vec!["mr".into(), "ct".into()]).expect("known");
        assert_eq!(known.label("ct"), Some(1));
        let error = manifest.with_modalities(vec!["mr".into()]).expect_err("unknown");
        assert!(error.to_string().contains("class `ct` is unknown; the classes are `mr`"), "{error}");
    }

    #[test]
    fn extra_rows_are_synthetic_and_in_no_split() {
        let (real, made) = (Root::new(), Root::new());
        for root in [&real, &made] {
            root.pair("ct", "train", "a");
            root.csv("a.csv", "image_path,question,answer,split\nct/train_masks/a.png,q,a,train\n");
        }
        let open = |root: &Root| Manifest::open(root.path(), None).expect("good");
        let both = open(&real).with_extra(open(&made)).expect("train rows of a known class");
        assert_eq!((both.rows_of(Split::Train), both.synthetic_rows()), (vec![0], vec![1]));
        assert!(both.rows[1].target().mask_path.starts_with(made.path()));
        assert_eq!(both.skipped_note(), None);
        let mut held_out = open(&made);
        held_out.rows[0].split = Split::Test;
        let error = open(&real).with_extra(held_out).expect_err("a test row").to_string();
        assert!(error.contains("a.csv:2: split `test` in an extra data root"), "{error}");
        let mut other = open(&made);
        other.rows[0].modality = "mr".into();
        let error = open(&real).with_extra(other).expect_err("a new class").to_string();
        assert!(error.contains("a.csv:2: class `mr` is unknown; the classes are `ct`"), "{error}");
        let rows = "ct/train_masks/a.png,q,a,train\nct/train_masks/none.png,q,a,train\n";
        made.csv("a.csv", &format!("image_path,question,answer,split\n{rows}"));
        let some = Manifest::open_with(made.path(), None, OpenOptions { skip_bad: true }).expect("a good row");
        let note = open(&real).with_extra(some).expect("train rows").skipped_note().expect("a bad row");
        assert!(note.contains("a.csv:3: mask `ct/train_masks/none.png` is missing"), "{note}");
    }

    #[test]
    #[ignore = "needs shared data"]
    fn shared_data_the_reference_data_set_needs_skip_bad() {
        let folder = shared("reference/oracle/preprocess/dataset");
        let (data, csvs) = (folder.join("data"), folder.join("annotation"));
        let error = Manifest::open(&data, Some(&csvs)).expect_err("an empty cell");
        assert!(error.to_string().contains("a.csv:5: column `position` is empty (the first of 2 bad rows)"), "{error}");
        let manifest = Manifest::open_with(&data, Some(&csvs), OpenOptions { skip_bad: true }).expect("six rows");
        assert_eq!(manifest.rows.len(), 6);
        let manifest = manifest.with_modalities(REFERENCE_CLASSES.map(str::to_owned).to_vec()).expect("the six");
        assert_eq!(manifest.label("polyp_endoscopy"), Some(5));
    }
}
