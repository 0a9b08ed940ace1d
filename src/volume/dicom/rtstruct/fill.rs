//! Filling of polygons on the pixels of a slice.
//!
//! A pixel is inside if its centre is inside an odd number of the polygons (even-odd rule). A centre on a border is
//! inside if the polygon continues towards larger columns and rows, so that polygons that share a border share no
//! pixel.

use std::ops::Range;

/// Vertices of a closed polygon in pixels: column and row, with whole numbers at the centres of pixels.
pub(super) type Polygon = Vec<[f64; 2]>;

/// Most places of a slice where borders cross rows. A comb over all rows of a slice has 4 million.
const MAX_CROSSINGS: usize = 1 << 22;

/// The pixels of a slice of `[width, height]` pixels inside the polygons, as runs of linear indices in ascending order;
/// `None` for borders that cross rows too often. Coordinates must be finite, and below 10^9.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the width")]
pub(super) fn fill(polygons: &[Polygon], [width, height]: [usize; 2]) -> Option<Vec<Range<usize>>> {
    let num_crossings: usize = edges(polygons).map(|edge| rows(edge, height).len()).sum();
    if num_crossings > MAX_CROSSINGS {
        return None;
    }
    let mut crossings: Vec<(usize, f64)> = Vec::with_capacity(num_crossings);
    for edge @ [top, bottom] in edges(polygons) {
        let slope = (bottom[0] - top[0]) / (bottom[1] - top[1]);
        crossings.extend(rows(edge, height).map(|row| (row, top[0] + (row as f64 - top[1]) * slope)));
    }
    crossings.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let column = |at: f64| at.ceil().clamp(0.0, width as f64) as usize;
    // closed polygons cross each row an even number of times
    let pairs = crossings.as_chunks::<2>().0.iter();
    let runs = pairs.map(|[from, to]| from.0 * width + column(from.1)..from.0 * width + column(to.1));
    Some(runs.filter(|run| !run.is_empty()).collect())
}

/// The edges of polygons from the smaller row to the larger one, so that the two directions of a keyhole cross rows in
/// the same places.
fn edges(polygons: &[Polygon]) -> impl Iterator<Item = [[f64; 2]; 2]> + '_ {
    polygons.iter().flat_map(|polygon| {
        let ends = polygon.iter().skip(1).chain(polygon.first());
        polygon.iter().zip(ends).map(|(a, b)| if (a[1], a[0]) <= (b[1], b[0]) { [*a, *b] } else { [*b, *a] })
    })
}

/// The rows that an edge crosses: with its first end, without its last one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the height")]
fn rows([top, bottom]: [[f64; 2]; 2], height: usize) -> Range<usize> {
    let row = |at: f64| at.ceil().clamp(0.0, height as f64) as usize;
    row(top[1])..row(bottom[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(polygons: &[&[[f64; 2]]], [width, height]: [usize; 2]) -> Vec<String> {
        let polygons: Vec<Polygon> = polygons.iter().map(|polygon| polygon.to_vec()).collect();
        let mut pixels = vec![b'.'; width * height];
        for run in fill(&polygons, [width, height]).expect("few crossings") {
            pixels[run].iter_mut().for_each(|pixel| *pixel = if *pixel == b'.' { b'#' } else { b'2' });
        }
        pixels.chunks(width).map(|row| String::from_utf8(row.to_vec()).expect("letters")).collect()
    }

    const fn square(low: f64, high: f64) -> [[f64; 2]; 4] {
        [[low, low], [high, low], [high, high], [low, high]]
    }

    #[test]
    fn a_pixel_is_inside_if_its_centre_is() {
        assert_eq!(drawn(&[&square(0.6, 3.4)], [5, 5]), [".....", ".###.", ".###.", ".###.", "....."]);
        // on its centres: with the smaller column and row, without the larger ones
        assert_eq!(drawn(&[&square(1.0, 3.0)], [5, 4]), [".....", ".##..", ".##..", "....."]);
        // neighbours that share a border share no pixel, and leave none out
        let neighbours = [square(1.0, 3.0), square(1.0, 3.0).map(|[x, y]| [x + 2.0, y])];
        assert_eq!(drawn(&[&neighbours[0], &neighbours[1]], [6, 3]), ["......", ".####.", ".####."]);
        // the first point again at the end, no area, beyond the image
        let closed = [square(0.6, 2.4).as_slice(), &[[0.6, 0.6]]].concat();
        assert_eq!(drawn(&[&closed], [4, 3]), ["....", ".##.", ".##."]);
        assert_eq!(drawn(&[&[[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]], [3, 2]), ["...", "..."]);
        assert_eq!(drawn(&[&square(-1e6, 1.5)], [3, 3]), ["##.", "##.", "..."]);
    }

    #[test]
    fn nested_and_keyhole_polygons_have_holes() {
        let rings = ["######", "#....#", "#.##.#", "#.##.#", "#....#", "######"];
        let [outer, hole, island] = [square(-0.5, 5.5), square(0.5, 4.5), square(1.5, 3.5)];
        assert_eq!(drawn(&[&outer, &hole, &island], [6, 6]), rings);
        assert_eq!(drawn(&[&island, &outer, &hole], [6, 6]), rings);
        // in and out along one line through centres of pixels
        let keyhole = [&outer[..], &outer[..1], &[[1.0, 1.0], [1.0, 5.0], [5.0, 5.0], [5.0, 1.0], [1.0, 1.0]]].concat();
        let found = drawn(&[&keyhole], [6, 6]);
        assert_eq!(found, ["######", "#....#", "#....#", "#....#", "#....#", "######"]);
    }

    #[test]
    fn borders_that_cross_rows_too_often_are_refused() {
        let comb: Polygon = (0..20_000).map(|at| [f64::from(at), f64::from(at % 2) * 999.0]).collect();
        assert_eq!(fill(&[comb], [20_000, 999]), None);
    }
}
