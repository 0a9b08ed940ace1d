//! Images inside a page: data URIs of bounded size.

use crate::Error;
use crate::data::decode;
use crate::data::sheet::{PREDICTION_COLOR, TRUTH_COLOR};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::imageops::{self, FilterType as Resize};
use image::{ExtendedColorType, GrayImage, ImageEncoder, ImageResult, RgbImage};
use std::path::Path;

/// JPEG quality, 1..=100.
const QUALITY: u8 = 82;
/// Longer side of a [`Picture`] in pixels.
const SIDE_PX: u32 = 384;
/// Opacity of the filled prediction.
const FILL_ALPHA: u8 = 80;

/// `data:image/jpeg;base64,..` of an image; empty if it cannot be encoded.
pub(super) fn photo(image: &RgbImage) -> String {
    let mut bytes = Vec::new();
    uri("jpeg", JpegEncoder::new_with_quality(&mut bytes, QUALITY).encode_image(image), &bytes)
}

/// Which mask a layer shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum MaskLayer {
    /// Filled, with an outline inside of its border.
    Prediction,
    /// An outline outside of its border.
    Truth,
}

/// `data:image/png;base64,..` of a transparent image of a mask, foreground from level 128 on.
pub(super) fn layer(mask: &GrayImage, layer: MaskLayer) -> String {
    let (width, height) = mask.dimensions();
    let thickness = i64::from(width.max(height) / 200 + 1);
    let is_set = |x: i64, y: i64| match (u32::try_from(x), u32::try_from(y)) {
        (Ok(x), Ok(y)) if x < width && y < height => mask.get_pixel(x, y)[0] >= 128,
        _ => false,
    };
    let mut pixels = Vec::with_capacity(width as usize * height as usize * 4);
    for y in 0..i64::from(height) {
        for x in 0..i64::from(width) {
            let own = is_set(x, y);
            let is_border = (-thickness..=thickness).any(|d| is_set(x + d, y) != own || is_set(x, y + d) != own);
            let (color, alpha) = match layer {
                MaskLayer::Prediction if own && is_border => (PREDICTION_COLOR, 255),
                MaskLayer::Prediction if own => (PREDICTION_COLOR, FILL_ALPHA),
                MaskLayer::Truth if !own && is_border => (TRUTH_COLOR, 255),
                _ => (image::Rgb([0; 3]), 0),
            };
            pixels.extend([color[0], color[1], color[2], alpha]);
        }
    }
    let mut bytes = Vec::new();
    let encoder = PngEncoder::new_with_quality(&mut bytes, CompressionType::Best, FilterType::Up);
    uri("png", encoder.write_image(&pixels, width, height, ExtendedColorType::Rgba8), &bytes)
}

fn uri(format: &str, encoded: ImageResult<()>, bytes: &[u8]) -> String {
    encoded.map_or_else(|_| String::new(), |()| format!("data:image/{format};base64,{}", BASE64_STANDARD.encode(bytes)))
}

/// An image and the outline of its label as data URIs; or why it cannot be shown.
pub(super) struct Picture {
    pub(super) shows: &'static str,
    pub(super) image: String,
    pub(super) outline: String,
    pub(super) problem: String,
}

impl Picture {
    /// The image of a file with the outline of a label.
    pub(super) fn of(shows: &'static str, image: &Path, label: std::result::Result<&GrayImage, &Error>) -> Self {
        let drawn = decode::image(image).map_err(|error| error.to_string()).and_then(|image| {
            let (image, label) = smaller(&image.to_rgb8(), label.map_err(ToString::to_string)?);
            Ok((photo(&image), layer(&label, MaskLayer::Truth)))
        });
        let problem = drawn.as_ref().err().cloned().unwrap_or_default();
        let (image, outline) = drawn.unwrap_or_default();
        Self { shows, image, outline, problem }
    }
}

/// An image and its label, both with at most [`SIDE_PX`] pixels a side.
fn smaller(image: &RgbImage, label: &GrayImage) -> (RgbImage, GrayImage) {
    let (width, height) = image.dimensions();
    let scale = (f64::from(SIDE_PX) / f64::from(width.max(height))).min(1.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most SIDE_PX")]
    let [w, h] = [width, height].map(|side| (f64::from(side) * scale).round().max(1.0) as u32);
    (imageops::resize(image, w, h, Resize::Triangle), imageops::resize(label, w, h, Resize::Nearest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_data_uris() {
        let uri = photo(&RgbImage::new(9, 7));
        assert!(uri.starts_with("data:image/jpeg;base64,/9j/"), "{uri}");
        let mut mask = GrayImage::new(9, 7);
        mask.put_pixel(4, 3, image::Luma([255]));
        for kind in [MaskLayer::Prediction, MaskLayer::Truth] {
            assert!(layer(&mask, kind).starts_with("data:image/png;base64,iVBOR"));
        }
        assert_ne!(layer(&mask, MaskLayer::Prediction), layer(&mask, MaskLayer::Truth));
    }
}
