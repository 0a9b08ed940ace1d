//! Files whose content is no image that can be read, whatever their names say: what they are by their first bytes.

use std::path::Path;

use prsmed_base::error::Error;

const CONVERT: &str = "convert it to PNG";
const COPY: &str = "copy the file again: its content was lost";

/// First bytes, at a position, of a kind of files, with its name and a remedy. `?` is any byte.
const KINDS: [(usize, &[u8], &str, &str); 26] = [
    (4, b"ftypheic", "a HEIC image", CONVERT),
    (4, b"ftypheix", "a HEIC image", CONVERT),
    (4, b"ftypmif1", "a HEIC image", CONVERT),
    (4, b"ftypavif", "an AVIF image", CONVERT),
    (4, b"ftyp", "a video", "save its frames as PNG"),
    (8, b"AVI ", "a video", "save its frames as PNG"),
    (4, b"jP  \r\n", "a JPEG 2000 image", CONVERT),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 image", CONVERT),
    (4, b"JXL \r\n", "a JPEG XL image", CONVERT),
    (0, b"\xff\x0a", "a JPEG XL image", CONVERT),
    (0, b"P1\n", "a bitmap (PBM)", CONVERT),
    (0, b"P4\n", "a bitmap (PBM)", CONVERT),
    (0, b"8BPS", "a Photoshop file", CONVERT),
    (0, b"%PDF", "a PDF file", "save its images as PNG"),
    (0, b"\x93NUMPY", "a NumPy array", "save it as a PNG of 8 or 16 bits"),
    (128, b"DICM", "a DICOM file", "give it the ending `.dcm`"),
    (344, b"n+1\0", "a NIfTI file", "give it the ending `.nii`"),
    (0, b"\x1f\x8b", "a gzip file", "decompress it, or give a compressed NIfTI file the ending `.nii.gz`"),
    (0, b"PK\x03\x04", "a zip file", "unpack it"),
    (0, b"\0\x05\x16\x07", "a note of macOS about the file of this name without `._`", "delete it"),
    (0, b"version https://git-lfs", "a placeholder of Git LFS", "fetch the files with `git lfs pull`"),
    (0, b"version https://hawser", "a placeholder of Git LFS", "fetch the files with `git lfs pull`"),
    (0, b"/annex/objects/", "a placeholder of git-annex", "fetch the files with `git annex get .`"),
    (0, b"<!doctype html", "a web page", "download the file again: the server sent a page, such as that of a login"),
    (0, b"<html", "a web page", "download the file again: the server sent a page, such as that of a login"),
    (0, b"<svg", "an SVG drawing", CONVERT),
];

/// What a file that cannot be read as an image is by its content, and a remedy; `None` if that is not known.
fn kind(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    if bytes.is_empty() {
        return Some(("an empty file", "copy the file again"));
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(("a file of zeros", COPY));
    }
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start();
    let is_of = |(at, begin, ..): &&(usize, &[u8], &str, &str)| {
        let is_text = begin.starts_with(b"<");
        let found = if is_text { text } else { bytes }.get(*at..at + begin.len());
        let is_equal = |(byte, wanted): (&u8, &u8)| {
            byte == wanted || *wanted == b'?' || (is_text && byte.eq_ignore_ascii_case(wanted))
        };
        found.is_some_and(|found| found.iter().zip(*begin).all(is_equal))
    };
    KINDS.iter().find(is_of).map(|(_, _, name, remedy)| (*name, *remedy))
}

/// The error of a file that is not `expected`, with what it is instead if that is known.
pub fn unknown_format(path: &Path, bytes: &[u8], expected: &str, hint: &str) -> Error {
    match kind(bytes) {
        Some((name, remedy)) => Error::data(path, format!("is not {expected} but {name}"), remedy),
        None => Error::data(path, format!("is not {expected}"), hint),
    }
}

#[cfg(test)]
mod tests {
    use super::super::image;
    use super::*;
    use crate::fixture::Root;
    use crate::format::IMAGES;

    #[test]
    fn files_with_the_name_of_an_image_are_named_by_their_content() {
        let root = Root::new();
        let heic = [&24_u32.to_be_bytes()[..], b"ftypheic\0\0\0\0mif1heic"].concat();
        let dicom = [&[0; 128][..], b"DICM"].concat();
        let nifti = [&348_u32.to_le_bytes()[..], &[0; 340], b"n+1\0"].concat();
        for (bytes, kind, hint) in [
            (&b"RIFF\x20\0\0\0AVI LIST"[..], " but a video", "save its frames as PNG"),
            (&heic, " but a HEIC image", CONVERT),
            (b"\0\0\0\x0cjP  \r\n\x87\n", " but a JPEG 2000 image", CONVERT),
            (b"P4\n64 64\n", " but a bitmap (PBM)", CONVERT),
            (&dicom, " but a DICOM file", "give it the ending `.dcm`"),
            (&nifti, " but a NIfTI file", "give it the ending `.nii`"),
            (
                b"\n <!DOCTYPE HTML><html>",
                " but a web page",
                "download the file again: the server sent a page, such as that of a login",
            ),
            (
                b"\xef\xbb\xbf<html lang=en>",
                " but a web page",
                "download the file again: the server sent a page, such as that of a login",
            ),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                " but a placeholder of Git LFS",
                "fetch the files with `git lfs pull`",
            ),
            (
                b"\0\x05\x16\x07\0\x02\0\0Mac OS X",
                " but a note of macOS about the file of this name without `._`",
                "delete it",
            ),
            (b"", " but an empty file", "copy the file again"),
            (&[0; 900], " but a file of zeros", COPY),
            (b"BMI of the patients\n", "", CONVERT),
            (b"WEBP or not", "", CONVERT),
            (b"hello", "", CONVERT),
            (b"RIFF\x20\0\0\0WAVEfmt ", "", CONVERT),
        ] {
            let path = root.file("0001.png");
            std::fs::write(&path, bytes).expect("written");
            let error = image(&path).expect_err("refused");
            let expected = format!("0001.png: is not a {IMAGES} image{kind}");
            assert!(error.to_string().ends_with(&expected), "{error}: {expected}");
            assert_eq!(error.hint(), hint, "{error}");
        }
    }
}
