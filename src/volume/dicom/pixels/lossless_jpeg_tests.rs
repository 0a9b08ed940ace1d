//! Images of an encoder that is written here. libjpeg-turbo 3 decodes all of its streams to the same samples, except for
//! those whose height follows, which it refuses.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// How an image is encoded.
#[derive(Debug, Clone, Copy)]
struct Options {
    size: [usize; 2],
    bits: u8,
    num_components: usize,
    predictor: u8,
    shift: u8,
    /// Lines between restarts; 0 for none.
    lines: usize,
    /// One scan for all components.
    is_interleaved: bool,
    /// The height follows the first scan.
    has_late_height: bool,
}

const USUAL: Options = Options {
    size: [9, 7],
    bits: 12,
    num_components: 1,
    predictor: 1,
    shift: 0,
    lines: 0,
    is_interleaved: true,
    has_late_height: false,
};

/// Samples with smooth parts and jumps.
fn samples(options: Options) -> Vec<u16> {
    let mut rng = StdRng::seed_from_u64(7);
    let limit = 1_u32 << options.bits;
    let count = options.size[0] * options.size[1] * options.num_components;
    let mut value = limit / 2;
    (0..count)
        .map(|index| {
            value = match index % 5 {
                0 => rng.random_range(0..limit),
                1 => limit - 1,
                2 => 0,
                _ => (value + rng.random_range(0..3)) % limit,
            };
            u16::try_from(value >> options.shift << options.shift).expect("16 bits")
        })
        .collect()
}

#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    bit: u32,
    count: u32,
}

impl Writer {
    fn put(&mut self, value: u32, length: u32) {
        for index in (0..length).rev() {
            self.bit = self.bit << 1 | value >> index & 1;
            self.count += 1;
            if self.count == 8 {
                let byte = u8::try_from(self.bit).expect("8 bits");
                self.bytes.push(byte);
                if byte == 0xff {
                    self.bytes.push(0);
                }
                (self.bit, self.count) = (0, 0);
            }
        }
    }

    /// Fills the last byte with ones.
    fn align(&mut self) {
        while self.count > 0 {
            self.put(1, 1);
        }
    }
}

/// A segment with its length.
fn segment_of(marker: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len() + 2).expect("short");
    [&[0xff, marker], length.to_be_bytes().as_slice(), content].concat()
}

/// Encodes samples. The code of category N is N in 5 bits.
fn encode(options: Options, samples: &[u16]) -> Vec<u8> {
    let Options { size: [width, height], bits, num_components, predictor, shift, lines, .. } = options;
    let half = |value: usize| u16::try_from(value).expect("16 bits").to_be_bytes();
    let mut jpeg = vec![0xff, 0xd8];
    let counts: [u8; 16] = [0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let table: Vec<u8> = (0..17).collect();
    jpeg.extend(segment_of(0xc4, &[&[0], counts.as_slice(), &table].concat()));
    let ids: Vec<u8> = (1..=u8::try_from(num_components).expect("few")).collect();
    let late = if options.has_late_height { 0 } else { height };
    let mut frame = [&[bits], half(late).as_slice(), &half(width), &[ids[ids.len() - 1]]].concat();
    frame.extend(ids.iter().flat_map(|id| [*id, 0x11, 0]));
    jpeg.extend(segment_of(0xc3, &frame));
    if lines > 0 {
        jpeg.extend(segment_of(0xdd, &half(lines * width)));
    }
    let scans: Vec<Vec<u8>> =
        if options.is_interleaved { vec![ids] } else { ids.into_iter().map(|id| vec![id]).collect() };
    for (index, scan) in scans.iter().enumerate() {
        let mut header = vec![u8::try_from(scan.len()).expect("few")];
        header.extend(scan.iter().flat_map(|id| [*id, 0]));
        header.extend([predictor, 0, shift]);
        jpeg.extend(segment_of(0xda, &header));
        jpeg.extend(scan_data(options, samples, scan));
        if index == 0 && options.has_late_height {
            jpeg.extend(segment_of(0xdc, &half(height)));
        }
    }
    jpeg.extend([0xff, 0xd9]);
    jpeg
}

fn scan_data(options: Options, samples: &[u16], ids: &[u8]) -> Vec<u8> {
    let Options { size: [width, height], bits, num_components, predictor, shift, lines, .. } = options;
    let at = |x: usize, y: usize, c: usize| i32::from(samples[(y * width + x) * num_components + c] >> shift);
    let mut writer = Writer::default();
    for y in 0..height {
        let is_restart = lines > 0 && y > 0 && y % lines == 0;
        if is_restart {
            writer.align();
            writer.bytes.extend([0xff, 0xd0 + u8::try_from((y / lines - 1) % 8).expect("small")]);
        }
        let is_first = y == 0 || is_restart;
        for x in 0..width {
            for c in ids.iter().map(|id| usize::from(*id) - 1) {
                let predicted = match (x, is_first) {
                    (0, true) => 1 << (bits - shift - 1),
                    (_, true) => at(x - 1, y, c),
                    (0, false) => at(x, y - 1, c),
                    _ => {
                        let (a, b, d) = (at(x - 1, y, c), at(x, y - 1, c), at(x - 1, y - 1, c));
                        [a, b, d, a + b - d, a + ((b - d) >> 1), b + ((a - d) >> 1), (a + b) >> 1]
                            [usize::from(predictor) - 1]
                    }
                };
                // modulo 2^16, from -32767 to 32768
                let difference = (at(x, y, c) - predicted + 0x7fff).rem_euclid(0x1_0000) - 0x7fff;
                let category = 32 - difference.unsigned_abs().leading_zeros();
                writer.put(category, 5);
                if category < 16 {
                    let low = if difference < 0 { difference + (1 << category) - 1 } else { difference };
                    writer.put(u32::try_from(low).expect("not negative"), category);
                }
            }
        }
    }
    writer.align();
    writer.bytes
}

/// Every option with every predictor.
fn all() -> Vec<Options> {
    let mut all = Vec::new();
    for predictor in 1..=7 {
        for bits in 2..=16 {
            for shift in [0, 1, bits / 2, bits - 1] {
                for lines in [0, 1, 2, 3] {
                    for num_components in [1, 3] {
                        all.push(Options { bits, num_components, predictor, shift, lines, ..USUAL });
                    }
                }
            }
        }
        let num_components = 3;
        all.push(Options { predictor, num_components, is_interleaved: false, lines: 2, ..USUAL });
        all.push(Options { predictor, num_components, is_interleaved: false, has_late_height: true, ..USUAL });
        all.push(Options { predictor, size: [1, 9], lines: 1, ..USUAL });
        all.push(Options { predictor, size: [9, 1], has_late_height: true, ..USUAL });
    }
    all
}

#[test]
fn every_predictor_precision_restart_interval_and_point_transform_is_decoded() {
    for options in all() {
        let wanted = samples(options);
        let jpeg = encode(options, &wanted);
        let found = decode(&jpeg, options.size, options.num_components, false);
        assert_eq!(found.as_ref(), Ok(&wanted), "{options:?}");
    }
}

#[test]
fn signed_samples_may_have_more_bits_as_their_sign() {
    let options = Options { predictor: 4, ..USUAL };
    let wanted: Vec<u16> = (0..63).map(|index: i16| (index * 31 - 900).cast_unsigned()).collect();
    let jpeg = encode(options, &wanted);
    assert_eq!(decode(&jpeg, options.size, 1, true), Ok(wanted));
    let error = decode(&jpeg, options.size, 1, false).expect_err("more than 12 bits");
    assert!(error.contains("more than its 12 bits"), "{error}");
}

/// A stream of [`USUAL`] with restarts after some bytes were replaced.
fn changed(from: &[u8], to: &[u8]) -> Result<Vec<u16>, String> {
    let options = Options { lines: 2, ..USUAL };
    let mut jpeg = encode(options, &samples(options));
    let at = jpeg.windows(from.len()).position(|found| found == from).expect("the bytes");
    jpeg.splice(at..at + from.len(), to.iter().copied());
    decode(&jpeg, options.size, 1, false)
}

#[test]
fn what_cannot_be_decoded_is_refused() {
    let scan = |predictor, shift| [0xff, 0xda, 0, 8, 1, 1, 0, predictor, 0, shift];
    let usual = scan(1, 0);
    for (from, to, part) in [
        (&usual[..], &scan(0, 0)[..], "predictor 0"),
        (&usual, &scan(8, 0), "predictor 8"),
        (&usual, &scan(1, 12), "a point transform of 12"),
        // an interval of half a line
        (&[0xff, 0xdd, 0, 4, 0, 18], &[0xff, 0xdd, 0, 4, 0, 4], "restarts that are not at the start of a line"),
        (&[0xff, 0xdd, 0, 4, 0, 18], &[0xff, 0xdd, 0, 4, 0, 9], "no restart marker"),
        (&[0xff, 0xdd, 0, 4, 0, 18], &[], "end before the last pixel"),
        (&[0xff, 0xd1], &[0xff, 0xd2], "no restart marker"),
        (&[0xff, 0xd1], &[], ""),
        (&[0xff, 0xc3, 0, 11, 12], &[0xff, 0xc3, 0, 11, 17], "damaged"),
        (&[0xff, 0xc3, 0, 11, 12, 0, 7], &[0xff, 0xc3, 0, 11, 12, 0, 0], "does not say its height"),
        (&[0xff, 0xc3, 0, 11, 12, 0, 7], &[0xff, 0xc3, 0, 11, 12, 0, 8], "damaged"),
        (&[0xff, 0xc3], &[0xff, 0xcb], "several frames"),
        (&[0xff, 0xc3], &[0xff, 0xde], "hierarchical"),
        // categories, and the number of codes
        (&[14, 15, 16], &[14, 15, 17], "damaged"),
        (&[0, 0, 0, 0, 17, 0], &[3, 0, 0, 0, 14, 0], "damaged"),
    ] {
        let error = changed(from, to).expect_err(part);
        assert!(error.contains(part), "{from:?} -> {to:?}: {error}");
    }
    let options = Options { num_components: 3, ..USUAL };
    let jpeg = encode(options, &samples(options));
    assert!(decode(&jpeg, options.size, 1, false).is_err_and(|error| error.contains("3 components")));
    let at = jpeg.windows(3).position(|found| found == [2, 0x11, 0]).expect("the second component");
    for (id, sampling) in [(1, 0x11), (2, 0x21)] {
        let mut other = jpeg.clone();
        (other[at], other[at + 1]) = (id, sampling);
        assert!(decode(&other, options.size, 3, false).is_err_and(|error| error.contains("different sizes or equal")));
    }
}

#[test]
fn truncated_and_random_streams_are_refused_without_a_panic() {
    let mut rng = StdRng::seed_from_u64(3);
    for options in [
        Options { lines: 2, ..USUAL },
        Options { num_components: 3, is_interleaved: false, predictor: 6, bits: 16, ..USUAL },
        Options { has_late_height: true, ..USUAL },
    ] {
        let jpeg = encode(options, &samples(options));
        for length in 0..jpeg.len() - 2 {
            let cut = decode(&jpeg[..length], options.size, options.num_components, false);
            let ended = decode(&[&jpeg[..length], &[0xff, 0xd9]].concat(), options.size, options.num_components, false);
            // without a height at the end, the last byte may be padding
            assert!(length + 3 > jpeg.len() || cut.is_err() && ended.is_err(), "{options:?}: {length}");
        }
        for _ in 0..20_000 {
            let mut other = jpeg.clone();
            for _ in 0..rng.random_range(1..6) {
                let at = rng.random_range(2..other.len());
                other[at] = if rng.random() { rng.random() } else { 0xff };
            }
            let _ = decode(&other, options.size, options.num_components, rng.random());
        }
    }
}

/// The bytes that would allocate much without data are refused first.
#[test]
fn a_promise_of_many_pixels_is_refused() {
    let header = segment_of(0xc3, &[16, 0xff, 0xff, 0xff, 0xff, 1, 1, 0x11, 0]);
    let error = decode(&[&[0xff, 0xd8], header.as_slice()].concat(), [0xffff, 0xffff], 1, false);
    assert_eq!(error, Err(ENDS_EARLY.to_owned()));
}
