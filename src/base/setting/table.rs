//! Settings as a TOML table with dotted keys.

use super::Setting;
use crate::{Error, Result};
use toml::{Table, Value};

/// A value as TOML, else a bare string.
pub fn parse_value(text: &str) -> Value {
    let table = format!("v = {text}").parse::<Table>().ok();
    table.and_then(|mut table| table.remove("v")).unwrap_or_else(|| Value::String(text.to_owned()))
}

/// A table with `value` at a dotted key.
pub fn nested(key: &str, value: Value) -> Table {
    let mut table = Table::new();
    insert(&mut table, key, value);
    table
}

/// `prefix.key`, or `key` without a prefix.
pub fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}

/// All values with their dotted keys, in the order of the table.
pub fn leaves(table: &Table) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => {
                found.extend(leaves(inner).into_iter().map(|(rest, value)| (join(key, &rest), value)));
            }
            _ => found.push((key.clone(), value)),
        }
    }
    found
}

/// The value at a dotted key.
pub fn value_at<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((head, rest)) => value_at(table.get(head)?.as_table()?, rest),
        None => table.get(key),
    }
}

/// Sets or removes the value at a dotted key, where its section exists.
pub fn replace(table: &mut Table, key: &str, value: Option<Value>) {
    match (key.split_once('.'), value) {
        (Some((head, rest)), value) => {
            if let Some(inner) = table.get_mut(head).and_then(Value::as_table_mut) {
                replace(inner, rest, value);
            }
        }
        (None, Some(value)) => drop(table.insert(key.to_owned(), value)),
        (None, None) => drop(table.remove(key)),
    }
}

/// Sets the value at a dotted key and adds the sections on its way.
pub fn insert(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        Some((head, rest)) => {
            if let Value::Table(inner) = table.entry(head).or_insert_with(|| Value::Table(Table::new())) {
                insert(inner, rest, value);
            }
        }
        None => drop(table.insert(key.to_owned(), value)),
    }
}

/// Settings of earlier versions: key, its default, and what replaces it. A file with the default is read as it was.
const REMOVED: [(&str, &str, &str); 13] = [
    ("augment.base_pipeline", "", FOLDERS),
    ("augment.prediction_type", "model", PREDICTION),
    ("augment.preview_every", "50", "`report.html` in the folder of the pairs shows them when all are made"),
    ("finetune.base_pipeline", "", FOLDERS),
    ("finetune.prediction_type", "model", PREDICTION),
    ("finetune.buckets", "false", "images are padded to squares: crop them to one shape before"),
    ("finetune.region_contrast", "0.0", OBJECTIVE),
    ("finetune.region_contrast_margin", "2.0", OBJECTIVE),
    ("finetune.siamese", "0.0", OBJECTIVE),
    ("finetune.prior_images", "", PRIOR),
    ("finetune.prior_caption", "", PRIOR),
    ("finetune.prior_weight", "1.0", PRIOR),
    ("finetune.unlock_decoder", "false", "`finetune.method=full` trains the whole UNet"),
];
const FOLDERS: &str =
    "convert the model to a folder in diffusers' layout with `from_single_file(..).save_pretrained(..)`";
const PREDICTION: &str = "change `prediction_type` in the model's `scheduler/scheduler_config.json`";

const PRIOR: &str = "add these images, with their masks, as rows of the split `train`";
const OBJECTIVE: &str = "`finetune.lesion_weight` gives lesions more weight in the loss";

/// Replaces old names of settings by the present ones, and leaves out settings that were removed.
///
/// # Errors
/// [`Error::Config`] for a setting that was removed and has another value than its default, with what replaces it.
pub fn renamed(mut table: Table, settings: &[Setting]) -> Result<Table> {
    for (key, default, remedy) in REMOVED {
        if value_at(&table, key).is_some_and(|value| *value != parse_value(default)) {
            return Err(Error::config(key, "this setting was removed", remedy));
        }
        replace(&mut table, key, None);
    }
    for setting in settings {
        let (section, _) = setting.key.split_once('.').expect("a dotted key");
        for old in setting.old_names.iter().map(|old| join(section, old)) {
            if let Some(value) = value_at(&table, &old).cloned() {
                replace(&mut table, &old, None);
                replace(&mut table, setting.key, Some(value));
            }
        }
    }
    Ok(table)
}

/// `value`, as a real number where `slot` is one.
pub fn widen(slot: &Value, value: Value) -> Value {
    match (slot, number(&value)) {
        (Value::Float(_), Some(number)) => Value::Float(number),
        _ => value,
    }
}

/// The value of a number.
pub fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(n) => Some(*n as f64),
        Value::Float(n) => Some(*n),
        _ => None,
    }
}

/// `text` in lines of at most 110 characters; `indent` begins the later ones.
pub fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("one line");
        if line.chars().count() + 1 + word.chars().count() > 110 {
            lines.push(format!("{indent}{word}"));
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.join("\n")
}
