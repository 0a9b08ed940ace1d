//! Prompts for the generator, made from a row's modality and text.
//!
//! The embedded file `prompts.toml` documents its own format; custom files use the same one. A class without its own
//! section is described by the words of its folder name and of the row's question.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::Deserialize;

use super::pipeline::PromptPair;
use super::settings::Mode;
use crate::Result;
use crate::data::manifest::Row;
use crate::data::templates;
use crate::location::{Zones, first_location};
use crate::tensor::rng;

const EMBEDDED: &str = include_str!("../../data/prompts.toml");
/// Maximum number of words of a description: CLIP reads 77 tokens.
const MOST_WORDS: usize = 25;

/// Prompt and negative prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPrompt {
    /// The prompt.
    pub positive: String,
    /// The negative prompt; may be empty.
    pub negative: String,
}

/// The different prompts and negative prompts of a job. A plan needs their number.
pub struct DrawnPrompts {
    prompts: PromptFile,
    mode: Mode,
    /// Seed and purpose of the random numbers.
    random: (u64, &'static str),
    /// The different texts, in the order in which they were drawn.
    pub texts: Vec<String>,
    index_of: HashMap<String, usize>,
}

impl DrawnPrompts {
    /// No text yet; prompts come from `file`, or are the built-in ones if that is empty.
    ///
    /// # Errors
    /// As [`PromptFile::open`].
    pub(super) fn new(file: &str, mode: Mode, random: (u64, &'static str)) -> Result<Self> {
        let prompts = if file.is_empty() { PromptFile::embedded() } else { PromptFile::open(Path::new(file))? };
        Ok(Self { prompts, mode, random, texts: Vec::new(), index_of: HashMap::new() })
    }

    /// Draws the prompts of a row; `number` selects the random numbers.
    pub(super) fn draw(&mut self, row: &Row, number: u64) -> PromptPair {
        let mut rng = rng::stream(self.random.0, self.random.1, &[number]);
        let prompt = self.prompts.for_row(row, self.mode, &mut rng);
        PromptPair { positive: self.number(prompt.positive), negative: self.number(prompt.negative) }
    }

    /// The number of a text.
    pub(super) fn number(&mut self, text: String) -> usize {
        *self.index_of.entry(text.clone()).or_insert_with(|| {
            self.texts.push(text);
            self.texts.len() - 1
        })
    }
}

/// Words and prompts of one class; missing entries are taken from the default section.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Section {
    /// How the image was taken (`{modality}`).
    pub modality: Option<String>,
    /// The target (`{target}`), if the row's question does not name it.
    pub target: Option<String>,
    /// The kind of image (`{image}`), if the row's question does not name it.
    pub image: Option<String>,
    /// Prompts for repainting the surroundings of the target (`keep_lesion`). They should not ask for a second
    /// target.
    pub surroundings: Vec<String>,
    /// Prompts for painting a target (`edit_lesion`, `insert_lesion`).
    pub targets: Vec<String>,
    /// Prompts for whole images (`mask_to_image`, `img2img`).
    pub whole: Vec<String>,
    /// Negative prompts.
    pub negatives: Vec<String>,
}

impl Section {
    fn prompts(&self, mode: Mode) -> &[String] {
        match mode {
            Mode::KeepLesion => &self.surroundings,
            Mode::EditLesion | Mode::InsertLesion => &self.targets,
            Mode::MaskToImage | Mode::Img2img => &self.whole,
        }
    }
}

/// All prompts of one file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptFile {
    default: Section,
    #[serde(default)]
    class: BTreeMap<String, Section>,
}

/// The words that fill a prompt; `None` where the row does not have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptWords {
    /// `{modality}`.
    pub modality: String,
    /// `{target}`.
    pub target: String,
    /// `{image}`.
    pub image: String,
    /// `{place}`: the location of the target, for example `upper left`.
    pub location: Option<String>,
    /// `{description}`: the first sentence of the answer.
    pub description: Option<String>,
}

impl PromptWords {
    /// `template` with all placeholders replaced; `None` when the row lacks one of them.
    fn fill(&self, template: &str) -> Option<String> {
        let mut text = template.to_owned();
        for (name, word) in [
            ("{modality}", Some(&self.modality)),
            ("{target}", Some(&self.target)),
            ("{image}", Some(&self.image)),
            ("{place}", self.location.as_ref()),
            ("{description}", self.description.as_ref()),
        ] {
            if text.contains(name) {
                text = text.replace(name, word?);
            }
        }
        Some(text)
    }
}

impl PromptFile {
    /// The built-in prompts.
    pub fn embedded() -> Self {
        toml::from_str(EMBEDDED).expect("a unit test parses the embedded prompts")
    }

    /// Reads a file in the format of the built-in prompts.
    ///
    /// # Errors
    /// As [`templates::read`]; also for an unknown placeholder, an empty prompt, or a list without a prompt that
    /// every row can fill.
    pub fn open(path: &Path) -> Result<Self> {
        templates::read(path, "data/prompts.toml", Self::check)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let named = std::iter::once(("[default]".to_owned(), &self.default))
            .chain(self.class.iter().map(|(name, section)| (format!("[class.{name}]"), section)));
        for (name, section) in named {
            for word in [&section.modality, &section.target, &section.image].into_iter().flatten() {
                if word.trim().is_empty() || word.contains(['{', '}']) {
                    return Err(format!(
                        "`{name}`: `{word}` cannot fill a prompt; it is empty or contains a placeholder"
                    ));
                }
            }
            let lists = [
                ("surroundings", &section.surroundings),
                ("targets", &section.targets),
                ("whole", &section.whole),
                ("negatives", &section.negatives),
            ];
            for (list, prompts) in lists {
                for prompt in prompts {
                    known(prompt).map_err(|reason| format!("`{name}`, `{list}`: {reason}"))?;
                }
                let anyone = |prompt: &String| !prompt.contains("{place}") && !prompt.contains("{description}");
                let needed = name == "[default]" || !prompts.is_empty();
                if needed && list != "negatives" && !prompts.iter().any(anyone) {
                    return Err(format!(
                        "`{name}`, `{list}`: at least one prompt must not contain `{{place}}` or `{{description}}`, \
                         because not every row has them"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The words of a row: from its question, else from the section of its class, else from the folder name of the
    /// class.
    pub fn words(&self, row: &Row) -> PromptWords {
        let class = self.class.get(&row.modality);
        let own = |get: fn(&Section) -> &Option<String>| class.and_then(|section| get(section).clone());
        let default = &self.default;
        let (folder_target, folder_image) = folder_words(&row.modality);
        let image = image_of(&row.question).or_else(|| own(|section| &section.image)).or_else(|| folder_image.clone());
        let image = image.or_else(|| default.image.clone()).unwrap_or_else(|| "medical image".to_owned());
        let modality = own(|section| &section.modality).or(folder_image).or_else(|| default.modality.clone());
        let target = target_of(&row.question).or_else(|| own(|section| &section.target)).or(folder_target);
        let location = row.position.as_deref().and_then(first_location).or_else(|| first_location(&row.answer));
        PromptWords {
            modality: modality.unwrap_or_else(|| image.clone()),
            target: target.or_else(|| default.target.clone()).unwrap_or_else(|| "lesion".to_owned()),
            image,
            location: location.map(|location| location.label(Zones::Grid)),
            description: description(&row.answer),
        }
    }

    /// A random prompt among those that the row can fill.
    pub fn for_row(&self, row: &Row, mode: Mode, rng: &mut impl Rng) -> RowPrompt {
        let words = self.words(row);
        let class = self.class.get(&row.modality);
        let own = class.map_or(&[][..], |section| section.prompts(mode));
        let prompts = if own.is_empty() { self.default.prompts(mode) } else { own };
        let negatives = class.map(|section| &section.negatives).filter(|own| !own.is_empty());
        let negatives = negatives.unwrap_or(&self.default.negatives);
        let mut draw = |templates: &[String]| {
            let filled: Vec<String> = templates.iter().filter_map(|template| words.fill(template)).collect();
            filled.choose(rng).cloned().unwrap_or_default()
        };
        RowPrompt { positive: draw(prompts), negative: draw(negatives) }
    }
}

fn known(text: &str) -> std::result::Result<(), String> {
    if text.trim().is_empty() {
        return Err("a prompt is empty".to_owned());
    }
    templates::check_placeholders(text, &["modality", "target", "image", "place", "description"])
}

/// Words that end the name of a target.
const AFTER_TARGET: [&str; 12] =
    ["in", "on", "at", "located", "appear", "appears", "visible", "seen", "shown", "and", "lie", "lies"];
const BEFORE_TARGET: [&str; 9] = [
    "segment the ", "where is the ", "where are the ", "does the ", "do the ", "outline the ", "point out the ",
    "find the ", "is there a ",
];

/// Words that end the name of an image.
const AFTER_IMAGE: [&str; 11] = ["and", "appear", "show", "shows", "does", "do", "is", "are", "that", "which", "where"];

/// The target of a question (`polyp` in `Where is the polyp located in this image?`), in lower case.
pub fn target_of(question: &str) -> Option<String> {
    let lower = question.to_lowercase();
    let start = BEFORE_TARGET.iter().filter_map(|before| Some(lower.find(before)? + before.len())).min()?;
    let words: Vec<&str> = lower[start..]
        .split_whitespace()
        .take_while(|word| !AFTER_TARGET.contains(&word.trim_end_matches(['?', '.', ','])))
        .collect();
    // A longer match is not a name but another kind of sentence.
    ((1..=6).contains(&words.len()) && !words.iter().any(|word| word.contains(['?', '.', ',', ';'])))
        .then(|| words.join(" "))
}

/// The kind of image in a question (`chest X-ray` in `... in this chest X-ray?`).
fn image_of(question: &str) -> Option<String> {
    let start = question.find("in this ")? + "in this ".len();
    let mut words = Vec::new();
    for word in question[start..].split_whitespace() {
        let bare = word.trim_end_matches(['?', '.', ',']);
        if AFTER_IMAGE.contains(&bare) {
            break;
        }
        words.push(bare);
        if bare.len() < word.len() {
            break;
        }
    }
    ((1..=5).contains(&words.len())).then(|| words.join(" "))
}

/// The first sentence of an answer without its full stop, limited to [`MOST_WORDS`].
fn description(answer: &str) -> Option<String> {
    let sentence = answer.split(['.', ';', '\n']).next()?.trim();
    let words: Vec<&str> = sentence.split_whitespace().take(MOST_WORDS).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// Kinds of images by the last words of a class folder.
const FOLDER_IMAGES: [(&str, &str); 16] = [
    ("ct scan", "CT scan"),
    ("mri scan", "MRI scan"),
    ("ct", "CT slice"),
    ("mri", "MRI scan"),
    ("mr", "MRI scan"),
    ("xray", "X-ray"),
    ("x ray", "X-ray"),
    ("mammography", "mammogram"),
    ("ultrasound", "ultrasound image"),
    ("us", "ultrasound image"),
    ("rgbimage", "photograph"),
    ("dermoscopy", "dermoscopic image"),
    ("endoscopy", "endoscopy image"),
    ("colonoscopy", "colonoscopy image"),
    ("fundus", "fundus photograph"),
    ("histology", "histology image"),
];
/// Words of a class folder that name a target.
const FOLDER_TARGETS: [&str; 10] =
    ["tumor", "tumour", "polyp", "lesion", "nodule", "cyst", "cancer", "ulcer", "stone", "fracture"];

/// Target and kind of image from a folder name: `brain_tumors_ct_scan` gives (`brain tumor`, `brain CT scan`).
fn folder_words(folder: &str) -> (Option<String>, Option<String>) {
    let lower = folder.replace(['_', '-', '.'], " ").to_lowercase();
    let lower = lower.trim();
    let Some((rest, image)) = FOLDER_IMAGES.iter().find_map(|(ending, image)| {
        let rest = lower.strip_suffix(ending)?;
        (rest.is_empty() || rest.ends_with(' ')).then(|| (rest.trim(), *image))
    }) else {
        return (None, None);
    };
    let singular = |word: &str| FOLDER_TARGETS.iter().find(|target| word.trim_end_matches('s') == **target).copied();
    let mut organ = Vec::new();
    let mut target = None;
    for word in rest.split_whitespace() {
        match singular(word) {
            Some(name) => target = Some(name),
            None => organ.push(word),
        }
    }
    let organ = organ.join(" ");
    let with_organ = |noun: &str| format!("{organ} {noun}").trim().to_owned();
    (target.map(&with_organ), Some(with_organ(image)))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::fixture;

    fn row(modality: &str, question: &str, answer: &str, position: Option<&str>) -> Row {
        Row { modality: modality.to_owned(), ..fixture::row(question, answer, position) }
    }

    const MODES: [Mode; 5] = [Mode::KeepLesion, Mode::EditLesion, Mode::InsertLesion, Mode::MaskToImage, Mode::Img2img];

    fn rng() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(0)
    }

    #[test]
    fn targets_and_images_are_read_from_questions() {
        for (question, target, image) in [
            ("Where is the aorta located in this abdominal CT slice?", Some("aorta"), Some("abdominal CT slice")),
            (
                "Please segment the right middle lobe of the lung in this chest CT slice and describe its position.",
                Some("right middle lobe of the lung"),
                Some("chest CT slice"),
            ),
            ("In which region of this chest X-ray does the opacity appear?", Some("opacity"), None),
            (
                "Is there a polyp visible in this colonoscopy image, and if so, where is it?",
                Some("polyp"),
                Some("colonoscopy image"),
            ),
            (
                "I need to find the fetal head in this fetal ultrasound image. Where should I look?",
                Some("fetal head"),
                Some("fetal ultrasound image"),
            ),
            ("What abnormality can be seen in this chest X-ray, and where is it?", None, Some("chest X-ray")),
            ("Segment the lesion and describe its position.", Some("lesion"), None),
            ("where?", None, None),
        ] {
            assert_eq!(target_of(question).as_deref(), target, "{question}");
            assert_eq!(image_of(question).as_deref(), image, "{question}");
        }
    }

    #[test]
    fn folder_names_give_target_and_image_words() {
        for (folder, target, image) in [
            ("brain_tumors_ct_scan", Some("brain tumor"), Some("brain CT scan")),
            ("polyp_endoscopy", Some("polyp"), Some("endoscopy image")),
            ("skin_rgbimage", None, Some("skin photograph")),
            ("lung_Xray", None, Some("lung X-ray")),
            ("abdomen_CT", None, Some("abdomen CT slice")),
            ("retina_fundus", None, Some("retina fundus photograph")),
            ("plus", None, None),
        ] {
            let found = folder_words(folder);
            assert_eq!((found.0.as_deref(), found.1.as_deref()), (target, image), "{folder}");
        }
    }

    #[test]
    fn every_class_and_mode_has_a_filled_prompt() {
        let prompts = PromptFile::embedded();
        prompts.check().unwrap();
        let classes: Vec<&str> =
            prompts.class.keys().map(String::as_str).chain(["unheard_of", "liver_tumors_mri"]).collect();
        assert!(crate::data::manifest::REFERENCE_CLASSES.iter().all(|class| prompts.class.contains_key(*class)));
        let mut rng = rng();
        for class in classes {
            for mode in MODES {
                for (answer, position) in
                    [("It is in the upper left part of the image.", Some("upper left")), ("?", None)]
                {
                    let row = row(class, "where?", answer, position);
                    for _ in 0..20 {
                        let RowPrompt { positive, negative } = prompts.for_row(&row, mode, &mut rng);
                        assert!(!positive.trim().is_empty() && !negative.trim().is_empty(), "{class} {mode:?}");
                        assert!(!positive.contains(['{', '}']) && !negative.contains(['{', '}']), "{positive}");
                        assert!(positive.split_whitespace().count() <= 45, "{positive}");
                    }
                }
            }
        }
        let liver = prompts.words(&row("liver_tumors_mri", "where?", "x", None));
        assert_eq!((liver.target.as_str(), liver.image.as_str()), ("liver tumor", "liver MRI scan"));
    }

    #[test]
    fn the_question_has_priority_over_the_class() {
        let prompts = PromptFile::embedded();
        let words = prompts.words(&row(
            "abdomen_CT",
            "Where is the spleen located in this abdominal CT slice?",
            "The spleen is in the center right part of the image. It is large.",
            None,
        ));
        assert_eq!((words.target.as_str(), words.image.as_str()), ("spleen", "abdominal CT slice"));
        assert_eq!(words.location.as_deref(), Some("center right"));
        assert_eq!(words.description.as_deref(), Some("The spleen is in the center right part of the image"));
    }

    #[test]
    fn equal_seeds_give_equal_prompts() {
        let prompts = PromptFile::embedded();
        let row = row("polyp_endoscopy", "where?", "x", None);
        let draw = || prompts.for_row(&row, Mode::KeepLesion, &mut rng());
        assert_eq!(draw(), draw());
    }

    #[test]
    fn an_invalid_prompt_file_is_rejected_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.toml");
        assert!(PromptFile::open(&path).is_err());
        let open = |text: &str| {
            std::fs::write(&path, text).unwrap();
            PromptFile::open(&path).map_err(|error| error.to_string())
        };
        let good = "[default]\nsurroundings = ['a']\ntargets = ['b {target}']\nwhole = ['c']\n";
        let prompts = open(good).unwrap();
        let row = row("plus", "Where is the cyst in this scan?", "x", None);
        assert_eq!(prompts.for_row(&row, Mode::InsertLesion, &mut rng()).positive, "b cyst");
        assert_eq!(prompts.for_row(&row, Mode::InsertLesion, &mut rng()).negative, "");
        for (text, reason) in [
            (good.replace("{target}", "{organ}"), "`{organ}` is not known"),
            (good.replace("whole", "hole"), "hole"),
            (good.replace("'c'", "'c {place}'"), "must not contain `{place}`"),
            (good.replace("'c'", ""), "must not contain `{place}`"),
            (good.replace("'c'", "' '"), "a prompt is empty"),
            (format!("{good}[class.x]\ntarget = ' '\n"), "cannot fill a prompt"),
            (format!("{good}[classes.x]\n"), "classes"),
            (String::new(), "default"),
        ] {
            let error = open(&text).expect_err(&text);
            assert!(error.contains(reason), "{error}");
        }
    }
}
