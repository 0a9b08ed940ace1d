//! The six modalities of phantoms: how the background and the lesions are drawn.

use rand_chacha::ChaCha8Rng;

use super::canvas::{Canvas, Oval};
use super::colour::{polyp_endoscopy, skin_dermoscopy};
use super::grey::{IN_ABDOMEN, abdomen_ct, brain_mri, breast_ultrasound, lung_xray};
use super::lesion::Lesion;

/// Modality of an image.
pub(super) struct PhantomModality {
    /// Folder in the data root, and stem of the annotation file.
    pub(super) folder: &'static str,
    /// Whether both bright and dark lesions are visible.
    pub(super) two_looks: bool,
    /// Whether lesions are usually bright.
    pub(super) bright: bool,
    /// The area where lesions may be placed.
    pub(super) area: Oval,
    /// Draws the image with its lesions: one channel, or red, green and blue.
    pub(super) draw: fn(&[&Lesion], usize, &mut ChaCha8Rng) -> Vec<Canvas>,
}

const HEAD: Oval = Oval::new(0.5, 0.5, 0.45, 0.465).power(2.2);
const VIEW: Oval = Oval::new(0.5, 0.5, 0.49, 0.49).power(3.0);
const ALL: Oval = Oval::new(0.5, 0.5, 0.5, 0.5).power(30.0);

/// All modalities. Images alternate between them in this order.
pub(super) static MODALITIES: [PhantomModality; 6] = [
    PhantomModality { folder: "abdomen_CT", two_looks: true, bright: true, area: IN_ABDOMEN, draw: abdomen_ct },
    PhantomModality { folder: "brain_MRI", two_looks: true, bright: true, area: HEAD, draw: brain_mri },
    PhantomModality { folder: "lung_Xray", two_looks: false, bright: false, area: ALL, draw: lung_xray },
    PhantomModality { folder: "breast_ultrasound", two_looks: true, bright: false, area: ALL, draw: breast_ultrasound },
    PhantomModality { folder: "polyp_endoscopy", two_looks: false, bright: false, area: VIEW, draw: polyp_endoscopy },
    PhantomModality { folder: "skin_dermoscopy", two_looks: true, bright: false, area: ALL, draw: skin_dermoscopy },
];
