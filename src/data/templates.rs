//! Question and answer templates of generated data: read from a TOML file, with placeholders to fill.
//!
//! The embedded file `data/question_templates.toml` explains itself and is the model for files of one's own.

use std::path::Path;

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use prsmed_base::location::first_location;
use prsmed_base::{Error, Result, files};

const EMBEDDED: &str = include_str!("../../data/question_templates.toml");

/// A question with possible answers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionTemplate {
    /// The question, with the placeholders `{target}`, `{image}` and, for one of two regions, `{which}`.
    pub question: String,
    /// Answers, one of which is drawn; each contains `{zone}`.
    pub answers: Vec<String>,
}

/// Answers that name two zones; each contains `{zone}` and `{second_zone}`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionTemplates {
    /// The answers.
    pub answers: Vec<String>,
}

/// Answers about a target that is not in the image; none contains a zone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbsentTemplates {
    /// The answers.
    pub answers: Vec<String>,
}

/// Sentences that are added to an answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraTemplates {
    /// For several regions described by one zone; contains `{count}`.
    pub areas: String,
    /// For a region close to the centre (quadrants).
    pub near: String,
    /// For a region far from the centre (quadrants).
    pub far: String,
}

/// All templates of one file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Templates {
    /// Questions about the only region, or about all regions together.
    pub one: Vec<QuestionTemplate>,
    /// Questions about one of two regions.
    pub pair: Vec<QuestionTemplate>,
    /// Answers that name two regions.
    pub regions: RegionTemplates,
    /// Answers about targets that are absent; empty in files of earlier versions.
    #[serde(default)]
    pub absent: AbsentTemplates,
    /// Additional sentences.
    pub extra: ExtraTemplates,
}

/// The words that fill a template.
#[derive(Debug, Clone, Copy, Default)]
pub struct Words<'a> {
    /// The target (`lesion`).
    pub target: &'a str,
    /// The kind of image (`image`, `chest X-ray`).
    pub image: &'a str,
    /// Label of the zone (`upper left`, `center`).
    pub zone: &'a str,
    /// Label of the other region's zone.
    pub second_zone: &'a str,
    /// Which of two targets (`left`, `brighter`).
    pub which: &'a str,
    /// Number of separate regions.
    pub count: usize,
}

/// `upper left` becomes `upper left part`; `center` does not change.
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
    /// The built-in templates.
    pub fn embedded() -> Self {
        toml::from_str(EMBEDDED).expect("a unit test parses the embedded templates")
    }

    /// Reads a file in the format of the built-in templates.
    ///
    /// # Errors
    /// As [`read`]; also for an empty section, an unknown placeholder, an answer without its zone, or an answer about an
    /// absent target that names a location.
    pub fn open(path: &Path) -> Result<Self> {
        read(path, "data/question_templates.toml", Self::check)
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
                check_placeholders(text, if which { &["target", "image", "which"] } else { &["target", "image"] })?;
                if which && !text.contains("{which}") {
                    return Err(format!("`[[pair]]`: the question `{text}` lacks `{{which}}`"));
                }
                for answer in &template.answers {
                    check_placeholders(
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
            check_placeholders(answer, &["target", "image", "zone", "second_zone"])?;
            if !answer.contains("{zone}") || !answer.contains("{second_zone}") {
                return Err(format!("`[regions]`: the answer `{answer}` lacks `{{zone}}` or `{{second_zone}}`"));
            }
        }
        for answer in &self.absent.answers {
            check_placeholders(answer, &["target", "image"])?;
            if answer.trim().is_empty() || first_location(answer).is_some() {
                return Err(format!("`[absent]`: the answer `{answer}` is empty or names a location"));
            }
        }
        check_placeholders(&self.extra.areas, &["target", "image", "count"])?;
        check_placeholders(&self.extra.near, &["target", "image"])?;
        check_placeholders(&self.extra.far, &["target", "image"])
    }
}

/// Draws `count` different questions (fewer if there are not enough), each with one of its answers.
pub fn draw<'a>(templates: &'a [QuestionTemplate], count: usize, rng: &mut impl Rng) -> Vec<(&'a str, &'a str)> {
    templates
        .choose_multiple(rng, count)
        .map(|template| {
            let answer = template.answers.choose(rng).map_or("", String::as_str);
            (template.question.as_str(), answer)
        })
        .collect()
}

/// Reads a TOML file of templates. `example` is the path of the program's own file of this format.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::Config`] for invalid TOML or when `check` fails.
pub fn read<T: DeserializeOwned>(
    path: &Path,
    example: &str,
    check: impl FnOnce(&T) -> Result<(), String>,
) -> Result<T> {
    let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    let sentences = toml::from_str(&text).map_err(|error| error.to_string());
    sentences.and_then(|sentences| check(&sentences).map(|()| sentences)).map_err(|reason| {
        let hint = format!("start from the program's own `{example}`; its first lines explain the placeholders");
        Error::config(path.display().to_string(), reason, hint)
    })
}

/// Whether `text` has no other placeholders than those `allowed`.
///
/// # Errors
/// What is wrong, as a sentence.
pub fn check_placeholders(text: &str, allowed: &[&str]) -> std::result::Result<(), String> {
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
    use prsmed_base::location::{Position, Zones, first_location};

    #[test]
    fn built_in_answers_contain_a_zone_that_can_be_parsed() {
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
                        assert_eq!(first_location(&text), Some(position), "{text}");
                    }
                    for extra in [&templates.extra.near, &templates.extra.far] {
                        let text = words.fill(&templates.one[0].answers[0]) + " " + &words.fill(extra);
                        assert_eq!(first_location(&text), Some(position), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_invalid_template_file_is_rejected_with_the_reason() {
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
        let located =
            open(&EMBEDDED.replacen("There is no {target} in this", "None in the upper left part of this", 1));
        assert!(located.contains("`[absent]`") && located.contains("names a location"), "{located}");
        let zone = open(&EMBEDDED.replacen("shows no {target}", "shows no {target} in the {zone}", 1));
        assert!(zone.contains("`{zone}` is not known here"), "{zone}");
    }

    #[test]
    fn files_of_earlier_versions_have_no_answers_about_absent_targets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.toml");
        let (start, rest) = EMBEDDED.split_once("[absent]").unwrap();
        std::fs::write(&path, format!("{start}{}", &rest[rest.find("[extra]").unwrap()..])).unwrap();
        let templates = Templates::open(&path).unwrap();
        assert!(templates.absent.answers.is_empty() && !Templates::embedded().absent.answers.is_empty());
    }
}
