//! Shapes of objects, and how they are drawn.

use std::collections::BTreeSet;
use std::path::Path;

use image::{GrayImage, Luma};

use super::polygon;
use super::rle::{self, Counts};
use crate::decode;

/// Notes about drawn masks, in the words of findings.
const CUT: &str = "masks of outlines that reach beyond the image, which were cut at its border";
const THIN: &str = "masks whose outlines have parts without an area, which were left out";
const SMALL: &str = "masks with objects that are smaller than a pixel and have none";
pub(super) const CROWD: &str = "masks with crowds of objects (`iscrowd`), which are part of the target";

/// An outline: columns and rows, where a pixel has the side 1.
pub(super) type Outline = Vec<[f64; 2]>;

/// What an object covers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Shape {
    /// Areas that are united.
    Outlines(Vec<Outline>),
    /// One area in fractions of the width and the height of the image.
    Fractions(Outline),
    /// The pixels whose centres are not further from the centre than the second point.
    Circle([f64; 2], [f64; 2]),
    /// Run lengths for an image of this width and height.
    Runs((u32, u32), Counts),
    /// A PNG file whose pixels above 0 are the object, from its first to its last column and row.
    Patch { first: [i64; 2], last: [i64; 2], png: Vec<u8> },
    /// No more than a box is known: the pixels of the object are not.
    Box,
    /// A point or a line, by its name in the file.
    WithoutArea(String),
}

/// A mask of 0 and 255 with what the user should know about it.
#[derive(Debug, Clone)]
pub struct DrawnMask {
    /// The mask.
    pub mask: GrayImage,
    /// Words for several masks, as in "masks of outlines that ...".
    pub notes: BTreeSet<&'static str>,
    /// Steps of outlines that may still be drawn.
    left: i64,
}

impl DrawnMask {
    pub(super) fn empty((width, height): (u32, u32)) -> Self {
        Self { mask: GrayImage::new(width, height), notes: BTreeSet::new(), left: polygon::MAX_STEPS }
    }

    /// Adds a shape. `path` is the file that it is from.
    ///
    /// # Errors
    /// What is wrong with the shape.
    pub(super) fn draw(&mut self, shape: &Shape, path: &Path) -> Result<(), String> {
        let size = self.mask.dimensions();
        let count = match shape {
            Shape::Outlines(outlines) => self.outlines(outlines)?,
            Shape::Fractions(outline) => {
                let [width, height] = [size.0, size.1].map(f64::from);
                self.outlines(&[outline.iter().map(|[x, y]| [x * width, y * height]).collect()])?
            }
            Shape::Circle(centre, edge) => self.circle(*centre, *edge)?,
            Shape::Runs(of, counts) => {
                if *of != size {
                    let (a, b) = (*of, size);
                    let turned = decode::turned_by_90(a, b);
                    return Err(format!(
                        "has run lengths for {} x {} pixels, its image {} x {}{turned}",
                        a.0, a.1, b.0, b.1
                    ));
                }
                self.fill(&rle::runs(counts, size)?)
            }
            Shape::Patch { first, last, png } => self.patch(*first, *last, png, path)?,
            Shape::Box => return Err("is a box without an outline, so that its pixels are not known".to_owned()),
            Shape::WithoutArea(kind) => return Err(format!("is a `{kind}`, which has no area")),
        };
        if count == 0 {
            self.notes.insert(SMALL);
        }
        Ok(())
    }

    /// Sets pixels in the order of columns and returns their number.
    fn fill(&mut self, runs: &[(usize, usize)]) -> usize {
        let (width, height) = (self.mask.width() as usize, self.mask.height() as usize);
        let pixels: &mut [u8] = &mut self.mask;
        for at in runs.iter().flat_map(|(from, to)| *from..*to) {
            pixels[at % height * width + at / height] = 255;
        }
        runs.iter().map(|(from, to)| to - from).sum()
    }

    fn outlines(&mut self, outlines: &[Outline]) -> Result<usize, String> {
        let has_area = |outline: &&Outline| outline.len() > 2;
        let with_area: Vec<&Outline> = outlines.iter().filter(has_area).collect();
        if with_area.is_empty() {
            let most = outlines.iter().map(Vec::len).max().unwrap_or(0);
            return Err(format!("has an outline of {most} points; three are needed"));
        }
        if with_area.len() < outlines.len() {
            self.notes.insert(THIN);
        }
        let mut count = 0;
        for outline in with_area {
            let runs = polygon::runs(outline, self.mask.dimensions(), &mut self.left)?;
            self.check_inside(bounds(outline))?;
            count += self.fill(&runs);
        }
        Ok(count)
    }

    /// Notes what reaches beyond the image, and refuses what is outside: smallest and largest column, and row.
    fn check_inside(&mut self, [x, y]: [[f64; 2]; 2]) -> Result<(), String> {
        let size = self.mask.dimensions();
        let sides = [f64::from(size.0), f64::from(size.1)];
        for ([least, most], side) in [x, y].into_iter().zip(sides) {
            if most <= 0.0 || least >= side {
                return Err(format!(
                    "is outside of its image of {} x {} pixels: columns {} to {}, rows {} to {}",
                    size.0, size.1, x[0], x[1], y[0], y[1]
                ));
            }
            // programs draw up to a pixel beyond the border
            if least < -1.0 || most > side + 1.0 {
                self.notes.insert(CUT);
            }
        }
        Ok(())
    }

    fn circle(&mut self, [x, y]: [f64; 2], edge: [f64; 2]) -> Result<usize, String> {
        polygon::check(&[[x, y], edge])?;
        let radius = (x - edge[0]).hypot(y - edge[1]);
        self.check_inside([[x - radius, x + radius], [y - radius, y + radius]])?;
        let (width, height) = self.mask.dimensions();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 if it is negative")]
        let range =
            |centre: f64, side: u32| (centre - radius) as u32..((centre + radius) as u32).saturating_add(1).min(side);
        let mut count = 0;
        for row in range(y, height) {
            for column in range(x, width) {
                let (across, down) = (f64::from(column) + 0.5 - x, f64::from(row) + 0.5 - y);
                if across * across + down * down <= radius * radius {
                    self.mask.put_pixel(column, row, Luma([255]));
                    count += 1;
                }
            }
        }
        Ok(count)
    }

    fn patch(&mut self, first: [i64; 2], last: [i64; 2], png: &[u8], path: &Path) -> Result<usize, String> {
        let size = self.mask.dimensions();
        let most = u64::from(size.0) * u64::from(size.1);
        let patch = decode::image_of(png, path, most).map_err(|error| match error {
            prsmed_base::Error::Data { reason, .. } => format!("has a mask that {reason}"),
            other => other.to_string(),
        })?;
        let patch = patch.into_luma8();
        let sides = [0, 1].map(|axis| last[axis].saturating_sub(first[axis]).saturating_add(1));
        let found = [i64::from(patch.width()), i64::from(patch.height())];
        if found != sides {
            let [a, b] = [found, sides].map(|[width, height]| format!("{width} x {height}"));
            return Err(format!("has a mask of {a} pixels, but its points are the corners of {b}"));
        }
        let bounds = [0, 1].map(|axis| [first[axis] as f64, first[axis] as f64 + sides[axis] as f64]);
        self.check_inside(bounds)?;
        let mut count = 0;
        for (column, row, _) in patch.enumerate_pixels().filter(|(.., value)| value.0[0] > 0) {
            let (x, y) = (first[0] + i64::from(column), first[1] + i64::from(row));
            if let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y))
                && let Some(pixel) = self.mask.get_pixel_mut_checked(x, y)
            {
                pixel.0 = [255];
                count += 1;
            }
        }
        Ok(count)
    }
}

/// Smallest and largest column, and row, of an outline.
fn bounds(outline: &Outline) -> [[f64; 2]; 2] {
    [0, 1].map(|axis| {
        let values = outline.iter().map(|point| point[axis]);
        values.fold([f64::INFINITY, f64::NEG_INFINITY], |[least, most], value| [least.min(value), most.max(value)])
    })
}
