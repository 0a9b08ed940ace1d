//! The ways to make a pair, as they are named in flags, prompts and records.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is repainted, and where the mask comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The label is held, its surroundings are repainted; the mask is the source's.
    KeepLesion,
    /// The lesion of a picture is repainted in the form of another mask.
    EditLesion,
    /// A new lesion is painted into a picture; the mask is a donor's, moved.
    InsertLesion,
    /// All of the picture is made from a mask.
    MaskToImage,
    /// All of the picture is varied; the mask is the source's.
    Img2img,
}

impl Mode {
    /// All modes, the default first.
    pub const ALL: [Self; 5] =
        [Self::KeepLesion, Self::EditLesion, Self::InsertLesion, Self::MaskToImage, Self::Img2img];

    /// The word used in flags, file names and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::KeepLesion => "keep_lesion",
            Self::EditLesion => "edit_lesion",
            Self::InsertLesion => "insert_lesion",
            Self::MaskToImage => "mask_to_image",
            Self::Img2img => "img2img",
        }
    }

    /// Whether the pair's mask is that of the source picture, pixel for pixel.
    pub fn keeps_mask(self) -> bool {
        matches!(self, Self::KeepLesion | Self::Img2img)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What becomes of the held pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Paste {
    /// They are the original's, bit for bit.
    #[default]
    Exact,
    /// They are the autoencoder's, as all others: uniform texture, only the geometry is held.
    Vae,
}
