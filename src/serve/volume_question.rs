//! A question about all slices of a volume: the options of a client, checked.

use super::failure::{HttpFailure, HttpResult};
use super::picture::{ServedImage, SliceView};
use crate::data::volume::{Axis, Cleanup, Window};
use crate::front::volume::{SliceRange, VolumeSettings};
use crate::{Error, Result};
use serde::Deserialize;

/// The options of a client. The defaults are those of `prsmed predict`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct VolumeRequest {
    /// Direction of the slices; `None`: that of the shown slices.
    pub(super) axis: Option<Axis>,
    slices: SliceRange,
    /// Every N-th slice.
    every: usize,
    cleanup: Cleanup,
}

impl Default for VolumeRequest {
    fn default() -> Self {
        Self { axis: None, slices: SliceRange::default(), every: 1, cleanup: Cleanup::default() }
    }
}

impl VolumeRequest {
    /// The settings of a question about `picture`. `window` is the user's choice, if there is one.
    pub(super) fn settings(
        self,
        picture: &ServedImage,
        question: String,
        window: Option<Window>,
    ) -> HttpResult<VolumeSettings> {
        let (volume, axis) = picture.volume()?;
        self.check()?;
        picture.check(SliceView { slice: 0, window })?;
        let settings = VolumeSettings {
            question,
            axis: self.axis.unwrap_or(axis),
            slices: self.slices,
            every: self.every,
            // the settings say which window `auto` is
            window: window.or(picture.window()).unwrap_or_default().chosen_for(volume),
            cleanup: self.cleanup,
            always_paint: false,
        };
        settings.chosen(&volume.plane(settings.axis)).map_err(|error| match error {
            Error::Config { reason, hint, .. } | Error::Argument { reason, hint, .. } => {
                Error::Config { key: "volume.slices".into(), reason, hint }
            }
            other => other,
        })?;
        Ok(settings)
    }

    fn check(&self) -> Result<()> {
        if self.every == 0 {
            return Err(Error::config("volume.every", "must be at least 1", "use 1 for every slice"));
        }
        if self.cleanup.min_volume_ml < 0.0 {
            let hint = "use a number of millilitres from 0";
            return Err(Error::config("volume.cleanup.min_volume_ml", "must not be negative", hint));
        }
        Ok(())
    }
}

/// Refuses a field that a question about all slices has no use for.
pub(super) fn without(field: &str, is_given: bool) -> HttpResult<()> {
    if !is_given {
        return Ok(());
    }
    let error = format!("a question about all slices has no `{field}`");
    let hint = format!("leave `{field}` out, or leave `volume` out to ask about one slice");
    Err(HttpFailure::unprocessable(error, hint))
}
