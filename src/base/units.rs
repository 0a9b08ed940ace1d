//! Byte sizes with units.

use std::fmt;
use std::time::Duration;

/// A number with `digits` decimals. What rounds to zero has no sign: `0.0000`, not `-0.0000`.
pub fn fixed(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    match text.strip_prefix('-') {
        Some(zero) if zero.bytes().all(|byte| matches!(byte, b'0' | b'.')) => zero.to_owned(),
        _ => text,
    }
}

/// As [`fixed`], with `+` before a number that is not negative, also before one that rounds to zero.
pub fn signed(value: f64, digits: usize) -> String {
    let text = fixed(value, digits);
    if text.starts_with('-') { text } else { format!("+{text}") }
}

/// A number of bytes. It is printed in binary units (`1.50 GiB`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let (value, unit) = match self.0 {
            0..=1023 => return write!(f, "{} B", self.0),
            1024..=1_048_575 => (bytes / 1024.0, "KiB"),
            1_048_576..=1_073_741_823 => (bytes / 1_048_576.0, "MiB"),
            _ => (bytes / 1_073_741_824.0, "GiB"),
        };
        write!(f, "{value:.2} {unit}")
    }
}

impl std::str::FromStr for Bytes {
    type Err = String;

    /// Parses `512mib`, `24gb`, `1.5 GiB` or `4096`. All units are binary.
    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_lowercase();
        let of_unit = |unit: &str| ["ib", "b", ""].iter().find_map(|end| lower.strip_suffix(end)?.strip_suffix(unit));
        let found =
            [("k", 10), ("m", 20), ("g", 30)].into_iter().find_map(|(unit, power)| Some((of_unit(unit)?, power)));
        let (number, power) = found.unwrap_or((lower.strip_suffix('b').unwrap_or(&lower), 0));
        let bytes = number.trim().parse::<f64>().ok().map(|number| number * f64::from(1_u32 << power));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        match bytes.filter(|bytes| (1.0..1e18).contains(bytes)) {
            Some(bytes) => Ok(Self(bytes as u64)),
            None => Err(format!("`{text}` is not a size such as `24gb` or `512mib`")),
        }
    }
}

/// A duration for people: `8s`, `4m 10s`, `2h 05m`.
pub fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m {s:02}s"),
        (h, m, _) => format!("{h}h {m:02}m"),
    }
}

/// A part of an image: `3.94 %`. One that is not zero is never `0.00 %`.
pub fn percent(part: f64) -> String {
    let percent = 100.0 * part;
    if percent > 0.0 && percent < 0.005 { "less than 0.01 %".into() } else { format!("{percent:.2} %") }
}

/// A number with its noun: `1 image`, `2 images`.
pub fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, counted, fixed, percent, signed};

    #[test]
    fn a_pixel_is_not_zero_percent() {
        let of = |pixels: u32| percent(f64::from(pixels) / 65_536.0);
        assert_eq!(of(0), "0.00 %");
        assert_eq!(of(1), "less than 0.01 %");
        assert_eq!([of(4), of(65_536)], ["0.01 %", "100.00 %"]);
    }

    #[test]
    fn zero_has_no_minus() {
        for (value, digits, plain, with_sign) in [
            (-0.000_01, 4, "0.0000", "+0.0000"),
            (-0.0, 4, "0.0000", "+0.0000"),
            (0.000_01, 4, "0.0000", "+0.0000"),
            (-0.4, 0, "0", "+0"),
            (-0.000_06, 4, "-0.0001", "-0.0001"),
            (-10.0, 1, "-10.0", "-10.0"),
            (1.25, 1, "1.2", "+1.2"),
        ] {
            assert_eq!((fixed(value, digits), signed(value, digits)), (plain.into(), with_sign.into()), "{value}");
        }
        assert_eq!((fixed(f64::NAN, 2), fixed(f64::NEG_INFINITY, 2)), ("NaN".into(), "-inf".into()));
    }

    #[test]
    fn nouns_are_counted() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "image")), ["0 images", "1 image", "2 images"]);
    }

    #[test]
    fn sizes_are_parsed_in_binary_units() {
        let of = |text: &str| text.parse::<Bytes>();
        assert_eq!(of("24gb"), Ok(Bytes(24 << 30)));
        assert_eq!((of("1.5 GiB"), of("512m"), of("7")), (Ok(Bytes(3 << 29)), Ok(Bytes(512 << 20)), Ok(Bytes(7))));
        assert!(of("much").is_err() && of("-3gb").is_err() && of("0").is_err());
    }

    #[test]
    fn sizes_are_printed_in_binary_units() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(1536).to_string(), "1.50 KiB");
        assert_eq!(Bytes(24 << 30).to_string(), "24.00 GiB");
    }
}
