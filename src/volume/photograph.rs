//! Photographs and scans in place of masks.

/// A mask with fewer levels is not looked at.
const MIN_LEVELS: usize = 64;

/// The number of levels of an image that is no mask, but looks like a photograph or a scan.
///
/// A mask fills areas with few values; soft borders are between them. In a photograph many pixels are neither background
/// nor foreground and differ from their neighbours. Where that is so in less than a third of the image, because of a
/// black background, a photograph has many small peaks too, which a soft mask does not have.
pub(super) fn num_levels<T: Copy + Into<u16>>(values: &[T], width: usize) -> Option<usize> {
    let most: u16 = values.iter().map(|&value| value.into()).max()?;
    let mut occurs = vec![false; usize::from(most) + 1];
    for &value in values {
        occurs[usize::from(value.into())] = true;
    }
    let num_levels = occurs.into_iter().filter(|occurs| *occurs).count();
    if num_levels < MIN_LEVELS {
        return None;
    }
    let at = |index: usize| -> u16 { values[index].into() };
    let (low, high) = (most / 8, most - most / 8);
    let (mut num_bright, mut num_between, mut num_peaks) = (0, 0, 0);
    for (index, value) in values.iter().map(|&value| value.into()).enumerate() {
        num_bright += usize::from(value > low);
        if value <= low || value >= high {
            continue;
        }
        let (x, is_last_row) = (index % width, index + width >= values.len());
        let right = (x + 1 < width).then(|| at(index + 1));
        let below = (!is_last_row).then(|| at(index + width));
        let differs = |other: Option<u16>| other.is_some_and(|other| other != value);
        num_between += usize::from(differs(right) || differs(below));
        let left = (x > 0).then(|| at(index - 1));
        let above = (index >= width).then(|| at(index - width));
        num_peaks += usize::from([right, below, left, above].iter().flatten().all(|other| *other < value));
    }
    let is_everywhere = 3 * num_between > values.len();
    let has_texture = 2 * num_between > num_bright && 10 * num_between > values.len() && 50 * num_peaks > num_between;
    (is_everywhere || has_texture).then_some(num_levels)
}
