//! Keeps synthetic pairs that were made from validation or test images out of trainings.

use crate::manifest::{Manifest, Row, Split};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use prsmed_base::files::sha256;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Journal of a data root of synthetic pairs: one JSON object for each pair.
pub const JOURNAL: &str = "manifest.jsonl";

/// The source of a pair, as the journal names it.
#[derive(serde::Deserialize)]
struct Pair {
    name: String,
    class: String,
    source_sha256: String,
}

impl Pair {
    /// Its mask in the data root.
    fn mask_in(&self, root: &Path) -> PathBuf {
        root.join(&self.class).join("train_masks").join(format!("{}.png", self.name))
    }
}

/// Removes synthetic rows whose source is a `val` or `test` image of `manifest`, and counts them in
/// [`Manifest::num_leaking`].
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a damaged journal.
pub(crate) fn drop_leaking_pairs(manifest: &mut Manifest) -> Result<()> {
    let roots = roots_of_pairs(manifest.rows.iter());
    if roots.is_empty() {
        return Ok(());
    }
    let real = manifest.rows.iter().filter(|row| !row.synthetic && row.split != Split::Train);
    let held_out: BTreeSet<&Path> = real.map(|row| row.image_path.as_path()).collect();
    let sums: BTreeSet<String> = held_out.into_iter().map(sha256).collect::<Result<_>>()?;
    let mut leaking: BTreeSet<PathBuf> = BTreeSet::new();
    for root in roots {
        let all = pairs(&root.join(JOURNAL))?.into_iter();
        leaking.extend(all.filter(|pair| sums.contains(&pair.source_sha256)).map(|pair| pair.mask_in(&root)));
    }
    let before = manifest.rows.len();
    manifest.rows.retain(|row| !row.synthetic || !leaking.contains(&row.target().mask_path));
    manifest.num_leaking += before - manifest.rows.len();
    Ok(())
}

/// The data roots of synthetic rows that have a journal.
fn roots_of_pairs<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<PathBuf> {
    let roots =
        rows.filter(|row| row.synthetic).filter_map(|row| Some(row.target().mask_path.ancestors().nth(3)?.into()));
    let roots: BTreeSet<PathBuf> = roots.collect();
    roots.into_iter().filter(|root| root.join(JOURNAL).exists()).collect()
}

/// SHA-256 of the files that the synthetic ones of some rows were made from, as the journals name them.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a damaged journal.
pub(crate) fn sources<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> Result<BTreeSet<String>> {
    let used: BTreeSet<&Path> =
        rows.clone().filter(|row| row.synthetic).map(|row| row.target().mask_path.as_path()).collect();
    let mut sources = BTreeSet::new();
    for root in roots_of_pairs(rows) {
        let all = pairs(&root.join(JOURNAL))?.into_iter();
        sources.extend(all.filter(|pair| used.contains(pair.mask_in(&root).as_path())).map(|pair| pair.source_sha256));
    }
    Ok(sources)
}

/// The complete lines of a journal.
fn pairs(path: &Path) -> Result<Vec<Pair>> {
    let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
    let complete = bytes.iter().rposition(|&byte| byte == b'\n').unwrap_or(0);
    let lines = (1..).zip(bytes[..complete].split(|&byte| byte == b'\n')).filter(|(_, text)| !text.is_empty());
    lines
        .map(|(line, text)| {
            let hint = "restore the file, or begin a new data root in another folder";
            let bad = |e| Error::data_line(path, line, format!("is no record: {e}"), hint);
            serde_json::from_slice(text).map_err(bad)
        })
        .collect()
}
