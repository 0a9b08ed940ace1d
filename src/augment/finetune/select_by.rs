//! What chooses the best checkpoint of a fine-tuning, and the mode of the pairs that candidates make.

use crate::augment::settings::Mode;

/// What chooses the best checkpoint of a fine-tuning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum), value(rename_all = "snake_case"))]
#[serde(rename_all = "snake_case")]
pub enum SelectBy {
    /// The validation loss, or the KID of samples.
    Metric,
    /// What a small U-Net gains from the pairs of each candidate.
    Segmenter,
}

impl SelectBy {
    /// The word of flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Metric => "metric",
            Self::Segmenter => "segmenter",
        }
    }
}

/// Mode of the pairs that candidates make. `img2img` is missing: the label of such a pair is correct for small changes
/// only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PairMode {
    /// `mask_to_image` for a ControlNet, else `keep_lesion`.
    Auto,
    /// See [`Mode::KeepLesion`].
    KeepLesion,
    /// See [`Mode::EditLesion`].
    EditLesion,
    /// See [`Mode::InsertLesion`].
    InsertLesion,
    /// See [`Mode::MaskToImage`].
    MaskToImage,
}

impl PairMode {
    /// The mode of generation for a fine-tuned ControlNet, or another generator.
    pub fn resolved(self, is_controlnet: bool) -> Mode {
        match self {
            Self::Auto if is_controlnet => Mode::MaskToImage,
            Self::Auto | Self::KeepLesion => Mode::KeepLesion,
            Self::EditLesion => Mode::EditLesion,
            Self::InsertLesion => Mode::InsertLesion,
            Self::MaskToImage => Mode::MaskToImage,
        }
    }
}
