//! TIFF files with LZW compression whose decoder takes whole data for incomplete ones.

use tiff::decoder::ChunkType;
use tiff::tags::{CompressionMethod, PlanarConfiguration, Tag};
use weezl::BitOrder;
use weezl::decode::Configuration;

use super::shared::MAX_PIXELS;
use super::tiff::{Directory, decoder};

/// The file without compression. The decoder reads tiles row by row. It fails where a row ends with a code after the last
/// byte of the tile was read, which depends on the pixels. `None` for other files, and for tiles that are incomplete.
pub(super) fn uncompressed(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut decoder = decoder(bytes).ok()?;
    let mut numbers = |tag| decoder.find_tag_unsigned_vec::<u64>(tag).ok().flatten();
    let first = |values: Option<Vec<u64>>| values.and_then(|values| values.first().copied());
    if first(numbers(Tag::Compression))? != u64::from(CompressionMethod::LZW.to_u16()) {
        return None;
    }
    let bits = first(numbers(Tag::BitsPerSample)).unwrap_or(1);
    let is_planar = first(numbers(Tag::PlanarConfiguration)) == Some(u64::from(PlanarConfiguration::Planar.to_u16()));
    let samples = if is_planar { 1 } else { first(numbers(Tag::SamplesPerPixel)).unwrap_or(1) };
    let is_tiled = decoder.get_chunk_type() == ChunkType::Tile;
    let (of_offsets, of_counts) =
        if is_tiled { (Tag::TileOffsets, Tag::TileByteCounts) } else { (Tag::StripOffsets, Tag::StripByteCounts) };
    let mut numbers = |tag| decoder.find_tag_unsigned_vec::<u64>(tag).ok().flatten();
    let (offsets, counts) = (numbers(of_offsets)?, numbers(of_counts)?);
    let (width, height) = decoder.chunk_dimensions();
    let row = u64::from(width).checked_mul(bits)?.checked_mul(samples)?.div_ceil(8);
    let size = usize::try_from(row.checked_mul(u64::from(height))?).ok()?;
    // the tiles at the border may be larger than what is seen of them
    if offsets.len() != counts.len() || size.checked_mul(offsets.len())? > 2 * MAX_PIXELS {
        return None;
    }
    let mut copy = bytes.to_vec();
    let (mut new_offsets, mut new_counts) = (Vec::new(), Vec::new());
    for (offset, count) in offsets.iter().zip(&counts) {
        let start = usize::try_from(*offset).ok()?;
        let packed = bytes.get(start..start.checked_add(usize::try_from(*count).ok()?)?)?;
        let plain = unpacked(packed, size);
        if is_tiled && plain.len() < size {
            return None;
        }
        new_offsets.push(copy.len() as u64);
        new_counts.push(plain.len() as u64);
        copy.extend_from_slice(&plain);
    }
    let directory = Directory::first(bytes)?;
    directory.replace(&mut copy, of_offsets, &new_offsets)?;
    directory.replace(&mut copy, of_counts, &new_counts)?;
    directory.set(&mut copy, Tag::Compression, CompressionMethod::None.to_u16())?;
    Some(copy)
}

/// At most this number of bytes of packed ones. The decoder may deliver bytes and say
/// that there is no progress.
fn unpacked(mut packed: &[u8], size: usize) -> Vec<u8> {
    let mut plain = vec![0; size];
    let mut decoder = Configuration::with_tiff_size_switch(BitOrder::Msb, 8).with_yield_on_full_buffer(true).build();
    let mut length = 0;
    while length < size {
        let result = decoder.decode_bytes(packed, &mut plain[length..]);
        if result.status.is_err() || result.consumed_in + result.consumed_out == 0 {
            break;
        }
        packed = &packed[result.consumed_in..];
        length += result.consumed_out;
    }
    plain.truncate(length);
    plain
}
