//! Markers and headers of JPEG images.

/// Renames the three components of a JPEG image to R, G and B, unless a marker of Adobe says that it is YCbCr.
pub(super) fn name_components(jpeg: &mut [u8]) {
    let header = jpeg.get(..1024).unwrap_or(jpeg);
    let adobe = header.windows(5).position(|name| name == b"Adobe");
    if adobe.and_then(|at| header.get(at + 11)).is_some_and(|transform| *transform != 0) {
        return;
    }
    let (mut at, mut names) = (2, [0; 3]);
    while let Some(&[0xff, marker, high, low]) = jpeg.get(at..at + 4) {
        let next = at + 2 + big_endian(&[high, low]);
        if is_frame_header(marker)
            && let Some(frame) = jpeg.get_mut(at + 9..at + 17)
            && frame[0] == 3
        {
            names = [frame[1], frame[4], frame[7]];
            (frame[1], frame[4], frame[7]) = (b'R', b'G', b'B');
        }
        if marker == 0xda {
            let Some([count, scan @ ..]) = jpeg.get_mut(at + 4..next) else { return };
            for selector in scan.iter_mut().step_by(2).take(usize::from(*count)) {
                if let Some(index) = names.iter().position(|name| name == selector) {
                    *selector = b"RGB"[index];
                }
            }
            let data = jpeg.get(next..).unwrap_or_default();
            let Some(length) = data.windows(2).position(ends_scan) else { return };
            at = next + length;
        } else {
            at = next;
        }
    }
}

/// True for a marker that ends the data of a scan.
pub(super) fn ends_scan(pair: &[u8]) -> bool {
    pair[0] == 0xff && !matches!(pair[1], 0 | 0xff | 0xd0..=0xd7)
}

/// True for the markers SOF0 to SOF15 of JPEG, and SOF55 of JPEG-LS.
pub(super) fn is_frame_header(marker: u8) -> bool {
    matches!(marker, 0xc0..=0xcf | 0xf7) && !matches!(marker, 0xc4 | 0xc8 | 0xcc)
}

pub(super) fn big_endian(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |value, byte| value << 8 | usize::from(*byte))
}

/// The frame header of a JPEG image: its marker, bits of a sample, and width and height.
pub(super) fn frame(bytes: &[u8]) -> Option<(u8, u8, [usize; 2])> {
    let mut at = 2;
    loop {
        let marker = bytes.get(at..at + 4)?;
        if marker[0] != 0xff {
            return None;
        }
        if marker[1] == 0xff {
            at += 1;
            continue;
        }
        if is_frame_header(marker[1]) {
            let frame = bytes.get(at + 4..at + 9)?;
            return Some((marker[1], frame[0], [big_endian(&frame[3..]), big_endian(&frame[1..3])]));
        }
        at += 2 + big_endian(&marker[2..]);
    }
}
