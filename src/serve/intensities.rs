//! Intensity windows and axes of the training images by class, and those that a question about a volume needs.

use super::failure::{HttpFailure, HttpResult};
use super::picture::ServedImage;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::prepared::Intensity;
use crate::data::volume::{Axis, Neighbours, Sequence, Window};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Windows and axes of the classes that were prepared from volumes.
#[derive(Debug, Default)]
pub(super) struct Intensities {
    classes: BTreeMap<String, Intensity>,
    questions: Option<Arc<KnownQuestions>>,
}

/// The window of a class.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct WindowChoice<'a> {
    class: &'a str,
    window: Window,
}

impl Intensities {
    pub(super) fn new(classes: BTreeMap<String, Intensity>, questions: Option<Arc<KnownQuestions>>) -> Self {
        Self { classes, questions }
    }

    /// Slices that the training images show beside their own.
    pub(super) fn context(&self) -> Neighbours {
        self.classes.values().next().map_or(Neighbours::None, |intensity| intensity.context)
    }

    /// The sequences that are the colours of the training images; empty for images of one file.
    pub(super) fn sequences(&self) -> &[Sequence] {
        self.classes.values().next().map_or(&[], |intensity| &intensity.sequences)
    }

    /// The classes to which the training has put this question; all classes for another question.
    fn about(&self, question: &str) -> Vec<(&str, &Intensity)> {
        let asked = self.questions.as_ref().map(|known| known.classes_of_question(question)).unwrap_or_default();
        let all = || self.classes.iter().map(|(class, intensity)| (class.as_str(), intensity));
        let own: Vec<_> = all().filter(|(class, _)| asked.contains(class)).collect();
        if own.is_empty() { all().collect() } else { own }
    }

    /// The windows that a volume can be shown with, if the classes have different ones.
    pub(super) fn choices(&self, picture: &ServedImage) -> Vec<WindowChoice<'_>> {
        let choices = self.classes.iter().map(|(class, intensity)| WindowChoice { class, window: intensity.window });
        let differ = common(self.classes.values().map(|intensity| intensity.window), Window::is_same).is_err();
        if differ && picture.window().is_some() { choices.collect() } else { Vec::new() }
    }

    /// The window for a question about a picture: the client's choice, else that of the class. `None` is the window that the
    /// picture has.
    pub(super) fn window(
        &self,
        picture: &ServedImage,
        question: &str,
        chosen: Option<Window>,
    ) -> HttpResult<Option<Window>> {
        if chosen.is_some() || picture.window().is_none() {
            return Ok(chosen);
        }
        let about = self.about(question);
        let found = common(about.iter().map(|(_, intensity)| intensity.window), Window::is_same);
        let window = found.map_err(|()| {
            let all: Vec<String> = about.iter().map(|(class, own)| format!("`{}` for `{class}`", own.window)).collect();
            undecided(&format!("windows: {}", all.join(", ")), "`window`, or choose it in the menu Window of the page")
        })?;
        let (volume, _) = picture.volume()?;
        Ok(window.map(|window| window.chosen_for(volume)).filter(|window| Some(*window) != picture.window()))
    }

    /// The axis for a question about all slices: the client's choice, else that of the class. `None` is that of the picture.
    pub(super) fn axis(&self, picture: &ServedImage, question: &str, chosen: Option<Axis>) -> HttpResult<Option<Axis>> {
        if chosen.is_some() || picture.slices() == 1 {
            return Ok(chosen);
        }
        let about = self.about(question);
        common(about.iter().map(|(_, intensity)| intensity.axis), |a, b| a == b).map_err(|()| {
            let all: Vec<String> = about.iter().map(|(class, own)| format!("`{}` for `{class}`", own.axis)).collect();
            undecided(&format!("directions of slices: {}", all.join(", ")), "`axis` in `volume`")
        })
    }

    /// How a volume was shown to the model, if the images of the training were not shown so. `None` as window or axis is
    /// that of the picture.
    pub(super) fn difference(
        &self,
        picture: &ServedImage,
        question: &str,
        (window, axis): (Option<Window>, Option<Axis>),
    ) -> Option<String> {
        let (volume, shown) = picture.volume().ok()?;
        let (window, axis) = (window.or(picture.window())?, axis.unwrap_or(shown));
        let about = self.about(question);
        let has_axis = |own: &Intensity| picture.slices() == 1 || own.axis == axis;
        let is_trained = |own: &Intensity| own.window.chosen_for(volume).is_same(window) && has_axis(own);
        if about.is_empty() || about.iter().any(|(_, own)| is_trained(own)) {
            return None;
        }
        let words = |axis: Axis, window: Window| format!("{axis} slices with the window `{window}`");
        let all: Vec<String> =
            about.iter().map(|(class, own)| format!("{} for `{class}`", words(own.axis, own.window))).collect();
        Some(format!("{}, and the training had {}", words(axis, window), all.join(", ")))
    }
}

/// The value that all have; `Ok(None)` of nothing, `Err` if they differ.
fn common<T: Copy>(mut all: impl Iterator<Item = T>, is_same: impl Fn(T, T) -> bool) -> Result<Option<T>, ()> {
    let Some(first) = all.next() else { return Ok(None) };
    if all.all(|other| is_same(first, other)) { Ok(Some(first)) } else { Err(()) }
}

fn undecided(different: &str, what: &str) -> HttpFailure {
    let error = format!("the question may be about classes whose training images have different {different}");
    HttpFailure::unprocessable(error, format!("send {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use std::path::Path;

    /// A run about three organs and a class of photographs.
    fn intensities() -> Intensities {
        let of = |window: &str, axis: &str| {
            let (window, axis) = (window.parse().unwrap(), axis.parse().unwrap());
            Intensity { window, axis, context: Neighbours::None, sequences: Vec::new() }
        };
        let classes = [
            ("chest_CT", of("lung", "axial")),
            ("abdomen_CT", of("400/40", "axial")),
            ("liver_CT", of("soft-tissue", "axial")),
            ("spine_CT", of("bone", "sagittal")),
        ];
        let rows = [
            ("Where is the nodule in this image?", "chest_CT"),
            ("Where is the liver in this image?", "liver_CT"),
            ("Where is the spleen in this image?", "abdomen_CT"),
            ("Where is the organ?", "abdomen_CT"),
            ("Where is the organ?", "liver_CT"),
            ("Where is the lesion?", "abdomen_CT"),
            ("Where is the lesion?", "chest_CT"),
            ("Where is the vertebra?", "spine_CT"),
            ("Where is the polyp?", "colon"),
        ];
        let questions = rows.iter().map(|(question, _)| *question);
        let known = KnownQuestions::new(questions.clone(), questions).with_classes(rows);
        Intensities::new(classes.map(|(class, own)| (class.to_owned(), own)).into(), Some(Arc::new(known)))
    }

    fn volume() -> ServedImage {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/axial.zip");
        ServedImage::of_volume(crate::data::volume::open(&file).unwrap(), (None, None)).unwrap()
    }

    #[test]
    fn the_class_of_a_question_decides_the_window_or_the_client_is_asked() {
        let (known, picture) = (intensities(), volume());
        assert_eq!(picture.window(), "soft-tissue".parse().ok());
        for (question, expected) in [
            ("Where is the nodule in this image?", Some("lung")),
            ("where is the NODULE in this image", Some("lung")),
            ("Where is the vertebra?", Some("bone")),
            // the window that the volume has
            ("Where is the liver in this image?", None),
            ("Where is the organ?", Some("400/40")),
        ] {
            let window = known.window(&picture, question, None).unwrap();
            assert_eq!(window, expected.map(|window| window.parse().unwrap()), "{question}");
        }
        for question in ["Where is the lesion?", "Is it malignant?", "Where is the polyp?"] {
            let failure = known.window(&picture, question, None).unwrap_err();
            assert_eq!(failure.status, StatusCode::UNPROCESSABLE_ENTITY);
            assert!(failure.error.contains("`lung` for `chest_CT`"), "{}", failure.error);
            assert!(failure.hint.starts_with("send `window`"), "{}", failure.hint);
            let chosen = "brain".parse().ok();
            assert_eq!(known.window(&picture, question, chosen).unwrap(), chosen);
        }
        assert_eq!(known.choices(&picture).len(), 4);
        let image = ServedImage::new(image::DynamicImage::new_luma8(2, 2), None);
        assert_eq!(
            (known.window(&image, "Where is the lesion?", None).unwrap(), known.choices(&image)),
            (None, vec![])
        );
    }

    #[test]
    fn the_class_of_a_question_decides_the_axis() {
        let (known, picture) = (intensities(), volume());
        let axis = |question: &str| known.axis(&picture, question, None).map_err(|failure| failure.error);
        assert_eq!(axis("Where is the vertebra?"), Ok(Some(Axis::Sagittal)));
        assert_eq!(axis("Where is the lesion?"), Ok(Some(Axis::Axial)));
        let error = axis("Is it malignant?").unwrap_err();
        assert!(error.contains("`sagittal` for `spine_CT`"), "{error}");
        assert_eq!(known.axis(&picture, "Is it malignant?", Some(Axis::Coronal)).unwrap(), Some(Axis::Coronal));
    }

    #[test]
    fn another_window_than_that_of_the_class_is_named() {
        let (known, picture) = (intensities(), volume());
        let ask = |text: &str, window: Option<&str>| {
            known.difference(&picture, text, (window.map(|window| window.parse().unwrap()), None))
        };
        assert_eq!(ask("Where is the nodule in this image?", Some("lung")), None);
        assert_eq!(ask("Where is the organ?", None), None, "400/40 is soft-tissue");
        assert_eq!(
            ask("Where is the nodule in this image?", None).unwrap(),
            "axial slices with the window `soft-tissue`, and the training had axial slices with the window `lung` for \
             `chest_CT`"
        );
        // shown along another axis
        assert!(ask("Where is the vertebra?", Some("bone")).unwrap().contains("sagittal slices"));
        let none = Intensities::default();
        assert_eq!(none.difference(&picture, "Where?", (None, None)), None);
        assert_eq!(none.window(&picture, "Where?", None).unwrap(), None);
    }
}
