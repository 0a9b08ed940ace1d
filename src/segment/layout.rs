//! Where everything of a micro-batch stands, decided on the host from token ids alone, so that a pass over the model uses
//! tensors of known shapes and never asks the host.
//!
//! A *sequence* of the language model holds the prefix of a text (all ids up to the image's, and the image) once, then
//! the questions about that picture one after another. A question goes on from the prefix's positions and sees the
//! prefix and itself, so its states are those of a sequence of its own. Without packing each sequence has one question.
//!
//! Legend: b pictures, q questions, s sequences, t tokens of the longest sequence, p image tokens, n supervised tokens,
//! l tokens of the longest prompt (what the mask decoder reads of a question: all before the answer).

use super::Semantics;
use crate::models::llava::IMAGE_TOKEN;
use crate::models::mistral::Sight;
use crate::tensor::{Device, Tensor};
use std::ops::Range;

/// One text about one picture.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    /// Real ids, one [`IMAGE_TOKEN`] among them.
    text: Vec<i64>,
    /// Where the image's id stands in it.
    image_at: usize,
    /// Where the answer begins (its length when there is none).
    answer_start: usize,
    picture: usize,
    sequence: usize,
    /// Column of the first token after the prefix.
    start: usize,
}

impl Question {
    /// Ids after the image's.
    fn own(&self) -> &[i64] {
        &self.text[self.image_at + 1..]
    }

    /// Ids before the image's.
    fn before_image(&self) -> &[i64] {
        &self.text[..self.image_at]
    }
}

/// Lengths that shapes depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sizes {
    /// Tokens of a sequence, t.
    pub sequence: usize,
    /// Supervised tokens of all questions, n.
    pub supervised: usize,
    /// Tokens of a prompt, l.
    pub prompt: usize,
}

impl Sizes {
    /// The next multiples of `steps`, each at least one.
    #[must_use]
    pub fn rounded_up(self, steps: Self) -> Self {
        let up = |size: usize, step: usize| size.max(1).next_multiple_of(step.max(1));
        Self {
            sequence: up(self.sequence, steps.sequence),
            supervised: up(self.supervised, steps.supervised),
            prompt: up(self.prompt, steps.prompt),
        }
    }
}

/// Where every id, image token, prompt and label of a micro-batch stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    questions: Vec<Question>,
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    pictures: usize,
    image_tokens: usize,
    semantics: Semantics,
    needed: Sizes,
    sizes: Sizes,
    is_padded: bool,
}

impl Layout {
    /// `texts` hold the real ids of each question (padding already removed), each with exactly one [`IMAGE_TOKEN`];
    /// `answer_starts` where the answers begin in them; `groups` how many questions each picture has, in their order;
    /// `image_tokens` what a picture becomes.
    ///
    /// Questions of a picture share a sequence where their ids up to the image are the same.
    ///
    /// # Panics
    /// When a text has no image token or more than one, when `groups` do not add up, and when questions share a sequence
    /// under semantics whose decoder reads more than prompts.
    pub fn new(
        texts: Vec<Vec<i64>>,
        answer_starts: &[usize],
        groups: &[usize],
        semantics: Semantics,
        image_tokens: i64,
    ) -> Self {
        let image_tokens = usize::try_from(image_tokens).expect("a count of tokens");
        assert_eq!(groups.iter().sum::<usize>(), texts.len(), "shape mismatch: questions of the pictures");
        let pictures = groups.iter().enumerate().flat_map(|(picture, count)| std::iter::repeat_n(picture, *count));
        let (mut questions, mut lengths) = (Vec::<Question>::with_capacity(texts.len()), Vec::<usize>::new());
        for ((text, answer_start), picture) in texts.into_iter().zip(answer_starts).zip(pictures) {
            let image_at = image_of(&text);
            let shares = questions.last().is_some_and(|last| {
                last.picture == picture && last.before_image() == &text[..image_at] && semantics.hides_answer()
            });
            if !shares {
                lengths.push(image_at + image_tokens);
            }
            let sequence = lengths.len() - 1;
            let start = lengths[sequence];
            lengths[sequence] += text.len() - image_at - 1;
            questions.push(Question { text, image_at, answer_start: *answer_start, picture, sequence, start });
        }
        let mut layout = Self {
            questions,
            lengths,
            pictures: groups.len(),
            image_tokens,
            semantics,
            needed: Sizes { sequence: 0, supervised: 0, prompt: 0 },
            sizes: Sizes { sequence: 0, supervised: 0, prompt: 0 },
            is_padded: false,
        };
        layout.needed = Sizes {
            sequence: layout.lengths.iter().copied().max().unwrap_or(0),
            supervised: layout.supervised().count(),
            prompt: layout.questions.iter().map(|question| layout.prompt(question)).max().unwrap_or(0),
        };
        layout.sizes = layout.needed;
        layout
    }

    /// The same with padding up to `sizes`: losses and gradients stay, the number of shapes becomes small. (Dropout draws
    /// other numbers for other shapes.)
    ///
    /// # Panics
    /// When something does not fit `sizes`, and under semantics whose decoder reads padding.
    #[must_use]
    pub fn padded_to(&self, sizes: Sizes) -> Self {
        assert!(self.semantics.hides_answer(), "the published decoder reads padding");
        let fits = |of: fn(&Sizes) -> usize| of(&self.needed) <= of(&sizes);
        assert!(
            fits(|s| s.sequence) && fits(|s| s.supervised) && fits(|s| s.prompt),
            "shape mismatch: {:?} do not fit {sizes:?}",
            self.needed
        );
        Self { sizes, is_padded: true, ..self.clone() }
    }

    /// The pictures of `range` with their questions; padded to the same sizes where this is.
    #[must_use]
    pub fn part(&self, range: &Range<usize>) -> Self {
        let questions = &self.questions[self.questions_of(range)];
        let texts = questions.iter().map(|question| question.text.clone()).collect();
        let starts: Vec<usize> = questions.iter().map(|question| question.answer_start).collect();
        let count = |picture| questions.iter().filter(|question| question.picture == picture).count();
        let groups: Vec<usize> = range.clone().map(count).collect();
        let part = Self::new(texts, &starts, &groups, self.semantics, to_i64(self.image_tokens));
        if self.is_padded { part.padded_to(self.sizes) } else { part }
    }

    /// The questions of the pictures of `range`, which stand one after another.
    pub fn questions_of(&self, range: &Range<usize>) -> Range<usize> {
        let before = |picture: usize| self.questions.partition_point(|question| question.picture < picture);
        before(range.start)..before(range.end)
    }

    /// What fits without padding.
    pub fn needed(&self) -> Sizes {
        self.needed
    }

    /// What it is padded to.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Questions, q.
    pub fn questions(&self) -> usize {
        self.questions.len()
    }

    /// Pictures, b.
    pub fn pictures(&self) -> usize {
        self.pictures
    }

    /// Sequences, s.
    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Supervised tokens without padding.
    pub fn tokens(&self) -> usize {
        self.needed.supervised
    }

    /// The semantics it was made for.
    pub fn semantics(&self) -> Semantics {
        self.semantics
    }

    /// Whether a sequence holds more than one question.
    pub fn is_packed(&self) -> bool {
        self.questions.len() > self.lengths.len()
    }

    /// Puts it on `device`.
    pub fn to_device(&self, device: Device) -> Places {
        let numbers = |values: Vec<i64>| Tensor::from_slice(&values).to_device(device);
        let flags = |values: Vec<bool>| Tensor::from_slice(&values).to_device(device);
        let [s, t, q, l] = [self.sequences(), self.sizes.sequence, self.questions(), self.sizes.prompt].map(to_i64);
        let (positions, labels) = self.supervised_positions();
        let is_ragged = self.lengths.iter().any(|length| *length < self.sizes.sequence);
        let order = if self.is_packed() {
            let (positions, blocks) = self.packed();
            Order::Packed { positions: numbers(positions).view([s, t]), blocks: numbers(blocks).view([s, t]) }
        } else if is_ragged && !self.semantics.hides_answer() {
            // causal attention hides right-padding from real tokens; only `reference` reads the padding's own states
            Order::Padded(flags(self.real()).view([s, t]))
        } else {
            Order::Causal
        };
        let is_one_each = self.questions.iter().enumerate().all(|(index, question)| question.picture == index);
        let has_short_prompts =
            self.is_padded || self.questions.iter().any(|question| self.prompt(question) < self.sizes.prompt);
        Places {
            ids: numbers(self.ids()),
            index: numbers(self.splice_index()).view([s, t]),
            order,
            prompt: self.semantics.hides_answer().then(|| numbers(self.prompt_index()).view([q, l])),
            prompt_keep: (self.semantics.hides_answer() && has_short_prompts)
                .then(|| flags(self.prompt_keep()).view([q, l])),
            pictures: (!is_one_each)
                .then(|| numbers(self.questions.iter().map(|question| to_i64(question.picture)).collect())),
            supervised: numbers(positions),
            labels: numbers(labels),
        }
    }

    /// Tokens of the prefix of a question's sequence.
    fn prefix(&self, question: &Question) -> usize {
        question.image_at + self.image_tokens
    }

    /// Tokens before the answer, the image's included.
    fn prompt(&self, question: &Question) -> usize {
        self.spliced(question, question.answer_start)
    }

    /// Where id `index` of a question's text lands once the image is spliced in (the image's id on its first token).
    fn spliced(&self, question: &Question, index: usize) -> usize {
        if index <= question.image_at { index } else { index - 1 + self.image_tokens }
    }

    /// Place of a question's spliced token in all sequences, `[s * t]`.
    fn place(&self, question: &Question, token: usize) -> usize {
        let prefix = self.prefix(question);
        let column = if token < prefix { token } else { question.start + token - prefix };
        question.sequence * self.sizes.sequence + column
    }

    /// Question and index of every id that the text loss covers.
    fn supervised(&self) -> impl Iterator<Item = (&Question, usize)> {
        let answer_only = self.semantics.labels_answer_only();
        self.questions.iter().flat_map(move |question| {
            let first = if answer_only { question.answer_start.max(1) } else { 1 };
            (first..question.text.len())
                .filter(|&index| question.text[index] != IMAGE_TOKEN)
                .map(move |index| (question, index))
        })
    }

    /// Ids that a sequence has room for.
    fn room(&self) -> usize {
        self.sizes.sequence - self.image_tokens
    }

    /// Ids of all sequences without images, each padded to the same length.
    fn ids(&self) -> Vec<i64> {
        let mut ids = vec![0; self.sequences() * self.room()];
        for question in &self.questions {
            let row = &mut ids[question.sequence * self.room()..][..self.room()];
            row[..question.image_at].copy_from_slice(question.before_image());
            row[question.start - self.image_tokens..][..question.own().len()].copy_from_slice(question.own());
        }
        ids
    }

    /// For every place the row of `[embedded ids; image tokens; 0]` that belongs there.
    fn splice_index(&self) -> Vec<i64> {
        let (room, p, t) = (self.room(), self.image_tokens, self.sizes.sequence);
        let images = self.sequences() * room;
        let mut index = vec![images + self.pictures * p; self.sequences() * t];
        for question in &self.questions {
            let row = &mut index[question.sequence * t..][..self.lengths[question.sequence]];
            for (column, slot) in row.iter_mut().enumerate() {
                *slot = match column.checked_sub(question.image_at) {
                    None => question.sequence * room + column,
                    Some(token) if token < p => images + question.picture * p + token,
                    Some(_) => question.sequence * room + column - p,
                };
            }
        }
        index.into_iter().map(to_i64).collect()
    }

    /// Position and block of every place: block 0 is the prefix, the others are the questions, the last is padding.
    fn packed(&self) -> (Vec<i64>, Vec<i64>) {
        let t = self.sizes.sequence;
        let padding = self.questions.len() + 1;
        let mut positions: Vec<usize> = (0..self.sequences()).flat_map(|_| 0..t).collect();
        let mut blocks = vec![padding; positions.len()];
        for (number, question) in self.questions.iter().enumerate() {
            let row = question.sequence * t;
            let prefix = self.prefix(question);
            blocks[row..row + prefix].fill(0);
            let own = row + question.start..row + question.start + question.own().len();
            blocks[own.clone()].fill(number + 1);
            for (offset, position) in positions[own].iter_mut().enumerate() {
                *position = prefix + offset;
            }
        }
        let numbers = |values: Vec<usize>| values.into_iter().map(to_i64).collect();
        (numbers(positions), numbers(blocks))
    }

    /// Whether a place holds a token.
    fn real(&self) -> Vec<bool> {
        self.lengths.iter().flat_map(|length| (0..self.sizes.sequence).map(move |column| column < *length)).collect()
    }

    /// Places of the prompts' tokens; padding takes the first.
    fn prompt_index(&self) -> Vec<i64> {
        let places = self.questions.iter().flat_map(|question| {
            let end = self.prompt(question);
            (0..self.sizes.prompt).map(move |token| self.place(question, if token < end { token } else { 0 }))
        });
        places.map(to_i64).collect()
    }

    fn prompt_keep(&self) -> Vec<bool> {
        let ends = self.questions.iter().map(|question| self.prompt(question));
        ends.flat_map(|end| (0..self.sizes.prompt).map(move |token| token < end)).collect()
    }

    /// Places of the states that predict supervised tokens, and those tokens.
    fn supervised_positions(&self) -> (Vec<i64>, Vec<i64>) {
        let pairs = self.supervised().map(|(question, index)| {
            // the state just before a token predicts it
            (to_i64(self.place(question, self.spliced(question, index) - 1)), question.text[index])
        });
        let (mut positions, mut labels): (Vec<_>, Vec<_>) = pairs.unzip();
        positions.resize(self.sizes.supervised, 0);
        labels.resize(self.sizes.supervised, IGNORED);
        (positions, labels)
    }
}

/// A label that counts for nothing.
pub const IGNORED: i64 = -100;

/// What the tokens of the language model see, and where they stand.
#[derive(Debug)]
enum Order {
    Causal,
    Padded(Tensor),
    Packed { positions: Tensor, blocks: Tensor },
}

/// A [`Layout`] on a device.
#[derive(Debug)]
pub struct Places {
    /// Ids of all sequences without images, `[s (t - p)]` i64.
    pub ids: Tensor,
    /// For every place the row of `[embedded ids; image tokens; 0]` that belongs there, `[s, t]` i64.
    pub index: Tensor,
    order: Order,
    /// Places of each question's prompt, `[q, l]` i64; `None` where the decoder reads all states.
    pub prompt: Option<Tensor>,
    /// `[q, l]` bool, false = padding; `None` without any.
    pub prompt_keep: Option<Tensor>,
    /// Picture of each question, `[q]` i64; `None` where each has its own.
    pub pictures: Option<Tensor>,
    /// Places of the states that predict supervised tokens, `[n]` i64.
    pub supervised: Tensor,
    /// Those tokens, `[n]` i64; [`IGNORED`] for padding.
    pub labels: Tensor,
}

impl Places {
    /// What the tokens of the language model see, and where they stand.
    pub fn sight(&self) -> Sight<'_> {
        match &self.order {
            Order::Causal => Sight::Causal,
            Order::Padded(keep) => Sight::Padded(keep),
            Order::Packed { positions, blocks } => Sight::Packed { positions, blocks },
        }
    }

    /// All tensors, in an order that depends on the layout's kind alone.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut all = vec![&self.ids, &self.index];
        match &self.order {
            Order::Causal => {}
            Order::Padded(keep) => all.push(keep),
            Order::Packed { positions, blocks } => all.extend([positions, blocks]),
        }
        all.extend([&self.prompt, &self.prompt_keep, &self.pictures].into_iter().flatten());
        all.extend([&self.supervised, &self.labels]);
        all
    }
}

fn image_of(text: &[i64]) -> usize {
    let mut places = text.iter().enumerate().filter(|(_, id)| **id == IMAGE_TOKEN).map(|(index, _)| index);
    let first = places.next().expect("shape mismatch: a text without an image token");
    assert!(places.next().is_none(), "shape mismatch: a text with more than one image token");
    first
}

fn to_i64(n: usize) -> i64 {
    i64::try_from(n).expect("lengths fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKED: [&[i64]; 3] = [&[1, IMAGE_TOKEN, 5, 6, 7], &[1, IMAGE_TOKEN, 8, 9], &[1, IMAGE_TOKEN, 5]];

    fn layout(semantics: Semantics, groups: &[usize]) -> Layout {
        let texts = PACKED.map(<[i64]>::to_vec).to_vec();
        Layout::new(texts, &[4, 3, 2], groups, semantics, 2)
    }

    #[test]
    fn image_tokens_replace_their_id_and_rows_are_padded() {
        let layout = layout(Semantics::Corrected, &[1, 1, 1]);
        assert_eq!(layout.sizes(), Sizes { sequence: 6, supervised: 3, prompt: 5 });
        assert_eq!(layout.ids(), [1, 5, 6, 7, 1, 8, 9, 0, 1, 5, 0, 0]);
        let zero = 12 + 3 * 2;
        assert_eq!(
            layout.splice_index(),
            [0, 12, 13, 1, 2, 3, 4, 14, 15, 5, 6, zero, 8, 16, 17, 9, zero, zero].map(i64::from)
        );
        assert_eq!(layout.prompt_index(), [0, 1, 2, 3, 4, 6, 7, 8, 9, 6, 12, 13, 14, 12, 12]);
        assert_eq!(layout.supervised_positions(), (vec![4, 9, 14], vec![7, 9, 5]));
        assert!(!layout.is_packed());
    }

    #[test]
    fn questions_of_a_picture_share_its_tokens() {
        let layout = layout(Semantics::Corrected, &[2, 1]);
        assert_eq!((layout.sequences(), layout.pictures(), layout.is_packed()), (2, 2, true));
        assert_eq!(layout.sizes(), Sizes { sequence: 8, supervised: 3, prompt: 5 });
        assert_eq!(layout.ids(), [1, 5, 6, 7, 8, 9, 1, 5, 0, 0, 0, 0]);
        let (positions, blocks) = layout.packed();
        assert_eq!(positions[..8], [0, 1, 2, 3, 4, 5, 3, 4]);
        assert_eq!(blocks[..8], [0, 0, 0, 1, 1, 1, 2, 2]);
        assert_eq!(blocks[8..], [0, 0, 0, 3, 4, 4, 4, 4]);
        assert_eq!(layout.prompt_index()[5..10], [0, 1, 2, 6, 0]);
        // the first own token is predicted by the prefix
        assert_eq!(layout.supervised_positions(), (vec![4, 6, 10], vec![7, 9, 5]));
    }

    #[test]
    fn other_prefixes_and_other_pictures_have_sequences_of_their_own() {
        let texts = vec![vec![1, IMAGE_TOKEN, 5], vec![2, IMAGE_TOKEN, 5], vec![2, IMAGE_TOKEN, 6]];
        let layout = Layout::new(texts, &[2, 2, 2], &[3], Semantics::Corrected, 2);
        assert_eq!((layout.sequences(), layout.pictures()), (2, 1));
        assert_eq!(layout.splice_index()[..4], [0, 6, 7, 1].map(i64::from));
        assert_eq!(layout.questions.iter().map(|q| q.sequence).collect::<Vec<_>>(), [0, 1, 1]);
    }

    #[test]
    fn the_published_semantics_reads_whole_texts() {
        let layout = layout(Semantics::Reference, &[1, 1, 1]);
        assert_eq!(layout.needed().supervised, 3 + 2 + 1);
        assert_eq!(layout.real().iter().filter(|real| **real).count(), 6 + 5 + 4);
    }

    #[test]
    fn parts_keep_whole_pictures_and_padding() {
        let whole = layout(Semantics::Corrected, &[2, 0, 1]);
        assert_eq!([0..1, 1..2, 1..3].map(|pictures| whole.questions_of(&pictures)), [0..2, 2..2, 2..3]);
        let texts = |of: &[&[i64]]| of.iter().map(|text| text.to_vec()).collect();
        let first = Layout::new(texts(&PACKED[..2]), &[4, 3], &[2], Semantics::Corrected, 2);
        assert_eq!(whole.part(&(0..1)), first);
        assert_eq!(whole.part(&(0..1)).tokens() + whole.part(&(1..3)).tokens(), whole.tokens());
        let sizes = whole.needed().rounded_up(Sizes { sequence: 16, supervised: 4, prompt: 8 });
        assert_eq!(whole.padded_to(sizes).part(&(1..3)).sizes(), sizes);
    }

    #[test]
    fn padding_repeats_places_and_ignores_labels() {
        let plain = layout(Semantics::Corrected, &[2, 1]);
        let sizes = plain.needed().rounded_up(Sizes { sequence: 16, supervised: 4, prompt: 8 });
        assert_eq!(sizes, Sizes { sequence: 16, supervised: 4, prompt: 8 });
        let padded = plain.padded_to(sizes);
        assert_eq!((padded.ids().len(), padded.splice_index().len()), (2 * 14, 2 * 16));
        assert_eq!(padded.supervised_positions(), (vec![4, 6, 18, 0], vec![7, 9, 5, IGNORED]));
        assert_eq!(padded.prompt_keep().iter().filter(|keep| **keep).count(), 5 + 4 + 3);
        assert_eq!(padded.tokens(), 3);
    }
}
