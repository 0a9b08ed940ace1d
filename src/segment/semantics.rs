//! The two named semantics: the published arithmetic, and the same with its mistakes mended.

use crate::data::image::{MaskMode, PadOffset};

/// Which arithmetic a run uses; saved with every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Semantics {
    /// As published: every state, the answer's and the padding's included, reaches the mask decoder; the boundary
    /// weights of the BCE cancel; template and question are in the text loss; no end token; soft masks; batch statistics.
    Reference,
    /// The decoder sees the states before the answer, padding is masked, the BCE is weighted per pixel, the text loss
    /// covers the answer and `</s>`, masks are binary, batch normalisation keeps its statistics.
    #[default]
    Corrected,
}

impl Semantics {
    /// Whether the decoder sees only states before the answer, and no padding.
    pub fn hides_answer(self) -> bool {
        self == Self::Corrected
    }

    /// Whether the BCE is weighted per pixel.
    pub fn weighs_pixels(self) -> bool {
        self == Self::Corrected
    }

    /// Whether the text loss covers the answer alone (and its end token).
    pub fn labels_answer_only(self) -> bool {
        self == Self::Corrected
    }

    /// Whether ids 0 inside a text are dropped, as the original's padding rule does.
    pub fn drops_zero_ids(self) -> bool {
        self == Self::Reference
    }

    /// Whether attention probabilities of the decoder's self-attention are dropped out.
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

    /// How masks become targets.
    pub fn mask_mode(self) -> MaskMode {
        match self {
            Self::Reference => MaskMode::Soft,
            Self::Corrected => MaskMode::Binary,
        }
    }

    /// Where the picture lies in its padded square.
    pub fn pad_offset(self) -> PadOffset {
        PadOffset::Centre
    }
}
