//! The prompt of a base: the texts around image and question, and how an answer ends.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Text of a prompt.
type Text = Cow<'static, str>;

/// The prompt that a model is trained on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Token that the tokenizer puts before every text; `None` if it puts none.
    pub begin: Option<Text>,
    /// Text before the image.
    pub before_image: Text,
    /// Text between the image and the answer; `{question}` stands for the question.
    pub question: Text,
    /// Token that ends an answer.
    pub end: Text,
    /// Begins a turn in a generated text; later turns are not part of the answer. Empty: there are none.
    pub turn: Text,
    /// Speakers whose names are removed after the mark of the first turns.
    pub speakers: Cow<'static, [Text]>,
}

impl Prompt {
    /// The prompt of PRS-Med.
    pub const PUBLISHED: Self = Self {
        begin: Some(Text::Borrowed("<s>")),
        before_image: Text::Borrowed(""),
        question: Text::Borrowed("\n### User: {question} \n### Assistant: \n"),
        end: Text::Borrowed("</s>"),
        turn: Text::Borrowed("###"),
        speakers: Cow::Borrowed(&[Text::Borrowed("Assistant:"), Text::Borrowed("User:")]),
    };

    /// The text between the image and the answer.
    pub(super) fn render(&self, question: &str) -> String {
        self.question.replacen("{question}", question, 1)
    }

    /// The answer in a generated text: without marks of turns and later turns, with single spaces.
    pub fn clean(&self, text: &str) -> String {
        let mut rest = text.trim();
        if !self.turn.is_empty() {
            while let Some(header) = rest.strip_prefix(&*self.turn) {
                let header = header.trim_start();
                let after = self.speakers.iter().find_map(|name| header.strip_prefix(&**name));
                let Some(after) = after else { break };
                rest = after.trim_start();
            }
            rest = rest.split(&*self.turn).next().unwrap_or_default();
        }
        rest.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

impl Default for Prompt {
    /// Runs that state no prompt have the published one.
    fn default() -> Self {
        Self::PUBLISHED
    }
}
