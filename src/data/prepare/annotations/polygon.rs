//! Filled polygons, pixel for pixel as `pycocotools` fills them (`annToMask`).
//!
//! Coordinates are those of COCO: the pixel in column 0 and row 0 reaches from (0, 0) to (1, 1). The outline is rounded to
//! fifths of a pixel, and in each column the pixels whose centres are inside are set, by the even-odd rule. A rectangle from
//! (5, 5) to (20, 20) has 15 x 15 pixels. Pillow and OpenCV set the pixels under the outline too: 16 x 16.

/// Steps of the outline in each pixel.
const STEPS: i64 = 5;
/// Most steps of all outlines of a mask: 4 million pixels, and less than a second.
pub(super) const MAX_STEPS: i64 = 20_000_000;
/// Largest coordinate: more than any image has.
const MAX_COORDINATE: f64 = 1e7;

/// Refuses points that no image can have, also NaN.
pub(super) fn check(points: &[[f64; 2]]) -> Result<(), String> {
    match points.iter().find(|point| point.iter().any(|value| value.is_nan() || value.abs() > MAX_COORDINATE)) {
        Some([x, y]) => Err(format!("has the point ({x:?}, {y:?}), which is in no image")),
        None => Ok(()),
    }
}

/// Ranges of pixels inside of a polygon, in the order of columns: pixel `x * height + y` is in column `x` and row `y`.
///
/// The steps of the outline are taken from `left`, of which a mask has [`MAX_STEPS`].
///
/// # Errors
/// What is wrong with the outline.
pub(super) fn runs(
    points: &[[f64; 2]],
    (width, height): (u32, u32),
    left: &mut i64,
) -> Result<Vec<(usize, usize)>, String> {
    check(points)?;
    #[expect(clippy::cast_possible_truncation, reason = "limited above")]
    let step = |value: f64| (STEPS as f64 * value + 0.5) as i64;
    let fine: Vec<[i64; 2]> = points.iter().map(|point| point.map(step)).collect();
    let edges = || fine.iter().zip(fine.iter().cycle().skip(1)).filter(|(from, to)| from != to);
    let length: i64 = edges().map(|(from, to)| (from[0] - to[0]).abs().max((from[1] - to[1]).abs())).sum();
    *left -= length;
    if *left < 0 {
        return Err(format!("has outlines that are too long: {} pixels are the limit of a mask", MAX_STEPS / STEPS));
    }
    let (width, height) = (i64::from(width), i64::from(height));
    let mut crossings = Vec::new();
    let mut last: Option<[i64; 2]> = None;
    for (from, to) in edges() {
        walk(*from, *to, |[u, v]| {
            // the outline crosses the middle of a column between two steps
            if let Some([before_u, before_v]) = last
                && u.min(before_u).rem_euclid(STEPS) == STEPS / 2
                && u != before_u
            {
                let column = u.min(before_u).div_euclid(STEPS);
                let row = (v.min(before_v) + STEPS / 2).div_euclid(STEPS).clamp(0, height);
                crossings.extend((0..width).contains(&column).then_some(column * height + row));
            }
            last = Some([u, v]);
        });
    }
    crossings.sort_unstable();
    let index = |at: i64| usize::try_from(at).unwrap_or(0);
    let pairs = crossings.chunks_exact(2).map(|pair| (index(pair[0]), index(pair[1])));
    Ok(pairs.filter(|(from, to)| from < to).collect())
}

/// Calls `visit` for each step of an edge, with both ends.
fn walk(from: [i64; 2], to: [i64; 2], mut visit: impl FnMut([i64; 2])) {
    let [dx, dy] = [0, 1].map(|axis| (to[axis] - from[axis]).abs());
    let (main, other, count) = if dx >= dy { (0, 1, dx) } else { (1, 0, dy) };
    // the same pixels in both directions
    let is_flipped = from[main] > to[main];
    let (start, end) = if is_flipped { (to, from) } else { (from, to) };
    let slope = (end[other] - start[other]) as f64 / count as f64;
    for number in 0..=count {
        let at = if is_flipped { count - number } else { number };
        let mut point = [0; 2];
        point[main] = start[main] + at;
        #[expect(clippy::cast_possible_truncation, reason = "between two coordinates")]
        let across = (start[other] as f64 + slope * at as f64 + 0.5) as i64;
        point[other] = across;
        visit(point);
    }
}
