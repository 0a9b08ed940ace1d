//! The six modalities of phantoms: how the background and the lesions are drawn.

use rand_chacha::ChaCha8Rng;

use super::canvas::{Draw, Oval, Plane};
use super::lesion::{Lesion, LesionArea};
use super::{colour, grey};

/// Modality of an image. Images alternate between the modalities in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Modality {
    AbdomenCt,
    BrainMri,
    LungXray,
    BreastUltrasound,
    PolypEndoscopy,
    SkinDermoscopy,
}

impl Modality {
    pub(super) const ALL: [Self; 6] = [
        Self::AbdomenCt,
        Self::BrainMri,
        Self::LungXray,
        Self::BreastUltrasound,
        Self::PolypEndoscopy,
        Self::SkinDermoscopy,
    ];

    /// Folder in the data root, and stem of the annotation file.
    pub(super) fn folder(self) -> &'static str {
        match self {
            Self::AbdomenCt => "abdomen_CT",
            Self::BrainMri => "brain_MRI",
            Self::LungXray => "lung_Xray",
            Self::BreastUltrasound => "breast_ultrasound",
            Self::PolypEndoscopy => "polyp_endoscopy",
            Self::SkinDermoscopy => "skin_dermoscopy",
        }
    }

    /// Colour photographs are JPEG files, as in real collections; the others are 8-bit grey PNG files.
    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::PolypEndoscopy | Self::SkinDermoscopy => "jpg",
            _ => "png",
        }
    }

    /// Whether both bright and dark lesions are visible.
    pub(super) fn has_two_looks(self) -> bool {
        !matches!(self, Self::LungXray | Self::PolypEndoscopy)
    }

    /// Whether lesions are usually bright.
    pub(super) fn usual_is_bright(self) -> bool {
        matches!(self, Self::AbdomenCt | Self::BrainMri)
    }

    /// The area where lesions may be placed.
    pub(super) fn allowed_area(self, size_px: u32) -> LesionArea {
        let inside = match self {
            Self::AbdomenCt => grey::inside_abdomen(),
            Self::BrainMri => Oval::new(0.5, 0.5, 0.45, 0.465).power(2.2),
            Self::PolypEndoscopy => Oval::new(0.5, 0.5, 0.49, 0.49).power(3.0),
            Self::LungXray | Self::BreastUltrasound | Self::SkinDermoscopy => Oval::new(0.5, 0.5, 0.5, 0.5).power(30.0),
        };
        LesionArea { inside, size_px }
    }

    /// Draws the image with its lesions: one channel, or red, green and blue.
    pub(super) fn draw(self, lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Plane> {
        match self {
            Self::AbdomenCt => vec![grey::abdomen_ct(lesions, size, rng)],
            Self::BrainMri => vec![grey::brain_mri(lesions, size, rng)],
            Self::LungXray => vec![grey::lung_xray(lesions, size, rng)],
            Self::BreastUltrasound => vec![grey::breast_ultrasound(lesions, size, rng)],
            Self::PolypEndoscopy => colour::polyp_endoscopy(lesions, size, rng),
            Self::SkinDermoscopy => colour::skin_dermoscopy(lesions, size, rng),
        }
    }
}

/// A random number in the range, for variation between patients.
pub(super) fn vary(from: f32, to: f32, rng: &mut impl Draw) -> f32 {
    rng.vary(from, to)
}
