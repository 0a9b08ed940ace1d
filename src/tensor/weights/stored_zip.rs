//! Entries of a zip archive whose contents are stored without compression, as PyTorch writes them. Everything is
//! checked against the length of the file, and nothing is allocated for what the file only claims to contain.
//!
//! Layout: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16
//! (its end, with the ZIP64 forms).

use std::ops::Range;

/// One entry of the central directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ZipEntry {
    pub(super) name: String,
    /// Whether the bytes in the file are the content: neither compressed nor encrypted.
    pub(super) is_stored: bool,
    /// The content in the file.
    pub(super) range: Range<usize>,
    /// CRC-32 of the content.
    pub(super) crc: u32,
}

const LOCAL: [u8; 4] = *b"PK\x03\x04";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";
/// Bytes of the end of the central directory without its comment, and the most with it.
const END_BYTES: usize = 22;
const LONGEST_END: usize = END_BYTES + 0xffff;
const LOCATOR_64_BYTES: usize = 20;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;
/// Id of the extra field with 64-bit sizes and offsets.
const ZIP64_FIELD: u16 = 1;

/// The entries of the archive `bytes` in the order of its central directory, or what is wrong with it.
pub(super) fn entries(bytes: &[u8]) -> Result<Vec<ZipEntry>, String> {
    let (count, mut directory) = directory(bytes)?;
    let mut entries = Vec::new();
    for index in 0..count {
        let (entry, length) = entry(bytes, directory).map_err(|reason| format!("entry {index}: {reason}"))?;
        directory = &directory[length..];
        entries.push(entry);
    }
    Ok(entries)
}

/// The number of entries, and the bytes of the central directory.
fn directory(bytes: &[u8]) -> Result<(u64, &[u8]), String> {
    let missing = || "the end of its directory is missing".to_owned();
    let last = bytes.len().checked_sub(END_BYTES).ok_or_else(missing)?;
    let first = bytes.len().saturating_sub(LONGEST_END);
    let ends_here = |at: &usize| {
        let end = &bytes[*at..];
        end.starts_with(&END) && u16_at(end, 20).is_some_and(|comment| END_BYTES + usize::from(comment) <= end.len())
    };
    let at = (first..=last).rev().find(ends_here).ok_or_else(missing)?;
    let end = &bytes[at..];
    let short = (|| Some((u16_at(end, 10)?, u32_at(end, 12)?, u32_at(end, 16)?)))().ok_or_else(missing)?;
    let (mut count, mut size, mut start) = (u64::from(short.0), u64::from(short.1), u64::from(short.2));
    if short.0 == u16::MAX || short.1 == u32::MAX || short.2 == u32::MAX {
        let locator =
            at.checked_sub(LOCATOR_64_BYTES).map(|at| &bytes[at..]).filter(|end| end.starts_with(&LOCATOR_64));
        let end = locator.and_then(|locator| tail(bytes, u64_at(locator, 8)?)).filter(|end| end.starts_with(&END_64));
        let long = end.and_then(|end| Some((u64_at(end, 32)?, u64_at(end, 40)?, u64_at(end, 48)?)));
        (count, size, start) = long.ok_or_else(missing)?;
    }
    let size = usize::try_from(size).ok();
    let directory = tail(bytes, start).and_then(|tail| tail.get(..size?)).ok_or("its directory is not in the file")?;
    Ok((count, directory))
}

/// The first entry of the directory, and the length of its record.
fn entry(bytes: &[u8], directory: &[u8]) -> Result<(ZipEntry, usize), String> {
    let ends = || "the directory ends early".to_owned();
    let header = directory.get(..CENTRAL_BYTES).filter(|header| header.starts_with(&CENTRAL)).ok_or_else(ends)?;
    let length = |at| u16_at(header, at).map(usize::from).ok_or_else(ends);
    let (name_end, extra, comment) = (CENTRAL_BYTES + length(28)?, length(30)?, length(32)?);
    let extra_end = name_end + extra;
    let record = directory.get(..extra_end + comment).ok_or_else(ends)?;
    let name = String::from_utf8_lossy(&record[CENTRAL_BYTES..name_end]).into_owned();
    let number = |at| u32_at(header, at).map(u64::from).ok_or_else(ends);
    let (crc, flags, method) = (u32_at(header, 16), u16_at(header, 8), u16_at(header, 10));
    let (mut packed, mut size, mut start) = (number(20)?, number(24)?, number(42)?);
    // the 64-bit values of those fields that are full, in this order
    let mut long = zip64_field(&record[name_end..extra_end]).chunks_exact(8).map(|chunk| u64_at(chunk, 0));
    for value in [&mut size, &mut packed, &mut start] {
        if *value == u64::from(u32::MAX) {
            *value = long.next().flatten().ok_or_else(|| format!("`{name}` has no 64-bit size or offset"))?;
        }
    }
    let outside = || format!("`{name}` extends past the end of the file");
    let local = tail(bytes, start).ok_or_else(outside)?;
    let local = local.get(..LOCAL_BYTES).filter(|local| local.starts_with(&LOCAL));
    let local = local.ok_or_else(|| format!("`{name}` is not where the directory says"))?;
    let before = [26, 28].into_iter().filter_map(|at| u16_at(local, at)).map(u64::from).sum::<u64>();
    let start = start.checked_add(LOCAL_BYTES as u64 + before).and_then(|start| usize::try_from(start).ok());
    let range = start.zip(usize::try_from(size).ok()).and_then(|(start, size)| Some(start..start.checked_add(size)?));
    let range = range.filter(|range| range.end <= bytes.len()).ok_or_else(outside)?;
    let is_stored = method == Some(0) && flags.is_some_and(|flags| flags & 1 == 0);
    Ok((ZipEntry { name, is_stored, range, crc: crc.unwrap_or_default() }, record.len()))
}

/// The content of the extra field with 64-bit numbers; empty without one.
fn zip64_field(mut extra: &[u8]) -> &[u8] {
    while let (Some(id), Some(length)) = (u16_at(extra, 0), u16_at(extra, 2)) {
        let Some(content) = extra.get(4..4 + usize::from(length)) else { break };
        if id == ZIP64_FIELD {
            return content;
        }
        extra = &extra[4 + usize::from(length)..];
    }
    &[]
}

fn tail(bytes: &[u8], start: u64) -> Option<&[u8]> {
    bytes.get(usize::try_from(start).ok()?..)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Cursor, Write};
    use zip::write::SimpleFileOptions;
    use zip::{CompressionMethod, ZipWriter};

    fn archive(large: bool) -> Vec<u8> {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(large);
        for (name, content) in [("a/data.pkl", &b"pickle"[..]), ("a/data/0", &[7; 100]), ("a/version", b"3\n")] {
            zip.start_file(name, stored).unwrap();
            zip.write_all(content).unwrap();
        }
        zip.set_comment("a comment with PK\x05\x06 in it");
        zip.finish().unwrap().into_inner()
    }

    #[test]
    fn entries_of_archives_with_32_and_64_bit_sizes_are_found() {
        for large in [false, true] {
            let bytes = archive(large);
            let found = entries(&bytes).unwrap();
            let contents: Vec<(&str, &[u8])> =
                found.iter().map(|entry| (entry.name.as_str(), &bytes[entry.range.clone()])).collect();
            assert_eq!(contents, [("a/data.pkl", &b"pickle"[..]), ("a/data/0", &[7; 100]), ("a/version", b"3\n")]);
            assert!(found.iter().all(|entry| entry.is_stored));
            assert_eq!(found[0].crc, crc32fast::hash(b"pickle"));
        }
    }

    /// A directory of one entry at `start` in the ZIP64 form, which claims `count` entries and `size` bytes.
    fn long(bytes: &mut Vec<u8>, count: u64, size: u64, start: u64) {
        let end = bytes.len() as u64;
        bytes.extend(END_64);
        bytes.extend([0; 28]);
        for number in [count, size, start] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(LOCATOR_64);
        bytes.extend([0; 4]);
        bytes.extend(end.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(END);
        bytes.extend([0; 4]);
        bytes.extend([0xff; 12]);
        bytes.extend([0; 2]);
    }

    #[test]
    fn a_zip64_directory_is_read_and_its_claims_are_not_believed() {
        let mut bytes = archive(false);
        let end = bytes.len() - bytes.windows(4).rev().position(|four| four == CENTRAL).unwrap() - 4;
        let first = bytes.windows(4).position(|four| four == CENTRAL).unwrap();
        let size = (bytes.windows(4).skip(end).position(|four| four == END).unwrap() + end - first) as u64;
        long(&mut bytes, 3, size, first as u64);
        assert_eq!(entries(&bytes).unwrap().len(), 3);
        for (count, size, start) in [
            (u64::MAX, size, first as u64),
            (3, u64::MAX, first as u64),
            (3, size, u64::MAX),
            (1 << 40, 1 << 45, 1 << 41),
        ] {
            let mut bytes = archive(false);
            long(&mut bytes, count, size, start);
            assert!(entries(&bytes).is_err(), "{count} {size} {start}");
        }
    }

    #[test]
    fn a_shortened_or_changed_archive_is_an_error_or_has_other_entries() {
        let bytes = archive(true);
        for length in 0..bytes.len() {
            assert!(entries(&bytes[..length]).is_err(), "{length}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            if let Ok(found) = entries(&changed) {
                assert!(found.iter().all(|entry| entry.range.end <= bytes.len()));
            }
        }
    }

    #[test]
    fn compressed_and_encrypted_entries_are_marked() {
        let bytes = archive(false);
        let central = bytes.windows(4).position(|four| four == CENTRAL).unwrap();
        for (at, value) in [(8, 1), (10, 8)] {
            let mut changed = bytes.clone();
            changed[central + at] = value;
            let stored: Vec<bool> = entries(&changed).unwrap().iter().map(|entry| entry.is_stored).collect();
            assert_eq!(stored, [false, true, true]);
        }
    }
}
