//! Overlays of masks on images, and sheets of tiles with a CSV file that describes them. They are for people; no
//! model uses them.
//!
//! The prediction is filled in blue and the truth is a yellow outline. Both colours are from the palette of Okabe and
//! Ito: they are distinct with every kind of colour vision and over grey, red and brown tissue. The outline of the
//! prediction runs inside its border and that of the truth outside, so that equal masks show both.

use std::io::Cursor;
use std::path::Path;

use image::imageops::{self, FilterType};
use image::{DynamicImage, GrayImage, ImageBuffer, ImageError, ImageFormat, Rgb, RgbImage};

use prsmed_base::error::{Error, Result};
use prsmed_base::files::write_bytes;

/// Fill and outline of the prediction.
pub const PREDICTION_COLOR: Rgb<u8> = Rgb([40, 150, 255]);
/// Outline of the truth.
pub const TRUTH_COLOR: Rgb<u8> = Rgb([255, 214, 0]);

const FILL_ALPHA: f32 = 0.35;
/// A pixel of a mask is foreground from this level on.
const FOREGROUND: u8 = 128;

/// Writes an image, atomically, in the format of the path's extension: `png`, `jpg` or `jpeg`.
///
/// # Errors
/// [`Error::Config`] for another extension; [`Error::Io`].
pub fn save(image: &DynamicImage, path: &Path) -> Result<()> {
    write_bytes(path, &encode(image, path)?)
}

/// The content of an image file, in the format of the path's extension: `png`, `jpg` or `jpeg`.
///
/// # Errors
/// [`Error::Config`] for another extension.
pub fn encode(image: &DynamicImage, path: &Path) -> Result<Vec<u8>> {
    // The `image` crate's own `save` does not report a failure to write the last bytes.
    let refused = |error: ImageError| {
        let hint = "use a name that ends in `.png` or `.jpg`";
        Error::config(path.display().to_string(), error.to_string(), hint)
    };
    let mut bytes = Cursor::new(Vec::new());
    let format = ImageFormat::from_path(path).map_err(refused)?;
    image.write_to(&mut bytes, format).map_err(refused)?;
    Ok(bytes.into_inner())
}

/// An 8-bit image of a probability map, row by row; NaN is 0.
///
/// # Errors
/// [`Error::Shape`] when there are not `width * height` values.
pub fn probability_image(probabilities: &[f32], width: u32, height: u32) -> Result<GrayImage> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
    let levels = probabilities.iter().map(|p| (p * 255.0).round() as u8).collect();
    GrayImage::from_raw(width, height, levels)
        .filter(|_| width as usize * height as usize == probabilities.len())
        .ok_or_else(|| Error::Shape {
            reason: format!("{} probabilities do not fill an image of {width}x{height}", probabilities.len()),
        })
}

/// A 16-bit image of a probability map, row by row: 65535 is 1. NaN is 0.
///
/// # Errors
/// [`Error::Shape`] when there are not `width * height` values.
pub fn probability_image_16(probabilities: &[f32], width: u32, height: u32) -> Result<DynamicImage> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
    let levels = probabilities.iter().map(|p| (p * 65_535.0).round() as u16).collect();
    ImageBuffer::from_raw(width, height, levels)
        .filter(|_| width as usize * height as usize == probabilities.len())
        .map(DynamicImage::ImageLuma16)
        .ok_or_else(|| Error::Shape {
            reason: format!("{} probabilities do not fill an image of {width}x{height}", probabilities.len()),
        })
}

/// `image` with the prediction filled and outlined, and the truth outlined where given. Masks are foreground from
/// level 128 on.
///
/// # Errors
/// [`Error::Shape`] when the sizes differ.
pub fn overlay(image: &RgbImage, prediction: &GrayImage, truth: Option<&GrayImage>) -> Result<RgbImage> {
    for (name, mask) in [("prediction", Some(prediction)), ("truth", truth)] {
        let Some(mask) = mask.filter(|mask| mask.dimensions() != image.dimensions()) else { continue };
        let ((w, h), (mask_w, mask_h)) = (image.dimensions(), mask.dimensions());
        return Err(Error::Shape { reason: format!("the image is {w}x{h}, the {name} {mask_w}x{mask_h}") });
    }
    let mut out = image.clone();
    for (pixel, level) in out.pixels_mut().zip(prediction.pixels()) {
        if level[0] >= FOREGROUND {
            blend(pixel, PREDICTION_COLOR, FILL_ALPHA);
        }
    }
    // About one pixel and a half once the image is a tile of a sheet.
    let thickness = (image.width().max(image.height()) / 200).max(1);
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
fn outline(image: &mut RgbImage, mask: &GrayImage, thickness: u32, side: Side, color: Rgb<u8>) {
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
    for (pixel, distance) in image.pixels_mut().zip(distance) {
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

/// One image of a sheet.
#[derive(Debug, Clone)]
pub struct Tile {
    /// Any size; it is scaled into its cell.
    pub image: RgbImage,
    /// Which image or pair it is.
    pub name: String,
    /// What is drawn in it.
    pub shows: &'static str,
    /// Scores, answers, reasons.
    pub notes: String,
}

/// Content of an evaluation's tile.
pub const SHOWS_BOTH: &str = "prediction (blue, filled) and truth (yellow outline)";

const CELL_PX: u32 = 320;
const GAP_PX: u32 = 12;
const PAGE: Rgb<u8> = Rgb([255; 3]);

/// Writes a sheet of tiles in rows of `columns` to `path`. A CSV file of the same name describes the tiles: row and
/// column from 1, name, content, notes.
///
/// # Errors
/// As [`save`].
pub fn save_sheet(tiles: &[Tile], columns: usize, path: &Path) -> Result<()> {
    save(&sheet(tiles, columns).into(), path)?;
    let mut index = csv::Writer::from_writer(Vec::new());
    let in_memory = "writing to memory";
    index.write_record(["row", "column", "name", "shows", "notes"]).expect(in_memory);
    for (i, tile) in tiles.iter().enumerate() {
        let (row, column) = (i / columns + 1, i % columns + 1);
        index.serialize((row, column, &tile.name, tile.shows, &tile.notes)).expect(in_memory);
    }
    write_bytes(&path.with_extension("csv"), &index.into_inner().expect(in_memory))
}

/// The sheet of [`save_sheet`] as an image.
pub fn sheet(tiles: &[Tile], columns: usize) -> RgbImage {
    let at = |cell: usize| GAP_PX + u32::try_from(cell).unwrap_or(0) * (CELL_PX + GAP_PX);
    let mut page = RgbImage::from_pixel(at(columns), at(tiles.len().div_ceil(columns)), PAGE);
    for (i, tile) in tiles.iter().enumerate() {
        let is_large = tile.image.width().max(tile.image.height()) > CELL_PX;
        let filter = if is_large { FilterType::Triangle } else { FilterType::CatmullRom };
        let image = DynamicImage::from(tile.image.clone()).resize(CELL_PX, CELL_PX, filter).into_rgb8();
        let (w, h) = image.dimensions();
        let (left, top) = (at(i % columns) + (CELL_PX - w) / 2, at(i / columns) + (CELL_PX - h) / 2);
        imageops::replace(&mut page, &image, i64::from(left), i64::from(top));
    }
    page
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
        let image = RgbImage::from_pixel(40, 40, Rgb([100; 3]));
        let out = overlay(&image, &square(10, 20), Some(&square(10, 20))).unwrap();
        assert_eq!(*out.get_pixel(9, 15), TRUTH_COLOR);
        assert_eq!(*out.get_pixel(10, 15), PREDICTION_COLOR);
        assert_eq!(*out.get_pixel(15, 15), Rgb([79, 118, 154]), "35 % of blue over grey");
        assert_eq!(*out.get_pixel(8, 15), Rgb([100; 3]));
        assert_eq!(*out.get_pixel(20, 15), TRUTH_COLOR);
        assert_eq!(*out.get_pixel(19, 15), PREDICTION_COLOR);
    }

    #[test]
    fn an_outline_reaches_the_borders_of_the_image() {
        let image = RgbImage::from_pixel(40, 40, Rgb([100; 3]));
        let level = |at: u32| image::Luma([if (10..20).contains(&at) { 255 } else { 0 }]);
        let outlined = |mask: GrayImage| overlay(&image, &square(0, 0), Some(&mask)).unwrap();
        let upright = outlined(GrayImage::from_fn(40, 40, |x, _| level(x)));
        let lying = outlined(GrayImage::from_fn(40, 40, |_, y| level(y)));
        for at in 0..40 {
            for side in [9, 20] {
                assert_eq!(*upright.get_pixel(side, at), TRUTH_COLOR, "row {at}");
                assert_eq!(*lying.get_pixel(at, side), TRUTH_COLOR, "column {at}");
            }
        }
    }

    #[test]
    fn empty_and_full_masks() {
        let image = RgbImage::from_pixel(40, 40, Rgb([100; 3]));
        assert_eq!(overlay(&image, &square(0, 0), None).unwrap(), image);
        let full = overlay(&image, &square(0, 40), Some(&square(0, 40))).unwrap();
        assert!(full.pixels().all(|pixel| *pixel == Rgb([79, 118, 154])), "no border inside the image");
    }

    #[test]
    fn sizes_are_checked() {
        let error = overlay(&RgbImage::new(8, 6), &GrayImage::new(6, 8), None).unwrap_err();
        assert_eq!(error.to_string(), "the image is 8x6, the prediction 6x8");
        assert!(probability_image(&[0.5; 5], 2, 3).is_err());
        assert!(probability_image(&[0.5; 7], 2, 3).is_err());
        assert_eq!(probability_image(&[0.0, 1.0, f32::NAN, 7.0], 2, 2).unwrap().into_raw(), [0, 255, 0, 255]);
    }

    #[test]
    fn a_sheet_holds_every_tile_and_its_csv_describes_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sheet.png");
        let colors = [Rgb([200, 0, 0]), Rgb([0, 200, 0]), Rgb([0, 0, 200])];
        let tile = |color, w, h| Tile {
            image: RgbImage::from_pixel(w, h, color),
            name: "a".into(),
            shows: SHOWS_BOTH,
            notes: "Dice 0.9, \"yes\"".into(),
        };
        let tiles = [tile(colors[0], 64, 64), tile(colors[1], 900, 300), tile(colors[2], 10, 30)];
        save_sheet(&tiles, 2, &path).unwrap();
        let page = image::open(&path).unwrap().to_rgb8();
        assert_eq!(page.dimensions(), (GAP_PX + 2 * (CELL_PX + GAP_PX), GAP_PX + 2 * (CELL_PX + GAP_PX)));
        for color in colors {
            assert!(page.pixels().filter(|pixel| **pixel == color).count() > 10_000, "{color:?}");
        }
        let text = std::fs::read_to_string(path.with_extension("csv")).unwrap();
        assert!(text.starts_with("row,column,name,shows,notes\n1,1,a,") && text.contains("\n2,1,a,"), "{text}");
        assert!(sheet(&[], 3).height() > 0);
    }
}
