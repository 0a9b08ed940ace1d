//! Pixels -> model inputs: the two preprocessings of PRS-Med and the mask target, as bytes in CHW order.
//!
//! Source: the PRS-Med data code (LLaVA's `expand2square` and CLIP's processor; Pillow's `resize`). Deviations: the
//! image of the vision tower is padded at a fixed offset instead of a random one, masks may be thresholded, and a mask stored as 0/1
//! is read as 0/255. Aspect ratio: preserved by padding for the tower, not preserved for SAM, as in the original.
//!
//! Pixels stay bytes until the model's device normalises them. This makes caches, waiting batches and copies four
//! times smaller.

use ::image::{DynamicImage, GrayImage};
use serde::{Deserialize, Serialize};

use crate::labels::Labels;
use crate::resample::{self, Filter};
use prsmed_base::error::{Error, Result};

/// Conversion of a mask into a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskMode {
    /// Resized with antialiasing, with soft borders, as in the original.
    Soft,
    /// Every pixel is 0 or 1: the foreground is decided at the mask's own size ([`foreground`]), resized with
    /// antialiasing and cut at one half. If this would erase a tiny target, every pixel that it touches is set.
    #[default]
    Binary,
}

/// Offset of the image inside the tower's square, for a difference `d` of its sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PadOffset {
    /// `floor(d / 2)`.
    #[default]
    Centre,
    /// `floor(d / 2) + 1`: the original picks one of the two offsets at random.
    CentrePlusOne,
}

/// How an image fills the square of the image encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fit {
    /// Stretched to the square, as in PRS-Med.
    #[default]
    Stretch,
    /// In the upper left corner with its proportions, as in SAM. The rest of the square has this colour.
    Corner([u8; 3]),
}

impl Fit {
    /// Side of the square, in pixels of an image of these sides, and the colour beside the image; `None` if it is stretched.
    fn pad(self, (width, height): (u32, u32)) -> Option<Pad> {
        match self {
            Self::Corner(colour) if width != height => {
                Some(Pad { side: width.max(height) as usize, offset: (0, 0), colour })
            }
            Self::Corner(_) | Self::Stretch => None,
        }
    }

    /// The way back from a square of `side` cells to an image of `sides`: the first columns and rows, which show the
    /// image, and the columns and rows to which they are enlarged. All but those of the image are beside it.
    #[must_use]
    pub fn way_back(self, side: u32, sides: (u32, u32)) -> [(u32, u32); 2] {
        let Some(pad) = self.pad(sides) else { return [(side, side), sides] };
        let (from, to) = (u64::from(side), pad.side as u64);
        let small = |number: u64| u32::try_from(number).expect("no more than a side");
        let cells = |pixels: u32| small((u64::from(pixels) * from).div_ceil(to));
        let enlarged = |pixels: u32| small((u64::from(cells(pixels)) * to + from / 2) / from).max(pixels);
        [(cells(sides.0), cells(sides.1)), (enlarged(sides.0), enlarged(sides.1))]
    }
}

/// Preprocessing settings. They must not change after training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PixelConfig {
    /// Side of the vision tower's square input in pixels.
    #[serde(rename = "clip_size")]
    pub tower_size: u32,
    /// Side of the SAM input and of the mask target in pixels (1024 in the original).
    pub sam_size: u32,
    /// Soft or binary target.
    pub mask: MaskMode,
    /// Offset of the image inside the tower's square.
    pub pad_offset: PadOffset,
    /// Colour of the rest of the tower's square. It is the tower's, and not stored.
    #[serde(skip)]
    pub padding: [u8; 3],
    /// How images fill the square of the image encoder. It is the encoder's, and not stored.
    #[serde(skip)]
    pub fit: Fit,
    /// Labels of masks that are foreground; empty for masks of one label.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl PixelConfig {
    /// Bytes of an image's pixels with so many masks: three planes of the tower's input, three SAM planes, the masks.
    pub fn image_bytes(&self, masks: usize) -> usize {
        let plane = |side: u32| side as usize * side as usize;
        3 * plane(self.tower_size) + (3 + masks) * plane(self.sam_size)
    }
}

/// Input of the vision tower before normalisation: padded to a square with `padding`, resized bicubically. Returns `3 * size * size` bytes, CHW.
///
/// The square is not built: the padding of a panorama would take far more memory than the panorama.
///
/// # Errors
/// [`Error::Shape`] for an image or `size` of 0 pixels.
pub fn tower_pixels(image: &DynamicImage, size: u32, offset: PadOffset, padding: [u8; 3]) -> Result<Vec<u8>> {
    let (width, height) = (image.width(), image.height());
    if width == height {
        return planes(image, None, size, Filter::Bicubic);
    }
    let shift = width.abs_diff(height) / 2 + u32::from(offset == PadOffset::CentrePlusOne);
    let (x, y) = if width > height { (0, shift) } else { (shift, 0) };
    let pad = Pad { side: width.max(height) as usize, offset: (x as usize, y as usize), colour: padding };
    planes(image, Some(pad), size, Filter::Bicubic)
}

/// A square of one colour around an image.
#[derive(Debug, Clone, Copy)]
struct Pad {
    side: usize,
    /// Column and row of the image in the square.
    offset: (usize, usize),
    colour: [u8; 3],
}

/// Input of the image encoder before normalisation: `size x size` pixels, bilinear. Returns `3 * size * size` bytes, CHW.
///
/// # Errors
/// [`Error::Shape`] for an image or `size` of 0 pixels.
pub fn sam_pixels(image: &DynamicImage, size: u32, fit: Fit) -> Result<Vec<u8>> {
    planes(image, fit.pad((image.width(), image.height())), size, Filter::Bilinear)
}

/// Mask target: `size * size` bytes, 255 = foreground.
///
/// # Errors
/// [`Error::Shape`] for a mask or `size` of 0 pixels.
pub fn mask_pixels(mask: &GrayImage, size: u32, mode: MaskMode, fit: Fit) -> Result<Vec<u8>> {
    match mode {
        MaskMode::Soft if mask.iter().max() == Some(&1) => soft(&foreground(mask), size, fit),
        MaskMode::Soft => soft(mask, size, fit),
        MaskMode::Binary => {
            let foreground = foreground(mask);
            let mut target = soft(&foreground, size, fit)?;
            for value in &mut target {
                *value = if *value >= 128 { 255 } else { 0 };
            }
            if target.iter().all(|&value| value == 0) {
                set_touched_pixels(&foreground, size, fit, &mut target);
            }
            Ok(target)
        }
    }
}

/// The foreground of a mask at its own size, 0 or 255.
///
/// Pixels above half of the mask's largest value are foreground, so 0/1, 0/255 and antialiased masks all work. A mask
/// whose largest value is below 16 has no antialiasing: every value except 0 is foreground. Masks with several labels
/// are refused when they are decoded, unless labels are chosen.
pub fn foreground(mask: &GrayImage) -> GrayImage {
    let most = u16::from(mask.iter().copied().max().unwrap_or(0));
    let mut cut = mask.clone();
    for value in cut.iter_mut() {
        let set = if most < 16 { *value > 0 } else { 2 * u16::from(*value) > most };
        *value = if set { 255 } else { 0 };
    }
    cut
}

/// Sets the target pixels that contain a foreground pixel.
fn set_touched_pixels(foreground: &GrayImage, size: u32, fit: Fit, target: &mut [u8]) {
    let (width, height) = (u64::from(foreground.width()), u64::from(foreground.height()));
    let (width, height) =
        fit.pad(foreground.dimensions()).map_or((width, height), |pad| (pad.side as u64, pad.side as u64));
    let size = u64::from(size);
    for (x, y, _) in foreground.enumerate_pixels().filter(|(_, _, value)| value.0[0] > 0) {
        let (column, row) = (u64::from(x) * size / width, u64::from(y) * size / height);
        if let Some(value) = usize::try_from(row * size + column).ok().and_then(|at| target.get_mut(at)) {
            *value = 255;
        }
    }
}

fn soft(mask: &GrayImage, size: u32, fit: Fit) -> Result<Vec<u8>> {
    match fit.pad(mask.dimensions()) {
        None => square(mask.as_raw(), mask.dimensions(), size, Filter::Bilinear),
        Some(pad) => padded_square(mask.as_raw(), mask.dimensions(), pad, 0, (size, Filter::Bilinear)),
    }
}

/// Splits the channels and resizes each to a square. A grey image without padding is resized once and repeated.
fn planes(image: &DynamicImage, pad: Option<Pad>, size: u32, filter: Filter) -> Result<Vec<u8>> {
    let sides = (image.width(), image.height());
    if let (Some(grey), None) = (image.as_luma8(), pad) {
        return Ok(square(grey.as_raw(), sides, size, filter)?.repeat(3));
    }
    let converted;
    let (bytes, channels) = match image {
        DynamicImage::ImageLuma8(grey) => (grey.as_raw(), 1),
        DynamicImage::ImageRgb8(rgb) => (rgb.as_raw(), 3),
        other => {
            converted = other.to_rgb8();
            (converted.as_raw(), 3)
        }
    };
    let mut planes = Vec::with_capacity(3 * size as usize * size as usize);
    for (channel, fill) in pad.map_or([0; 3], |pad| pad.colour).into_iter().enumerate() {
        let plane: Vec<u8> = bytes.iter().skip(channel % channels).step_by(channels).copied().collect();
        planes.extend(match pad {
            None => square(&plane, sides, size, filter)?,
            Some(pad) => padded_square(&plane, sides, pad, fill, (size, filter))?,
        });
    }
    Ok(planes)
}

fn check_sides((width, height): (u32, u32), size: u32) -> Result<()> {
    if width == 0 || height == 0 || size == 0 {
        return Err(Error::Shape { reason: format!("cannot resize {width}x{height} pixels to {size}x{size}") });
    }
    Ok(())
}

fn square(bytes: &[u8], sides: (u32, u32), size: u32, filter: Filter) -> Result<Vec<u8>> {
    check_sides(sides, size)?;
    let side = size as usize;
    Ok(resample::plane(bytes, (sides.0 as usize, sides.1 as usize), (side, side), filter))
}

fn padded_square(
    bytes: &[u8],
    sides: (u32, u32),
    pad: Pad,
    fill: u8,
    (size, filter): (u32, Filter),
) -> Result<Vec<u8>> {
    check_sides(sides, size)?;
    let (side, outer) = (size as usize, (pad.side, pad.side));
    let from = resample::Plane { bytes, size: (sides.0 as usize, sides.1 as usize), outer, offset: pad.offset, fill };
    Ok(resample::padded(from, (side, side), filter))
}

#[cfg(test)]
mod tests {
    use ::image::{Luma, Rgb, RgbImage};

    use super::*;

    const PADDING: [u8; 3] = [122, 116, 104];

    #[test]
    fn tower_input_is_padded_at_the_configured_offset() {
        let image = DynamicImage::ImageRgb8(RgbImage::from_pixel(6, 3, Rgb([1, 2, 3])));
        let rows = |offset| {
            let bytes = tower_pixels(&image, 6, offset, PADDING).expect("sized");
            (0..6).map(|row| bytes[row * 6]).collect::<Vec<_>>()
        };
        assert_eq!(rows(PadOffset::Centre), [122, 1, 1, 1, 122, 122]);
        assert_eq!(rows(PadOffset::CentrePlusOne), [122, 122, 1, 1, 1, 122]);
        let tall = DynamicImage::ImageLuma8(GrayImage::from_pixel(3, 4, Luma([9])));
        let bytes = tower_pixels(&tall, 4, PadOffset::CentrePlusOne, PADDING).expect("sized");
        assert_eq!(bytes[..4], [122, 9, 9, 9]);
        assert_eq!(bytes[16..20], [116, 9, 9, 9]);
        assert_eq!(bytes[32..36], [104, 9, 9, 9]);
    }

    #[test]
    fn a_panorama_of_one_row_is_padded_without_its_square() {
        // its square would have 10 GB
        let image = DynamicImage::ImageRgb8(RgbImage::from_pixel(60_000, 1, Rgb([255, 0, 0])));
        let bytes = tower_pixels(&image, 14, PadOffset::Centre, PADDING).expect("sized");
        assert_eq!(bytes.len(), 3 * 14 * 14);
        assert!(bytes.iter().zip(0..).all(|(&byte, at)| byte.abs_diff(PADDING[at / 196]) <= 1));
        let tall = DynamicImage::ImageLuma8(GrayImage::from_pixel(1, 60_000, Luma([255])));
        assert_eq!(tower_pixels(&tall, 14, PadOffset::Centre, PADDING).expect("sized").len(), 3 * 14 * 14);
    }

    #[test]
    fn binary_masks_accept_all_foreground_encodings() {
        for (off, on) in [(0_u8, 1_u8), (0, 255), (0, 200), (0, 3)] {
            let mask = GrayImage::from_fn(8, 8, |x, _| Luma([if x < 4 { on } else { off }]));
            let target = mask_pixels(&mask, 16, MaskMode::Binary, Fit::Stretch).expect("sized");
            assert!(target.iter().enumerate().all(|(i, &v)| v == if i % 16 < 8 { 255 } else { 0 }), "{off}/{on}");
        }
        let labels = GrayImage::from_fn(4, 1, |x, _| Luma([u8::try_from(x).expect("small")]));
        assert_eq!(foreground(&labels).as_raw(), &[0, 255, 255, 255]);
        let soft_edge = GrayImage::from_fn(4, 1, |x, _| Luma([[0, 100, 128, 255][x as usize]]));
        assert_eq!(foreground(&soft_edge).as_raw(), &[0, 0, 255, 255]);
    }

    #[test]
    fn a_tiny_target_survives_and_an_empty_one_stays_empty() {
        let dot = GrayImage::from_fn(64, 64, |x, y| Luma([if (x, y) == (20, 40) { 255 } else { 0 }]));
        let target = mask_pixels(&dot, 8, MaskMode::Binary, Fit::Stretch).expect("sized");
        assert_eq!(target.iter().position(|&v| v == 255), Some(5 * 8 + 2));
        assert_eq!(target.iter().rposition(|&v| v == 255), Some(5 * 8 + 2), "only one pixel is set");
        // So small that antialiasing rounds it to zero everywhere.
        let speck = GrayImage::from_fn(512, 512, |x, y| Luma([u8::from((x, y) == (511, 0))]));
        assert_eq!(
            mask_pixels(&speck, 4, MaskMode::Binary, Fit::Stretch).expect("sized").iter().position(|&v| v == 255),
            Some(3)
        );
        let empty = mask_pixels(&GrayImage::new(64, 64), 8, MaskMode::Binary, Fit::Stretch).expect("sized");
        assert!(empty.iter().all(|&v| v == 0));
    }

    #[test]
    fn soft_masks_of_zero_and_one_equal_those_of_zero_and_255() {
        let of = |on: u8| GrayImage::from_fn(4, 4, |x, _| Luma([if x < 2 { on } else { 0 }]));
        let target = |on| mask_pixels(&of(on), 2, MaskMode::Soft, Fit::Stretch).expect("sized");
        assert_eq!(target(1), target(255));
        assert!(target(1)[0] > 200 && target(1)[1] < 55, "{:?}", target(1));
    }

    #[test]
    fn resizing_an_empty_image_is_an_error() {
        let error = mask_pixels(&GrayImage::new(0, 3), 8, MaskMode::Soft, Fit::Stretch).expect_err("no pixels");
        assert_eq!(error.to_string(), "cannot resize 0x3 pixels to 8x8");
    }

    #[test]
    fn an_image_in_a_corner_keeps_its_proportions_on_the_way_there_and_back() {
        let fit = Fit::Corner([7, 8, 9]);
        let image = DynamicImage::ImageRgb8(RgbImage::from_pixel(8, 4, Rgb([1, 2, 3])));
        let planes = sam_pixels(&image, 4, fit).expect("sized");
        let rows: Vec<u8> = planes.iter().step_by(4).copied().collect();
        // resizing mixes the rows at the border
        assert_eq!(rows, [1, 2, 6, 7, 2, 3, 7, 8, 3, 4, 8, 9]);
        let mask = GrayImage::from_fn(8, 4, |x, _| Luma([if x < 2 { 255 } else { 0 }]));
        let cells = mask_pixels(&mask, 4, MaskMode::Binary, fit).expect("sized");
        assert_eq!(
            cells.iter().map(|value| value / 255).collect::<Vec<_>>(),
            [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        let speck = GrayImage::from_fn(64, 16, |x, y| Luma([u8::from((x, y) == (63, 15))]));
        let target = mask_pixels(&speck, 4, MaskMode::Binary, fit).expect("sized");
        assert_eq!(target.iter().position(|&value| value == 255), Some(3));

        assert_eq!(fit.way_back(4, (8, 4)), [(4, 2), (8, 4)]);
        assert_eq!(fit.way_back(16, (3, 100)), [(1, 16), (6, 100)]);
        assert_eq!(fit.way_back(16, (30, 30)), [(16, 16), (30, 30)]);
        assert_eq!(Fit::Stretch.way_back(16, (30, 10)), [(16, 16), (30, 10)]);
    }
}
