//! Questions that give their answers away: they name the location that the answer names, or the class of the image.
//!
//! A model that reads the location in the question learns to repeat it, and its scores say nothing about a question without
//! it. The class matters if there are several: the class head reads the question too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rayon::prelude::*;
use serde::Serialize;

use crate::manifest::{Manifest, Row};
use crate::word_check::locations_of_image;
use prsmed_base::location::stated_location;

/// A row of an annotation file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RowAt {
    /// The CSV file.
    pub csv: PathBuf,
    /// 1-based line of `csv`.
    pub line: u64,
}

/// Questions that give their answers away.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct GivenAway {
    /// Rows whose question names the location of the answer, by file and line.
    pub locations: Vec<RowAt>,
    /// Number of questions that name their class, by class; empty with one class.
    pub classes: BTreeMap<String, usize>,
}

/// Finds such questions.
pub(super) fn given_away(manifest: &Manifest) -> GivenAway {
    let is_told = |row: &&Row| {
        let Some(answer) = stated_location(&row.answer) else { return false };
        locations_of_image(&row.question).iter().any(|asked| asked.fits(answer.position()))
    };
    let at = |row: &Row| RowAt { csv: row.csv.clone(), line: row.line };
    let mut locations: Vec<RowAt> = manifest.rows.par_iter().filter(is_told).map(at).collect();
    locations.sort();
    let mut classes = BTreeMap::new();
    if manifest.modalities.len() > 1 {
        for row in manifest.rows.iter().filter(|row| names_class(&row.question, &row.modality)) {
            *classes.entry(row.modality.clone()).or_default() += 1;
        }
    }
    GivenAway { locations, classes }
}

/// Whether a text has all words of the name of a class; `X-ray` is `xray`.
fn names_class(text: &str, class: &str) -> bool {
    let words = |text: &str| -> Vec<String> {
        let lower = text.to_lowercase();
        lower.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let of_text = words(text);
    let joined = of_text.windows(2).map(<[String]>::concat);
    let all: BTreeSet<String> = of_text.iter().cloned().chain(joined).collect();
    let of_class = words(class);
    !of_class.is_empty() && of_class.iter().all(|word| all.contains(word))
}

impl GivenAway {
    /// A sentence for each kind.
    pub fn texts(&self) -> Vec<String> {
        /// Most rows that a sentence names.
        const MAX_NAMED: usize = 3;
        let count = self.locations.len();
        let named = self.locations.iter().take(MAX_NAMED).map(|row| format!("{}:{}", row.csv.display(), row.line));
        let named: Vec<String> = named.collect();
        let more = if count > named.len() { format!(" and {} more", count - named.len()) } else { String::new() };
        let locations = (count > 0).then(|| {
            format!(
                "questions that name the location of their answer: {count} ({}{more}); a model repeats what it reads",
                named.join(", ")
            )
        });
        let classes: Vec<String> = self.classes.iter().map(|(class, count)| format!("`{class}` ({count})")).collect();
        let classes = (!classes.is_empty()).then(|| {
            format!(
                "questions that name the class of their image, which a model then reads there: {}",
                classes.join(", ")
            )
        });
        locations.into_iter().chain(classes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Root;

    #[test]
    fn questions_with_the_location_of_the_answer_or_the_class_are_named() {
        let root = Root::new();
        let mut csv = "image_path,question,answer,split\n".to_owned();
        let upper = "The nodule is in the upper left part of the image.";
        for (number, question, is_told) in [
            (0, "Where is the nodule in this image?", false),
            (1, "Is there a nodule in the upper left part of the image?", true),
            (2, "Is there a nodule on the left side of the image?", true),
            (3, "Is there a nodule in the lower right part of the image?", false),
            (4, "Where is the nodule of the left lung?", false),
            (5, "Where is the nodule in this chest X-ray?", false),
        ] {
            root.pair("chest_Xray", "train", &format!("{number}_{is_told}"));
            let row = format!("chest_Xray/train_masks/{number}_{is_told}.png,{question},{upper},train\n");
            csv.push_str(&row);
        }
        root.csv("a.csv", &csv);
        let found = given_away(&Manifest::open(root.path(), None).expect("good"));
        assert_eq!(found.locations.iter().map(|row| row.line).collect::<Vec<_>>(), [3, 4]);
        assert!(found.classes.is_empty(), "one class is no question");
        root.pair("lung_CT", "train", "x");
        csv += "lung_CT/train_masks/x.png,Where is the section of the lung?,Here.,train\n";
        root.csv("a.csv", &csv);
        let found = given_away(&Manifest::open(root.path(), None).expect("good"));
        assert_eq!(found.classes, BTreeMap::from([("chest_Xray".to_owned(), 1)]));
        assert_eq!(found.texts().len(), 2);
    }
}
