//! Missing data of lossless JPEG images (SOF3), whose decoder fills the missing pixels without an error.

use std::iter::repeat_n;

use super::jpeg::{big_endian, ends_scan, is_frame_header};

/// True if the data of a lossless JPEG image end before its last sample. Other images and damaged headers are left to
/// their decoders.
pub(super) fn is_incomplete(jpeg: &[u8]) -> bool {
    has_all_samples(jpeg) == Some(false)
}

fn has_all_samples(jpeg: &[u8]) -> Option<bool> {
    // number of bits of a sample (Huffman code and difference), by the 16 bits from its start
    let mut tables: [Vec<u8>; 4] = Default::default();
    let (mut num_pixels, mut restart_interval, mut at) = (None, 0, 2);
    loop {
        let &[0xff, marker] = jpeg.get(at..at + 2)? else { return None };
        if marker == 0xff {
            at += 1;
            continue;
        }
        if marker == 0xd9 {
            return Some(true);
        }
        let next = at + 2 + big_endian(jpeg.get(at + 2..at + 4)?);
        let content = jpeg.get(at + 4..next)?;
        at = next;
        match marker {
            0xc3 => num_pixels = Some(big_endian(content.get(1..3)?) * big_endian(content.get(3..5)?)),
            0xc4 => read_tables(content, &mut tables)?,
            0xdd => restart_interval = big_endian(content.get(..2)?),
            0xda => {
                let (count, components) = content.split_first()?;
                let of_component = |pair: &[u8]| tables.get(usize::from(pair[1] >> 4));
                let components = components.chunks_exact(2).take(usize::from(*count));
                let used: Vec<&Vec<u8>> = components.map(of_component).collect::<Option<_>>()?;
                if used.is_empty() {
                    return None;
                }
                let data = jpeg.get(at..)?;
                if !has_samples(data, &used, num_pixels?, restart_interval)? {
                    return Some(false);
                }
                at += data.windows(2).position(ends_scan)?;
            }
            _ if is_frame_header(marker) => return None,
            _ => {}
        }
    }
}

/// Reads the tables of a DHT segment for differences (class 0).
fn read_tables(mut content: &[u8], tables: &mut [Vec<u8>; 4]) -> Option<()> {
    while let [class_and_index, rest @ ..] = content {
        let (counts, rest) = rest.split_at_checked(16)?;
        let (categories, rest) = rest.split_at_checked(counts.iter().copied().map(usize::from).sum())?;
        content = rest;
        let lengths = (1_u8..).zip(counts).flat_map(|(length, count)| repeat_n(length, usize::from(*count)));
        // codes are in ascending order; category 16 has no more bits
        let entries = lengths.zip(categories);
        let sizes = entries.flat_map(|(length, category)| repeat_n(length + category % 16, 1 << (16 - length)));
        if let Some(table) = tables.get_mut(usize::from(*class_and_index)) {
            *table = sizes.take(1 << 16).collect();
        }
    }
    Some(())
}

/// True if a scan has a sample of each component for every pixel; `None` for a code that no table has.
fn has_samples(mut data: &[u8], tables: &[&Vec<u8>], num_pixels: usize, restart_interval: usize) -> Option<bool> {
    let mut left = num_pixels;
    loop {
        let (bytes, rest) = split_at_marker(data);
        let count = if restart_interval == 0 { left } else { left.min(restart_interval) };
        let mut at = 0;
        for _ in 0..count {
            for table in tables {
                let byte = |offset| bytes.get(at / 8 + offset).map_or(0, |byte| usize::from(*byte));
                let three = byte(0) << 16 | byte(1) << 8 | byte(2);
                at += usize::from(*table.get(three >> (8 - at % 8) & 0xffff)?);
                if at > 8 * bytes.len() {
                    return Some(false);
                }
            }
        }
        left -= count;
        let [0xff, 0xd0..=0xd7, next @ ..] = rest else { return Some(left == 0) };
        data = next;
    }
}

/// The data before the next marker, without the zeros after 0xff; and the rest, from the marker on.
fn split_at_marker(data: &[u8]) -> (Vec<u8>, &[u8]) {
    let (mut bytes, mut rest) = (Vec::new(), data);
    loop {
        match rest {
            [0xff, 0, next @ ..] => {
                bytes.push(0xff);
                rest = next;
            }
            // padding
            [0xff, 0xff, ..] => rest = &rest[1..],
            [] | [0xff, ..] => return (bytes, rest),
            [byte, next @ ..] => {
                bytes.push(*byte);
                rest = next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of 4x2 pixels. Categories 0, 12 and 16 have the codes 0, 10 and 110.
    fn image(num_components: u8, restart_interval: u8, data: &[u8]) -> Vec<u8> {
        let mut jpeg = vec![0xff, 0xd8, 0xff, 0xc4, 0, 22, 0, 1, 1, 1];
        jpeg.extend([0; 13]);
        jpeg.extend([0, 12, 16, 0xff, 0xff, 0xdd, 0, 4, 0, restart_interval]);
        jpeg.extend([0xff, 0xc3, 0, 8 + 3 * num_components, 16, 0, 2, 0, 4, num_components]);
        (0..num_components).for_each(|index| jpeg.extend([index, 0x11, 0]));
        jpeg.extend([0xff, 0xda, 0, 6 + 2 * num_components, num_components]);
        (0..num_components).for_each(|index| jpeg.extend([index, 0]));
        jpeg.extend([1, 0, 0]);
        jpeg.extend(data);
        jpeg.extend([0xff, 0xd9, 0]);
        jpeg
    }

    #[test]
    fn samples_of_a_scan_are_counted() {
        for (num_components, restart_interval, data, is_wanted) in [
            (1, 0, &[0][..], false),
            (1, 0, &[], true),
            // a difference of 12 bits
            (1, 0, &[0x80, 0, 0], false),
            (1, 0, &[0x80, 0], true),
            // category 16 has no bits
            (1, 0, &[0b1101_1011, 0b0110_1101, 0b1011_0110], false),
            (1, 0, &[0b1101_1011, 0b0110_1101], true),
            // 0xff in the data
            (1, 0, &[0xbf, 0xff, 0, 0x01], false),
            (1, 0, &[0xbf, 0xff, 0], true),
            (2, 0, &[0, 0], false),
            (2, 0, &[0], true),
            // each interval has its own samples
            (1, 4, &[0x0f, 0xff, 0xd0, 0x0f], false),
            (1, 4, &[0x0f, 0xff, 0xff, 0xd0, 0x0f], false),
            (1, 4, &[0x80, 0xff, 0xd0, 0x0f], true),
            (1, 4, &[0x0f, 0xff, 0xd0, 0x80], true),
            (1, 4, &[0], true),
            (1, 0, &[0x80, 0xff, 0xd0, 0], true),
        ] {
            let jpeg = image(num_components, restart_interval, data);
            assert_eq!(is_incomplete(&jpeg), is_wanted, "{num_components} {restart_interval} {data:?}");
        }
    }

    #[test]
    fn other_images_are_left_to_their_decoders() {
        let mut lossy = image(1, 0, &[]);
        assert!(is_incomplete(&lossy));
        let frame = lossy.windows(2).position(|pair| pair == [0xff, 0xc3]).expect("a frame header");
        lossy[frame + 1] = 0xc1;
        let whole = image(1, 0, &[]);
        let cut = (0..whole.len() - 5).map(|length| whole[..length].to_vec());
        for jpeg in cut.chain([lossy, b"no JPEG".to_vec()]) {
            assert!(!is_incomplete(&jpeg), "{jpeg:?}");
        }
    }
}
