//! The two named semantics: the published arithmetic, and the same arithmetic with its mistakes corrected.

use crate::data::image::{MaskMode, PadOffset};

/// Semantics of a run, saved in its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Semantics {
    /// As published. The mask decoder reads every state, including answer and padding. The boundary weights of the BCE
    /// cancel. The text loss includes template and question. No end token, soft masks, batch statistics.
    Reference,
    /// The decoder reads only the states before the answer, without padding. The BCE is weighted per pixel. The text
    /// loss covers the answer and `</s>`. Masks are binary, and batch normalisation keeps its statistics.
    #[default]
    Corrected,
}

impl Semantics {
    /// True if the decoder reads only states before the answer, and no padding.
    pub fn hides_answer(self) -> bool {
        self == Self::Corrected
    }

    /// True if the BCE is weighted per pixel.
    pub fn weighs_pixels(self) -> bool {
        self == Self::Corrected
    }

    /// True if the text loss covers the answer only (and its end token).
    pub fn labels_answer_only(self) -> bool {
        self == Self::Corrected
    }

    /// True if ids 0 inside a text are dropped, as the original's padding rule does.
    pub fn drops_zero_ids(self) -> bool {
        self == Self::Reference
    }

    /// True if attention probabilities of the decoder's self-attention are dropped out.
    pub fn drops_attention(self) -> bool {
        self == Self::Reference
    }

    /// Initial value of the decoder's and class head's biases.
    pub fn initial_bias(self) -> f64 {
        match self {
            Self::Reference => 1.0,
            Self::Corrected => 0.0,
        }
    }

    /// Conversion of masks to targets.
    pub fn mask_mode(self) -> MaskMode {
        match self {
            Self::Reference => MaskMode::Soft,
            Self::Corrected => MaskMode::Binary,
        }
    }

    /// Alignment of the image in its padded square.
    pub fn pad_offset(self) -> PadOffset {
        PadOffset::Centre
    }
}
