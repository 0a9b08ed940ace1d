//! Keeps synthetic pairs that were made from validation or test images out of trainings.

use super::manifest::{Manifest, Split};
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

/// Removes synthetic rows whose source is a `val` or `test` image of `manifest`, and counts them in
/// [`Manifest::num_leaking`].
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a damaged journal.
pub(super) fn drop_leaking_pairs(manifest: &mut Manifest) -> Result<()> {
    let synthetic = manifest.rows.iter().filter(|row| row.synthetic);
    let roots: BTreeSet<PathBuf> = synthetic.filter_map(|row| Some(row.mask_path.ancestors().nth(3)?.into())).collect();
    let roots: Vec<PathBuf> = roots.into_iter().filter(|root| root.join(JOURNAL).exists()).collect();
    if roots.is_empty() {
        return Ok(());
    }
    let real = manifest.rows.iter().filter(|row| !row.synthetic && row.split != Split::Train);
    let held_out: BTreeSet<&Path> = real.map(|row| row.image_path.as_path()).collect();
    let sums: BTreeSet<String> = held_out.into_iter().map(sha256).collect::<Result<_>>()?;
    let mut leaking: BTreeSet<PathBuf> = BTreeSet::new();
    for root in roots {
        for pair in pairs(&root.join(JOURNAL))?.into_iter().filter(|pair| sums.contains(&pair.source_sha256)) {
            leaking.insert(root.join(pair.class).join("train_masks").join(format!("{}.png", pair.name)));
        }
    }
    let before = manifest.rows.len();
    manifest.rows.retain(|row| !row.synthetic || !leaking.contains(&row.mask_path));
    manifest.num_leaking += before - manifest.rows.len();
    Ok(())
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
