//! Colours of masks: which colours are labels.

use std::collections::{HashMap, HashSet};

use ::image::RgbImage;

use super::foreground::{NOISE, SMALL, counted};

/// Largest distance in a channel between a blend with black and a multiple of its colour.
const BLEND: f64 = 4.0;

/// A colour and its number of pixels.
pub(super) type Colour = ([u8; 3], u64);

/// True for black and for what a palette of few colours makes of black.
pub(super) fn is_black(colour: [u8; 3]) -> bool {
    colour.iter().all(|&channel| usize::from(channel) < SMALL)
}

/// Pillow's fixed-point ITU-R 601 weights.
pub(super) fn grey_of(colour: [u8; 3]) -> u8 {
    let [r, g, b] = colour.map(u32::from);
    u8::try_from((r * 19_595 + g * 38_470 + b * 7_471 + 0x8000) >> 16).unwrap_or(u8::MAX)
}

/// The colours that are labels, as [`super::labels::labels_of`] finds levels. Black is the background.
///
/// A label fills an area. Other colours are blends with black (antialiasing), or rare, or noise if `is_lossy`.
pub(super) fn label_colours(image: &RgbImage, is_lossy: bool) -> Vec<Colour> {
    let (counts, areas) = counts_and_areas(image);
    let most = counts.keys().flatten().copied().max().unwrap_or(0);
    let num_other = counts.len() - areas.len();
    let tolerance = if is_lossy || num_other >= NOISE.max(areas.len()) { most / 8 } else { 0 };
    let near = |a: [u8; 3], b: [u8; 3]| a.iter().zip(b).all(|(a, b)| a.abs_diff(b) <= tolerance);
    let mut colours: Vec<Colour> = counts.into_iter().filter(|(colour, _)| !near(*colour, [0; 3])).collect();
    colours.sort_by_key(|&(colour, count)| (std::cmp::Reverse(count), colour));
    let every = usize::from(most) < SMALL;
    let mut labels: Vec<Colour> = Vec::new();
    for &(colour, count) in colours.iter().filter(|(colour, _)| every || areas.contains(colour)) {
        if !labels.iter().any(|(label, _)| near(*label, colour)) {
            labels.push((colour, count));
        }
    }
    // a target that is nowhere three pixels thick
    labels.extend(colours.first().filter(|_| labels.is_empty()));
    if let ([(label, pixels)], false) = (labels.as_slice(), is_lossy) {
        let (label, rare) = (*label, if tolerance == 0 { 0 } else { (pixels / 20).max(8) });
        let is_other = |(colour, count): &&Colour| {
            *count > rare && !near(*colour, label) && !is_blend(*colour, label, BLEND.max(tolerance.into()))
        };
        labels.extend(colours.iter().filter(is_other));
    }
    labels.sort_unstable();
    labels
}

/// Whether a colour is a multiple of another one.
fn is_blend(colour: [u8; 3], of: [u8; 3], tolerance: f64) -> bool {
    let dot = |a: [u8; 3], b: [u8; 3]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(b)).sum::<f64>();
    let times = dot(colour, of) / dot(of, of).max(1.0);
    colour.iter().zip(of).all(|(a, b)| (f64::from(*a) - times * f64::from(b)).abs() <= tolerance)
}

/// The number of pixels of each colour, and the colours that a pixel and all of its neighbours have somewhere.
fn counts_and_areas(image: &RgbImage) -> (HashMap<[u8; 3], u64>, HashSet<[u8; 3]>) {
    let (mut counts, mut areas) = (HashMap::new(), HashSet::new());
    let (width, height) = image.dimensions();
    let at = |x: u32, y: u32| image.get_pixel(x, y).0;
    for y in 0..height {
        let mut x = 0;
        while x < width {
            let colour = at(x, y);
            let end = (x..width).find(|&x| at(x, y) != colour).unwrap_or(width);
            *counts.entry(colour).or_default() += u64::from(end - x);
            let fills = |x: u32| {
                let columns = x.saturating_sub(1)..(x + 2).min(width);
                let rows = y.saturating_sub(1)..(y + 2).min(height);
                columns.flat_map(|x| rows.clone().map(move |y| (x, y))).all(|(x, y)| at(x, y) == colour)
            };
            if !areas.contains(&colour) && (x..end).any(fills) {
                areas.insert(colour);
            }
            x = end;
        }
    }
    (counts, areas)
}

/// `#ff0000 (480 pixels), #00ff00 (33 pixels)`.
pub(super) fn describe(colours: &[Colour]) -> String {
    counted(colours.iter().map(|(colour, count)| (hex(*colour), *count)))
}

/// `#ff0000`.
pub(super) fn hex([r, g, b]: [u8; 3]) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// True for a colour that is a grey.
pub(super) fn is_grey<T: PartialEq>([r, g, b]: [T; 3]) -> bool {
    r == g && g == b
}
