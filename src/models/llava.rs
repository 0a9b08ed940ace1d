//! LLaVA-Med's glue: the projector and the splice of image tokens into the text (Liu et al. 2023; `mlp2x_gelu`).
//!
//! Legend: b batch, l text ids, p image tokens, t spliced tokens, d width.

use crate::nn::Linear;
use crate::tensor::store::Scope;
use crate::tensor::{Device, Kind, Tensor, dims};

/// The id that stands for the image in a text.
pub const IMAGE_TOKEN: i64 = -200;

/// Two linear layers with GELU between, from the tower's width to the language model's.
#[derive(Debug)]
pub struct Projector {
    first: Linear,
    second: Linear,
}

impl Projector {
    /// Keys `0` and `2` below `scope` (`model.mm_projector`).
    pub fn new(scope: &Scope, in_dim: i64, out_dim: i64) -> Self {
        Self {
            first: Linear::new(&scope.sub(0), in_dim, out_dim),
            second: Linear::new(&scope.sub(2), out_dim, out_dim),
        }
    }

    /// # Shapes
    /// `[b, p, in]` to `[b, p, d]`.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(xs, false).gelu("none"), false)
    }
}

/// Where every id of a batch lands once the image is spliced in; made on the host from the ids alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Splice {
    rows: Vec<Vec<i64>>,
    image_at: Vec<usize>,
    num_image_tokens: i64,
    /// Tokens of the longest row, t.
    pub len: i64,
}

impl Splice {
    /// `rows` hold the real ids of each sample (padding already removed), each with exactly one [`IMAGE_TOKEN`].
    ///
    /// # Panics
    /// When a row has no image token or more than one.
    pub fn new(rows: Vec<Vec<i64>>, num_image_tokens: i64) -> Self {
        let image_at = rows
            .iter()
            .map(|row| {
                let mut places = row.iter().enumerate().filter(|(_, id)| **id == IMAGE_TOKEN).map(|(i, _)| i);
                let first = places.next().expect("shape mismatch: a text without an image token");
                assert!(places.next().is_none(), "shape mismatch: a text with more than one image token");
                first
            })
            .collect();
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let len = to_i64(longest) - 1 + num_image_tokens;
        Self { rows, image_at, num_image_tokens, len }
    }

    /// Position in the spliced row of id `index` of `row` (of the first image token for the image id).
    pub fn position(&self, row: usize, index: usize) -> i64 {
        let index_i64 = to_i64(index);
        if index <= self.image_at[row] { index_i64 } else { index_i64 - 1 + self.num_image_tokens }
    }

    /// Real tokens of `row` once spliced.
    pub fn row_len(&self, row: usize) -> i64 {
        to_i64(self.rows[row].len()) - 1 + self.num_image_tokens
    }

    /// The ids of each row.
    pub fn rows(&self) -> &[Vec<i64>] {
        &self.rows
    }

    /// Puts image features in place of the image ids and pads with zeros on the right.
    ///
    /// # Shapes
    /// `embed` maps ids `[n]` to `[n, d]`; `image [b, p, d]`; result `[b, t, d]`.
    pub fn embed(&self, image: &Tensor, embed: impl Fn(&Tensor) -> Tensor) -> Tensor {
        let [b, p, d] = dims(image);
        assert_eq!(p, self.num_image_tokens, "shape mismatch: image tokens");
        let text: Vec<i64> = self.rows.iter().flatten().copied().filter(|id| *id != IMAGE_TOKEN).collect();
        let num_text = to_i64(text.len());
        let ids = Tensor::from_slice(&text).to_device(image.device());
        let zero = Tensor::zeros([1, d], (image.kind(), image.device()));
        let table = Tensor::cat(&[&embed(&ids).to_kind(image.kind()), &image.reshape([b * p, d]), &zero], 0);
        let mut index = Vec::new();
        let mut next_text = 0;
        for (row, ids) in self.rows.iter().enumerate() {
            let start = index.len();
            for id in ids {
                if *id == IMAGE_TOKEN {
                    let first = num_text + to_i64(row) * p;
                    index.extend(first..first + p);
                } else {
                    index.push(next_text);
                    next_text += 1;
                }
            }
            index.resize(start + usize::try_from(self.len).expect("not negative"), num_text + b * p);
        }
        table.index_select(0, &Tensor::from_slice(&index).to_device(image.device())).view([b, self.len, d])
    }

    /// `bool [b, t]`, true where `position < end(row)`.
    pub fn keep_before(&self, device: Device, end: impl Fn(usize) -> i64) -> Tensor {
        let ends: Vec<i64> = (0..self.rows.len()).map(end).collect();
        let positions = Tensor::arange(self.len, (Kind::Int64, device));
        positions.unsqueeze(0).lt_tensor(&Tensor::from_slice(&ends).to_device(device).unsqueeze(1))
    }
}

fn to_i64(n: usize) -> i64 {
    i64::try_from(n).expect("lengths fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_tokens_replace_their_id_and_rows_are_zero_padded() {
        let splice = Splice::new(vec![vec![1, IMAGE_TOKEN, 5, 6], vec![1, IMAGE_TOKEN, 7]], 2);
        assert_eq!(splice.len, 5);
        assert_eq!((splice.position(0, 0), splice.position(0, 1), splice.position(0, 2)), (0, 1, 3));
        let image = Tensor::from_slice(&[10.0_f32, 11.0, 20.0, 21.0]).view([2, 2, 1]);
        let xs = splice.embed(&image, |ids| ids.to_kind(Kind::Float).unsqueeze(1));
        let rows: Vec<f32> = Vec::try_from(xs.flatten(0, -1)).unwrap();
        assert_eq!(rows, [1.0, 10.0, 11.0, 5.0, 6.0, 1.0, 20.0, 21.0, 7.0, 0.0]);
        let keep = splice.keep_before(Device::Cpu, |row| splice.row_len(row));
        assert_eq!(keep.sum_dim_intlist([1].as_slice(), false, Kind::Int64), Tensor::from_slice(&[5_i64, 4]));
    }
}
