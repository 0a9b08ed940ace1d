//! Training rows of the arms of an ablation.

use super::arms::Arm;
use crate::augment::export::{JOURNAL, Journal, Record};
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::mixing_sampler::Ratio;
use crate::data::split::spread;
use crate::tensor::weights::sha256;
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Rows for one number of real images.
pub(super) struct ArmRows {
    /// Real rows of all splits; the `train` rows are those of the chosen images.
    real: Manifest,
    /// Rows of the pairs whose sources are among the chosen images.
    pub(super) synthetic: Vec<Row>,
    /// For each of `synthetic` the real row of its source, marked as an extra row.
    duplicates: Vec<Row>,
    /// For each of `synthetic` the record of its pair.
    pub(super) records: Vec<Record>,
    /// Number of chosen real images.
    pub(super) num_images: usize,
    /// Number of pairs.
    pub(super) num_pairs: usize,
}

impl ArmRows {
    /// Rows for `limit` real images (0 = all). A synthetic pair is used only when its source is among them. Other pairs
    /// would bring in images that the real arm does not have.
    pub(super) fn new(real: &Manifest, synthetic: &Manifest, limit: usize) -> Result<Self> {
        let (rows, images) = limited(real, limit);
        let real = Manifest { rows, ..real.clone() };
        let root = &synthetic.root;
        // names are compared too: a copy of an image may have a mask that the real arm does not use
        let key = |path: &Path, sum: String| (path.file_name().map(ToOwned::to_owned), sum);
        let sources: HashMap<_, &PathBuf> =
            images.iter().map(|path| Ok((key(path, sha256(path)?), path))).collect::<Result<_>>()?;
        let records = Journal::read(&root.join(JOURNAL))?.into_iter().filter(|record| record.accepted);
        let made: HashMap<String, (Record, &PathBuf)> = records
            .filter_map(|record| {
                let source = *sources.get(&key(&record.source_image, record.source_sha256.clone()))?;
                Some((record.name.clone(), (record, source)))
            })
            .collect();
        let pair_of = |row: &Row| made.get(&*row.target().mask_path.file_stem()?.to_string_lossy());
        let of_images = synthetic.rows.iter().filter(|row| pair_of(row).is_some()).cloned().collect();
        let extra = Manifest { rows: of_images, ..synthetic.clone() };
        let both = real.clone().with_extra(extra)?;
        let (synthetic, real_rows): (Vec<Row>, Vec<Row>) = both.rows.into_iter().partition(|row| row.synthetic);
        let real = Manifest { rows: real_rows, ..real };
        let (mut duplicates, mut records) = (Vec::new(), Vec::new());
        for row in &synthetic {
            if let Some((record, source)) = pair_of(row)
                && let Some(replaced) = source_row(&real, source, row)
            {
                duplicates.push(Row { synthetic: true, ..replaced.clone() });
                // the folder of the images may have moved since
                records.push(Record { source_image: (*source).clone(), ..record.clone() });
            }
        }
        if synthetic.is_empty() || duplicates.len() != synthetic.len() {
            let reason = "contains no pair made from these real training images";
            return Err(Error::data(root, reason, "make some with `prsmed augment generate` on the same data root"));
        }
        let num_pairs = records.iter().map(|record| &record.name).collect::<HashSet<_>>().len();
        Ok(Self { real, synthetic, duplicates, records, num_images: images.len(), num_pairs })
    }

    /// Number of real training rows.
    pub(super) fn num_real(&self) -> usize {
        self.real.rows_of(Split::Train).len()
    }

    /// Extra rows per real row.
    pub(super) fn ratio(&self, ratio: Ratio) -> f64 {
        match ratio {
            Ratio::All => self.synthetic.len() as f64 / self.num_real().max(1) as f64,
            Ratio::PerReal(ratio) => ratio,
        }
    }

    /// The rows of `arm` for a training that uses `num_samples` samples.
    ///
    /// Rows are repeated until one epoch is longer than the training. Otherwise the short last batch of an epoch would
    /// give the arm with fewer rows fewer samples per step, and a ratio above the number of pairs could not be reached.
    pub(super) fn manifest(&self, arm: Arm, num_samples: usize) -> Manifest {
        let is_train = |row: &&Row| row.split == Split::Train;
        let once: Vec<&Row> = self.real.rows.iter().filter(is_train).collect();
        let times = num_samples.div_ceil(once.len().max(1)) + 1;
        let mut rows: Vec<Row> = self.real.rows.iter().filter(|row| !is_train(row)).cloned().collect();
        rows.extend(std::iter::repeat_n(once.iter().map(|row| (*row).clone()), times).flatten());
        let extra: &[Row] = match arm {
            Arm::Real | Arm::Classical => &[],
            Arm::Duplicates(_) => &self.duplicates,
            Arm::Synthetic(_) => &self.synthetic,
        };
        if let Some(ratio) = arm.ratio() {
            let ratio = Ratio::PerReal(self.ratio(ratio));
            let wanted = ratio.rows(once.len() * times, usize::MAX);
            // whole repetitions, so that each extra row is equally likely
            let times = wanted.div_ceil(extra.len().max(1));
            rows.extend(std::iter::repeat_n(extra.iter().cloned(), times).flatten());
        }
        Manifest { rows, ..self.real.clone() }
    }
}

/// The real training row that the synthetic row `made` replaces: the row of its source with the same texts, else with
/// the same question, else the first one (the texts of a moved lesion are new).
fn source_row<'a>(real: &'a Manifest, source: &Path, made: &Row) -> Option<&'a Row> {
    let rows = || real.rows.iter().filter(|row| row.split == Split::Train && row.image_path == source);
    let same_question = |row: &&Row| row.question == made.question;
    rows()
        .find(|row| same_question(row) && row.answer == made.answer)
        .or_else(|| rows().find(same_question))
        .or_else(|| rows().next())
}

/// Number of training rows when an ablation uses `limit` real images.
pub fn training_rows(manifest: &Manifest, limit: usize) -> usize {
    limited(manifest, limit).0.iter().filter(|row| row.split == Split::Train).count()
}

/// Keeps `limit` real training images (0 = all), the same ones that an ablation with this limit uses. Pairs for that
/// ablation must be generated and filtered with these images only.
#[must_use]
pub fn limited_to(manifest: Manifest, limit: usize) -> Manifest {
    let (rows, _) = limited(&manifest, limit);
    Manifest { rows, ..manifest }
}

/// Rows of at most `limit` training images, spread evenly over each class, plus all rows of the other splits. Also
/// returns the images.
fn limited(manifest: &Manifest, limit: usize) -> (Vec<Row>, HashSet<PathBuf>) {
    let mut by_class: BTreeMap<&str, Vec<&PathBuf>> = BTreeMap::new();
    for row in manifest.rows.iter().filter(|row| row.split == Split::Train) {
        let images = by_class.entry(&row.modality).or_default();
        if images.last() != Some(&&row.image_path) && !images.contains(&&row.image_path) {
            images.push(&row.image_path);
        }
    }
    let classes = by_class.len().max(1);
    let mut selected: HashSet<PathBuf> = HashSet::new();
    for (number, images) in by_class.values().enumerate() {
        // the first classes take the remainder
        let share = if limit == 0 { 0 } else { (limit / classes + usize::from(number < limit % classes)).max(1) };
        let chosen = spread((0..images.len()).collect(), share);
        selected.extend(chosen.into_iter().map(|i| images[i].clone()));
    }
    let rows = manifest.rows.iter().filter(|row| row.split != Split::Train || selected.contains(&row.image_path));
    (rows.cloned().collect(), selected)
}
