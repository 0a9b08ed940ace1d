//! Pairs of several sequences: their names and windows, and which are missing.

use std::path::Path;

use super::options::PrepareOptions;
use super::table::{Pair, PairTable};
use crate::annotation::is_image;
use crate::prepared::{Intensity, Prepared};
use crate::volume::sequences::{list, names_problem};
use crate::volume::{Sequence, Windows};
use prsmed_base::{Error, Result};

/// Refuses pairs of which some have other sequences than the first one, and files that cannot be one image.
///
/// # Errors
/// [`Error::Data`] that names the image.
pub(super) fn check(rows: &[Pair]) -> Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    let names = |pair: &Pair| pair.sequences.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
    let wanted = names(first);
    if let Some((reason, hint)) = Some(&wanted).filter(|names| !names.is_empty()).and_then(|names| names_problem(names))
    {
        return Err(Error::data(&first.image, reason, hint));
    }
    for pair in rows {
        if names(pair) != wanted {
            let reason = format!("has other sequences than `{}`", first.image.display());
            return Err(Error::data(&pair.image, reason, "prepare them as different modalities"));
        }
        let files: Vec<&Path> = pair.sequences.iter().filter_map(|file| file.path.as_deref()).collect();
        if let Some(other) = files.iter().find(|path| is_image(path) != pair.is_image()) {
            let reason =
                format!("is one image with `{}`: one is a flat image, and the other a volume", other.display());
            return Err(Error::data(&pair.image, reason, "give all sequences of an image as one kind of file"));
        }
        let twice = |number: usize| files[..number].contains(&files[number]);
        if let Some(number) = (0..files.len()).find(|number| twice(*number)) {
            let reason = "is the file of two sequences of one image";
            return Err(Error::data(files[number], reason, "give each sequence its own file, or leave its cell empty"));
        }
    }
    Ok(())
}

/// The sequences of new images, each with the window that the options or the class say.
///
/// # Errors
/// [`Error::Config`] for a window of another sequence, neighbouring slices beside sequences, and a class of other sequences
/// or windows. `has_rows` says whether the class has images.
pub(super) fn settled(table: &PairTable, options: &PrepareOptions, has_rows: bool) -> Result<Vec<Sequence>> {
    let names: Vec<&str> =
        table.rows.first().into_iter().flat_map(|pair| &pair.sequences).map(|file| file.name.as_str()).collect();
    let windows = Windows { all: options.slices.window, by_name: options.windows.clone() };
    windows.check(&names)?;
    if !names.is_empty() && !options.slices.context.is_none() {
        let reason = "the sequences need the three colours of an image, and so do neighbouring slices";
        return Err(Error::argument("context", reason, "leave the argument out, or use one sequence"));
    }
    let class = options.out.join(&options.modality);
    let before = Prepared::read(&class)?.map(|prepared| prepared.intensity);
    let known = before.as_ref().map_or(&[][..], |intensity| &intensity.sequences);
    let is_same = known.iter().map(|sequence| sequence.name.as_str()).eq(names.iter().copied());
    if !is_same && !table.rows.is_empty() && (has_rows || before.is_some()) {
        let was = if known.is_empty() { "without sequences".to_owned() } else { format!("from {}", list(known)) };
        let reason = format!("the class was prepared {was}");
        let hint = match known {
            [] => "give one image for each line, in a column `image`, or another modality name".to_owned(),
            _ => format!("give a table with {}, or another modality name", columns(known)),
        };
        return Err(Error::argument("modality", reason, hint));
    }
    names.into_iter().map(|name| settled_one(name, &windows, before.as_ref())).collect()
}

/// The columns of sequences in a table, for messages.
fn columns(sequences: &[Sequence]) -> String {
    let columns: Vec<String> = sequences.iter().map(|sequence| format!("`image.{}`", sequence.name)).collect();
    format!("the columns {} in this order", columns.join(", "))
}

fn settled_one(name: &str, windows: &Windows, before: Option<&Intensity>) -> Result<Sequence> {
    let known = before.and_then(|intensity| intensity.sequences.iter().find(|sequence| sequence.name == name));
    let chosen = windows.of(name);
    if let Some(known) = known.filter(|known| chosen.is_some_and(|chosen| !chosen.is_same(known.window))) {
        let reason = format!("the class was prepared with the window `{}` for `{name}`", known.window);
        return Err(Error::argument("window", reason, "leave the argument out, or give another modality name"));
    }
    let window = known.map(|known| known.window).or(chosen).unwrap_or_default();
    Ok(Sequence { name: name.to_owned(), window })
}

/// Says which sequences are missing for how many pairs.
pub(super) fn missing(rows: &[Pair]) -> Vec<String> {
    let names = rows.first().into_iter().flat_map(|pair| &pair.sequences).map(|file| file.name.as_str());
    let is_missing =
        |pair: &&Pair, name: &str| pair.sequences.iter().any(|file| file.name == name && file.path.is_none());
    let note = |name: &str| {
        let count = rows.iter().filter(|pair| is_missing(pair, name)).count();
        (count > 0).then(|| format!("{name} is missing for {count} of {} images; it is 0 there", rows.len()))
    };
    names.filter_map(note).collect()
}

#[cfg(test)]
#[path = "sequences_tests.rs"]
mod tests;
