//! An uploaded image, as slices with an intensity window. An image file has one slice and no window.

use crate::{Error, Result};
use image::DynamicImage;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// An intensity window, as the text `WIDTH/LEVEL`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Window {
    width: f32,
    level: f32,
}

impl TryFrom<String> for Window {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parts = text.split_once('/').and_then(|(width, level)| Some([width.parse().ok()?, level.parse().ok()?]));
        let [width, level] = parts.ok_or_else(|| format!("`{text}` is not a window; write WIDTH/LEVEL"))?;
        Ok(Self { width, level })
    }
}

impl From<Window> for String {
    fn from(window: Window) -> Self {
        format!("{}/{}", window.width, window.level)
    }
}

/// The part of a picture that is shown, and that a question is about.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct View {
    /// Index of the slice, from 0.
    pub(super) slice: usize,
    /// `None`: the window of the file.
    pub(super) window: Option<Window>,
}

/// An uploaded image.
#[derive(Debug)]
pub(super) struct Picture {
    pixels: DynamicImage,
    spacing_mm: Option<[f64; 2]>,
}

impl Picture {
    /// An image of one slice. `spacing_mm` is the size of a pixel, across and down.
    pub(super) fn new(pixels: DynamicImage, spacing_mm: Option<[f64; 2]>) -> Self {
        Self { pixels, spacing_mm }
    }

    /// Width and height of a slice in pixels.
    pub(super) fn size(&self) -> (u32, u32) {
        (self.pixels.width(), self.pixels.height())
    }

    /// Number of slices.
    #[expect(clippy::unused_self, reason = "a volume has several")]
    pub(super) fn slices(&self) -> usize {
        1
    }

    /// The window of the file; an image has none.
    #[expect(clippy::unused_self, reason = "a volume has one")]
    pub(super) fn window(&self) -> Option<Window> {
        None
    }

    /// Size of a pixel in mm, across and down.
    pub(super) fn spacing_mm(&self) -> Option<[f64; 2]> {
        self.spacing_mm
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.pixels.as_bytes().len()
    }

    /// Checks that a view exists.
    ///
    /// # Errors
    /// [`Error::Config`] for a slice that does not exist, or a window of an image that has none.
    pub(super) fn check(&self, view: View) -> Result<()> {
        if view.slice >= self.slices() {
            let reason = format!("there is no slice {}, the image has {}", view.slice, self.slices());
            return Err(Error::config("slice", reason, "slices count from 0"));
        }
        if view.window.is_some() {
            let reason = "the image has 8 bits and no intensity window";
            return Err(Error::config("window", reason, "leave `window` out"));
        }
        Ok(())
    }

    /// The pixels of a view, 8-bit grey or RGB.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(super) fn pixels(&self, view: View) -> Result<Cow<'_, DynamicImage>> {
        self.check(view)?;
        Ok(Cow::Borrowed(&self.pixels))
    }
}
