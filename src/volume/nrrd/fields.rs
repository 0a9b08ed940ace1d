//! Fields of an NRRD header.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use super::super::detached::names_of_pattern;
use prsmed_base::error::{Error, Result};

/// What to do about a header that cannot be used.
pub(super) const EXPORT: &str = "export the file again, for example with 3D Slicer or `SimpleITK.WriteImage`";

/// The fields (`type: short`) and keys (`Segment0_Name:=liver`) of a header.
pub(super) struct Header {
    /// By their names without spaces, which some programs leave out.
    fields: BTreeMap<String, String>,
    keys: BTreeMap<String, String>,
    /// The lines after `data file: LIST`.
    files: Vec<String>,
}

fn short(name: &str) -> String {
    name.chars().filter(|letter| *letter != ' ').collect::<String>().to_lowercase()
}

impl Header {
    pub(super) fn new(path: &Path, lines: &[String]) -> Result<Self> {
        let wrong = |reason: String| Error::data(path, reason, EXPORT);
        let mut lines = lines.iter();
        let magic = lines.next().map_or("", String::as_str);
        if !magic.strip_prefix("NRRD000").is_some_and(|version| ["1", "2", "3", "4", "5", "6"].contains(&version)) {
            return Err(wrong("it has no first line of an NRRD file, `NRRD0001` to `NRRD0006`".to_owned()));
        }
        let mut header = Self { fields: BTreeMap::new(), keys: BTreeMap::new(), files: Vec::new() };
        for line in lines {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if header.fields.get("datafile").is_some_and(|file| file.starts_with("LIST")) {
                header.files.push(line.trim().to_owned());
                continue;
            }
            let field = line.split_once(": ").or_else(|| line.strip_suffix(':').map(|name| (name, "")));
            match (line.split_once(":="), field) {
                (Some((key, value)), field) if field.is_none_or(|(name, _)| key.len() <= name.len()) => {
                    header.keys.insert(key.to_owned(), value.to_owned());
                }
                (_, Some((name, value))) => {
                    if header.fields.insert(short(name), value.trim().to_owned()).is_some() {
                        return Err(wrong(format!("its header has the field `{name}` twice")));
                    }
                }
                _ => {
                    let start: String = line.chars().filter(|letter| !letter.is_control()).take(40).collect();
                    return Err(wrong(format!("its header has a line that is neither a field nor a key: `{start}`")));
                }
            }
        }
        Ok(header)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.fields.get(&short(name)).map(String::as_str)
    }

    /// A field in small letters.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.text(name).map(str::to_lowercase)
    }

    /// As [`Self::get`], for a field that every header has.
    pub(super) fn required(&self, path: &Path, name: &str) -> Result<String> {
        self.get(name).ok_or_else(|| Error::data(path, format!("its header has no field `{name}`"), EXPORT))
    }

    pub(super) fn key(&self, name: &str) -> Option<&str> {
        self.keys.get(name).map(String::as_str)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// The words of a field; none without it.
    pub(super) fn words(&self, name: &str) -> Vec<String> {
        self.get(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }

    /// The texts in double quotes of a field.
    pub(super) fn quoted(&self, name: &str) -> Vec<&str> {
        self.text(name).unwrap_or_default().split('"').skip(1).step_by(2).collect()
    }

    /// The numbers of a field; none without it.
    pub(super) fn numbers<T: FromStr>(&self, path: &Path, name: &str) -> Result<Vec<T>> {
        self.words(name).iter().map(|word| parsed(path, name, word)).collect()
    }

    /// The number of a field.
    pub(super) fn number(&self, path: &Path, name: &str) -> Result<Option<usize>> {
        self.get(name).map(|text| parsed(path, name, &text)).transpose()
    }

    /// The vectors of a field, of which `none` is one without numbers; `None` without the field.
    pub(super) fn vectors(&self, path: &Path, name: &str) -> Result<Option<Vec<Option<Vec<f64>>>>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let mut vectors = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let (vector, after) = if let Some(after) = rest.strip_prefix("none") {
                (None, after)
            } else {
                let inside = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
                let (inside, after) = inside.ok_or_else(|| {
                    Error::data(path, format!("its header has no vectors in the field `{name}`: `{text}`"), EXPORT)
                })?;
                let numbers: Result<Vec<f64>> = inside.split(',').map(|word| parsed(path, name, word.trim())).collect();
                (Some(numbers?), after)
            };
            vectors.push(vector);
            rest = after.trim_start();
        }
        Ok(Some(vectors))
    }

    /// The names of the files with the voxels; `None` if they are behind the header.
    pub(super) fn data_files(&self, path: &Path) -> Result<Option<Vec<String>>> {
        let Some(text) = self.text("data file") else { return Ok(None) };
        if text.split_whitespace().next() == Some("LIST") {
            return Ok(Some(self.files.clone()));
        }
        Ok(Some(names_of_pattern(path, text)?.unwrap_or_else(|| vec![text.to_owned()])))
    }
}

fn parsed<T: FromStr>(path: &Path, name: &str, word: &str) -> Result<T> {
    let reason = || format!("its header has a wrong number in the field `{name}`: `{word}`");
    word.parse().map_err(|_| Error::data(path, reason(), EXPORT))
}
