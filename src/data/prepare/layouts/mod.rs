//! Layouts: how images and their masks lie in the folders of a user. Each is a file of its own and one row of [`LAYOUTS`],
//! and gives a [`PairTable`].

mod annotated;
mod by_name;
mod matching;
mod names;
#[cfg(test)]
mod toy_layout;
mod volumes;

use super::options::PrepareOptions;
use super::table::{FileLayout, PairTable};
use prsmed_base::Result;

pub(super) use names::without_suffix;
pub(super) use volumes::file_name;
#[cfg(test)]
pub(super) use {names::without_number, volumes::are_volumes};

/// All layouts. The first one that knows the files counts; the last one knows all.
const LAYOUTS: &[FileLayout] = &[
    #[cfg(test)]
    toy_layout::TOY,
    annotated::ANNOTATED,
    by_name::BY_NAME,
];

/// The pairs among the files of the options.
///
/// # Errors
/// Those of the layout, for example [`prsmed_base::Error::Data`] for an ambiguous name.
pub(super) fn table(options: &PrepareOptions) -> Result<PairTable> {
    let layout = LAYOUTS.iter().find(|layout| (layout.knows)(options)).unwrap_or(&by_name::BY_NAME);
    (layout.table)(options)
}
