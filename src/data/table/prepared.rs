//! How the images of a class were made from volumes: `ROOT/CLASS/prepared.json`. A training copies it into the
//! description of the run, so that a prediction on a volume shows it as the training images were.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::manifest::Manifest;
use crate::volume::sequences::{colours, list};
use crate::volume::{Axis, Neighbours, Sequence, Window};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

const FILE: &str = "prepared.json";
/// Version of the file.
const FORMAT: u32 = 1;

/// How slices of a volume become images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Intensity {
    /// Direction of the slices.
    pub axis: Axis,
    /// Intensity window that was applied to the full depth of the voxels.
    pub window: Window,
    /// Slices that an image shows beside its own.
    #[serde(default, skip_serializing_if = "Neighbours::is_none")]
    pub context: Neighbours,
    /// Sequences or phases that are the colours of an image, red first, each with its own window; empty for images of one.
    /// Flat images have them too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sequences: Vec<Sequence>,
}

impl Intensity {
    /// The windows of the sequences, or the one window without any.
    pub fn windows(&self) -> String {
        if self.sequences.is_empty() {
            return format!("`{}`", self.window);
        }
        self.sequences.iter().map(Sequence::to_string).collect::<Vec<_>>().join(", ")
    }

    /// True if the windows show every volume alike.
    pub fn has_windows_of(&self, other: &Self) -> bool {
        let is_same =
            |(own, theirs): (&Sequence, &Sequence)| own.name == theirs.name && own.window.is_same(theirs.window);
        self.window.is_same(other.window)
            && self.sequences.len() == other.sequences.len()
            && self.sequences.iter().zip(&other.sequences).all(is_same)
    }
}

impl fmt::Display for Intensity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.sequences.is_empty() {
            let (axis, colours) = (self.axis, colours(&self.sequences));
            return write!(f, "{axis} slices with {colours}, and the windows {}", self.windows());
        }
        write!(f, "{} slices with the window `{}`", self.axis, self.window)?;
        let distance = match self.context {
            Neighbours::None => return Ok(()),
            Neighbours::Slices(1) => "next to them".to_owned(),
            Neighbours::Slices(count) => format!("{count} slices away"),
            Neighbours::Distance(mm) => format!("{mm} mm away"),
        };
        write!(f, " and those {distance} as red and blue")
    }
}

/// Contents of `prepared.json`. Files from newer versions may have more fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// Version of the file: 1.
    pub format: u32,
    /// Axis, window and neighbours of all slices.
    #[serde(flatten)]
    pub intensity: Intensity,
    /// Labels of each target in the label maps, for example `"liver": "1"`; an empty text: all labels.
    pub targets: BTreeMap<String, String>,
    /// Version of the program.
    pub program: String,
}

impl Prepared {
    /// The contents for a class that this program prepares.
    pub fn new(intensity: Intensity, targets: BTreeMap<String, String>) -> Self {
        Self { format: FORMAT, intensity, targets, program: env!("CARGO_PKG_VERSION").to_owned() }
    }

    /// Reads the file of a class folder; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Data`] for a damaged file and one of a newer format; [`Error::Io`].
    pub fn read(class: &Path) -> Result<Option<Self>> {
        let path = path(class);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let text = files::read_to_string(&path, files::MAX_SETTINGS).map_err(Error::io(&path, "read"))?;
        let hint = "prepare the class again with `prsmed data prepare`, or remove the file";
        let prepared: Self =
            serde_json::from_str(&text).map_err(|error| Error::data(&path, format!("damaged: {error}"), hint))?;
        if prepared.format > FORMAT {
            let reason = format!("has format {}, this program knows {FORMAT}", prepared.format);
            return Err(Error::data(&path, reason, "use a newer version of prsmed"));
        }
        Ok(Some(prepared))
    }

    /// This file with the targets of the file that the class folder has, if there is one.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn merged_with(mut self, class: &Path) -> Result<Self> {
        for (target, labels) in Self::read(class)?.map(|before| before.targets).unwrap_or_default() {
            self.targets.entry(target).or_insert(labels);
        }
        Ok(self)
    }

    /// Writes the file of a class folder.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, class: &Path) -> Result<()> {
        let path = path(class);
        let text = serde_json::to_string_pretty(self).expect("numbers and strings always serialise") + "\n";
        files::write(&path, text.as_bytes()).map_err(Error::io(&path, "write"))
    }
}

fn path(class: &Path) -> PathBuf {
    class.join(FILE)
}

/// How the images of those classes of a data root were made that were prepared from volumes.
///
/// # Errors
/// As [`Prepared::read`]; [`Error::Data`] for classes with different neighbours of a slice or different sequences, which one
/// model cannot tell apart.
pub fn intensities(manifest: &Manifest) -> Result<BTreeMap<String, Intensity>> {
    let mut found = BTreeMap::new();
    for class in &manifest.modalities {
        if let Some(prepared) = Prepared::read(&manifest.root.join(class))? {
            found.insert(class.clone(), prepared.intensity);
        }
    }
    let mut all = found.iter();
    if let Some((first, intensity)) = all.next()
        && let Some((other, theirs)) = all.find(|(_, theirs)| theirs.context != intensity.context)
    {
        let [own, theirs] = [intensity, theirs].map(|intensity| intensity.context);
        let reason = format!("`{first}` was prepared with the neighbouring slices `{own}`, `{other}` with `{theirs}`");
        let hint = "prepare the volumes of all classes with one `--context`, or train on one of them with a data root of its own";
        return Err(Error::data(&manifest.root, reason, hint));
    }
    check_sequences(manifest, &found)?;
    Ok(found)
}

/// Refuses classes with different sequences.
fn check_sequences(manifest: &Manifest, found: &BTreeMap<String, Intensity>) -> Result<()> {
    let names = |class: &String| list(found.get(class).into_iter().flat_map(|intensity| &intensity.sequences));
    let mut all = manifest.modalities.iter().map(|class| (class, names(class)));
    let Some((first, own)) = all.next() else { return Ok(()) };
    let Some((other, theirs)) = all.find(|(_, theirs)| *theirs != own) else { return Ok(()) };
    let words = |names: String| if names.is_empty() { "images without sequences".to_owned() } else { names };
    let reason = format!("`{first}` was prepared from {}, `{other}` from {}", words(own), words(theirs));
    let hint = "prepare all classes from the same sequences in the same order, or train on one of them with a data root of its \
                own";
    Err(Error::data(&manifest.root, reason, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Prepared::read(folder.path()).unwrap(), None);
        let window = "350/50".parse().unwrap();
        let intensity =
            Intensity { axis: Axis::Coronal, window, context: Neighbours::Distance(2.5), sequences: Vec::new() };
        assert_eq!(
            intensity.to_string(),
            "coronal slices with the window `350/50` and those 2.5 mm away as red and blue"
        );
        let prepared = Prepared::new(intensity, BTreeMap::from([("liver".into(), "1,2".into())]));
        prepared.write(folder.path()).unwrap();
        assert_eq!(Prepared::read(folder.path()).unwrap(), Some(prepared));
        let path = folder.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["axis"], &json["window"]), (&"coronal".into(), &"350/50".into()));
        assert_eq!(json["context"], "2.5mm");
        // a file of a version without neighbours
        std::fs::write(&path, text.replace("\"context\": \"2.5mm\",", "")).unwrap();
        assert!(Prepared::read(folder.path()).unwrap().unwrap().intensity.context.is_none());
        std::fs::write(&path, text.replace("\"format\": 1", "\"format\": 2")).unwrap();
        assert!(Prepared::read(folder.path()).unwrap_err().to_string().contains("has format 2"));
        std::fs::write(&path, "{").unwrap();
        assert!(Prepared::read(folder.path()).unwrap_err().to_string().contains("damaged"));
    }
}
