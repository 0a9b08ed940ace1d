//! Image encoders of the segmenter.
//!
//! A family is a file with its sizes ([`EncoderSizes`]) and its network ([`EncoderNetwork`]), and a line below. Weights that can be
//! read, and others that are recognised, are rows of [`known`].

pub mod family;
pub mod known;

pub use family::{EncoderNetwork, EncoderPass, EncoderSizes, ImageEmbedding, TrainedWeights};

use super::families::families;
use super::tiny_vit::{self, TinyVit};
use crate::tensor::{Device, Kind, Tensor};

families! {
    /// Sizes of an image encoder.
    sizes Config: EncoderSizes;
    /// An image encoder.
    network ImageEncoder: EncoderNetwork;
    unnamed TinyVit(tiny_vit::Config, TinyVit);
    #[cfg(test)] ToyEncoder(super::toy_encoder::Config, super::toy_encoder::ToyEncoder) = "toy_encoder";
}

/// Channel means and standard deviations as tensors `[1, 3, 1, 1]`, fp32.
pub(super) fn statistics(sizes: &Config, device: Device) -> [Tensor; 2] {
    sizes.pixel_statistics().map(|values| Tensor::from_slice(&values).view([1, 3, 1, 1]).to_device(device))
}

/// Bytes as the encoder reads them.
///
/// # Shapes
/// `pixels [b, 3, h, w]` u8 to the same, fp32.
pub(super) fn normalised(pixels: &Tensor, [mean, std]: &[Tensor; 2]) -> Tensor {
    let pixels = pixels.to_device(mean.device()).to_kind(Kind::Float) / 255.0;
    (pixels - mean) / std
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn black_and_white_have_the_values_of_torchvision_after_normalisation() {
        // torchvision 0.26: Normalize(mean, std) of 0.0 and of 1.0, by channel
        let expected = [[-2.117_904, 2.248_908], [-2.035_714, 2.428_571], [-1.804_444, 2.64]];
        let statistics = statistics(&Config::TinyVit(tiny_vit::Config::vit_t()), Device::Cpu);
        let pixels = Tensor::from_slice(&[0_u8, 255]).view([1, 1, 1, 2]).expand([1, 3, 1, 2], false);
        let normalised = normalised(&pixels, &statistics);
        for (channel, expected) in (0_i64..).zip(expected) {
            for (column, expected) in (0_i64..).zip(expected) {
                let value = normalised.double_value(&[0, channel, 0, column]);
                assert!((value - expected).abs() < 1e-5, "{value}");
            }
        }
    }

    #[test]
    fn sizes_without_a_family_are_those_of_tiny_vit() {
        let sizes = Config::TinyVit(tiny_vit::Config::vit_t());
        let json = serde_json::to_value(&sizes).unwrap();
        assert_eq!(json, serde_json::to_value(tiny_vit::Config::vit_t()).unwrap());
        assert_eq!(serde_json::from_value::<Config>(json.clone()).unwrap(), sizes);
        let error = |key: &str, value: &str| {
            let mut json = json.clone();
            json[key] = value.into();
            serde_json::from_value::<Config>(json).unwrap_err().to_string()
        };
        assert_eq!(error("family", "hiera"), "the family `hiera` is not known");
        assert!(error("depth", "2").starts_with("unknown field `depth`, expected one of `embed_dims`"));
    }
}
