//! Patients of files: from the file names, or from a table.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;

use super::grouping;
use crate::volume::format::stem_of;
use crate::{csv_text, names, patient};
use prsmed_base::{Error, Result, files};

/// Where the patient of a file is found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Patients {
    /// Not known.
    #[default]
    Unknown,
    /// The first capture group of this regular expression in the file name.
    Pattern(String),
    /// A CSV file with the columns `file` (a file name, with or without its extension) and `patient`.
    Table(PathBuf),
}

/// Finds the patients of files.
pub(super) enum Finder {
    Pattern(Regex),
    Table(PatientTable),
}

/// Patients by file names.
pub(super) struct PatientTable {
    path: PathBuf,
    exact: BTreeMap<String, String>,
    /// Names and patients by [`names::key`].
    similar: BTreeMap<String, BTreeMap<String, String>>,
}

impl PatientTable {
    /// The patient of a file name, also if the table writes it in another case, form or with other blanks.
    ///
    /// # Errors
    /// [`Error::Data`] if two names of the table may be meant.
    fn find(&self, name: &str) -> Result<Option<&String>> {
        if let Some(found) = self.exact.get(name).or_else(|| self.exact.get(stem_of(name))) {
            return Ok(Some(found));
        }
        let keys = [name, stem_of(name)].map(names::key);
        let Some(found) = keys.iter().find_map(|key| self.similar.get(key)) else { return Ok(None) };
        let mut all = found.iter();
        let Some((first, patient)) = all.next() else { return Ok(None) };
        let Some((other, _)) = all.find(|(_, other)| patient::key(other) != patient::key(patient)) else {
            return Ok(Some(patient));
        };
        let difference = names::difference(first, other);
        let reason = format!(
            "`{first}` and `{other}` differ in {difference} only and have different patients; both may be the file `{name}`"
        );
        Err(Error::data(&self.path, reason, "write the names as those of the files"))
    }
}

impl Finder {
    /// `None` if patients are not known.
    ///
    /// # Errors
    /// [`Error::Config`] for a regular expression without a capture group, [`Error::Data`] for a bad table.
    pub(super) fn open(patients: &Patients) -> Result<Option<Self>> {
        match patients {
            Patients::Unknown => Ok(None),
            Patients::Pattern(pattern) => pattern_of(pattern).map(|regex| Some(Self::Pattern(regex))),
            Patients::Table(path) => table(path).map(|table| Some(Self::Table(table))),
        }
    }

    /// The patient of a file.
    ///
    /// # Errors
    /// [`Error::Data`] if two names of a table fit the file.
    fn find(&self, path: &Path) -> Result<Option<String>> {
        let name = file_name(path);
        let patient = match self {
            Self::Pattern(regex) => {
                regex.captures(&name).and_then(|groups| groups.get(1)).map_or("", |group| group.as_str())
            }
            Self::Table(table) => table.find(&name)?.map_or("", String::as_str),
        };
        Ok(patient::key(patient).map(|_| patient.trim().to_owned()))
    }

    /// The patient of each file. A file without one is its own patient, named like the file; the second list has those
    /// files.
    ///
    /// # Errors
    /// [`Error::Config`] if no file has a patient.
    pub(super) fn patients(&self, paths: &[&Path]) -> Result<(Vec<String>, Vec<PathBuf>)> {
        let mut own = Vec::new();
        let mut found = Vec::new();
        for path in paths {
            found.push(self.find(path)?.unwrap_or_else(|| {
                own.push(path.to_path_buf());
                stem_of(&file_name(path)).to_owned()
            }));
        }
        if own.len() < paths.len() || paths.is_empty() {
            return Ok((found, own));
        }
        let names: Vec<String> = paths.iter().map(|path| file_name(path)).collect();
        let first = &names[0];
        Err(match self {
            Self::Pattern(regex) => {
                let example = grouping::example(&names);
                let reason = format!("`{regex}` matches none of {} file names; the first is `{first}`", paths.len());
                let hint = format!("write a regular expression whose first group is the patient{example}");
                Error::argument("group", reason, hint)
            }
            Self::Table(table) => {
                let reason = format!("it names none of {} files; the first is `{first}`", paths.len());
                Error::data(&table.path, reason, "the column `file` must have the names of the image files")
            }
        })
    }
}

pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn pattern_of(pattern: &str) -> Result<Regex> {
    let hint = "put the patient in parentheses, for example the argument `group='^(P[0-9]+)_'`";
    let bad = |reason: String| Error::argument("group", reason, hint);
    let regex =
        Regex::new(pattern).map_err(|error| bad(format!("`{pattern}` is not a regular expression: {error}")))?;
    if regex.captures_len() < 2 {
        return Err(bad(format!("`{pattern}` has no capture group")));
    }
    Ok(regex)
}

fn table(path: &Path) -> Result<PatientTable> {
    const HINT: &str = "write a CSV file with the columns `file` and `patient`, one line for each image file";
    let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
    let bytes = csv_text::utf8(path, bytes)?;
    let separator = csv_text::separator(&bytes, &["file", "patient"]);
    let mut reader = csv::ReaderBuilder::new().delimiter(separator).from_reader(bytes.as_slice());
    let unreadable = |error: csv::Error| csv_text::error(path, &bytes, &error, HINT);
    let header = reader.headers().map_err(unreadable)?.clone();
    let column = |name: &str| {
        csv_text::column(path, header.as_byte_record(), name)?.ok_or_else(|| {
            let found: Vec<&str> = header.iter().collect();
            Error::data_line(path, 1, format!("column `{name}` is missing; the header is `{}`", found.join(",")), HINT)
        })
    };
    let (file, patient) = (column("file")?, column("patient")?);
    let mut table = PatientTable { path: path.to_owned(), exact: BTreeMap::new(), similar: BTreeMap::new() };
    let mut lines = csv_text::Lines::new(&bytes);
    for record in reader.records() {
        let record = record.map_err(unreadable)?;
        let line = lines.at(record.position());
        let file = record.get(file).unwrap_or_default().trim().to_owned();
        let patient = names::cleaned(record.get(patient).unwrap_or_default());
        if names::cleaned(&file).is_empty() {
            return Err(Error::data_line(path, line, "the column `file` is empty", HINT));
        }
        if let Some(reason) = csv_text::spoiled(&patient) {
            return Err(Error::data_line(path, line, format!("patient `{patient}` {reason}"), csv_text::SPOILED_HINT));
        }
        let name = Path::new(&file).file_name().map_or(file.clone(), |name| name.to_string_lossy().into_owned());
        // a spreadsheet may write the number 12 as `12.0`
        for similar in [Some(name.as_str()), name.strip_suffix(".0")].into_iter().flatten() {
            table.similar.entry(names::key(similar)).or_default().insert(name.clone(), patient.clone());
        }
        let other = table.exact.insert(name, patient.clone());
        if let Some(other) = other.filter(|other| patient::key(other) != patient::key(&patient)) {
            let reason = format!("`{file}` has two patients, `{other}` and `{patient}`");
            return Err(Error::data_line(path, line, reason, "keep one line for each file"));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(patients: &Patients, names: &[&str]) -> Result<(Vec<String>, Vec<PathBuf>)> {
        let paths: Vec<&Path> = names.iter().map(Path::new).collect();
        Finder::open(patients)?.expect("known").patients(&paths)
    }

    #[test]
    fn the_first_group_of_the_file_name_is_the_patient() {
        let pattern = |text: &str| Patients::Pattern(text.to_owned());
        let names = ["x/P1_a.png", "x/P1_b.png", "x/P22.png", "x/other.nii.gz"];
        let (patients, own) = found(&pattern("^(P[0-9]+)"), &names).unwrap();
        assert_eq!(patients, ["P1", "P1", "P22", "other"]);
        assert_eq!(own, [PathBuf::from("x/other.nii.gz")]);
        let error = |text: &str| found(&pattern(text), &names).unwrap_err().to_string();
        assert!(error("^(Q)").contains("matches none of 4 file names; the first is `P1_a.png`"), "{}", error("^(Q)"));
        assert!(error("^P1").contains("no capture group"));
        assert!(error("(P1").contains("is not a regular expression"));
    }

    #[test]
    fn a_table_names_files_with_or_without_their_extension() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("patients.csv");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        let of = |names: &[&str]| found(&Patients::Table(path.clone()), names);
        write("site,patient,file\nA,p7,x/a.png\nA,p7,b\nB,p8,c.nii.gz\n");
        let (patients, own) = of(&["a.png", "b.jpg", "c.nii.gz", "d.png"]).unwrap();
        assert_eq!((patients, own), (["p7", "p7", "p8", "d"].map(str::to_owned).to_vec(), vec!["d.png".into()]));
        assert!(of(&["e.png"]).unwrap_err().to_string().contains("names none of 1 files; the first is `e.png`"));
        write("file;patient\r\na.png;p,7\r\n");
        assert_eq!(of(&["a.png"]).unwrap().0, ["p,7"]);
        write("file,patient\na,p1\na,p2\n");
        assert!(of(&["a.png"]).unwrap_err().to_string().contains(":3: `a` has two patients, `p1` and `p2`"));
        // other case, composed letters, invisible letters, and numbers of spreadsheets
        write("\u{200b}File\u{a0},Patient\nA.PNG,p1\nl\u{e9}sion.png,\u{feff}p2\u{a0}\n12.0,p3\n\u{feff}d.png,p4\n");
        let (patients, own) = of(&["a.png", "le\u{301}sion.png", "12.png", "d.png"]).unwrap();
        assert_eq!((patients, own), (["p1", "p2", "p3", "p4"].map(str::to_owned).to_vec(), vec![]));
        write("file,patient\nA.PNG,p1\na.PNG,p2\n");
        assert_eq!(of(&["A.PNG", "a.PNG"]).unwrap().0, ["p1", "p2"]);
        let text = of(&["a.png"]).unwrap_err().to_string();
        assert!(text.contains("`A.PNG` and `a.PNG` differ in upper and lower case only"), "{text}");
        // cells that are missing, with the line as an editor counts it
        for (text, reason) in [
            ("file,patient\r\n\r\na.png,p1\r\nb.png\r\n", ":4: 1 cell, but the header has 2"),
            ("file,patient\na.png,p1,x\n", ":2: 3 cells, but the header has 2"),
            ("file,patient\r\na.png,p1\r\n\u{200b},p2\r\n", ":3: the column `file` is empty"),
        ] {
            write(text);
            let error = of(&["a.png"]).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        write("file,subject\na,p1\n");
        assert!(of(&["a.png"]).unwrap_err().to_string().contains("column `patient` is missing"));
        write("file,patient,patient\na,p1,q1\n");
        assert!(of(&["a.png"]).unwrap_err().to_string().contains("two columns `patient`, number 2 and number 3"));
        write("file;patient\na;1,23457E+11\nb;1,23457E+11\n");
        let error = of(&["a.png"]).unwrap_err();
        assert!(
            error.to_string().contains(":2: patient `1,23457E+11` is a number that a spreadsheet program has rounded")
        );
        assert!(error.hint().contains("format `Text`"), "{}", error.hint());
        write("file,patient\n,p1\n");
        assert!(of(&["a.png"]).unwrap_err().to_string().contains("the column `file` is empty"));
        // a data frame writes `nan` or nothing for a missing patient
        write("file,patient\na,\nb,nan\nc,p1\nc,P01\nd,Unknown\n");
        let (patients, own) = of(&["a.png", "b.png", "c.png", "d.png"]).unwrap();
        assert_eq!((patients, own.len()), (["a", "b", "P01", "d"].map(str::to_owned).to_vec(), 3));
    }
}
