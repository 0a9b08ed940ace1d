//! Units that print themselves.

use std::fmt;

/// A number of bytes; prints in binary units (`1.50 GiB`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
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

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn bytes_print_in_binary_units() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(1536).to_string(), "1.50 KiB");
        assert_eq!(Bytes(24 << 30).to_string(), "24.00 GiB");
    }
}
