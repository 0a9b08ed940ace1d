//! Whether an answer is about the target of its question, as far as the training questions tell.
//!
//! Only words after an article (`the polyp`, `a nevus`) count as the name of a target, and no words for locations and
//! images. A name is another target in two cases: the training has it in questions about other classes only, or a training
//! question is the same but for this name (`Where is the aorta in this CT slice?` beside `Where is the liver in this CT
//! slice?`). Synonyms that no training question has are not known and not reported.

use super::questions::{FEW_ROWS, KnownQuestions, is_filler, words};
use super::{OtherTarget, SURE};
use crate::flip_rotate::{CENTRES, DIRECTIONS, IMAGES, LOCATION_NOUNS};
use std::collections::BTreeSet;

/// Words before the name of a target.
const ARTICLES: [&str; 4] = ["the", "a", "an", "no"];
/// Most words of a name.
const LONGEST: usize = 3;
/// Words of sentences about a target that are no name of one.
const NO_NAMES: [&str; 12] = [
    "position", "location", "locations", "positions", "places", "areas", "structure", "region", "regions", "target",
    "ct", "mri",
];

impl KnownQuestions {
    /// The target of an answer, if the question asks about another one. `class` is that of the image, with its
    /// probability.
    pub fn other_target(&self, question: &str, answer: &str, class: Option<(&str, f32)>) -> Option<OtherTarget> {
        let (question, answer) = (words(question), words(answer));
        self.of_other_class(&question, &answer, class).or_else(|| self.of_same_question(&question, &answer))
    }

    /// A name that the training has about other classes only than the name in the question, or, if the question has none,
    /// than the image.
    fn of_other_class(
        &self,
        question: &[String],
        answer: &[String],
        class: Option<(&str, f32)>,
    ) -> Option<OtherTarget> {
        let asked: Vec<(&String, BTreeSet<&str>)> =
            question.iter().filter_map(|word| Some((word, self.classes_named(word)?))).collect();
        // an answer that repeats the name of the question is about it
        if asked.iter().any(|(word, _)| answer.contains(word)) {
            return None;
        }
        let of_image = class.filter(|(_, probability)| *probability >= SURE).map(|(class, _)| BTreeSet::from([class]));
        let expected = if asked.is_empty() {
            of_image.filter(|of_image| of_image.iter().all(|class| self.num_rows(class) >= FEW_ROWS))?
        } else {
            asked.iter().flat_map(|(_, classes)| classes.iter().copied()).collect()
        };
        let is_other = |classes: &BTreeSet<&str>| classes.is_disjoint(&expected);
        nouns(answer).flatten().filter(|word| !question.contains(word)).find_map(|word| {
            let classes = self.classes_named(word).filter(is_other)?;
            Some(OtherTarget { name: word.clone(), classes: classes.into_iter().map(str::to_owned).collect() })
        })
    }

    /// A name in whose place the question has another one, while the training has the same question with this name.
    fn of_same_question(&self, question: &[String], answer: &[String]) -> Option<OtherTarget> {
        let is_in_answer = |name: &[String]| nouns(answer).any(|noun| noun.starts_with(name));
        for start in 1..question.len() {
            if !ARTICLES.contains(&question[start - 1].as_str()) {
                continue;
            }
            for end in start + 1..=(start + LONGEST).min(question.len()) {
                let asked = &question[start..end];
                if asked.iter().any(|word| answer.contains(word)) {
                    continue;
                }
                let same = self.words.iter().enumerate().find_map(|(number, known)| {
                    let rest = known.strip_prefix(&question[..start])?.strip_suffix(&question[end..])?;
                    let is_name = (1..=LONGEST).contains(&rest.len()) && rest.iter().all(|word| is_noun(word));
                    (is_name && rest.last() != asked.last() && is_in_answer(rest)).then(|| (number, rest.join(" ")))
                });
                if let Some((number, name)) = same {
                    return Some(OtherTarget { name, classes: self.classes_of(number) });
                }
            }
        }
        None
    }

    /// The classes that a word names: it is in most questions about each of them, and in no question about another class.
    fn classes_named(&self, word: &str) -> Option<BTreeSet<&str>> {
        is_noun(word).then(|| self.classes_of_name(word)).flatten()
    }
}

/// The words after each article, up to one that belongs to no name.
fn nouns(words: &[String]) -> impl Iterator<Item = &[String]> {
    let of = |(at, word): (usize, &String)| {
        let rest = ARTICLES.contains(&word.as_str()).then(|| &words[at + 1..])?;
        let end = rest.iter().take(LONGEST).position(|word| !is_noun(word)).unwrap_or(rest.len().min(LONGEST));
        (end > 0).then(|| &rest[..end])
    };
    words.iter().enumerate().filter_map(of)
}

/// Whether a word can be part of the name of a target.
fn is_noun(word: &str) -> bool {
    const VERBS: [&str; 14] = [
        "is", "are", "lies", "lie", "appears", "appear", "shows", "show", "visible", "seen", "located", "it", "its",
        "which",
    ];
    let known: [&[&str]; 7] =
        [&DIRECTIONS, &CENTRES, &LOCATION_NOUNS, &IMAGES, &NO_NAMES, &VERBS, &["this", "that", "to", "with", "from"]];
    !is_filler(word)
        && !known.iter().any(|list| list.contains(&word))
        && !word.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twenty rows about each class, with the built-in questions.
    fn known(classes: &[(&str, &str, &str)]) -> KnownQuestions {
        let mut rows = Vec::new();
        for (class, target, image) in classes {
            for template in crate::templates::Templates::embedded().one {
                let words = crate::templates::Words { target, image, ..crate::templates::Words::default() };
                rows.extend((0..5).map(|_| (words.fill(&template.question), *class)));
            }
        }
        let questions = || rows.iter().map(|(question, _)| question.as_str());
        KnownQuestions::new(questions(), questions())
            .with_classes(rows.iter().map(|(question, class)| (question.as_str(), *class)))
    }

    #[test]
    fn an_answer_about_another_class_is_recognised() {
        let known = known(&[
            ("skin", "skin lesion", "image"),
            ("polyp_endoscopy", "polyp", "image"),
            ("lung_CT", "lung tumor", "CT slice"),
        ]);
        let skin = "Where is the skin lesion in this image?";
        for (question, answer, expected) in [
            (skin, "The polyp is in the center of the image.", Some("polyp")),
            (skin, "There is no polyp in this image.", Some("polyp")),
            (skin, "The lung tumor is in the center of the CT slice.", Some("lung")),
            (skin, "The skin lesion is in the center of the image.", None),
            (skin, "The lesion is in the center.", None),
            (skin, "A nevus lies in the upper left part of the image.", None),
            (skin, "", None),
            // a question without a name: the class of the image
            ("Where is it?", "The polyp is in the center of the image.", Some("polyp")),
            ("Where is it?", "The skin lesion is in the center of the image.", None),
        ] {
            let found = known.other_target(question, answer, Some(("skin", 0.9)));
            assert_eq!(found.as_ref().map(|found| found.name.as_str()), expected, "{question} {answer}");
        }
        let found = known.other_target(skin, "The polyp is in the center.", None).unwrap();
        assert_eq!(found.classes, ["polyp_endoscopy"]);
        assert_eq!(known.other_target("Where is it?", "The polyp is in the center.", Some(("skin", 0.4))), None);
    }

    #[test]
    fn an_answer_about_another_target_of_the_same_class_is_recognised() {
        let known = known(&[
            ("abdomen_CT", "liver", "CT slice"),
            ("abdomen_CT", "aorta", "CT slice"),
            ("abdomen_CT", "liver tumour", "CT slice"),
            ("abdomen_CT", "left kidney", "CT slice"),
            ("abdomen_CT", "right kidney", "CT slice"),
        ]);
        let ask = |question: &str, answer: &str| known.other_target(question, answer, None).map(|found| found.name);
        let liver = "Where is the liver in this CT slice?";
        assert_eq!(ask(liver, "The aorta is in the center of the CT slice.").as_deref(), Some("aorta"));
        assert_eq!(ask(liver, "The liver is in the center left part of the CT slice."), None);
        assert_eq!(ask(liver, "The organ is in the center left part of the CT slice."), None);
        // a part of the asked target, and a side, are no other target
        let tumour = "Where is the liver tumour in this CT slice?";
        assert_eq!(ask(tumour, "The liver is in the center of the CT slice."), None);
        let kidney = "Where is the right kidney in this CT slice?";
        assert_eq!(ask(kidney, "The kidney is in the center left part of the CT slice."), None);
    }

    #[test]
    fn answers_in_the_words_of_the_training_are_about_their_question() {
        let known =
            known(&[("xray", "effusion", "chest X-ray"), ("mr", "brain tumor", "MRI scan"), ("us", "nodule", "image")]);
        for template in crate::templates::Templates::embedded().one {
            for (target, image, class) in
                [("effusion", "chest X-ray", "xray"), ("brain tumor", "MRI scan", "mr"), ("nodule", "image", "us")]
            {
                let words =
                    crate::templates::Words { target, image, zone: "upper left", count: 2, ..Default::default() };
                for answer in &template.answers {
                    let (question, answer) = (words.fill(&template.question), words.fill(answer));
                    assert_eq!(known.other_target(&question, &answer, Some((class, 1.0))), None, "{question} {answer}");
                }
            }
        }
    }
}
