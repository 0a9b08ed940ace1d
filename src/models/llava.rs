//! LLaVA's projector, and insertion of image tokens into the text (Liu et al. 2023; `mlp2x_gelu`).
//!
//! Legend: b images, p image tokens, s sequences, t tokens of a sequence, d width.

use crate::nn::Linear;
use crate::tensor::store::VarPath;
use crate::tensor::{Tensor, dims};

/// Two linear layers with a GELU between them, from the vision tower's width to the language model's.
#[derive(Debug)]
pub struct Projector {
    first: Linear,
    second: Linear,
}

impl Projector {
    /// `vs` is the path of `model.mm_projector`; the keys below it are `0` and `2`.
    pub fn new(vs: &VarPath, in_dim: i64, out_dim: i64) -> Self {
        Self { first: Linear::new(&vs.sub(0), in_dim, out_dim), second: Linear::new(&vs.sub(2), out_dim, out_dim) }
    }

    /// # Shapes
    /// `[b, p, in]` to `[b, p, d]`.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(xs, false).gelu("none"), false)
    }
}

/// Replaces the image ids of a text by the tokens of images. Indices that select no row are zero.
///
/// # Shapes
/// `text [n, d]` embedded ids, `image [b, p, d]`, `index [s, t]` i64: rows of `[text; image; 0]`; to `[s, t, d]` in the
/// dtype of `image`.
pub fn splice(text: &Tensor, image: &Tensor, index: &Tensor) -> Tensor {
    let ([_b, _p, d], [s, t]) = (dims(image), dims(index));
    let zero = Tensor::zeros([1, d], (image.kind(), image.device()));
    let table = Tensor::cat(&[&text.to_kind(image.kind()), &image.flatten(0, 1), &zero], 0);
    table.index_select(0, &index.flatten(0, 1)).view([s, t, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splice_selects_rows_of_text_image_and_zero() {
        let text = Tensor::from_slice(&[1.0_f32, 5.0, 6.0]).view([3, 1]);
        let image = Tensor::from_slice(&[10.0_f32, 11.0]).view([1, 2, 1]);
        let index = Tensor::from_slice(&[0_i64, 3, 4, 1, 2, 0, 3, 4, 5, 5]).view([2, 5]);
        let rows: Vec<f32> = Vec::try_from(splice(&text, &image, &index).flatten(0, -1)).unwrap();
        assert_eq!(rows, [1.0, 10.0, 11.0, 5.0, 6.0, 1.0, 10.0, 11.0, 0.0, 0.0]);
    }
}
