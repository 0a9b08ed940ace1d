//! Masks that a user sends: files of one target, with the size of the image.

use super::failure::{HttpFailure, HttpResult};
use super::upload::refused;
use crate::Error;
use crate::data::decode::{self, MaskRefusal, ONE_TARGET, StoredMask};
use crate::data::image::foreground;
use crate::data::labels::Labels;
use crate::data::volume::format::IMAGES;
use image::GrayImage;
use std::path::Path;

/// Reads an image file of the size of the image as a mask with 0 and 255. `name` is that of the file in errors.
pub(super) fn read(bytes: &[u8], name: &Path, size: (u32, u32), max_pixels: u64) -> HttpResult<GrayImage> {
    let stored = decode::stored_mask_of(bytes, name, max_pixels).map_err(|error| {
        let mut failure = refused(error);
        // the remedies of other files are about their names and folders
        if !decode::is_image(bytes) {
            failure.hint = format!("send a {IMAGES} file");
        }
        failure
    })?;
    Ok(target_of(stored, name, size)?)
}

/// As [`read`], for a mask that words are to follow: it has at least one pixel.
pub(super) fn read_given(bytes: &[u8], size: (u32, u32), max_pixels: u64) -> HttpResult<GrayImage> {
    let name = Path::new("the field `mask`");
    let mask = read(bytes, name, size, max_pixels)?;
    if mask.iter().all(|value| *value == 0) {
        let hint = "mark the target in it, or leave `mask` out: the model then paints its own";
        return Err(HttpFailure::unprocessable(format!("{}: the mask is empty", name.display()), hint));
    }
    Ok(mask)
}

/// A mask with 0 and 255. Its file has one target: 0 is background, and another value is foreground.
fn target_of(stored: StoredMask, name: &Path, size: (u32, u32)) -> Result<GrayImage, Error> {
    if stored.dimensions() != size {
        let ((width, height), (expected_width, expected_height)) = (stored.dimensions(), size);
        let reason = format!("the mask is {width}x{height} pixels but its image is {expected_width}x{expected_height}");
        return Err(Error::data(name, reason, "send a mask of the size of the image"));
    }
    let refused = |refusal: MaskRefusal| Error::data(name, refusal.to_string(), ONE_TARGET);
    Ok(foreground(&stored.target(Labels::NONE).map_err(refused)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::ImageFormat;
    use std::io::Cursor;

    #[test]
    fn a_mask_has_one_target_and_the_size_of_the_image() {
        let mask = |values: &[u8]| StoredMask::from(GrayImage::from_raw(4, 2, values.to_vec()).unwrap());
        let name = Path::new("the uploaded file");
        let read = |values: &[u8]| target_of(mask(values), name, (4, 2));
        assert_eq!(read(&[0, 0, 1, 1, 0, 0, 1, 1]).unwrap().as_raw(), &[0, 0, 255, 255, 0, 0, 255, 255]);
        assert_eq!(read(&[0; 8]).unwrap().as_raw(), &[0; 8]);
        assert_eq!(read(&[255; 8]).unwrap().as_raw(), &[255; 8]);
        assert!(read(&[0, 0, 1, 1, 0, 0, 2, 2]).unwrap_err().to_string().contains("several labels"));
        let size = target_of(mask(&[0; 8]), name, (2, 4)).unwrap_err();
        assert_eq!(size.to_string(), "the uploaded file: the mask is 4x2 pixels but its image is 2x4");
    }

    #[test]
    fn a_given_mask_is_a_file_with_a_target() {
        let png = |values: &[u8]| {
            let mut bytes = Cursor::new(Vec::new());
            let image = GrayImage::from_raw(4, 2, values.to_vec()).unwrap();
            image.write_to(&mut bytes, ImageFormat::Png).unwrap();
            bytes.into_inner()
        };
        let read = |bytes: &[u8]| read_given(bytes, (4, 2), 100);
        assert_eq!(read(&png(&[0, 0, 1, 1, 0, 0, 1, 1])).unwrap().as_raw(), &[0, 0, 255, 255, 0, 0, 255, 255]);
        for (bytes, expected) in [
            (png(&[0; 8]), "the mask is empty"),
            (png(&[0, 0, 1, 1, 0, 0, 2, 2]), "several labels"),
            (b"{}".to_vec(), "is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"),
            (b"\x1f\x8b\x08\0".to_vec(), "is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image but a gzip file"),
            (Vec::new(), "is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"),
        ] {
            let failure = read(&bytes).unwrap_err();
            assert!(failure.error.starts_with("the field `mask`: ") && failure.error.contains(expected), "{failure:?}");
            assert!(failure.status.is_client_error() && !failure.hint.is_empty(), "{failure:?}");
            assert!(!failure.hint.contains("ending"), "{failure:?}");
        }
    }
}
