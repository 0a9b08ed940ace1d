//! Work of several processes on one job.

use crate::data::identity::{DataIdentity, content_marks};
use crate::data::manifest::Manifest;
use crate::trainer::Ranks;
use crate::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// Work of the process that writes files; the others get `None`.
///
/// # Errors
/// Those of `work`.
pub fn main_only<T>(ranks: Ranks, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    ranks.is_main().then(work).transpose()
}

/// Most bytes of images and masks that are compared.
pub(crate) const COMPARED: u64 = 1 << 30;

/// Refuses data that is not the same for all processes: rows, and the content of images and masks.
///
/// # Errors
/// [`Error::Data`] with the first row or file that differs from that of rank 0; [`Error::Io`].
pub fn check_data(ranks: Ranks, manifest: &Manifest) -> Result<()> {
    check_data_up_to(ranks, manifest, COMPARED)
}

pub(crate) fn check_data_up_to(ranks: Ranks, manifest: &Manifest, most: u64) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let differs = |what: String| {
        let reason = format!("rank {} has other data than rank 0: {what}", ranks.rank());
        Error::data(&manifest.root, reason, "give all processes the same data root, or equal copies of it")
    };
    let own = ranks.agree_on(DataIdentity::of(manifest))?;
    let first = ranks.gather_if_all(Ok(own.clone()))?.swap_remove(0);
    let difference = own.difference_from_first(&first, manifest);
    ranks.agree(difference.map_or(Ok(()), |difference| Err(differs(difference))))?;
    let own = ranks.agree_on(content_marks(manifest, most))?;
    let marks: Vec<u64> = own.iter().map(|(_, mark)| *mark).collect();
    let first = ranks.gather_if_all(Ok(marks))?.swap_remove(0);
    let other = own.iter().zip(first).find(|((_, mark), first)| mark != first);
    let changed = |path: &Path| {
        let all = manifest.rows.iter().flat_map(|row| [&row.image_path, &row.target().mask_path]);
        let count = all.filter(|path| path.exists()).collect::<HashSet<_>>().len();
        let sample = format!("; a sample was compared, {} of {count} images and masks", own.len());
        let sample = if own.len() < count { sample } else { String::new() };
        differs(format!("the content of {} is another{sample}", path.display()))
    };
    ranks.agree(other.map_or(Ok(()), |((path, _), _)| Err(changed(path))))
}
