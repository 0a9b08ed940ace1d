//! Shape of the training images: a padded square, or the nearest of a list of shapes (aspect buckets).
//!
//! The list is that of kohya's `sd-scripts`: sides are multiples of 64, and the number of pixels is at most that of the
//! square. A bucket is filled without padding: the image is scaled until it covers the bucket, and what remains on two
//! sides is cropped in equal parts. Deviation: an image is never enlarged.

use crate::augment::inpaint_mask::Frame;
use crate::{Error, Result};
use image::imageops::{self, FilterType};
use image::{GrayImage, RgbImage};
use std::path::Path;

/// Sides are multiples of this.
const STEP: u32 = 64;

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// Pixels of a row.
    pub width: u32,
    /// Pixels of a column.
    pub height: u32,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

impl Shape {
    /// The buckets for images with the pixels of a square of `side`: sides from half to twice of it.
    pub fn buckets(side: u32) -> Vec<Self> {
        let mut all = vec![Self { width: side, height: side }];
        let least = (side / 2).div_ceil(STEP).max(1);
        for long in (least..=2 * side / STEP).map(|count| count * STEP) {
            let other = u64::from(side) * u64::from(side) / u64::from(long * STEP);
            let other = u32::try_from(other).unwrap_or(u32::MAX).min(2 * side / STEP) * STEP;
            if other >= least * STEP {
                all.extend([Self { width: long, height: other }, Self { width: other, height: long }]);
            }
        }
        all.sort();
        all.dedup();
        all
    }

    /// The bucket whose ratio of width to height is nearest to that of an image; the largest of several.
    pub fn nearest((width, height): (u32, u32), side: u32) -> Self {
        let ratio = |width: u32, height: u32| (f64::from(width) / f64::from(height)).ln();
        let distance = |shape: &Self| (ratio(shape.width, shape.height) - ratio(width, height)).abs();
        let area = |shape: &Self| u64::from(shape.width) * u64::from(shape.height);
        let all = Self::buckets(side).into_iter();
        let best = all.min_by(|a, b| distance(a).total_cmp(&distance(b)).then(area(b).cmp(&area(a))));
        best.unwrap_or(Self { width: side, height: side })
    }

    /// Height and width.
    pub fn pixels(self) -> [i64; 2] {
        [self.height, self.width].map(i64::from)
    }
}

/// Position of an image in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crop {
    /// Width and height of the image.
    size: (u32, u32),
    /// Width and height of the scaled image.
    scaled: (u32, u32),
    /// The bucket.
    shape: Shape,
}

/// Position of an image in the input of the networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// The whole image in a square.
    Padded(Frame),
    /// The image without a rim in a bucket.
    Cropped(Crop),
}

impl View {
    /// The view of an image of `size` (width, height) in a square of `side` pixels.
    ///
    /// # Errors
    /// As [`Frame::new`].
    pub fn padded(size: (u32, u32), side: u32) -> Result<Self> {
        Frame::new(size, side).map(Self::Padded)
    }

    /// The view of the image `path` of `size` (width, height) in `shape`.
    ///
    /// # Errors
    /// [`Error::Data`] for an image that is smaller than the bucket.
    pub fn cropped(path: &Path, size: (u32, u32), shape: Shape) -> Result<Self> {
        let (width, height) = size;
        if width < shape.width || height < shape.height {
            let reason = format!("is {width}x{height}, smaller than its bucket of {shape}");
            let hint = "lower `finetune.image_size`, set `finetune.buckets=false` to pad images, or leave out its rows";
            return Err(Error::data(path, reason, hint));
        }
        // the side that needs less scaling fills the bucket
        let fits_width = u64::from(width) * u64::from(shape.height) <= u64::from(height) * u64::from(shape.width);
        let scale = |length: u32, of: u32, to: u32| {
            let scaled = (u64::from(length) * u64::from(to) + u64::from(of) / 2) / u64::from(of);
            u32::try_from(scaled).unwrap_or(u32::MAX)
        };
        let scaled = if fits_width {
            (shape.width, scale(height, width, shape.width).max(shape.height))
        } else {
            (scale(width, height, shape.height).max(shape.width), shape.height)
        };
        Ok(Self::Cropped(Crop { size, scaled, shape }))
    }

    /// Shape of the input.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Padded(frame) => Shape { width: frame.side, height: frame.side },
            Self::Cropped(crop) => crop.shape,
        }
    }

    /// Length of a model pixel in pixels of the image.
    pub fn pixels_per_model_pixel(&self) -> f64 {
        match self {
            Self::Padded(frame) => frame.pixels_per_model_pixel(),
            Self::Cropped(crop) => f64::from(crop.size.0) / f64::from(crop.scaled.0),
        }
    }

    /// SDXL's numbers: original height and width, top and left of the crop, target height and width. A padded image counts
    /// as a whole one of the square's size.
    pub fn time_ids(&self) -> [f32; 6] {
        let numbers = match self {
            Self::Padded(frame) => [frame.side, frame.side, 0, 0, frame.side, frame.side],
            Self::Cropped(crop) => {
                let ((left, top), Shape { width, height }) = (crop.offset(), crop.shape);
                [crop.size.1, crop.size.0, top, left, height, width]
            }
        };
        numbers.map(|number| number as f32)
    }

    /// The input that shows `image`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the image does not have the view's size.
    pub fn image(&self, image: &RgbImage) -> Result<RgbImage> {
        match self {
            Self::Padded(frame) => frame.to_model(image),
            Self::Cropped(crop) => {
                crop.check(image.dimensions())?;
                let scaled = imageops::resize(image, crop.scaled.0, crop.scaled.1, FilterType::CatmullRom);
                let ((left, top), Shape { width, height }) = (crop.offset(), crop.shape);
                Ok(imageops::crop_imm(&scaled, left, top, width, height).to_image())
            }
        }
    }

    /// The mask in that input (nearest neighbour); 0 in the padding.
    ///
    /// # Errors
    /// As [`Self::image`].
    pub fn mask(&self, mask: &GrayImage) -> Result<GrayImage> {
        match self {
            Self::Padded(frame) => frame.mask_to_model(mask),
            Self::Cropped(crop) => {
                crop.check(mask.dimensions())?;
                let (left, top) = crop.offset();
                let nearest = |at: u32, scaled: u32, length: u32| {
                    let at = (2 * u64::from(at) + 1) * u64::from(length) / (2 * u64::from(scaled));
                    u32::try_from(at).unwrap_or(u32::MAX).min(length - 1)
                };
                Ok(GrayImage::from_fn(crop.shape.width, crop.shape.height, |x, y| {
                    let column = nearest(x + left, crop.scaled.0, crop.size.0);
                    *mask.get_pixel(column, nearest(y + top, crop.scaled.1, crop.size.1))
                }))
            }
        }
    }
}

impl Crop {
    /// Left and top of the bucket in the scaled image.
    fn offset(&self) -> (u32, u32) {
        ((self.scaled.0 - self.shape.width) / 2, (self.scaled.1 - self.shape.height) / 2)
    }

    fn check(&self, found: (u32, u32)) -> Result<()> {
        if found == self.size {
            return Ok(());
        }
        let ((width, height), (w, h)) = (self.size, found);
        Err(Error::Shape { reason: format!("the image or mask is {w}x{h}, expected {width}x{height}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_have_at_most_the_pixels_of_the_square() {
        for side in [64, 128, 512, 768, 1024] {
            let all = Shape::buckets(side);
            assert!(all.contains(&Shape { width: side, height: side }));
            for shape in &all {
                assert!(
                    shape.width * shape.height <= side * side && shape.width.min(shape.height) >= side / 2,
                    "{shape}"
                );
                assert!(shape.width.is_multiple_of(STEP) && shape.height.is_multiple_of(STEP));
                assert!(all.contains(&Shape { width: shape.height, height: shape.width }), "{shape}");
            }
        }
        // some of the shapes that SDXL was trained with
        let all = Shape::buckets(1024);
        for (width, height) in [(1152, 896), (1216, 832), (1344, 768), (1536, 640), (2048, 512)] {
            assert!(all.contains(&Shape { width, height }), "{width}x{height}");
        }
    }

    #[test]
    fn images_get_the_bucket_of_their_shape() {
        let nearest = |size| Shape::nearest(size, 1024).to_string();
        assert_eq!(nearest((3000, 3000)), "1024x1024");
        assert_eq!(nearest((1920, 1080)), "1344x768");
        assert_eq!(nearest((1080, 1920)), "768x1344");
        assert_eq!(nearest((9000, 1000)), "2048x512");
        assert_eq!(Shape::nearest((100, 300), 64).to_string(), "64x64");
    }

    #[test]
    fn a_bucket_is_filled_and_masks_stay_with_their_image() {
        let shape = Shape { width: 192, height: 64 };
        let view = View::cropped(Path::new("image.png"), (500, 200), shape).unwrap();
        // scaled to 192x77, so that 13 rows are cropped
        assert_eq!(view.time_ids(), [200.0, 500.0, 6.0, 0.0, 64.0, 192.0]);
        let bright = |x: u32, y: u32| (100..250).contains(&x) && (60..130).contains(&y);
        let value = |x: u32, y: u32| if bright(x, y) { 255 } else { 0 };
        let image = RgbImage::from_fn(500, 200, |x, y| image::Rgb([value(x, y); 3]));
        let mask = GrayImage::from_fn(500, 200, |x, y| image::Luma([value(x, y)]));
        let (image, mask) = (view.image(&image).unwrap(), view.mask(&mask).unwrap());
        assert_eq!((image.dimensions(), mask.dimensions()), ((192, 64), (192, 64)));
        let differing = image.pixels().zip(mask.pixels()).filter(|(a, b)| (a[0] > 127) != (b[0] > 127)).count();
        assert!(differing < 60 && mask.iter().filter(|value| **value > 0).count() > 1000, "{differing}");
        assert!(view.image(&RgbImage::new(200, 500)).is_err());
    }

    #[test]
    fn an_image_is_not_enlarged() {
        let shape = Shape { width: 192, height: 64 };
        let error = View::cropped(Path::new("a.png"), (190, 300), shape).unwrap_err();
        assert!(error.to_string().contains("is 190x300, smaller than its bucket of 192x64"), "{error}");
        assert!(View::cropped(Path::new("a.png"), (192, 64), shape).is_ok());
    }
}
