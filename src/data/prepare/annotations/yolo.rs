//! YOLO files: the outlines of one image in a text file, with fractions of its width and height.
//!
//! A line is `CLASS X Y X Y X Y ..`. The names of the classes are in a file beside, or in one of the folders above.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use saphyr_parser::{Event, Parser};

use super::shape::{Outline, Shape};
use super::{AnnotatedImage, Object};
use prsmed_base::error::quoted;
use prsmed_base::{Error, Result, files};

/// Files with the names of classes, in YAML or one in each line.
pub(super) const NAMES: [&str; 6] =
    ["data.yaml", "data.yml", "dataset.yaml", "dataset.yml", "classes.txt", "obj.names"];
/// Folders that are searched for one: `data/labels/train` is two below `data`.
const NUM_FOLDERS: usize = 3;
/// How far a coordinate may be outside, by rounding: as Ultralytics allows it.
const TOLERANCE: f64 = 0.01;
const EXPORT: &str = "export outlines (YOLO segmentation), a class and at least three points in each line";

/// Names of classes by their numbers.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ClassNames {
    /// The file that has them.
    pub(super) path: Option<PathBuf>,
    names: BTreeMap<u32, Arc<str>>,
}

impl ClassNames {
    /// The names for the files in `folder`. Without a file of names there are none.
    ///
    /// # Errors
    /// [`Error::Data`] for a file of names that cannot be read or is for keypoints, and for two that differ.
    pub(super) fn of_folder(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder).map_err(Error::io(folder, "find"))?;
        for folder in folder.ancestors().take(NUM_FOLDERS) {
            let mut found: Option<Self> = None;
            for path in NAMES.map(|name| folder.join(name)).into_iter().filter(|path| path.is_file()) {
                let own = Self::open(&path)?;
                match &found {
                    _ if own.names.is_empty() => {}
                    Some(first) if first.names != own.names => {
                        let other = first.path.as_deref().unwrap_or(Path::new("")).display();
                        let reason = format!("has other names of classes than `{other}`");
                        return Err(Error::data(path, reason, "keep the file with the right names"));
                    }
                    Some(_) => {}
                    None => found = Some(own),
                }
            }
            if let Some(found) = found {
                return Ok(found);
            }
        }
        Ok(Self::default())
    }

    fn open(path: &Path) -> Result<Self> {
        let text = files::read_to_string(path, files::MAX_SETTINGS).map_err(Error::io(path, "read"))?;
        let text = text.trim_start_matches('\u{feff}');
        let is_yaml = path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
        let names = if is_yaml {
            let refuse = |reason| Error::data(path, reason, "write for example `names: [polyp, cyst]`");
            yaml_names(text).map_err(refuse)?
        } else {
            (0..).zip(text.trim_end().lines().map(|line| Arc::from(line.trim()))).collect()
        };
        Ok(Self { path: Some(path.to_owned()), names })
    }

    fn of(&self, class: u32) -> Option<Arc<str>> {
        if self.names.is_empty() { Some(class.to_string().into()) } else { self.names.get(&class).cloned() }
    }
}

/// The entry `names` of a YAML file, a list or a map of numbers.
fn yaml_names(text: &str) -> Result<BTreeMap<u32, Arc<str>>, String> {
    // the texts on the way to a value, and in the list or map `names`
    let mut depth = 0_usize;
    let mut is_list = false;
    let mut top: Option<String> = None;
    let mut key: Option<String> = None;
    let mut names = BTreeMap::new();
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(|error| format!("is no YAML: {error}"))?;
        let is_names = top.as_deref() == Some("names");
        match event {
            Event::Alias(_) => return Err("has a YAML alias, which is not read".to_owned()),
            Event::MappingStart(..) | Event::SequenceStart(..) => {
                depth += 1;
                if is_names && depth > 2 {
                    return Err("has names within names".to_owned());
                }
                if depth == 2 {
                    is_list = matches!(event, Event::SequenceStart(..));
                }
            }
            Event::MappingEnd | Event::SequenceEnd => {
                depth -= 1;
                if depth == 1 {
                    top = None;
                }
            }
            Event::Scalar(text, ..) if depth == 1 => match top.take() {
                None if text == "kpt_shape" => return Err("is for keypoints, which are no masks".to_owned()),
                None => top = Some(text.into_owned()),
                Some(_) => {}
            },
            Event::Scalar(text, ..) if depth == 2 && is_names => {
                let number = match key.take() {
                    _ if is_list => u32::try_from(names.len()).unwrap_or(u32::MAX),
                    Some(key) => key.parse().map_err(|_| format!("has the class `{key}`, which is no number"))?,
                    None => {
                        key = Some(text.into_owned());
                        continue;
                    }
                };
                names.insert(number, Arc::from(text.as_ref()));
            }
            _ => {}
        }
    }
    Ok(names)
}

/// The image of a file with its objects.
///
/// # Errors
/// [`Error::Data`] with the line, for what is no outline.
pub(super) fn image(path: &Path, names: &ClassNames) -> Result<AnnotatedImage> {
    let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    let mut objects = Vec::new();
    for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
        let mut words = line.split_whitespace();
        let Some(class) = words.next() else { continue };
        let refuse = |reason: String| Error::data_line(path, number, reason, EXPORT);
        let class: u32 = class.parse().map_err(|_| refuse(format!("`{class}` is not the number of a class")))?;
        let label = names.of(class).ok_or_else(|| {
            let known: Vec<&u32> = names.names.keys().collect();
            let file = names.path.as_deref().unwrap_or(Path::new("")).display();
            refuse(format!("the class {class} has no name in `{file}`, which names {}", quoted(&known)))
        })?;
        let outline = outline(words).map_err(refuse)?;
        let name = format!("line {number}").into();
        objects.push(Object { label, name, shape: Shape::Fractions(outline), is_crowd: false });
    }
    Ok(AnnotatedImage { name: String::new(), size: None, objects })
}

fn outline<'a>(words: impl Iterator<Item = &'a str>) -> Result<Outline, String> {
    let number = |word: &str| {
        let value: f64 = word.parse().map_err(|_| format!("`{word}` is no coordinate"))?;
        if !(-TOLERANCE..=1.0 + TOLERANCE).contains(&value) {
            return Err(format!("the coordinate {word} is not from 0 to 1, a part of the width or height"));
        }
        Ok(value.clamp(0.0, 1.0))
    };
    let values: Vec<f64> = words.map(number).collect::<Result<_, String>>()?;
    match values.len() {
        4 => Err("it is a box, which is no mask".to_owned()),
        odd if odd % 2 == 1 => {
            Err(format!("it has {odd} coordinates, an odd number (a confidence is no coordinate: do not save it)"))
        }
        few if few < 6 => Err(format!("it has {few} coordinates; an outline has at least six")),
        _ => Ok(values.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_classes_are_lists_or_maps() {
        let of = |text: &str| {
            let names = yaml_names(text).map_err(|error| error.clone());
            names.map(|names| names.into_iter().map(|(number, name)| format!("{number}={name}")).collect::<Vec<_>>())
        };
        for text in [
            "path: ../data\nnc: 2\nnames: [polyp, 'large cyst']\n",
            "names:\n  - polyp\n  - large cyst\nval: images/val\n",
            "train: images\nnames:\n  0: polyp\n  1: large cyst # a remark\n",
            "names: {0: polyp, 1: \"large cyst\"}\nroboflow:\n  license: x\n  names: [other]\n",
        ] {
            assert_eq!(of(text).unwrap(), ["0=polyp", "1=large cyst"], "{text}");
        }
        assert!(of("train: images\n").unwrap().is_empty());
        for (text, reason) in [
            ("names: {polyp: 0}", "no number"),
            ("names: [a\n", "no YAML"),
            ("kpt_shape: [17, 3]\nnames: [a]", "keypoints"),
            ("names: &n [a]\nother: *n", "alias"),
            ("names: {0: [a], 1: b}", "names within names"),
        ] {
            assert!(of(text).unwrap_err().contains(reason), "{text}");
        }
    }

    #[test]
    fn lines_that_are_no_outlines_are_refused() {
        let of = |line: &str| outline(line.split_whitespace());
        assert_eq!(of("0 0 1 0 1 1.005").unwrap(), [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]);
        for (line, reason) in [
            ("0.5 0.5 0.2 0.2", "a box"),
            ("0.1 0.1 0.2 0.2 0.3 0.3 0.9", "confidence"),
            ("0.1 0.1", "at least six"),
            ("10 10 200 10 200 90", "the coordinate 10 is not from 0 to 1"),
            ("nan 0 1 0 1 1", "not from 0 to 1"),
            ("a 0 1 0 1 1", "`a` is no coordinate"),
        ] {
            assert!(of(line).unwrap_err().contains(reason), "{line}");
        }
    }
}
