//! Uploads of a run whose images have several sequences: a form with a field `image.NAME` for each, which is a file, or the
//! text `none` for a sequence that is missing.

use super::app::App;
use super::failure::{HttpFailure, HttpResult};
use super::picture::ServedImage;
use super::upload::{self, FormFiles};
use super::volumes;
use crate::Error;
use crate::data::decode;
use crate::data::volume::sequences::{self, MISSING};
use crate::data::volume::{Axis, Sequence};
use axum::extract::Request;
use std::path::{Path, PathBuf};

/// What comes before the name of a sequence in the name of its field.
const FIELD: &str = "image.";

/// Receives the files of an image, and reads them.
pub(super) async fn upload(
    app: &App,
    request: Request,
    sequences: Vec<Sequence>,
    spacing_mm: Option<[f64; 2]>,
) -> HttpResult<ServedImage> {
    let boundary = upload::boundary_of(&request).map_err(|error| undecided(error, &sequences))?;
    let Some(boundary) = boundary else {
        return Err(undecided("one file does not say which sequence it is".into(), &sequences));
    };
    let form = upload::receive_files(app, request, &boundary).await?;
    let files = files_of(&form, &sequences)?;
    let (max_pixels, (_, axis)) = (app.options.max_pixels, app.options.shown);
    let first = files.iter().flatten().next().copied();
    let is_flat = first.is_some_and(|number| decode::is_image(form.file(number)));
    let read = move || read(&form, &files, &sequences, (is_flat, max_pixels, axis, spacing_mm));
    if is_flat {
        return app.work(read).await;
    }
    // the semaphore is never closed
    let _one = app.volumes.acquire().await.ok();
    app.work(read).await
}

/// The number of the file of each sequence; `None` for one that is missing.
fn files_of(form: &FormFiles, sequences: &[Sequence]) -> HttpResult<Vec<Option<usize>>> {
    let mut found: Vec<Option<Option<usize>>> = vec![None; sequences.len()];
    let files = form.files.iter().enumerate().map(|(number, (name, _))| (name, Some(number)));
    let texts = form.texts.iter().filter(|(name, _)| name.starts_with(FIELD));
    for (_, text) in texts.clone() {
        if !text.trim().eq_ignore_ascii_case(MISSING) {
            let error = "a field of a sequence is a text and no file".to_owned();
            return Err(undecided(error, sequences));
        }
    }
    for (field, file) in files.chain(texts.map(|(name, _)| (name, None))) {
        let is_it = |sequence: &Sequence| field.strip_prefix(FIELD).is_some_and(|name| name == sequence.name);
        let Some(number) = sequences.iter().position(is_it) else {
            return Err(undecided(format!("the field `{field}` is no sequence of this run"), sequences));
        };
        if found[number].replace(file).is_some() {
            return Err(undecided(format!("the form has the field `{field}` several times"), sequences));
        }
    }
    if let Some(number) = found.iter().position(Option::is_none) {
        return Err(undecided(format!("the form has no field `{FIELD}{}`", sequences[number].name), sequences));
    }
    if found.iter().flatten().all(Option::is_none) {
        return Err(undecided("all sequences are missing".into(), sequences));
    }
    Ok(found.into_iter().map(Option::flatten).collect())
}

fn undecided(error: String, sequences: &[Sequence]) -> HttpFailure {
    let fields: Vec<String> = sequences.iter().map(|sequence| format!("-F '{FIELD}{}=@FILE'", sequence.name)).collect();
    let hint = format!(
        "the images of this run have the sequences {}: send a form with a file for each, `curl {} URL`; a missing one is the \
         text `{MISSING}`",
        sequences::list(sequences),
        fields.join(" ")
    );
    HttpFailure::unprocessable(error, hint)
}

/// Reads flat images or volumes, and joins them.
fn read(
    form: &FormFiles,
    files: &[Option<usize>],
    sequences: &[Sequence],
    (is_flat, max_pixels, axis, spacing_mm): (bool, u64, Option<Axis>, Option<[f64; 2]>),
) -> HttpResult<ServedImage> {
    let names: Vec<PathBuf> = sequences.iter().map(|sequence| format!("{FIELD}{}", sequence.name).into()).collect();
    let missing: Vec<&str> =
        sequences.iter().zip(files).filter(|(_, file)| file.is_none()).map(|(own, _)| own.name.as_str()).collect();
    let mut note = Vec::new();
    if !missing.is_empty() {
        note.push(format!("missing: {}; the colour is 0 there, and masks may be worse", missing.join(", ")));
    }
    let named = |name: &Path, error: Error| {
        let failure = upload::refused(error);
        HttpFailure::new(failure.status, format!("{}: {}", name.display(), failure.error), failure.hint)
    };
    if is_flat {
        let mut parts = Vec::new();
        for (name, file) in names.iter().zip(files) {
            let Some(number) = file else {
                parts.push(None);
                continue;
            };
            let pixels = decode::image_of(form.file(*number), name, max_pixels).map_err(upload::refused)?;
            parts.push(Some((name.as_path(), pixels)));
        }
        let pixels = sequences::join_images(&parts)?.into();
        return Ok(ServedImage::new(pixels, spacing_mm).with_sequences(sequences.to_vec(), note));
    }
    let mut parts = Vec::new();
    for (name, file) in names.iter().zip(files) {
        let Some(number) = file else {
            parts.push(None);
            continue;
        };
        let volume = volumes::read_bytes(form.file(*number), max_pixels).map_err(|error| named(name, error))?;
        parts.push(Some((name.as_path(), volume)));
    }
    let volume = sequences::join(parts, sequences)?.volume;
    Ok(ServedImage::of_volume(volume, (None, axis))?.with_sequences(sequences.to_vec(), note))
}
