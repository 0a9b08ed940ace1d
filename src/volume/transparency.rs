//! Transparency of masks: whether the mask is in the colours or in the transparency.

use std::collections::HashSet;

use super::colours::is_black;

/// What the transparency of a mask means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transparency {
    /// It says nothing: the colours are the mask.
    Opaque,
    /// It is the mask, because the colour is the same everywhere.
    IsMask,
    /// Transparent pixels are background.
    Hides,
}

/// The meaning of the transparency, and words for such masks if the colours alone would be another mask. A pixel is
/// its 8-bit colour, its alpha (0 = transparent) and the number of such pixels.
///
/// # Errors
/// A reason, for colours and transparency that contradict each other.
pub(super) fn of(
    pixels: impl Iterator<Item = ([u8; 3], u16, u64)>,
) -> Result<(Transparency, Option<&'static str>), String> {
    let (mut alphas, mut hidden, mut visible) = (HashSet::new(), HashSet::new(), HashSet::new());
    let (mut num_hidden, mut num_visible) = (0, 0);
    for (colour, alpha, count) in pixels {
        alphas.insert(alpha);
        if alpha == 0 {
            hidden.insert(colour);
            num_hidden += count;
        } else {
            visible.insert(colour);
            num_visible += count;
        }
    }
    if visible.is_empty() && hidden.len() > 1 {
        return Err(format!("all of its {num_hidden} pixels are transparent, but they have {} colours", hidden.len()));
    }
    if hidden.union(&visible).count() == 1 && (alphas.len() > 1 || visible.is_empty()) {
        return Ok((Transparency::IsMask, Some("masks of one colour, whose opaque pixels are the target")));
    }
    if hidden.is_empty() {
        let note =
            (alphas.len() > 1).then_some("masks that are partly transparent everywhere: the transparency is ignored");
        return Ok((Transparency::Opaque, note));
    }
    if hidden.iter().all(|colour| *colour == [0; 3]) {
        return Ok((Transparency::Hides, None));
    }
    let shows_background = visible.iter().any(|colour| is_black(*colour));
    let shows_target = visible.iter().any(|colour| !is_black(*colour));
    if shows_target && (hidden.len() == 1 || shows_background) {
        let note = "masks whose transparent pixels are background, although they are not black";
        return Ok((Transparency::Hides, Some(note)));
    }
    let colours = |colours: &HashSet<[u8; 3]>| if colours.len() == 1 { "one colour" } else { "several colours" };
    Err(format!(
        "its colours and its transparency are two different masks: {num_hidden} transparent pixels have {}, {num_visible} \
         other pixels have {}",
        colours(&hidden),
        colours(&visible)
    ))
}
