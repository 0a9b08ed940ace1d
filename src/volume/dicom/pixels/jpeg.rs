//! Markers and headers of JPEG images.

/// Start of a JPEG image.
pub(super) const START: [u8; 2] = [0xff, 0xd8];
/// Start of a scan.
pub(super) const SCAN: u8 = 0xda;

/// The next marker of an image, with its content. After a scan header, `at` must be moved behind the data of the scan.
pub(super) fn segment<'a>(jpeg: &'a [u8], at: &mut usize) -> Option<(u8, &'a [u8])> {
    loop {
        match *jpeg.get(*at..*at + 2)? {
            [0xff, 0xff] => *at += 1,
            [0xff, marker @ (0x01 | 0xd0..=0xd9)] => {
                *at += 2;
                return Some((marker, &[]));
            }
            [0xff, marker] => {
                let end = *at + 2 + big_endian(jpeg.get(*at + 2..*at + 4)?);
                let content = jpeg.get(*at + 4..end)?;
                *at = end;
                return Some((marker, content));
            }
            _ => return None,
        }
    }
}

/// The length of the data of a scan, up to the next marker that does not belong to them.
pub(super) fn scan_length(data: &[u8]) -> usize {
    let ends = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff | 0xd0..=0xd7);
    data.windows(2).position(ends).unwrap_or(data.len())
}

/// True for the markers SOF0 to SOF15 of JPEG, and SOF55 of JPEG-LS.
pub(super) fn is_frame_header(marker: u8) -> bool {
    matches!(marker, 0xc0..=0xcf | 0xf7) && !matches!(marker, 0xc4 | 0xc8 | 0xcc)
}

pub(super) fn big_endian(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |value, byte| value << 8 | usize::from(*byte))
}

/// What the headers before the first scan say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct JpegFrame {
    /// SOF0 to SOF15, or SOF55.
    pub marker: u8,
    /// Bits of a sample.
    pub bits: u8,
    /// Width and height. A height of 0 follows after the first scan.
    pub size: [usize; 2],
    pub num_components: u8,
    /// Whether three components are YCbCr and not RGB, if the image says so.
    pub is_ybr: Option<bool>,
}

/// The frame header of a JPEG image; `None` without one.
///
/// A JFIF segment means YCbCr, and one of Adobe names the transform; both as in libjpeg. Without them components with the
/// names R, G and B are RGB.
pub(super) fn frame(jpeg: &[u8]) -> Option<JpegFrame> {
    let (mut at, mut frame, mut jfif, mut adobe) = (2, None, None, None);
    while let Some((marker, content)) = segment(jpeg, &mut at) {
        match marker {
            SCAN | 0xd9 => break,
            0xe0 if content.starts_with(b"JFIF\0") => jfif = Some(true),
            0xee if content.starts_with(b"Adobe") && content.len() >= 12 => adobe = Some(content[11] != 0),
            _ if is_frame_header(marker) && frame.is_none() => frame = Some((marker, content)),
            _ => {}
        }
    }
    let (marker, content) = frame?;
    let names: Vec<u8> = content.get(6..)?.chunks(3).map(|component| component[0]).collect();
    let by_name = matches!(&*names, b"RGB" | b"rgb").then_some(false);
    Some(JpegFrame {
        marker,
        bits: content[0],
        size: [big_endian(&content[3..5]), big_endian(&content[1..3])],
        num_components: content[5],
        is_ybr: jfif.or(adobe).or(by_name),
    })
}

/// How the first scan of a JPEG-LS image stores its components: 0 for one scan each, 1 by lines, 2 by samples.
pub(super) fn interleave(jpeg: &[u8]) -> Option<u8> {
    let mut at = 2;
    loop {
        if let (SCAN, content) = segment(jpeg, &mut at)? {
            return content.get(content.len().checked_sub(2)?).copied();
        }
    }
}

impl JpegFrame {
    /// The name of a process that cannot be decoded here.
    pub(super) fn unknown_process(&self) -> Option<String> {
        let bits = self.bits;
        match self.marker {
            0xc0..=0xc2 if bits == 8 => None,
            0xc0..=0xc2 => Some(format!("lossy JPEG with {bits} bits (process 4)")),
            0xc3 | 0xf7 => None,
            0xc9..=0xcf => Some("JPEG with arithmetic coding".to_owned()),
            _ => Some("hierarchical JPEG".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOF: [u8; 17] = [0xff, 0xc3, 0, 17, 16, 1, 0, 2, 3, 3, 1, 0x11, 0, 2, 0x11, 0, 3];

    /// Segments before the frame header, and the names of its components.
    fn image(segments: &[u8], names: [u8; 3]) -> Vec<u8> {
        let mut image = [&START, segments, &SOF, &[0x11, 0]].concat();
        let frame = 2 + segments.len();
        (0..3).for_each(|index| image[frame + 10 + 3 * index] = names[index]);
        image
    }

    #[test]
    fn the_frame_header_is_read() {
        let jpeg = image(&[0xff, 0xe0, 0, 4, 1, 2, 0xff], [1, 2, 3]);
        let frame = frame(&jpeg).expect("a frame");
        assert_eq!((frame.marker, frame.bits, frame.size, frame.num_components), (0xc3, 16, [0x203, 0x100], 3));
        assert_eq!(frame.unknown_process(), None);
        for length in 0..jpeg.len() - 1 {
            assert_eq!(super::frame(&jpeg[..length]), None);
        }
    }

    #[test]
    fn markers_say_the_colour_space() {
        const JFIF: &[u8] = b"\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0";
        let adobe = |transform| [b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0".as_slice(), &[transform]].concat();
        let space = |segments: &[u8], names| frame(&image(segments, names)).expect("a frame").is_ybr;
        assert_eq!(space(&[], [1, 2, 3]), None);
        assert_eq!(space(&[], *b"RGB"), Some(false));
        assert_eq!(space(&[], *b"rgb"), Some(false));
        assert_eq!(space(JFIF, [1, 2, 3]), Some(true));
        assert_eq!(space(&adobe(0), [1, 2, 3]), Some(false));
        assert_eq!(space(&adobe(1), [1, 2, 3]), Some(true));
        assert_eq!(space(&[JFIF, &adobe(0)].concat(), [1, 2, 3]), Some(true));
        // the words in a comment are no segments
        assert_eq!(space(b"\xff\xfe\0\x10JFIF\0Adobe\0\0\0\0", [1, 2, 3]), None);
    }
}
