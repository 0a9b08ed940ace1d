//! Headers of JPEG 2000 images (ISO/IEC 15444-1, annex A): what their decoder does not check.

use super::jpeg::big_endian;

/// Most bytes before the code stream, in which a JP2 file has its boxes.
const MAX_START: usize = 4096;
const START: [u8; 4] = [0xff, 0x4f, 0xff, 0x51];
const CODING_STYLE: [u8; 2] = [0xff, 0x52];
const TILE: [u8; 2] = [0xff, 0x90];

/// What the header of a code stream says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Jpeg2000Header {
    pub size: [usize; 2],
    /// Bits of a sample.
    pub bits: u16,
    /// The decoder converts the first three components to RGB.
    pub has_transform: bool,
    num_components: usize,
    /// The components have one size and one number of bits.
    are_equal: bool,
}

/// The header of a code stream, also in a JP2 file; `None` without one.
pub(super) fn header(bytes: &[u8]) -> Option<Jpeg2000Header> {
    let start = bytes.get(..MAX_START).unwrap_or(bytes).windows(4).position(|four| four == START)?;
    let stream = bytes.get(start..)?;
    let number = |at: usize| stream.get(at..at + 4).map(big_endian);
    let num_components = big_endian(stream.get(40..42)?);
    let components = stream.get(42..42 + 3 * num_components)?.as_chunks::<3>().0;
    let first = components.first()?;
    // the highest bit is that of signed samples
    let bits = u16::from(first[0] & 0x7f) + 1;
    let mut at = 4 + big_endian(stream.get(4..6)?);
    while stream.get(at..at + 2).is_some_and(|marker| marker != CODING_STYLE && marker != TILE) {
        at += 2 + big_endian(stream.get(at + 2..at + 4)?);
    }
    Some(Jpeg2000Header {
        size: [number(8)?.checked_sub(number(16)?)?, number(12)?.checked_sub(number(20)?)?],
        bits,
        has_transform: stream.get(at..at + 2)? == CODING_STYLE && *stream.get(at + 8)? == 1,
        num_components,
        are_equal: components.iter().all(|component| component[0] == first[0] && component[1..] == [1, 1]),
    })
}

impl Jpeg2000Header {
    /// Fails for an image whose samples the decoder would write to wrong places.
    pub(super) fn check(&self, samples: usize, bits_allocated: u16) -> Result<(), String> {
        if self.num_components != samples {
            return Err(format!("its JPEG 2000 image has {} components, and not {samples}", self.num_components));
        }
        if !self.are_equal {
            return Err("the components of its JPEG 2000 image have different sizes or bits".to_owned());
        }
        if self.bits > bits_allocated {
            let bits = self.bits;
            return Err(format!("its JPEG 2000 samples have {bits} bits, and BitsAllocated is {bits_allocated}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with these components (bits, subsampling), after the boxes of a JP2 file.
    fn stream(components: &[[u8; 3]], transform: u8) -> Vec<u8> {
        let mut stream = vec![0, 0, 0xff, 0x4f, 0xff, 0x51, 0, 38 + 3 * u8::try_from(components.len()).unwrap(), 0, 0];
        for value in [300_u32, 200, 10, 20, 300, 200, 0, 0] {
            stream.extend(value.to_be_bytes());
        }
        stream.extend([0, u8::try_from(components.len()).unwrap()]);
        stream.extend(components.iter().flatten());
        stream.extend([0xff, 0x64, 0, 3, 9]);
        stream.extend([0xff, 0x52, 0, 12, 0, 0, 0, 1, transform, 5]);
        stream
    }

    #[test]
    fn headers_are_read_and_checked() {
        let found = header(&stream(&[[7, 1, 1]; 3], 1)).expect("a header");
        assert_eq!((found.size, found.bits, found.has_transform), ([290, 180], 8, true));
        assert_eq!(found.check(3, 8), Ok(()));
        assert!(found.check(1, 8).is_err_and(|error| error.contains("3 components, and not 1")));
        let signed = header(&stream(&[[0x8b, 1, 1]], 0)).expect("a header");
        assert_eq!((signed.bits, signed.has_transform), (12, false));
        assert!(signed.check(1, 8).is_err_and(|error| error.contains("12 bits, and BitsAllocated is 8")));
        for other in [[7, 2, 1], [7, 1, 2], [9, 1, 1]] {
            let found = header(&stream(&[[7, 1, 1], other, [7, 1, 1]], 0)).expect("a header");
            assert!(found.check(3, 16).is_err(), "{other:?}");
        }
        let whole = stream(&[[7, 1, 1]], 0);
        assert!((0..whole.len() - 1).all(|length| header(&whole[..length]).is_none()));
    }
}
