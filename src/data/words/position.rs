//! Position of a mask in its image.
//!
//! Left and right refer to the image, not to the patient. Two divisions exist: the quadrants with a centre of
//! PRS-Med's data pipeline, and a 3x3 grid. Both are cells of one [`Position`]. Deviation: components are numbered by
//! their first pixel in reading order, while OpenCV scans 2x2 blocks.

use image::GrayImage;

pub use prsmed_base::location::{GridColumn, GridRow, Position, Zones};

/// Bounding box in pixels, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelBox {
    /// Leftmost column.
    pub left: u32,
    /// Topmost row.
    pub top: u32,
    /// Rightmost column.
    pub right: u32,
    /// Lowest row.
    pub bottom: u32,
}

/// Summary of a set of foreground pixels: a whole mask or one connected component.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Region {
    /// Number of pixels, at least 1.
    pub area_px: u64,
    /// Mean of the pixel indices along x and y.
    pub centroid_px: (f64, f64),
    /// Bounding box.
    pub bounds: PixelBox,
}

/// Running sums for a [`Region`].
struct Sums {
    area: u64,
    x: u64,
    y: u64,
    bounds: PixelBox,
}

impl Sums {
    fn new(x: u32, y: u32) -> Self {
        Self { area: 0, x: 0, y: 0, bounds: PixelBox { left: x, top: y, right: x, bottom: y } }
    }

    fn add(&mut self, x: u32, y: u32) {
        self.area += 1;
        self.x += u64::from(x);
        self.y += u64::from(y);
        self.bounds.left = self.bounds.left.min(x);
        self.bounds.right = self.bounds.right.max(x);
        self.bounds.top = self.bounds.top.min(y);
        self.bounds.bottom = self.bounds.bottom.max(y);
    }

    fn region(&self) -> Region {
        let area = self.area as f64;
        Region { area_px: self.area, centroid_px: (self.x as f64 / area, self.y as f64 / area), bounds: self.bounds }
    }
}

/// The whole foreground (values above 0) of `mask`; `None` when it is empty.
pub fn whole(mask: &GrayImage) -> Option<Region> {
    let mut sums: Option<Sums> = None;
    for (x, y, pixel) in mask.enumerate_pixels() {
        if pixel.0[0] > 0 {
            sums.get_or_insert_with(|| Sums::new(x, y)).add(x, y);
        }
    }
    sums.map(|sums| sums.region())
}

/// The 8-connected components of the foreground, ordered by their first pixel in reading order.
pub fn components(mask: &GrayImage) -> Vec<Region> {
    let (width, height) = mask.dimensions();
    let mut todo: Vec<bool> = mask.as_raw().iter().map(|&value| value > 0).collect();
    let index = |x: u32, y: u32| y as usize * width as usize + x as usize;
    let mut regions = Vec::new();
    let mut stack = Vec::new();
    for (x, y, _) in mask.enumerate_pixels() {
        if !std::mem::take(&mut todo[index(x, y)]) {
            continue;
        }
        let mut sums = Sums::new(x, y);
        stack.push((x, y));
        while let Some((x, y)) = stack.pop() {
            sums.add(x, y);
            for ny in y.saturating_sub(1)..(y + 2).min(height) {
                for nx in x.saturating_sub(1)..(x + 2).min(width) {
                    if std::mem::take(&mut todo[index(nx, ny)]) {
                        stack.push((nx, ny));
                    }
                }
            }
        }
        regions.push(sums.region());
    }
    regions
}

/// The grid cell of a region's centroid, for an image of `size_px` (width, height).
pub fn grid(region: &Region, size_px: (u32, u32)) -> Position {
    // The centre of a pixel is half a pixel after its index.
    let third = |centre: f64, length: u32| (centre + 0.5) / f64::from(length) * 3.0;
    let (x, y) = (third(region.centroid_px.0, size_px.0), third(region.centroid_px.1, size_px.1));
    let row = if y < 1.0 {
        GridRow::Upper
    } else if y < 2.0 {
        GridRow::Center
    } else {
        GridRow::Lower
    };
    let column = if x < 1.0 {
        GridColumn::Left
    } else if x < 2.0 {
        GridColumn::Center
    } else {
        GridColumn::Right
    };
    Position { row, column }
}

/// A quadrant, and whether the region is close to the centre of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quadrant {
    /// A corner cell or the middle cell.
    pub position: Position,
    /// Whether the box centre is closer to the image centre than 0.2 of the width, or the box contains the image
    /// centre.
    pub near: bool,
}

fn contains_centre(bounds: &PixelBox, size_px: (u32, u32)) -> bool {
    let (x, y) = (size_px.0 / 2, size_px.1 / 2);
    (bounds.left..=bounds.right).contains(&x) && (bounds.top..=bounds.bottom).contains(&y)
}

fn corner(left: bool, upper: bool) -> Position {
    Position {
        row: if upper { GridRow::Upper } else { GridRow::Lower },
        column: if left { GridColumn::Left } else { GridColumn::Right },
    }
}

/// PRS-Med's rule for a bounding box: `center` when it contains the image centre, otherwise the quadrant of the box
/// centre.
pub fn quadrant(region: &Region, size_px: (u32, u32)) -> Quadrant {
    let bounds = &region.bounds;
    if contains_centre(bounds, size_px) {
        return Quadrant { position: Position { row: GridRow::Center, column: GridColumn::Center }, near: true };
    }
    let (x, y) = (u32::midpoint(bounds.left, bounds.right), u32::midpoint(bounds.top, bounds.bottom));
    let (middle_x, middle_y) = (size_px.0 / 2, size_px.1 / 2);
    let distance = (f64::from(x) - f64::from(middle_x)).hypot(f64::from(y) - f64::from(middle_y));
    Quadrant { position: corner(x < middle_x, y < middle_y), near: distance < 0.2 * f64::from(size_px.0) }
}

/// PRS-Med's rule for one of several components: the quadrant of its centroid, and whether it reaches the image
/// centre.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComponentZone {
    /// A corner cell.
    pub position: Position,
    /// Whether its box contains the image centre; the label then ends in ` center`.
    pub reaches_middle: bool,
}

impl ComponentZone {
    /// `top left`, or `top left center` when the component reaches the centre.
    pub fn label(&self) -> String {
        let suffix = if self.reaches_middle { " center" } else { "" };
        self.position.label(Zones::Quadrants) + suffix
    }
}

/// The zone of one component, from its centroid.
pub fn component_zone(region: &Region, size_px: (u32, u32)) -> ComponentZone {
    let (x, y) = region.centroid_px;
    ComponentZone {
        position: corner(x < f64::from(size_px.0 / 2), y < f64::from(size_px.1 / 2)),
        reaches_middle: contains_centre(&region.bounds, size_px),
    }
}

#[cfg(test)]
#[path = "position_tests.rs"]
mod tests;
