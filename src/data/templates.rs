//! The sentences of made data: questions with their answers, read from a TOML file, placeholders filled in.
//!
//! The embedded file `templates.toml` explains itself and is the model for files of one's own.

use std::path::Path;

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

const EMBEDDED: &str = include_str!("templates.toml");

/// A question and the forms of its answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionTemplate {
    /// The question; may hold `{target}`, `{image}` and, for one of two regions, `{which}`.
    pub question: String,
    /// Answers, of which one is drawn; each holds `{zone}`.
    pub answers: Vec<String>,
}

/// Answers that name two zones.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionTemplates {
    /// Each holds `{zone}` and `{second_zone}`.
    pub answers: Vec<String>,
}

/// Sentences that are added to an answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraTemplates {
    /// Several regions described by one zone; holds `{count}`.
    pub areas: String,
    /// The region is close to the middle (quadrants).
    pub near: String,
    /// The region is far from the middle (quadrants).
    pub far: String,
}

/// All templates of one file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Templates {
    /// Questions about the only region, or all regions together.
    pub one: Vec<QuestionTemplate>,
    /// Questions about one of two regions.
    pub pair: Vec<QuestionTemplate>,
    /// Answers that name two regions.
    pub regions: RegionTemplates,
    /// Added sentences.
    pub extra: ExtraTemplates,
}

/// The words that fill a template.
#[derive(Debug, Clone, Copy, Default)]
pub struct Words<'a> {
    /// What is looked for (`lesion`).
    pub target: &'a str,
    /// What it is looked for in (`image`, `chest X-ray`).
    pub image: &'a str,
    /// Label of the zone (`upper left`, `center`).
    pub zone: &'a str,
    /// Label of the other region's zone.
    pub second_zone: &'a str,
    /// Which one of two (`left`, `brighter`).
    pub which: &'a str,
    /// Number of separate regions.
    pub count: usize,
}

/// `upper left` reads `upper left part`; `center` stands alone.
fn phrase(label: &str) -> String {
    if label.contains(' ') { format!("{label} part") } else { label.to_owned() }
}

impl Words<'_> {
    /// `template` with every placeholder replaced.
    pub fn fill(&self, template: &str) -> String {
        template
            .replace("{target}", self.target)
            .replace("{image}", self.image)
            .replace("{zone}", &phrase(self.zone))
            .replace("{second_zone}", &phrase(self.second_zone))
            .replace("{which}", self.which)
            .replace("{count}", &self.count.to_string())
    }
}

impl Templates {
    /// The templates that are part of the program.
    pub fn embedded() -> Self {
        toml::from_str(EMBEDDED).expect("a unit test parses the embedded templates")
    }

    /// Reads a file of the embedded one's form.
    ///
    /// # Errors
    /// As [`read`], and for an empty section, an unknown placeholder, or an answer without its zone.
    pub fn open(path: &Path) -> Result<Self> {
        read(path, "src/data/templates.toml", Self::check)
    }

    fn check(&self) -> std::result::Result<(), String> {
        for (section, questions, which) in [("one", &self.one, false), ("pair", &self.pair, true)] {
            if questions.is_empty() {
                return Err(format!("`[[{section}]]` has no question"));
            }
            for template in questions {
                let text = &template.question;
                if text.trim().is_empty() || template.answers.is_empty() {
                    return Err(format!("`[[{section}]]`: a question or its list of answers is empty (`{text}`)"));
                }
                known(text, if which { &["target", "image", "which"] } else { &["target", "image"] })?;
                if which && !text.contains("{which}") {
                    return Err(format!("`[[pair]]`: the question `{text}` lacks `{{which}}`"));
                }
                for answer in &template.answers {
                    known(
                        answer,
                        if which { &["target", "image", "zone", "which"] } else { &["target", "image", "zone"] },
                    )?;
                    if !answer.contains("{zone}") {
                        return Err(format!("`[[{section}]]`: the answer `{answer}` lacks `{{zone}}`"));
                    }
                }
            }
        }
        if self.regions.answers.is_empty() {
            return Err("`[regions]` has no answer".to_owned());
        }
        for answer in &self.regions.answers {
            known(answer, &["target", "image", "zone", "second_zone"])?;
            if !answer.contains("{zone}") || !answer.contains("{second_zone}") {
                return Err(format!("`[regions]`: the answer `{answer}` lacks `{{zone}}` or `{{second_zone}}`"));
            }
        }
        known(&self.extra.areas, &["target", "image", "count"])?;
        known(&self.extra.near, &["target", "image"])?;
        known(&self.extra.far, &["target", "image"])
    }
}

/// Draws `count` different questions (fewer when there are not as many) with one answer form each.
pub fn draw<'a>(templates: &'a [QuestionTemplate], count: usize, rng: &mut impl Rng) -> Vec<(&'a str, &'a str)> {
    templates
        .choose_multiple(rng, count)
        .map(|template| {
            let answer = template.answers.choose(rng).map_or("", String::as_str);
            (template.question.as_str(), answer)
        })
        .collect()
}

/// Reads a file of sentences in the form of the program's own, `example` in its source.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::Config`] when it is no TOML of that form or `check` says so.
pub fn read<T: DeserializeOwned>(
    path: &Path,
    example: &str,
    check: impl FnOnce(&T) -> Result<(), String>,
) -> Result<T> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
    let sentences = toml::from_str(&text).map_err(|error| error.to_string());
    sentences.and_then(|sentences| check(&sentences).map(|()| sentences)).map_err(|reason| {
        let hint = format!("start from the program's own `{example}`; its head explains the placeholders");
        Error::config(path.display().to_string(), reason, hint)
    })
}

fn known(text: &str, allowed: &[&str]) -> std::result::Result<(), String> {
    for part in text.split('{').skip(1) {
        let name = part.split('}').next().unwrap_or_default();
        if !allowed.contains(&name) {
            return Err(format!("`{text}`: the placeholder `{{{name}}}` is not known here"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{EMBEDDED, Templates, Words};
    use crate::place::{Position, Zones, first_place};

    #[test]
    fn embedded_answers_name_the_zone_so_that_it_is_found_again() {
        let templates = Templates::embedded();
        templates.check().unwrap();
        assert!((4..=6).contains(&templates.one.len()));
        for which in ["left", "right", "upper", "lower", "brighter", "smaller"] {
            for position in Position::ALL {
                for zones in [Zones::Grid, Zones::Quadrants] {
                    let label = position.label(zones);
                    let words =
                        Words { target: "lesion", image: "image", zone: &label, which, count: 2, ..Words::default() };
                    for answer in templates.one.iter().chain(&templates.pair).flat_map(|t| &t.answers) {
                        let text = words.fill(answer) + " " + &words.fill(&templates.extra.areas);
                        assert!(text.contains(&label) && !text.contains('{'), "{text}");
                        assert_eq!(first_place(&text), Some(position), "{text}");
                    }
                    for extra in [&templates.extra.near, &templates.extra.far] {
                        let text = words.fill(&templates.one[0].answers[0]) + " " + &words.fill(extra);
                        assert_eq!(first_place(&text), Some(position), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_bad_file_is_refused_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.toml");
        let open = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Templates::open(&path).unwrap_err().to_string()
        };
        assert!(Templates::open(&path).is_err());
        let no_zone = open(&EMBEDDED.replacen("is in the {zone}", "is in the image", 1));
        assert!(no_zone.contains("lacks `{zone}`"), "{no_zone}");
        let unknown = open(&EMBEDDED.replacen("{target}", "{organ}", 3));
        assert!(unknown.contains("`{organ}` is not known"), "{unknown}");
        let key = open(&EMBEDDED.replacen("[extra]", "[extras]", 1));
        assert!(key.contains("extras"), "{key}");
    }
}
