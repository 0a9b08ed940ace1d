//! What `dataset.json` of nnU-Net and of the Medical Segmentation Decathlon says: names of channels and labels, and lists of
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};

use super::super::item::Skipped;
use super::super::options::word_problem;
use super::super::scan::tree::Tree;
use super::super::structures::NamedLabels;
use super::patterns::{GroupImage, Groups, words};
use prsmed_base::{Error, Result, files};

const HINT: &str = "correct the file, or move it out of the folder and give the labels with the argument `labels`";

/// Reads `dataset.json` of each data set.
///
/// # Errors
/// [`Error::Data`] for a file that is no such description; [`Error::Io`].
pub(super) fn describe(tree: &Tree, found: &mut Groups) -> Result<()> {
    let bases: BTreeSet<String> = found.groups.values().map(|group| group.base.clone()).collect();
    for base in bases {
        let path = tree.root.join(&base).join("dataset.json");
        if !path.is_file() {
            continue;
        }
        let text = files::read_to_string(&path, files::MAX_TEXT).map_err(Error::io(&path, "read"))?;
        let json: Value = serde_json::from_str(&text).map_err(|error| Error::data(&path, error.to_string(), HINT))?;
        let labels = labels(&path, &json)?;
        let channels = channels(&json);
        for group in found.groups.values_mut().filter(|group| group.base == base) {
            group.labels = labels.clone();
            for image in &mut group.images {
                let number = image.channel.as_ref().and_then(|number| number.parse::<usize>().ok());
                image.channel = number.and_then(|number| channels.get(&number).cloned()).or(image.channel.take());
            }
            // the Decathlon stores several channels in one file of four dimensions
            if let ([image], true) = (group.images.as_slice(), channels.len() > 1)
                && image.channel.is_none()
            {
                let file = image.file;
                let part = |(number, name): (&usize, &String)| GroupImage {
                    file,
                    channel: Some(name.clone()),
                    part: Some(*number),
                };
                group.images = channels.iter().map(part).collect();
            }
        }
        found.missing.extend(missing(tree, &base, &path, &json));
    }
    Ok(())
}

/// The names of the channels by their numbers.
fn channels(json: &Value) -> BTreeMap<usize, String> {
    let names = json.get("channel_names").or_else(|| json.get("modality")).and_then(Value::as_object);
    let all = names.into_iter().flatten();
    all.filter_map(|(number, name)| Some((number.parse().ok()?, name.as_str()?.to_owned()))).collect()
}

/// The labels: `{"liver": 1}`, `{"1": "liver"}`, or `{"whole tumor": [1, 2]}`.
fn labels(path: &Path, json: &Value) -> Result<NamedLabels> {
    let none = Map::new();
    let all = json.get("labels").and_then(Value::as_object).unwrap_or(&none);
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let mut parts = Vec::new();
    for (key, value) in all {
        let (name, numbers) = match (value, key.parse::<u64>()) {
            (Value::Array(values), _) => (key.as_str(), values.iter().map(number).collect::<Option<Vec<u64>>>()),
            (Value::String(name), Ok(label)) => (name.as_str(), Some(vec![label])),
            _ => (key.as_str(), number(value).map(|label| vec![label])),
        };
        let Some(numbers) = numbers else {
            return Err(Error::data(path, format!("the label `{key}` has no number"), HINT));
        };
        let name = if name == "ignore" { "background".to_owned() } else { words(&name.replace([',', '=', '+'], " ")) };
        if let Some((reason, _)) = word_problem(&name) {
            return Err(Error::data(path, reason, HINT));
        }
        if numbers != [0] {
            let numbers: Vec<String> = numbers.iter().filter(|label| **label > 0).map(u64::to_string).collect();
            parts.push(format!("{}={name}", numbers.join("+")));
        }
    }
    parts.join(",").parse().map_err(|reason: String| Error::data(path, reason, HINT))
}

/// Files of its list of training images that the tree has not.
fn missing(tree: &Tree, base: &str, path: &Path, json: &Value) -> Vec<Skipped> {
    let pairs = json.get("training").and_then(Value::as_array).into_iter().flatten();
    let listed = pairs.flat_map(|pair| ["image", "label"].into_iter().filter_map(|key| pair.get(key)?.as_str()));
    let absent = listed.filter(|name| {
        let name = format!("{base}{}", name.trim_start_matches("./"));
        // nnU-Net lists images without the number of their channel
        tree.find(&name).is_none() && tree.find(&name.replacen(".nii", "_0000.nii", 1)).is_none()
    });
    let reason = |name: &str| format!("`{name}` is listed, and missing");
    absent.map(|name| Skipped { path: path.to_owned(), reason: reason(name) }).collect()
}
