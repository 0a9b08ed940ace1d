//! Run lengths of COCO: lengths of background and foreground in turn, column by column, as numbers or as text.

/// Run lengths as the file has them.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Counts {
    Numbers(Vec<u64>),
    /// Six bits in each letter.
    Text(Box<str>),
}

/// Ranges of foreground pixels, in the order of columns: pixel `x * height + y` is in column `x` and row `y`.
///
/// # Errors
/// What is wrong, also if the lengths do not add up to the pixels of the image.
pub(super) fn runs(counts: &Counts, (width, height): (u32, u32)) -> Result<Vec<(usize, usize)>, String> {
    let total = u64::from(width) * u64::from(height);
    let decoded;
    let lengths = match counts {
        Counts::Numbers(lengths) => lengths,
        Counts::Text(text) => {
            decoded = decode(text)?;
            &decoded
        }
    };
    let mut runs = Vec::new();
    let mut at = 0_u64;
    for (number, length) in lengths.iter().enumerate() {
        let end = at.checked_add(*length).filter(|end| *end <= total);
        let end = end.ok_or_else(|| format!("has run lengths of more than {width} x {height} = {total} pixels"))?;
        if number % 2 == 1 && end > at {
            let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
            runs.push((index(at), index(end)));
        }
        at = end;
    }
    if at < total {
        return Err(format!("has run lengths of {at} pixels instead of {width} x {height} = {total}"));
    }
    Ok(runs)
}

/// The lengths of a text: five bits and a mark for "more follows" in each letter from `0` to `o`. From the fourth one on,
/// a number is the difference to the length two before it.
fn decode(text: &str) -> Result<Vec<u64>, String> {
    let mut lengths: Vec<i64> = Vec::new();
    let (mut value, mut shift) = (0_i64, 0);
    for letter in text.chars() {
        let bits = u32::from(letter).checked_sub(48).filter(|bits| *bits < 64);
        let bits = i64::from(bits.ok_or_else(|| format!("has the letter `{letter}`, which no run lengths have"))?);
        if shift > 50 {
            return Err("has a run length that is no number of pixels".to_owned());
        }
        value |= (bits & 31) << shift;
        shift += 5;
        if bits & 32 > 0 {
            continue;
        }
        if bits & 16 > 0 {
            value |= -1 << shift;
        }
        let before = if lengths.len() > 2 { lengths[lengths.len() - 2] } else { 0 };
        lengths.push(value + before);
        (value, shift) = (0, 0);
    }
    if shift > 0 {
        return Err("has run lengths that end within a number".to_owned());
    }
    let length = |length: i64| u64::try_from(length).map_err(|_| format!("has the run length {length}"));
    lengths.into_iter().map(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, size: (u32, u32)) -> Result<Vec<(usize, usize)>, String> {
        runs(&Counts::Text(text.into()), size)
    }

    #[test]
    fn run_lengths_must_have_the_pixels_of_the_image() {
        let numbers = |lengths: &[u64], size| runs(&Counts::Numbers(lengths.to_vec()), size);
        assert_eq!(numbers(&[2, 3, 1], (2, 3)), Ok(vec![(2, 5)]));
        assert_eq!(numbers(&[0, 6], (2, 3)), Ok(vec![(0, 6)]));
        for (lengths, reason) in [
            (&[2, 3][..], "of 5 pixels instead of 2 x 3 = 6"),
            (&[], "of 0 pixels instead"),
            (&[2, 5], "of more than 2 x 3 = 6 pixels"),
            (&[1, u64::MAX], "of more than"),
        ] {
            assert!(numbers(lengths, (2, 3)).unwrap_err().contains(reason), "{lengths:?}");
        }
        for (text, reason) in [
            ("2x", "the letter `x`"),
            ("2é", "the letter `é`"),
            ("2P", "end within a number"),
            ("2O", "the run length -1"),
            ("PPPPPPPPPPPPPP1", "no number of pixels"),
        ] {
            let error = of(text, (2, 3)).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
        assert_eq!(of("231", (2, 3)), Ok(vec![(2, 5)]));
    }
}
