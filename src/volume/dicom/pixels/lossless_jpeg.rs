//! Lossless JPEG images (process 14, SOF3), in all predictors, with restart intervals and a point transform.
//!
//! Source: ITU-T T.81, annex H (prediction), F (Huffman codes) and B (markers). Refused, and not decoded: the predictor 0
//! and the frames of hierarchical images, components of different size, arithmetic coding.

use std::iter::repeat_n;

use super::jpeg::{SCAN, big_endian, is_frame_header, scan_length, segment};

const ENDS_EARLY: &str = "the JPEG data end before the last pixel";
const DAMAGED: &str = "a header of the JPEG data is damaged";
/// Start of the number of lines.
const NUM_LINES: u8 = 0xdc;

/// What the frame header says, and the samples so far.
struct Image {
    /// Width and height.
    size: [usize; 2],
    bits: u8,
    is_signed: bool,
    /// Identifiers of the components, and whether their scan is decoded.
    components: Vec<(u8, bool)>,
    /// Whether several components may share a scan.
    can_interleave: bool,
    samples: Vec<u16>,
    /// The number of lines must follow the first scan.
    lacks_height: bool,
}

/// One scan.
struct Scan<'a> {
    /// Positions of its components in a pixel, and their tables.
    components: Vec<(usize, &'a Table)>,
    predictor: u8,
    /// Bits that were removed from each sample.
    shift: u8,
    /// Pixels between two restarts; 0 for none.
    interval: usize,
}

/// Length of the code (0 for no code) and category of the difference, by the 16 bits from its start.
type Table = Vec<(u8, u8)>;

/// The samples of an image, those of a pixel after each other. `size` is the width and height of the image. Signed samples
/// may have more bits than the image says, as their sign.
///
/// # Errors
/// Why the image cannot be decoded.
pub(super) fn decode(
    jpeg: &[u8],
    size: [usize; 2],
    num_components: usize,
    is_signed: bool,
) -> Result<Vec<u16>, String> {
    let mut tables: [Table; 4] = Default::default();
    // the last definition of each table before a scan is expanded
    let mut defined: [Option<&[u8]>; 4] = [None; 4];
    let (mut image, mut interval, mut at): (Option<Image>, usize, usize) = (None, 0, 2);
    loop {
        let (marker, content) = segment(jpeg, &mut at).ok_or(ENDS_EARLY)?;
        match marker {
            0xc3 if image.is_none() => {
                let new = Image::new(content, size, num_components, is_signed)?;
                // each sample has at least one bit
                if new.samples.len() > jpeg.len().saturating_mul(8) {
                    return Err(ENDS_EARLY.to_owned());
                }
                image = Some(new);
            }
            0xc4 => define(content, &mut defined)?,
            0xdd => interval = big_endian(content.get(..2).ok_or(DAMAGED)?),
            SCAN => {
                let image = image.as_mut().ok_or(DAMAGED)?;
                for (table, definition) in tables.iter_mut().zip(&mut defined) {
                    if let Some(definition) = definition.take() {
                        *table = expanded(definition)?;
                    }
                }
                let data = jpeg.get(at..).unwrap_or_default();
                let scan = Scan::new(content, image, &tables, interval)?;
                image.decode(&scan, data)?;
                at += scan_length(data);
                if image.lacks_height {
                    image.check_height(segment(jpeg, &mut at))?;
                }
                if image.components.iter().all(|(_, is_decoded)| *is_decoded) {
                    return Ok(std::mem::take(&mut image.samples));
                }
            }
            0xd9 => return Err(ENDS_EARLY.to_owned()),
            0xde | 0xdf => return Err("the JPEG is hierarchical".to_owned()),
            _ if is_frame_header(marker) => return Err("the JPEG has several frames".to_owned()),
            _ => {}
        }
    }
}

impl Image {
    fn new(header: &[u8], size: [usize; 2], num_components: usize, is_signed: bool) -> Result<Self, String> {
        let (Some([bits, y1, y0, x1, x0, count]), Some(parts)) = (header.first_chunk::<6>(), header.get(6..)) else {
            return Err(DAMAGED.to_owned());
        };
        let (width, height) = (big_endian(&[*x1, *x0]), big_endian(&[*y1, *y0]));
        let parts = parts.as_chunks::<3>().0;
        if width != size[0] || (height != size[1] && height != 0) || !(2..=16).contains(bits) {
            return Err(DAMAGED.to_owned());
        }
        if usize::from(*count) != num_components || parts.len() != num_components {
            return Err(format!("the JPEG has {count} components per pixel, and not {num_components}"));
        }
        let mut ids: Vec<u8> = parts.iter().map(|part| part[0]).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() != num_components || parts.iter().any(|part| part[1] != parts[0][1]) {
            return Err("the components of the JPEG have different sizes or equal names".to_owned());
        }
        Ok(Self {
            size,
            bits: *bits,
            is_signed,
            components: parts.iter().map(|part| (part[0], false)).collect(),
            can_interleave: parts[0][1] == 0x11,
            samples: vec![0; size[0] * size[1] * num_components],
            lacks_height: height == 0,
        })
    }

    /// Decodes the data of a scan.
    fn decode(&mut self, scan: &Scan, data: &[u8]) -> Result<(), String> {
        let ([width, height], step) = (self.size, self.components.len());
        let first_value = 1_i32 << (self.bits - scan.shift - 1);
        let limit = 2 * first_value;
        let mut bits = Bits { data, at: 0, buffer: 0, count: 0 };
        // a restart begins with the prediction of the first line
        let (mut first_line, mut num_restarts) = (0, 0);
        for y in 0..height {
            if y > 0 && scan.interval > 0 && (y * width).is_multiple_of(scan.interval) {
                bits.restart(num_restarts)?;
                (first_line, num_restarts) = (y, num_restarts + 1);
            }
            for x in 0..width {
                for &(component, table) in &scan.components {
                    let at = (y * width + x) * step + component;
                    let sample = |back: usize| i32::from(self.samples[at - back]);
                    let predicted = match (x, y == first_line) {
                        (0, true) => first_value,
                        (_, true) => sample(step),
                        (0, false) => sample(step * width),
                        _ => predict(scan.predictor, sample(step), sample(step * width), sample(step * width + step)),
                    };
                    let value = (predicted + bits.difference(table)?) & 0xffff;
                    let is_negative = self.is_signed && value >= 0x1_0000 - first_value;
                    if value >= limit && !is_negative {
                        return Err(format!("a sample of the JPEG has more than its {} bits", self.bits));
                    }
                    self.samples[at] = u16::try_from(value).unwrap_or(0);
                }
            }
        }
        for &(component, _) in &scan.components {
            self.samples.iter_mut().skip(component).step_by(step).for_each(|value| *value <<= scan.shift);
            self.components[component].1 = true;
        }
        Ok(())
    }

    /// Checks the number of lines that follows the first scan.
    fn check_height(&mut self, segment: Option<(u8, &[u8])>) -> Result<(), String> {
        self.lacks_height = false;
        match segment {
            Some((NUM_LINES, &[high, low])) if big_endian(&[high, low]) == self.size[1] => Ok(()),
            _ => Err("the JPEG does not say its height, or says another one than the file".to_owned()),
        }
    }
}

impl<'a> Scan<'a> {
    fn new(header: &[u8], image: &Image, tables: &'a [Table; 4], interval: usize) -> Result<Self, String> {
        let (count, rest) = header.split_first().ok_or(DAMAGED)?;
        let (parts, rest) = rest.split_at_checked(2 * usize::from(*count)).ok_or(DAMAGED)?;
        let &[predictor, 0, shift] = rest else { return Err(DAMAGED.to_owned()) };
        if !(1..=7).contains(&predictor) || shift >= image.bits {
            return Err(format!("predictor {predictor} with a point transform of {shift} is no lossless JPEG"));
        }
        // restarts within a line would need other predictions
        if !interval.is_multiple_of(image.size[0]) {
            return Err("the JPEG has restarts that are not at the start of a line".to_owned());
        }
        if *count > 1 && !image.can_interleave {
            return Err("the components of the JPEG have several samples per pixel".to_owned());
        }
        let mut components = Vec::new();
        for &[id, table] in parts.as_chunks::<2>().0 {
            let component = image.components.iter().position(|part| *part == (id, false)).ok_or(DAMAGED)?;
            let table = tables.get(usize::from(table >> 4)).filter(|table| !table.is_empty()).ok_or(DAMAGED)?;
            if components.iter().any(|(other, _)| *other == component) {
                return Err(DAMAGED.to_owned());
            }
            components.push((component, table));
        }
        let scan = Self { components, predictor, shift, interval };
        if scan.components.is_empty() { Err(DAMAGED.to_owned()) } else { Ok(scan) }
    }
}

/// The prediction from the sample to the left, above, and above to the left (T.81, table H.1).
fn predict(predictor: u8, left: i32, above: i32, diagonal: i32) -> i32 {
    match predictor {
        1 => left,
        2 => above,
        3 => diagonal,
        4 => left + above - diagonal,
        5 => left + ((above - diagonal) >> 1),
        6 => above + ((left - diagonal) >> 1),
        _ => (left + above) >> 1,
    }
}

/// Splits a DHT segment into its tables. Those of AC coefficients are not used.
fn define<'a>(mut content: &'a [u8], defined: &mut [Option<&'a [u8]>; 4]) -> Result<(), String> {
    while let [class_and_index, rest @ ..] = content {
        let counts = rest.get(..16).ok_or(DAMAGED)?;
        let size = 16 + counts.iter().copied().map(usize::from).sum::<usize>();
        let (table, rest) = rest.split_at_checked(size).ok_or(DAMAGED)?;
        if let Some(place) = defined.get_mut(usize::from(*class_and_index)) {
            *place = Some(table);
        }
        content = rest;
    }
    Ok(())
}

/// The entries of a table of codes, which are in ascending order.
fn expanded(definition: &[u8]) -> Result<Table, String> {
    let (counts, categories) = definition.split_at_checked(16).ok_or(DAMAGED)?;
    let lengths = (1_u8..).zip(counts).flat_map(|(length, count)| repeat_n(length, usize::from(*count)));
    let mut table = Table::with_capacity(1 << 16);
    for (length, category) in lengths.zip(categories) {
        table.extend(repeat_n((length, *category), 1 << (16 - length)));
        if *category > 16 || table.len() > 1 << 16 {
            return Err(DAMAGED.to_owned());
        }
    }
    table.resize(1 << 16, (0, 0));
    Ok(table)
}

/// The bits of a scan.
struct Bits<'a> {
    data: &'a [u8],
    /// The next byte of the data.
    at: usize,
    /// The bits before it that were not used; the last bit is the lowest.
    buffer: u64,
    count: u32,
}

impl Bits<'_> {
    /// The next difference.
    fn difference(&mut self, table: &Table) -> Result<i32, String> {
        while self.count <= 48 {
            let (byte, length) = match *self.data.get(self.at..).unwrap_or_default() {
                [0xff, 0, ..] => (0xff, 2),
                [] | [0xff, ..] => break,
                [byte, ..] => (byte, 1),
            };
            self.at += length;
            self.buffer = self.buffer << 8 | u64::from(byte);
            self.count += 8;
        }
        let next = if self.count < 16 { self.buffer << (16 - self.count) } else { self.buffer >> (self.count - 16) };
        let (length, category) = table[usize::try_from(next & 0xffff).unwrap_or(0)];
        if length == 0 && self.count >= 16 {
            return Err("the JPEG data have a code that no table has".to_owned());
        }
        // category 16 has no more bits
        let extra = u32::from(category) % 16;
        let used = u32::from(length) + extra;
        if length == 0 || used > self.count {
            return Err(ENDS_EARLY.to_owned());
        }
        self.count -= used;
        if category == 16 {
            return Ok(0x8000);
        }
        let bits = i32::try_from(self.buffer >> self.count & ((1 << extra) - 1)).unwrap_or(0);
        let is_positive = extra > 0 && bits >> (extra - 1) == 1;
        Ok(if is_positive || extra == 0 { bits } else { bits - (1 << extra) + 1 })
    }

    /// Continues behind the restart marker with a number (modulo 8).
    fn restart(&mut self, number: usize) -> Result<(), String> {
        while self.data.get(self.at..self.at + 2) == Some(&[0xff, 0xff]) {
            self.at += 1;
        }
        let is_marker = matches!(self.data.get(self.at..), Some([0xff, marker @ 0xd0..=0xd7, ..])
            if usize::from(*marker & 7) == number % 8);
        if self.count >= 8 || !is_marker {
            return Err("the JPEG has no restart marker where one is needed".to_owned());
        }
        (self.at, self.buffer, self.count) = (self.at + 2, 0, 0);
        Ok(())
    }
}

#[cfg(test)]
#[path = "lossless_jpeg_tests.rs"]
mod tests;
