//! Contours of masks: the borders of pixels.

/// How far contours lie within the border of their pixels, as a share of a pixel. Programs that fill polygons with the
/// pixels under their border (OpenCV, rt-utils) would add a layer of pixels to contours on the border itself.
const INSET: f64 = 1.0 / 16.0;

/// Closed contours of a mask of `[width, height]` pixels: column and row of each corner, with whole numbers at the
/// centres of pixels. A hole is a contour too. Pixels that touch at a corner only have contours of their own, so that
/// no contour touches itself or another one. The first point is not repeated.
pub(super) fn trace(mask: &[u8], [width, height]: [usize; 2]) -> Vec<Vec<[f64; 2]>> {
    let mask = Mask { mask, size: [width.cast_signed(), height.cast_signed()] };
    let mut is_traced = vec![false; width * height];
    let mut contours = Vec::new();
    for y in 0..mask.size[1] {
        for x in 0..mask.size[0] {
            // each contour has an upper border
            let has_border = mask.has(x, y) && !mask.has(x, y - 1);
            if has_border && !is_traced[mask.index(x, y)] {
                contours.push(mask.contour([x, y], &mut is_traced));
            }
        }
    }
    contours
}

struct Mask<'a> {
    mask: &'a [u8],
    size: [isize; 2],
}

impl Mask<'_> {
    fn index(&self, x: isize, y: isize) -> usize {
        (y * self.size[0] + x).cast_unsigned()
    }

    fn has(&self, x: isize, y: isize) -> bool {
        (0..self.size[0]).contains(&x) && (0..self.size[1]).contains(&y) && self.mask[self.index(x, y)] != 0
    }

    /// Follows the border from the upper left corner of a pixel, with the mask on the right-hand side. Corner `[x, y]`
    /// is the upper left one of that pixel. Marks the pixels whose upper borders it passes.
    fn contour(&self, start: [isize; 2], is_traced: &mut [bool]) -> Vec<[f64; 2]> {
        let mut points = Vec::new();
        let ([mut x, mut y], [mut dx, mut dy]) = (start, [1, 0]);
        loop {
            if dx == 1 {
                is_traced[self.index(x, y)] = true;
            }
            (x, y) = (x + dx, y + dy);
            // ahead on the right-hand and the left-hand side: for direction [1, 0] the pixels [x, y] and [x, y - 1]
            let right = [x + (dx - dy - 1) / 2, y + (dx + dy - 1) / 2];
            let left = [x + (dx + dy - 1) / 2, y + (dy - dx - 1) / 2];
            let next = match (self.has(right[0], right[1]), self.has(left[0], left[1])) {
                (false, _) => [-dy, dx],
                (true, true) => [dy, -dx],
                (true, false) => [dx, dy],
            };
            if next != [dx, dy] {
                // inwards from both borders
                let inside = [-dy - next[1], dx + next[0]];
                let place = |corner: isize, inside: isize| corner as f64 - 0.5 + INSET * inside as f64;
                points.push([place(x, inside[0]), place(y, inside[1])]);
                [dx, dy] = next;
            }
            if [x, y] == start && [dx, dy] == [1, 0] {
                return points;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fill::fill;
    use super::*;

    fn mask_of(rows: &[&str]) -> (Vec<u8>, [usize; 2]) {
        (
            rows.iter().flat_map(|row| row.bytes().map(|byte| u8::from(byte == b'#'))).collect(),
            [rows[0].len(), rows.len()],
        )
    }

    fn filled(contours: &[Vec<[f64; 2]>], size: [usize; 2]) -> Vec<u8> {
        let mut mask = vec![0; size[0] * size[1]];
        fill(contours, size).expect("few crossings").into_iter().for_each(|run| mask[run].fill(1));
        mask
    }

    #[test]
    fn contours_follow_the_borders_of_pixels() {
        let (mask, size) = mask_of(&["....", ".##.", "...."]);
        let contours = trace(&mask, size);
        let (low, high) = (0.5 + INSET, 1.5 - INSET);
        assert_eq!(contours, [[[high + 1.0, low], [high + 1.0, high], [low, high], [low, low]]]);
        // a hole, an island in it, and pixels that touch at corners
        for (rows, count) in [
            (&["#####", "#...#", "#.#.#", "#...#", "#####"][..], 3),
            (&["#.#", ".#.", "#.#"], 5),
            (&["###", "#.#", "##."], 1),
            (&[".##", "##.", "#.#"], 2),
            (&["....", "...."], 0),
        ] {
            let (mask, size) = mask_of(rows);
            let contours = trace(&mask, size);
            assert_eq!((contours.len(), filled(&contours, size)), (count, mask), "{rows:?}");
        }
    }

    #[test]
    fn any_mask_is_filled_as_it_was() {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 24
        };
        for size in [[1, 1], [1, 9], [13, 7], [32, 31]] {
            for share in [10, 128, 200] {
                let mask: Vec<u8> = (0..size[0] * size[1]).map(|_| u8::from(next() < share)).collect();
                assert_eq!(filled(&trace(&mask, size), size), mask, "{size:?}");
            }
        }
    }
}
