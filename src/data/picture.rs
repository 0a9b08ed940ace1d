//! Pictures for people: masks over images, and sheets of captioned tiles. Nothing here feeds a model.
//!
//! The prediction is blue and filled, the truth is a yellow outline: two of Okabe and Ito's colours, distinct with
//! every kind of colour vision and over grey, red and brown tissue. The prediction's outline runs inside its border, the
//! truth's outside, so that equal masks show both.

mod lettering;

use std::io::Cursor;
use std::ops::Range;
use std::path::Path;

use image::imageops::{self, FilterType};
use image::{DynamicImage, GrayImage, ImageError, ImageFormat, Rgb, RgbImage};

use crate::error::{Error, Result};
use crate::tensor::weights::write_bytes;
use lettering::Lettering;

/// Fill and outline of the prediction.
pub const PREDICTION_COLOR: Rgb<u8> = Rgb([40, 150, 255]);
/// Outline of the truth.
pub const TRUTH_COLOR: Rgb<u8> = Rgb([255, 214, 0]);

const FILL_ALPHA: f32 = 0.35;
/// A pixel of a mask is foreground from this level on.
const FOREGROUND: u8 = 128;

/// Writes a picture, atomically, in the format of the path's extension: `png`, `jpg` or `jpeg`.
///
/// # Errors
/// [`Error::Config`] for another extension; [`Error::Io`].
pub fn save(picture: &DynamicImage, path: &Path) -> Result<()> {
    // Not the crate's own saving: it drops a buffered writer without asking whether the last bytes arrived.
    let refused = |error: ImageError| {
        let hint = "use a name that ends in `.png` or `.jpg`";
        Error::config(path.display().to_string(), error.to_string(), hint)
    };
    let mut bytes = Cursor::new(Vec::new());
    let format = ImageFormat::from_path(path).map_err(refused)?;
    picture.write_to(&mut bytes, format).map_err(refused)?;
    write_bytes(path, bytes.get_ref())
}

/// An 8-bit picture of a probability map, row by row; NaN is 0.
///
/// # Errors
/// [`Error::Shape`] when there are not `width * height` values.
pub fn probability_picture(probabilities: &[f32], width: u32, height: u32) -> Result<GrayImage> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
    let levels = probabilities.iter().map(|p| (p * 255.0).round() as u8).collect();
    GrayImage::from_raw(width, height, levels)
        .filter(|_| width as usize * height as usize == probabilities.len())
        .ok_or_else(|| Error::Shape {
            reason: format!("{} probabilities are no picture of {width}x{height}", probabilities.len()),
        })
}

/// `picture` with the prediction filled and outlined, and the truth outlined where given. Masks are foreground from
/// level 128 on.
///
/// # Errors
/// [`Error::Shape`] when the sizes differ.
pub fn overlay(picture: &RgbImage, prediction: &GrayImage, truth: Option<&GrayImage>) -> Result<RgbImage> {
    for (name, mask) in [("prediction", Some(prediction)), ("truth", truth)] {
        let Some(mask) = mask.filter(|mask| mask.dimensions() != picture.dimensions()) else { continue };
        let ((w, h), (mask_w, mask_h)) = (picture.dimensions(), mask.dimensions());
        return Err(Error::Shape { reason: format!("the picture is {w}x{h}, the {name} {mask_w}x{mask_h}") });
    }
    let mut out = picture.clone();
    for (pixel, level) in out.pixels_mut().zip(prediction.pixels()) {
        if level[0] >= FOREGROUND {
            blend(pixel, PREDICTION_COLOR, FILL_ALPHA);
        }
    }
    // About one pixel and a half once the picture is a tile of a sheet.
    let thickness = (picture.width().max(picture.height()) / 200).max(1);
    if let Some(truth) = truth {
        outline(&mut out, truth, thickness, Side::Outside, TRUTH_COLOR);
    }
    outline(&mut out, prediction, thickness, Side::Inside, PREDICTION_COLOR);
    Ok(out)
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Inside,
    Outside,
}

/// Paints the pixels on one side of a mask's border that are at most `thickness` pixels from it, along rows and columns
/// (two passes with a running distance make that the distance in both directions together).
fn outline(picture: &mut RgbImage, mask: &GrayImage, thickness: u32, side: Side, color: Rgb<u8>) {
    let (width, height) = mask.dimensions();
    let is_painted_side = |x: u32, y: u32| (mask.get_pixel(x, y)[0] >= FOREGROUND) == (side == Side::Inside);
    let far = thickness + 1;
    let mut distance = vec![far; width as usize * height as usize];
    let index = |x: u32, y: u32| y as usize * width as usize + x as usize;
    let mut relax = |x: u32, y: u32, neighbours: [Option<(u32, u32)>; 2]| {
        let own = if is_painted_side(x, y) {
            neighbours.into_iter().flatten().map(|(x, y)| distance[index(x, y)] + 1).min().unwrap_or(far)
        } else {
            0
        };
        let cell = &mut distance[index(x, y)];
        *cell = own.min(*cell);
    };
    for y in 0..height {
        for x in 0..width {
            relax(x, y, [x.checked_sub(1).map(|x| (x, y)), y.checked_sub(1).map(|y| (x, y))]);
        }
    }
    for y in (0..height).rev() {
        for x in (0..width).rev() {
            relax(x, y, [(x + 1 < width).then_some((x + 1, y)), (y + 1 < height).then_some((x, y + 1))]);
        }
    }
    for (pixel, distance) in picture.pixels_mut().zip(distance) {
        if (1..=thickness).contains(&distance) {
            *pixel = color;
        }
    }
}

/// Mixes `alpha` (0..=1) of `color` into a pixel.
fn blend(pixel: &mut Rgb<u8>, color: Rgb<u8>, alpha: f32) {
    for (channel, target) in pixel.0.iter_mut().zip(color.0) {
        let mixed = f32::from(*channel) * (1.0 - alpha) + f32::from(target) * alpha;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of two bytes")]
        let mixed = mixed.round() as u8;
        *channel = mixed;
    }
}

/// One picture of a sheet.
#[derive(Debug, Clone)]
pub struct Tile {
    /// Any size; it is scaled into its cell.
    pub image: RgbImage,
    /// Below the picture, wrapped; newlines are kept. The first line stands out.
    pub caption: String,
}

const CELL_PX: u32 = 320;
const GAP_PX: u32 = 18;
const CAPTION_LINES: usize = 9;
const PAGE: Rgb<u8> = Rgb([255; 3]);
const BEHIND: Rgb<u8> = Rgb([228, 230, 233]);
const INK: Rgb<u8> = Rgb([20, 22, 26]);
const PALE_INK: Rgb<u8> = Rgb([88, 92, 99]);

/// A page of tiles in rows of `columns`, with a title and a legend of the two colours.
pub fn sheet(tiles: &[Tile], columns: usize, title: &str) -> RgbImage {
    let columns = columns.clamp(1, tiles.len().max(1));
    let width = GAP_PX + u32::try_from(columns).unwrap_or(1) * (CELL_PX + GAP_PX);
    let (heading, small) = (Lettering::new(26.0), Lettering::new(16.0));
    #[expect(clippy::cast_precision_loss, reason = "page sizes")]
    let title_lines = heading.wrapped(title, (width - 2 * GAP_PX) as f32, 3);
    let title_px = u32::try_from(title_lines.len()).unwrap_or(0) * heading.line_px();
    let legend_top = GAP_PX + title_px + 4;
    let first_row_top = legend_top + small.line_px() + GAP_PX;

    let captions: Vec<Vec<String>> =
        tiles.iter().map(|tile| small.wrapped(&tile.caption, 320.0, CAPTION_LINES)).collect();
    let row_heights: Vec<u32> = tiles
        .chunks(columns)
        .zip(captions.chunks(columns))
        .map(|(tiles, captions)| {
            let picture = tiles.iter().map(|tile| fitted(&tile.image).1).max().unwrap_or(0);
            let lines = u32::try_from(captions.iter().map(Vec::len).max().unwrap_or(0)).unwrap_or(0);
            picture + 6 + lines * small.line_px() + GAP_PX
        })
        .collect();
    let mut page = RgbImage::from_pixel(width, first_row_top + row_heights.iter().sum::<u32>(), PAGE);

    for (line, top) in title_lines.iter().zip((GAP_PX..).step_by(heading.line_px() as usize)) {
        heading.draw(&mut page, (GAP_PX, top), line, INK);
    }
    legend(&mut page, &small, legend_top);
    let mut top = first_row_top;
    for ((tiles, captions), height) in tiles.chunks(columns).zip(captions.chunks(columns)).zip(row_heights) {
        let picture_px = tiles.iter().map(|tile| fitted(&tile.image).1).max().unwrap_or(0);
        for ((tile, caption), left) in tiles.iter().zip(captions).zip((GAP_PX..).step_by((CELL_PX + GAP_PX) as usize)) {
            place(&mut page, &tile.image, (left, top), picture_px);
            let caption_tops = (top + picture_px + 6..).step_by(small.line_px() as usize);
            for ((number, line), line_top) in caption.iter().enumerate().zip(caption_tops) {
                small.draw(&mut page, (left, line_top), line, if number == 0 { INK } else { PALE_INK });
            }
        }
        top += height;
    }
    page
}

/// The size of a picture scaled to fit a cell.
fn fitted(picture: &RgbImage) -> (u32, u32) {
    let (width, height) = (u64::from(picture.width().max(1)), u64::from(picture.height().max(1)));
    let longest = width.max(height);
    let scaled =
        |side: u64| u32::try_from((side * u64::from(CELL_PX) + longest / 2) / longest).unwrap_or(CELL_PX).max(1);
    (scaled(width), scaled(height))
}

/// Scales a picture into the middle of a `CELL_PX` wide, `height` high box.
fn place(page: &mut RgbImage, picture: &RgbImage, (left, top): (u32, u32), height: u32) {
    fill(page, left..left + CELL_PX, top..top + height, BEHIND);
    let (w, h) = fitted(picture);
    let filter = if picture.width() > w { FilterType::Triangle } else { FilterType::CatmullRom };
    let scaled = imageops::resize(picture, w, h, filter);
    imageops::replace(page, &scaled, i64::from(left + (CELL_PX - w) / 2), i64::from(top + (height - h) / 2));
}

fn fill(page: &mut RgbImage, columns: Range<u32>, rows: Range<u32>, color: Rgb<u8>) {
    for y in rows {
        for x in columns.clone() {
            if let Some(pixel) = page.get_pixel_mut_checked(x, y) {
                *pixel = color;
            }
        }
    }
}

fn legend(page: &mut RgbImage, lettering: &Lettering, top: u32) {
    let mut left = GAP_PX;
    let (side, middle) = (13, top + lettering.line_px() / 2);
    for (name, color, is_filled) in [("prediction", PREDICTION_COLOR, true), ("truth", TRUTH_COLOR, false)] {
        let rows = middle - side / 2..middle + side / 2 + 1;
        fill(page, left..left + side, rows.clone(), color);
        let inside = if is_filled { Rgb([150, 203, 255]) } else { PAGE };
        fill(page, left + 3..left + side - 3, rows.start + 3..rows.end - 3, inside);
        lettering.draw(page, (left + side + 6, top), name, PALE_INK);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the width of a word")]
        let text_px = lettering.width_px(name) as u32;
        left += side + 6 + text_px + 22;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn square(from: u32, to: u32) -> GrayImage {
        GrayImage::from_fn(40, 40, |x, y| {
            image::Luma([if (from..to).contains(&x) && (from..to).contains(&y) { 255 } else { 0 }])
        })
    }

    #[test]
    fn fill_inside_outline_and_truth_outside() {
        let picture = RgbImage::from_pixel(40, 40, Rgb([100; 3]));
        let out = overlay(&picture, &square(10, 20), Some(&square(10, 20))).unwrap();
        assert_eq!(*out.get_pixel(9, 15), TRUTH_COLOR);
        assert_eq!(*out.get_pixel(10, 15), PREDICTION_COLOR);
        assert_eq!(*out.get_pixel(15, 15), Rgb([79, 118, 154]), "35 % of blue over grey");
        assert_eq!(*out.get_pixel(8, 15), Rgb([100; 3]));
        assert_eq!(*out.get_pixel(20, 15), TRUTH_COLOR);
        assert_eq!(*out.get_pixel(19, 15), PREDICTION_COLOR);
    }

    #[test]
    fn empty_and_full_masks() {
        let picture = RgbImage::from_pixel(40, 40, Rgb([100; 3]));
        assert_eq!(overlay(&picture, &square(0, 0), None).unwrap(), picture);
        let full = overlay(&picture, &square(0, 40), Some(&square(0, 40))).unwrap();
        assert!(full.pixels().all(|pixel| *pixel == Rgb([79, 118, 154])), "no border inside the picture");
    }

    #[test]
    fn sizes_are_checked() {
        let error = overlay(&RgbImage::new(8, 6), &GrayImage::new(6, 8), None).unwrap_err();
        assert_eq!(error.to_string(), "the picture is 8x6, the prediction 6x8");
        assert!(probability_picture(&[0.5; 5], 2, 3).is_err());
        assert!(probability_picture(&[0.5; 7], 2, 3).is_err());
        assert_eq!(probability_picture(&[0.0, 1.0, f32::NAN, 7.0], 2, 2).unwrap().into_raw(), [0, 255, 0, 255]);
    }

    #[test]
    fn a_sheet_holds_every_tile() {
        let colors = [Rgb([200, 0, 0]), Rgb([0, 200, 0]), Rgb([0, 0, 200])];
        let tile = |color, w, h| Tile { image: RgbImage::from_pixel(w, h, color), caption: "Dice 0.9".into() };
        let page = sheet(&[tile(colors[0], 64, 64), tile(colors[1], 900, 300), tile(colors[2], 10, 30)], 2, "worst");
        assert_eq!(page.width(), GAP_PX + 2 * (CELL_PX + GAP_PX));
        for color in colors {
            assert!(page.pixels().filter(|pixel| **pixel == color).count() > 10_000, "{color:?}");
        }
        assert!(sheet(&[], 3, "nothing to show").height() > 0);
    }
}
