//! Index tensors of a micro-batch: splice indices, positions, attention blocks, labels.
//!
//! The CPU builds them from token ids alone, so the forward pass needs no host synchronisation.
//!
//! A *sequence* of the language model starts with the prefix of a text: all ids up to the image token, and the image
//! tokens. The questions about that image follow one after another. Position ids of each question continue from the
//! prefix. A question attends to the prefix and to itself, so its states equal those of an unpacked sequence. Without
//! packing, each sequence has one question.
//!
//! Legend: b images, q questions, m targets of all questions, s sequences, t tokens of the longest sequence, p image
//! tokens, n supervised tokens, l tokens of the longest prompt. The prompt is everything before the answer; the mask
//! decoder reads only the prompt.

pub mod device;
mod read;

use crate::data::geometry::MovedMask;
use crate::data::text::IMAGE_TOKEN;
use crate::models::tower::ImageSpan;
use crate::segment::Semantics;
use std::ops::Range;

/// One text about one image.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    /// Token ids without padding, with one [`IMAGE_TOKEN`].
    text: Vec<i64>,
    /// Index of the image token in `text`.
    image_at: usize,
    /// Index of the answer's first id in `text`; the length of `text` if there is no answer.
    answer_start: usize,
    /// Index among all questions.
    number: usize,
    image: usize,
    sequence: usize,
    /// Column of the first token after the prefix.
    start: usize,
}

impl Question {
    /// Ids after the image token.
    fn own(&self) -> &[i64] {
        &self.text[self.image_at + 1..]
    }

    /// Ids before the image token.
    fn before_image(&self) -> &[i64] {
        &self.text[..self.image_at]
    }
}

/// Lengths that determine tensor shapes.
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
    /// Rounded up to the next multiples of `steps`, at least one step each.
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

/// Positions of every id, image token, prompt and label of a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    questions: Vec<Question>,
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    images: usize,
    /// Number of targets of each question.
    targets: Vec<usize>,
    /// Masks that the head draws for each question.
    masks: usize,
    /// Whether the words of answers follow the masks of their questions.
    reads_masks: bool,
    /// Masks at other places, of each question; empty without them.
    moved: Vec<Vec<MovedMask>>,
    /// The tokens of each image.
    spans: Vec<ImageSpan>,
    semantics: Semantics,
    needed: Sizes,
    sizes: Sizes,
    is_padded: bool,
}

impl Layout {
    /// - `texts`: ids of each question without padding, with exactly one [`IMAGE_TOKEN`].
    /// - `answer_starts`: index of the answer's first id in each text.
    /// - `groups`: number of questions of each image, in order.
    /// - `spans`: the tokens that replace the image token, of each image.
    ///
    /// Questions of an image share a sequence if their ids up to the image token are the same. They never do under
    /// semantics whose decoder reads more than prompts.
    ///
    /// # Panics
    /// If a text does not have exactly one image token, or if `groups` do not add up to the number of texts.
    pub fn new(
        texts: Vec<Vec<i64>>,
        answer_starts: &[usize],
        groups: &[usize],
        semantics: Semantics,
        spans: Vec<ImageSpan>,
    ) -> Self {
        assert_eq!(groups.len(), spans.len(), "shape mismatch: images");
        assert_eq!(groups.iter().sum::<usize>(), texts.len(), "shape mismatch: questions of the images");
        let images = groups.iter().enumerate().flat_map(|(image, count)| std::iter::repeat_n(image, *count));
        let (mut questions, mut lengths) = (Vec::<Question>::with_capacity(texts.len()), Vec::<usize>::new());
        for ((text, answer_start), image) in texts.into_iter().zip(answer_starts).zip(images) {
            let image_at = image_of(&text);
            let shares = questions.last().is_some_and(|last| {
                last.image == image && last.before_image() == &text[..image_at] && semantics.hides_answer()
            });
            if !shares {
                lengths.push(image_at + spans[image].tokens);
            }
            let sequence = lengths.len() - 1;
            let start = lengths[sequence];
            lengths[sequence] += text.len() - image_at - 1;
            let number = questions.len();
            questions.push(Question { text, image_at, answer_start: *answer_start, number, image, sequence, start });
        }
        let mut layout = Self {
            questions,
            lengths,
            images: groups.len(),
            targets: vec![1; answer_starts.len()],
            masks: 1,
            reads_masks: false,
            moved: Vec::new(),
            spans,
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

    /// With so many targets of each question, for a head that draws `masks` for each question.
    ///
    /// # Panics
    /// If a question has more targets than that.
    #[must_use]
    pub fn with_targets(self, targets: Vec<usize>, masks: usize) -> Self {
        assert_eq!(targets.len(), self.questions.len(), "shape mismatch: targets of the questions");
        assert!(targets.iter().all(|count| *count <= masks), "shape mismatch: the mask head draws {masks} masks");
        Self { targets, masks, ..self }
    }

    /// For a model whose words follow the masks if `reads_masks`.
    #[must_use]
    pub fn with_read_masks(self, reads_masks: bool) -> Self {
        Self { reads_masks, ..self }
    }

    /// With masks at other places, of each question, for words to follow.
    #[must_use]
    pub fn with_moved(self, moved: Vec<Vec<MovedMask>>) -> Self {
        Self { moved, ..self }
    }

    /// Layout padded to `sizes`, to reduce the number of different shapes. Losses and gradients do not change, except
    /// that dropout draws other numbers for other shapes.
    ///
    /// # Panics
    /// If the layout does not fit `sizes`, and under semantics whose decoder reads padding.
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

    /// Layout of the images of `range` with their questions; padded to the same sizes if this layout is padded.
    #[must_use]
    pub fn part(&self, range: &Range<usize>) -> Self {
        let all = self.questions_of(range);
        let (questions, targets) = (&self.questions[all.clone()], self.targets[all.clone()].to_vec());
        let moved = self.moved.get(all).unwrap_or_default().to_vec();
        let texts = questions.iter().map(|question| question.text.clone()).collect();
        let starts: Vec<usize> = questions.iter().map(|question| question.answer_start).collect();
        let count = |image| questions.iter().filter(|question| question.image == image).count();
        let groups: Vec<usize> = range.clone().map(count).collect();
        let part = Self::new(texts, &starts, &groups, self.semantics, self.spans[range.clone()].to_vec());
        let part = part.with_targets(targets, self.masks).with_read_masks(self.reads_masks).with_moved(moved);
        if self.is_padded { part.padded_to(self.sizes) } else { part }
    }

    /// Indices of the questions about the images of `range`.
    pub fn questions_of(&self, range: &Range<usize>) -> Range<usize> {
        let before = |image: usize| self.questions.partition_point(|question| question.image < image);
        before(range.start)..before(range.end)
    }

    /// Indices of the targets of `questions`.
    pub fn targets_of(&self, questions: &Range<usize>) -> Range<usize> {
        let before = |question: usize| self.targets[..question].iter().sum();
        before(questions.start)..before(questions.end)
    }

    /// Number of targets.
    pub fn targets(&self) -> usize {
        self.targets.iter().sum()
    }

    /// Sizes without padding.
    pub fn needed(&self) -> Sizes {
        self.needed
    }

    /// Sizes with padding.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Most tokens of so many ids, one of which is the image token.
    pub fn tokens_with_image(&self, ids: usize) -> usize {
        ids + self.spans.iter().map(|span| span.tokens).max().unwrap_or(1) - 1
    }

    /// Questions, q.
    pub fn questions(&self) -> usize {
        self.questions.len()
    }

    /// Images, b.
    pub fn images(&self) -> usize {
        self.images
    }

    /// Sequences, s.
    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Supervised tokens without padding.
    pub fn tokens(&self) -> usize {
        self.needed.supervised
    }

    /// Semantics of the layout.
    pub fn semantics(&self) -> Semantics {
        self.semantics
    }

    /// True if a sequence holds more than one question.
    pub fn is_packed(&self) -> bool {
        self.questions.len() > self.lengths.len()
    }

    /// Tokens of the prefix of a question's sequence.
    fn prefix(&self, question: &Question) -> usize {
        question.image_at + self.span(question).tokens
    }

    /// Tokens before the answer, including the image tokens.
    fn prompt(&self, question: &Question) -> usize {
        self.spliced(question, question.answer_start)
    }

    /// Token index of id `index` of a text after the image tokens replace the image token. The image token maps to the
    /// first of them.
    fn spliced(&self, question: &Question, index: usize) -> usize {
        if index <= question.image_at { index } else { index - 1 + self.span(question).tokens }
    }

    /// Flat index in `[s * t]` of token `token` of a question, counted with image tokens.
    fn flat_index(&self, question: &Question, token: usize) -> usize {
        let prefix = self.prefix(question);
        let column = if token < prefix { token } else { question.start + token - prefix };
        question.sequence * self.sizes.sequence + column
    }

    /// For each target, its mask among those that the head draws for all questions; `None` if it draws no others.
    fn target_index(&self) -> Option<Vec<i64>> {
        let masks = self.masks;
        let of_question = |(question, count): (usize, &usize)| (0..*count).map(move |target| question * masks + target);
        let has_others = self.targets.iter().any(|count| *count != masks);
        has_others.then(|| self.targets.iter().enumerate().flat_map(of_question).map(to_i64).collect())
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

    fn span(&self, question: &Question) -> ImageSpan {
        self.spans[question.image]
    }

    /// Most ids of a padded sequence, not counting image tokens.
    fn room(&self) -> usize {
        self.sizes.sequence - self.spans.iter().map(|span| span.tokens).min().unwrap_or(0)
    }

    /// Ids of all sequences without image tokens, each padded to the same length.
    fn ids(&self) -> Vec<i64> {
        let mut ids = vec![0; self.sequences() * self.room()];
        for question in &self.questions {
            let row = &mut ids[question.sequence * self.room()..][..self.room()];
            row[..question.image_at].copy_from_slice(question.before_image());
            row[question.start - self.span(question).tokens..][..question.own().len()].copy_from_slice(question.own());
        }
        ids
    }

    /// For each token of `[s * t]`, the row of `[embedded ids; image tokens; 0]` to take.
    fn splice_index(&self) -> Vec<i64> {
        let (room, t) = (self.room(), self.sizes.sequence);
        let (mut images, mut end) = (Vec::with_capacity(self.images), self.sequences() * room);
        for span in &self.spans {
            images.push(end);
            end += span.tokens;
        }
        let mut index = vec![end; self.sequences() * t];
        for question in &self.questions {
            let p = self.span(question).tokens;
            let row = &mut index[question.sequence * t..][..self.lengths[question.sequence]];
            for (column, slot) in row.iter_mut().enumerate() {
                *slot = match column.checked_sub(question.image_at) {
                    None => question.sequence * room + column,
                    Some(token) if token < p => images[question.image] + token,
                    Some(_) => question.sequence * room + column - p,
                };
            }
        }
        index.into_iter().map(to_i64).collect()
    }

    /// True if a token's position is its index.
    fn has_plain_positions(&self) -> bool {
        !self.is_packed() && self.spans.iter().all(|span| span.grid.is_none())
    }

    /// Positions of the axes time, height and width (if images have a grid, else of one axis) of each token: `[axes, s * t]`.
    fn positions(&self) -> Vec<i64> {
        let axes = if self.spans.iter().any(|span| span.grid.is_some()) { 3 } else { 1 };
        (0..axes).flat_map(|axis| self.positions_of(axis)).map(to_i64).collect()
    }

    fn positions_of(&self, axis: usize) -> Vec<usize> {
        let t = self.sizes.sequence;
        let mut positions: Vec<usize> = (0..self.sequences()).flat_map(|_| 0..t).collect();
        for question in &self.questions {
            let (row, span) = (question.sequence * t, self.span(question));
            if let Some([_, columns]) = span.grid {
                let image = positions[row + question.image_at..][..span.tokens].iter_mut();
                image.enumerate().for_each(|(token, position)| {
                    *position = question.image_at + [0, token / columns, token % columns][axis];
                });
            }
            let own = positions[row + question.start..][..question.own().len()].iter_mut();
            own.zip(question.image_at + span.next_position()..).for_each(|(position, value)| *position = value);
        }
        positions
    }

    /// What a token after the prompt of the first question adds to its index for its position.
    pub fn position_shift(&self) -> i64 {
        self.spans.first().map_or(0, |span| to_i64(span.next_position()) - to_i64(span.tokens))
    }

    /// Attention block of each token: block 0 is the prefix, the last block is padding, the blocks between are the
    /// questions.
    fn blocks(&self) -> Vec<i64> {
        let t = self.sizes.sequence;
        let mut blocks = vec![self.questions.len() + 1; self.sequences() * t];
        for (number, question) in self.questions.iter().enumerate() {
            let row = question.sequence * t;
            blocks[row..row + self.prefix(question)].fill(0);
            blocks[row + question.start..][..question.own().len()].fill(number + 1);
        }
        blocks.into_iter().map(to_i64).collect()
    }

    /// Number of queries and keys of each segment, and the token of each key, as [`crate::tensor::functions::Segments`] describes them.
    fn segments(&self) -> (Vec<[usize; 2]>, Vec<usize>) {
        let t = self.sizes.sequence;
        let (mut lengths, mut keys) = (Vec::new(), Vec::new());
        let mut questions = self.questions.iter().peekable();
        for (sequence, length) in self.lengths.iter().enumerate() {
            let row = sequence * t;
            let prefix = self.prefix(questions.peek().expect("a sequence has a question"));
            lengths.push([prefix; 2]);
            keys.extend(row..row + prefix);
            while let Some(question) = questions.next_if(|question| question.sequence == sequence) {
                let own = question.own().len();
                lengths.push([own, prefix + own]);
                keys.extend(row..row + prefix);
                keys.extend(row + question.start..row + question.start + own);
            }
            lengths.push([t - length; 2]);
            keys.extend(row + length..row + t);
        }
        (lengths, keys)
    }

    /// Keys of all segments, counted from the sizes alone: every token once, and a prefix for each question, which is no
    /// longer than a prompt.
    fn room_for_keys(&self) -> usize {
        let prefix = self.questions.iter().map(|question| self.prefix(question)).max().unwrap_or(0);
        self.sequences() * self.sizes.sequence + self.questions() * self.sizes.prompt.max(prefix)
    }

    /// For each token of `[s * t]`, false for padding.
    fn real(&self) -> Vec<bool> {
        self.lengths.iter().flat_map(|length| (0..self.sizes.sequence).map(move |column| column < *length)).collect()
    }

    /// Flat indices of the prompts' tokens; padding repeats the first token.
    fn prompt_index(&self) -> Vec<i64> {
        let indices = self.questions.iter().flat_map(|question| {
            let end = self.prompt(question);
            (0..self.sizes.prompt).map(move |token| self.flat_index(question, if token < end { token } else { 0 }))
        });
        indices.map(to_i64).collect()
    }

    fn prompt_keep(&self) -> Vec<bool> {
        let ends = self.questions.iter().map(|question| self.prompt(question));
        ends.flat_map(|end| (0..self.sizes.prompt).map(move |token| token < end)).collect()
    }

    /// Flat indices of the states that predict supervised tokens, and the ids of those tokens.
    fn supervised_targets(&self) -> (Vec<i64>, Vec<i64>) {
        let pairs = self.supervised().map(|(question, index)| {
            // the state just before a token predicts it
            (to_i64(self.flat_index(question, self.spliced(question, index) - 1)), question.text[index])
        });
        let (mut positions, mut labels): (Vec<_>, Vec<_>) = pairs.unzip();
        positions.resize(self.sizes.supervised, 0);
        labels.resize(self.sizes.supervised, IGNORED);
        (positions, labels)
    }
}

/// Label that the text loss ignores.
pub const IGNORED: i64 = -100;

fn image_of(text: &[i64]) -> usize {
    let mut indices = text.iter().enumerate().filter(|(_, id)| **id == IMAGE_TOKEN).map(|(index, _)| index);
    let first = indices.next().expect("shape mismatch: a text without an image token");
    assert!(indices.next().is_none(), "shape mismatch: a text with more than one image token");
    first
}

fn to_i64(n: usize) -> i64 {
    i64::try_from(n).expect("lengths fit")
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
