//! The rows of a training: which ones it uses, their texts as tokens, and how they are grouped by image.

use crate::data::agreement;
use crate::data::familiarity::images::KnownImages;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::loader::{Source, TextEncoder, TextLength};
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::mixing_sampler::Lengths;
use crate::data::prepared;
use crate::data::split::spread;
use crate::data::text::{self, TextTokenizer};
use crate::data::unreadable::Unreadable;
use crate::segment::Semantics;
use crate::segment::config::DataConfig;
use crate::segment::example::{Example, Largest};
use crate::segment::run_folder::loaded::LoadedModel;
use crate::segment::vision_features::FeatureCache;
use crate::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// Tokenizes the rows as the semantics requires.
#[derive(Debug)]
pub struct Encoder {
    /// The model's tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// Decides on the end token.
    pub semantics: Semantics,
    /// Longer texts are cut.
    pub max_tokens: usize,
    /// Most targets of a question: the masks that the head draws.
    pub max_targets: usize,
}

impl TextEncoder for Encoder {
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)> {
        if row.targets.len() > self.max_targets {
            let reason = format!("{} targets, the mask head draws {} masks", row.targets.len(), self.max_targets);
            return Err(Error::data_line(&row.csv, row.line, reason, "use a row for each target"));
        }
        let with_eos = self.semantics.labels_answer_only();
        let prompt = text::training_prompt(&self.tokenizer, &row.question, &row.answer, with_eos)?;
        if prompt.answer_start >= self.max_tokens {
            let reason = format!("the question has {} ids, the limit is {}", prompt.answer_start, self.max_tokens);
            return Err(Error::data_line(
                &row.csv,
                row.line,
                reason,
                "shorten the question or raise `model.max_text_tokens`",
            ));
        }
        let mut ids = prompt.ids;
        ids.truncate(self.max_tokens);
        Ok((ids, prompt.answer_start))
    }
}

/// The largest examples that batches of these rows can make. `texts` has all training texts, `sequences` the texts of each
/// sequence of training and of validation; without validation rows those of training stand for both.
pub(crate) fn longest(
    manifest: &Manifest,
    texts: &[TextLength],
    questions: usize,
    [train, val]: [&[Vec<TextLength>]; 2],
    micro_batch: usize,
) -> Example {
    let val = if val.is_empty() { train } else { val };
    Example {
        text_tokens: texts.iter().map(|text| text.tokens).max().unwrap_or(0),
        answer_tokens: texts.iter().map(|text| text.answer_tokens).max().unwrap_or(0),
        num_classes: manifest.modalities.len(),
        new_tokens: 1,
        questions,
        has_unknown_masks: manifest.has_unknown_masks(),
        largest: Some([train, val].map(|texts| Largest::of(texts, micro_batch))),
    }
}

/// Reads samples for the model of `loaded`.
pub(crate) fn source_of(
    loaded: &LoadedModel,
    manifest: &Arc<Manifest>,
    cache_bytes: usize,
    features: Option<&FeatureCache>,
    unreadable: &Arc<Unreadable>,
) -> Source {
    let model = &loaded.description.model;
    let encoder = Encoder {
        tokenizer: Arc::clone(&loaded.tokenizer),
        semantics: model.semantics,
        max_tokens: model.max_text_tokens,
        max_targets: loaded.model.num_masks(),
    };
    let source = Source::new(Arc::clone(manifest), Arc::new(encoder), loaded.description.pixels)
        .with_cache(cache_bytes)
        .skipping(Arc::clone(unreadable));
    match features {
        Some(cache) => source.with_features(Arc::clone(cache.features())),
        None => source,
    }
}

/// The real and the synthetic rows that are trained.
pub(crate) fn training_rows(manifest: &Manifest, data: &DataConfig) -> Result<(Vec<usize>, Vec<usize>)> {
    let rows = spread(manifest.rows_of(Split::Train), data.max_train_rows);
    if rows.is_empty() {
        let hint = "give at least one row the split `train`";
        return Err(Error::data(&manifest.root, "there are no training rows", hint));
    }
    let synthetic = match data.synthetic_ratio.rows(rows.len(), usize::MAX) {
        0 => Vec::new(),
        _ => manifest.synthetic_rows(),
    };
    Ok((rows, synthetic))
}

/// The texts of each sequence: those of a group of rows, or a single one where texts are not packed.
pub(crate) fn texts_of(
    groups: &[Vec<usize>],
    texts: &[TextLength],
    text_of: &HashMap<usize, TextLength>,
) -> Vec<Vec<TextLength>> {
    if groups.is_empty() {
        return texts.iter().map(|text| vec![*text]).collect();
    }
    groups.iter().map(|group| group.iter().map(|row| text_of[row]).collect()).collect()
}

/// Notes in `loaded` what the model is trained on: `trained` has the real and the synthetic rows.
///
/// # Errors
/// As [`prepared::intensities`].
pub(crate) fn describe(loaded: &mut LoadedModel, manifest: &Manifest, trained: [&[usize]; 2]) -> Result<()> {
    loaded.description.intensity = prepared::intensities(manifest)?;
    loaded.description.zones = agreement::zones_of_rows(manifest);
    let asked = |rows: &[usize]| rows.iter().map(|row| manifest.rows[*row].question.as_str()).collect::<Vec<_>>();
    let rows = trained.into_iter().flatten().map(|row| &manifest.rows[*row]);
    let questions = KnownQuestions::new(trained.into_iter().flat_map(asked), asked(&manifest.rows_of(Split::Val)))
        .with_classes(rows.map(|row| (row.question.as_str(), row.modality.as_str())));
    loaded.known_questions = Some(Arc::new(questions));
    loaded.known_images = Some(Arc::new(KnownImages::of(manifest, trained[0])));
    Ok(())
}

/// Groups `rows` by image, adds them to `groups`, and returns the numbers and lengths of the new groups.
pub(crate) fn grouped(source: &Source, rows: &Lengths, most: usize, groups: &mut Vec<Vec<usize>>) -> Lengths {
    let first = groups.len();
    if most > 1 {
        groups.extend(source.by_image(&rows.rows, most));
    } else {
        groups.extend(rows.rows.iter().map(|row| vec![*row]));
    }
    let tokens: HashMap<usize, usize> = rows.rows.iter().copied().zip(rows.lengths.iter().copied()).collect();
    let length = |group: &Vec<usize>| group.iter().map(|row| tokens[row]).sum();
    Lengths { rows: (first..groups.len()).collect(), lengths: groups[first..].iter().map(length).collect() }
}
