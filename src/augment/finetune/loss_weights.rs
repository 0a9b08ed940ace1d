//! Weights of the losses of a ControlNet.

/// Weights of the losses; 0 = off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Of the region contrast.
    pub contrast: f64,
    /// Difference of the predictions inside a lesion that is large enough.
    pub margin: f64,
    /// Of the Siamese losses.
    pub siamese: f64,
}

impl Weights {
    /// Whether there is any loss besides the denoising loss.
    pub fn any(&self) -> bool {
        self.contrast > 0.0 || self.siamese > 0.0
    }
}
