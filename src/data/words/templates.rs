//! Question and answer templates of generated data: read from a TOML file, with placeholders to fill.
//!
//! The embedded file `data/question_templates.toml` explains itself and is the model for files of one's own.

use std::path::Path;

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::grammar::{self, Number, without_article};
use prsmed_base::location::first_location;
use prsmed_base::{Error, Result, files};

const EMBEDDED: &str = include_str!("../../../data/question_templates.toml");

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

/// Appends a word, after the article that fits it if the text ends with one. A sentence begins with a capital.
fn push_word(text: &mut String, word: &str) {
    let last = text.trim_end().rfind([' ', '(', '"']).map_or(0, |at| at + 1);
    let article = match text[last..].strip_suffix(' ') {
        Some("a" | "an") => grammar::article(word).to_owned(),
        Some("A" | "An") => grammar::article(word).replacen('a', "A", 1),
        _ => String::new(),
    };
    if !article.is_empty() {
        text.truncate(last);
        *text += &(article + " ");
    }
    let begins = text.is_empty() || [". ", "? ", "! "].iter().any(|end| text.ends_with(end));
    match word.chars().next().filter(|_| begins) {
        Some(first) => text.extend(first.to_uppercase().chain(word.chars().skip(1))),
        None => text.push_str(word),
    }
}

impl Words<'_> {
    /// `template` with every placeholder replaced, and with the articles and the grammatical number of the words.
    pub fn fill(&self, template: &str) -> String {
        let target = without_article(self.target);
        let template = Number::of(target).rewrite(template);
        let (zone, second_zone) = (phrase(self.zone), phrase(self.second_zone));
        let count = self.count.to_string();
        let words = [
            ("{target}", target),
            ("{image}", self.image),
            ("{zone}", &zone),
            ("{second_zone}", &second_zone),
            ("{which}", self.which),
            ("{count}", &count),
        ];
        let mut text = String::with_capacity(2 * template.len());
        let mut rest = template.as_str();
        while let Some(at) = rest.find('{') {
            text.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some((name, word)) = words.iter().find(|(name, _)| rest.starts_with(name)) {
                push_word(&mut text, word);
                rest = &rest[name.len()..];
            } else {
                text.push('{');
                rest = &rest[1..];
            }
        }
        text + rest
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

    /// All built-in sentences about a target.
    fn sentences(target: &str, image: &str) -> Vec<String> {
        let templates = Templates::embedded();
        let words = Words { target, image, zone: "upper left", second_zone: "center", which: "larger", count: 2 };
        let questions = templates.one.iter().chain(&templates.pair);
        let texts = questions.flat_map(|template| std::iter::once(&template.question).chain(&template.answers));
        let extra = [&templates.extra.areas, &templates.extra.near, &templates.extra.far];
        let texts = texts.chain(&templates.regions.answers).chain(&templates.absent.answers).chain(extra);
        texts.map(|text| words.fill(text)).collect()
    }

    #[test]
    fn sentences_are_grammatical_for_every_target() {
        for (target, expected) in [
            ("effusion", "Yes, there is an effusion in the upper left part of the scan."),
            ("ureter", "Yes, there is a ureter in the upper left part of the scan."),
            ("MRI lesion", "Yes, there is an MRI lesion in the upper left part of the scan."),
            ("the aorta", "Yes, there is an aorta in the upper left part of the scan."),
            ("polyps", "Yes, there are polyps in the upper left part of the scan."),
            ("free fluid", "Yes, there is free fluid in the upper left part of the scan."),
        ] {
            assert!(
                sentences(target, "scan").iter().any(|sentence| sentence == expected),
                "{:?}",
                sentences(target, "scan")
            );
        }
        for expected in [
            "Where are the lungs in this chest X-ray?",
            "Which part of this chest X-ray shows the lungs?",
            "Segment the lungs and describe their position.",
            "Where are the larger lungs in this chest X-ray?",
            "The lungs are in the upper left part of the chest X-ray.",
            "The segmented lungs lie in the upper left part of the chest X-ray.",
            "The lungs lie in two places: in the upper left part and in the center of the chest X-ray.",
            "There are no lungs in this chest X-ray.",
            "This chest X-ray shows no lungs.",
            "No lungs are visible in this chest X-ray.",
            "They consist of 2 separate areas, and this is the position of all of them together.",
            "They are close to the middle of the chest X-ray.",
        ] {
            let all = sentences("lungs", "chest X-ray");
            assert!(all.iter().any(|sentence| sentence == expected), "{expected}: {all:?}");
        }
    }

    #[test]
    fn sentences_about_one_thing_with_a_consonant_are_the_templates_as_they_are() {
        let plain = |template: &str| {
            template
                .replace("{target}", "lesion")
                .replace("{image}", "image")
                .replace("{zone}", "upper left part")
                .replace("{second_zone}", "center")
                .replace("{which}", "larger")
                .replace("{count}", "2")
        };
        let templates = Templates::embedded();
        let questions = templates.one.iter().chain(&templates.pair);
        let texts = questions.flat_map(|template| std::iter::once(&template.question).chain(&template.answers));
        let filled = sentences("lesion", "image");
        for (text, filled) in texts.zip(&filled) {
            assert_eq!(*filled, plain(text));
        }
        assert!(filled.contains(&"It is far from the middle of the image.".to_owned()));
    }

    #[test]
    fn templates_of_ones_own_get_articles_and_capitals() {
        let fill =
            |target: &str, template: &str| Words { target, image: "US image", ..Words::default() }.fill(template);
        assert_eq!(fill("ulcer", "{target} seen. {target} again, (a {target})"), "Ulcer seen. Ulcer again, (an ulcer)");
        assert_eq!(fill("ulcer", "A {target} on an {image}."), "An ulcer on a US image.");
        assert_eq!(fill("ulcer", "Is there a {target}?"), "Is there an ulcer?");
        assert_eq!(fill("polyps", "Is there a {target}? I see {unknown} 7 {"), "Are there polyps? I see {unknown} 7 {");
    }
}
