//! What a client sends to ask a question: JSON, or a form with a mask that the words follow.

use super::app::App;
use super::failure::{HttpFailure, HttpResult};
use super::mask_file;
use super::upload::{self, Upload};
use super::volume_question::VolumeRequest;
use crate::data::volume::Window;
use axum::extract::Request;
use axum::http::StatusCode;
use image::GrayImage;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Name of the file in a form.
const MASK: &str = "mask";

/// A question of a client.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    pub(super) question: String,
    pub(super) slice: Option<usize>,
    pub(super) window: Option<Window>,
    pub(super) max_new_tokens: Option<usize>,
    /// Ask about all slices of a volume.
    pub(super) volume: Option<VolumeRequest>,
    /// Keep the answer: for its mask, corrections and pairs.
    #[serde(default = "yes")]
    pub(super) keep: bool,
}

fn yes() -> bool {
    true
}

/// Receives a question, with the file of a mask that its words are to follow.
pub(super) async fn receive(app: &App, request: Request) -> HttpResult<(Asked, Option<Upload>)> {
    let Some(boundary) = upload::boundary_of(&request).map_err(upload::of_question)? else {
        return Ok((upload::json(request).await?, None));
    };
    let (fields, file) = upload::receive_form(app, request, &boundary).await?;
    let asked = of_form(fields)?;
    match file {
        Some((name, _)) if name != MASK => {
            let error = format!("the form has the file `{name}`, and a question has no file but `{MASK}`");
            Err(HttpFailure::unprocessable(error, "send the mask in the field `mask`: `curl -F mask=@mask.png`"))
        }
        file => Ok((asked, file.map(|(_, file)| file))),
    }
}

/// The question of the text fields of a form. All but the texts are written as in JSON.
fn of_form(fields: Vec<(String, String)>) -> HttpResult<Asked> {
    let mut values = Map::new();
    for (name, text) in fields {
        if name == MASK {
            let error = "the field `mask` is a text and no file";
            return Err(HttpFailure::unprocessable(error, "send a file: `curl -F mask=@mask.png`"));
        }
        let is_text = ["question", "window"].contains(&name.as_str());
        let value = if is_text { None } else { serde_json::from_str(&text).ok() };
        if values.insert(name.clone(), value.unwrap_or(Value::String(text))).is_some() {
            let error = format!("the form has the field `{name}` several times");
            return Err(HttpFailure::unprocessable(error, "send it once"));
        }
    }
    serde_json::from_value(Value::Object(values)).map_err(|error| {
        let error = format!("the fields of the form cannot be used: {error}");
        HttpFailure::of_values(StatusCode::UNPROCESSABLE_ENTITY, &error)
    })
}

/// The mask of a file that words are to follow.
pub(super) async fn mask_of(app: &App, file: Upload, size: (u32, u32)) -> HttpResult<Arc<GrayImage>> {
    check_reader(app.shared.reads_masks)?;
    let max_pixels = app.options.max_pixels;
    app.work(move || mask_file::read_given(&file, size, max_pixels).map(Arc::new)).await
}

fn check_reader(reads_masks: bool) -> HttpResult<()> {
    if reads_masks {
        return Ok(());
    }
    let hint = "leave `mask` out, or serve a run that was trained with `model.answer_reads_mask=true`";
    Err(HttpFailure::unprocessable("the field `mask`: the words of this run do not follow a mask", hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &[(&str, &str)]) -> HttpResult<Asked> {
        of_form(fields.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect())
    }

    #[test]
    fn a_form_has_the_fields_of_the_json() {
        let asked = read(&[("question", "12"), ("slice", "3"), ("window", "400/40"), ("keep", "false")]).unwrap();
        assert_eq!((asked.question.as_str(), asked.slice, asked.keep), ("12", Some(3), false));
        assert!(asked.window.is_some() && asked.volume.is_none());
        let asked = read(&[("volume", "{\"every\": 2}"), ("question", "Where?")]).unwrap();
        assert!(asked.volume.is_some() && asked.keep);
        for (fields, expected) in [
            (&[("slice", "3")][..], "missing field `question`"),
            (&[("question", "a"), ("question", "b")], "`question` several times"),
            (&[("question", "a"), ("slice", "first")], "string \"first\", expected a whole number from 0"),
            (&[("question", "a"), ("temperature", "1")], "unknown field `temperature`"),
            (&[("question", "a"), ("mask", "iVBORw0KGgo=")], "the field `mask` is a text"),
        ] {
            let failure = read(fields).unwrap_err();
            assert!(failure.error.contains(expected) && failure.status.is_client_error(), "{failure:?}");
        }
    }

    #[test]
    fn a_run_whose_words_follow_no_mask_refuses_one() {
        check_reader(true).unwrap();
        let failure = check_reader(false).unwrap_err();
        assert!(failure.error.starts_with("the field `mask`: ") && failure.hint.contains("answer_reads_mask"));
    }
}
