//! Text on pictures: one embedded font, measured, wrapped and drawn with soft edges. Left to right scripts only.

use ab_glyph::{Font, FontRef, Glyph, PxScale, ScaleFont, point};
use image::{Rgb, RgbImage};

/// A font at one size.
pub(super) struct Lettering {
    font: FontRef<'static>,
    scale: PxScale,
}

impl Lettering {
    /// The embedded font with lines `size_px` high.
    pub(super) fn new(size_px: f32) -> Self {
        let font =
            FontRef::try_from_slice(epaint_default_fonts::UBUNTU_LIGHT).expect("the embedded font is well-formed");
        Self { font, scale: PxScale::from(size_px) }
    }

    /// Distance between two lines.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive size")]
    pub(super) fn line_px(&self) -> u32 {
        (self.scale.y * 1.2).ceil() as u32
    }

    /// Width of one line.
    pub(super) fn width_px(&self, text: &str) -> f32 {
        self.laid_out(text).1
    }

    /// The lines of `text`, broken at its newlines and where they would be wider than `width_px`; a word wider than
    /// that is broken inside. At most `max_lines`, the last then ends in an ellipsis.
    pub(super) fn wrapped(&self, text: &str, width_px: f32, max_lines: usize) -> Vec<String> {
        let mut lines = Vec::new();
        for paragraph in text.lines() {
            let mut line = String::new();
            for word in paragraph.split_whitespace() {
                let longer = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
                if self.width_px(&longer) <= width_px {
                    line = longer;
                    continue;
                }
                if !line.is_empty() {
                    lines.push(std::mem::take(&mut line));
                }
                for c in word.chars() {
                    if !line.is_empty() && self.width_px(&format!("{line}{c}")) > width_px {
                        lines.push(std::mem::take(&mut line));
                    }
                    line.push(c);
                }
            }
            lines.push(line);
        }
        if lines.len() > max_lines {
            lines.truncate(max_lines);
            if let Some(last) = lines.last_mut() {
                while !last.is_empty() && self.width_px(&format!("{last}…")) > width_px {
                    last.pop();
                }
                *last = format!("{}…", last.trim_end());
            }
        }
        lines
    }

    /// Draws one line; `left_top` is the corner of its line box. What lies outside the picture is cut.
    pub(super) fn draw(&self, picture: &mut RgbImage, left_top: (u32, u32), text: &str, color: Rgb<u8>) {
        let ascent = self.font.as_scaled(self.scale).ascent();
        for mut glyph in self.laid_out(text).0 {
            #[expect(clippy::cast_precision_loss, reason = "pixel positions")]
            let origin = point(left_top.0 as f32, left_top.1 as f32 + ascent);
            glyph.position += origin;
            let Some(outline) = self.font.outline_glyph(glyph) else { continue };
            let bounds = outline.px_bounds();
            outline.draw(|x, y, coverage| {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
                let (x, y) = ((bounds.min.x as i64 + i64::from(x)) as u32, (bounds.min.y as i64 + i64::from(y)) as u32);
                if let Some(pixel) = picture.get_pixel_mut_checked(x, y) {
                    // The light face reads better a little heavier.
                    super::blend(pixel, color, coverage.clamp(0.0, 1.0).powf(0.75));
                }
            });
        }
    }

    fn laid_out(&self, text: &str) -> (Vec<Glyph>, f32) {
        let font = self.font.as_scaled(self.scale);
        let (mut glyphs, mut x, mut previous) = (Vec::new(), 0.0, None);
        for c in text.chars().filter(|c| !c.is_control()) {
            let id = font.glyph_id(c);
            x += previous.map_or(0.0, |previous| font.kern(previous, id));
            glyphs.push(id.with_scale_and_position(self.scale, point(x, 0.0)));
            x += font.h_advance(id);
            previous = Some(id);
        }
        (glyphs, x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_captions_wrap_inside_their_width() {
        let lettering = Lettering::new(16.0);
        let text = "The segmented region is a nevus, and it lies in the center of the image.\nsupercalifragilisticexpialidocious";
        let lines = lettering.wrapped(text, 120.0, 20);
        assert!(lines.len() > 5);
        assert!(lines.iter().all(|line| lettering.width_px(line) <= 120.0), "{lines:?}");
        assert_eq!(lines.concat().replace(' ', ""), text.replace([' ', '\n'], ""));
        let cut = lettering.wrapped(text, 120.0, 2);
        assert_eq!(cut.len(), 2);
        assert!(cut[1].ends_with('…') && lettering.width_px(&cut[1]) <= 120.0);
    }

    #[test]
    fn letters_leave_ink_and_stay_inside() {
        let mut picture = RgbImage::from_pixel(60, 20, Rgb([255; 3]));
        Lettering::new(16.0).draw(&mut picture, (50, 0), "Wide text", Rgb([0; 3]));
        assert!(picture.pixels().any(|pixel| pixel[0] < 60));
    }
}
