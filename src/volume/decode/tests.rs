//! Tests of the decoder on files made for them.

use std::fs;
use std::path::PathBuf;

use ::image::{ImageBuffer, Luma, LumaA, Rgb, RgbImage, Rgba};

use super::jpeg::stop_at_corrupt_data;
use super::*;
use crate::fixture::Root;

fn refused(path: &Path) -> String {
    image(path).expect_err("refused").to_string()
}

#[test]
fn decoding_errors_name_the_file_and_the_reason() {
    let root = Root::new();
    assert!(refused(&root.path().join("none.png")).ends_with("none.png: the file is missing"));

    let text = root.file("text.png");
    fs::write(&text, "hello").expect("written");
    assert!(refused(&text).ends_with("text.png: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"));

    root.image("a.png", 40, 30);
    let png = fs::read(root.file("a.png")).expect("read");
    fs::write(root.file("cut.png"), &png[..png.len() / 2]).expect("written");
    assert!(refused(&root.file("cut.png")).contains("cut.png: cannot be decoded: "));
    let mut bent = png.clone();
    let middle = bent.len() / 2;
    bent[middle] ^= 0x55;
    fs::write(root.file("bent.png"), &bent).expect("written");
    assert!(refused(&root.file("bent.png")).contains("bent.png: cannot be decoded: "));

    root.image("a.jpg", 64, 64);
    let jpeg = fs::read(root.file("a.jpg")).expect("read");
    assert!(image(&root.file("a.jpg")).is_ok());
    for part in [jpeg.len() / 4, jpeg.len() / 2, jpeg.len() - 2] {
        fs::write(root.file("cut.jpg"), &jpeg[..part]).expect("written");
        assert!(
            refused(&root.file("cut.jpg")).ends_with("cut.jpg: cannot be decoded: the JPEG is truncated"),
            "{part}"
        );
    }
    // An image of 0 rows: fatal for libjpeg.
    let mut flat = jpeg.clone();
    let frame = flat.windows(2).position(|pair| pair == [0xFF, 0xC0]).expect("a frame header");
    flat[frame + 5..frame + 7].fill(0);
    fs::write(root.file("flat.jpg"), &flat).expect("written");
    assert!(refused(&root.file("flat.jpg")).contains("flat.jpg: cannot be decoded: libjpeg fatal error: "));
}

/// A PNG with this chunk after its header.
fn with_chunk(png: &[u8], kind: [u8; 4], content: &[u8]) -> Vec<u8> {
    let mut checked = flate2::Crc::new();
    checked.update(&[&kind, content].concat());
    let length = u32::try_from(content.len()).expect("small").to_be_bytes();
    let after_header = 8 + 25;
    [&png[..after_header], &length, &kind, content, &checked.sum().to_be_bytes(), &png[after_header..]].concat()
}

#[test]
fn colour_profiles_of_png_files_are_not_unpacked() {
    let root = Root::new();
    root.image("a.png", 40, 30);
    let plain = fs::read(root.file("a.png")).expect("read");
    let mut profile = flate2::write::ZlibEncoder::new(b"name\0\0".to_vec(), flate2::Compression::fast());
    std::io::Write::write_all(&mut profile, &vec![0; 1 << 20]).expect("packed");
    let bytes = with_chunk(&plain, *b"iCCP", &profile.finish().expect("packed"));
    assert_eq!(png::without_profile(&bytes), plain);
    assert!(matches!(png::without_profile(&plain), std::borrow::Cow::Borrowed(_)), "copied for nothing");
    // cut inside of the profile, and behind it without its checksum
    for length in [8 + 25 + 20, bytes.len() - plain.len() + 8 + 25 - 2] {
        assert!(png::without_profile(&bytes[..length]).len() <= length);
    }
    fs::write(root.file("b.png"), &bytes).expect("written");
    assert_eq!(image(&root.file("b.png")).expect("decoded"), image(&root.file("a.png")).expect("decoded"));
    assert_eq!(dimensions(&root.file("b.png")).expect("a size"), (40, 30));
}

#[test]
fn animations_are_refused_like_files_of_several_pages() {
    let root = Root::new();
    root.image("a.png", 40, 30);
    let plain = fs::read(root.file("a.png")).expect("read");
    let path = root.file("b.png");
    for (count, expected) in [(1_u32, None), (2, Some("is an animation of 2 frames"))] {
        let control = [count.to_be_bytes(), [0; 4]].concat();
        fs::write(&path, with_chunk(&plain, *b"acTL", &control)).expect("written");
        match expected {
            None => drop(image(&path).expect("one frame")),
            Some(expected) => assert!(refused(&path).ends_with(expected), "{}", refused(&path)),
        }
    }
}

#[test]
fn the_format_is_detected_from_the_content() {
    let root = Root::new();
    root.image("a.png", 4, 4);
    let renamed: PathBuf = root.file("b.jpg");
    fs::copy(root.file("a.png"), &renamed).expect("copied");
    assert_eq!(image(&renamed).expect("a PNG").into_rgb8(), image(&root.file("a.png")).expect("a PNG").into_rgb8());
}

#[test]
fn all_pixel_formats_become_eight_bits() {
    let root = Root::new();
    let deep: ImageBuffer<Luma<u16>, Vec<u16>> = ImageBuffer::from_vec(3, 1, vec![0, 129, 65_535]).expect("sized");
    for name in ["deep.png", "deep.tif"] {
        deep.save(root.file(name)).expect("written");
        assert_eq!(image(&root.file(name)).expect("decoded").as_luma8().expect("grey").as_raw(), &[0, 1, 255]);
    }
    let rgb: ImageBuffer<Rgb<u16>, Vec<u16>> = ImageBuffer::from_pixel(1, 1, Rgb([257, 514, 65_535]));
    rgb.save(root.file("rgb16.png")).expect("written");
    assert_eq!(image(&root.file("rgb16.png")).expect("decoded").into_rgb8().as_raw(), &[1, 2, 255]);
    let rgba: ImageBuffer<Rgba<u8>, Vec<u8>> = ImageBuffer::from_pixel(1, 1, Rgba([1, 2, 3, 0]));
    rgba.save(root.file("rgba.png")).expect("written");
    assert_eq!(image(&root.file("rgba.png")).expect("decoded").into_rgb8().as_raw(), &[1, 2, 3]);
    let grey: ImageBuffer<LumaA<u8>, Vec<u8>> = ImageBuffer::from_pixel(1, 1, LumaA([7, 0]));
    grey.save(root.file("la.png")).expect("written");
    assert_eq!(image(&root.file("la.png")).expect("decoded").as_luma8().expect("grey").as_raw(), &[7]);
}

#[test]
fn masks_keep_small_values_and_convert_colour_like_pillow() {
    let root = Root::new();
    let labels: ImageBuffer<Luma<u16>, Vec<u16>> = ImageBuffer::from_vec(2, 1, vec![0, 1]).expect("sized");
    labels.save(root.file("labels.png")).expect("written");
    assert_eq!(mask(&root.file("labels.png")).expect("decoded").as_raw(), &[0, 1]);
    RgbImage::from_pixel(1, 1, Rgb([200, 100, 50])).save(root.file("rgb.png")).expect("written");
    // PIL: Image.new("RGB", (1, 1), (200, 100, 50)).convert("L").getpixel((0, 0)) == 124
    assert_eq!(mask(&root.file("rgb.png")).expect("decoded").as_raw(), &[124]);
}

#[test]
fn floating_point_images_are_rejected() {
    let root = Root::new();
    let float: ImageBuffer<Rgb<f32>, Vec<f32>> = ImageBuffer::from_pixel(2, 2, Rgb([0.5, 0.5, 0.5]));
    DynamicImage::ImageRgb32F(float).save(root.file("float.tif")).expect("written");
    assert!(refused(&root.file("float.tif")).ends_with("has 32-bit floating-point pixels"));
}

#[test]
fn corrupt_and_hollow_jpegs_are_errors() {
    let root = Root::new();
    root.image("a.jpg", 512, 512);
    let whole = fs::read(root.file("a.jpg")).expect("read");
    let scan = whole.windows(2).position(|pair| pair == [0xFF, 0xDA]).expect("a scan");
    let data = scan + 2 + usize::from(u16::from_be_bytes([whole[scan + 2], whole[scan + 3]]));
    // one byte, or a half, of the image's data before the end marker
    for end in [data + 1, data + (whole.len() - data) / 2] {
        fs::write(root.file("cut.jpg"), [&whole[..end], &[0xFF, 0xD9]].concat()).expect("written");
        let reason = refused(&root.file("cut.jpg"));
        assert!(reason.contains("Corrupt JPEG data") || reason.contains("too few"), "{reason}");
    }
    let mut zeros = whole.clone();
    let middle = data + (whole.len() - data) / 2;
    zeros[middle..middle + 64].fill(0xAA);
    fs::write(root.file("bent.jpg"), &zeros).expect("written");
    let damaged = image(&root.file("bent.jpg"));
    assert!(damaged.is_err_and(|error| error.to_string().contains("cannot be decoded")));
    let frame = whole.windows(2).position(|pair| pair == [0xFF, 0xC0]).expect("a frame header");
    let claims = |[high, low]: [u8; 2]| {
        let mut huge = whole[..data + 8].to_vec();
        huge[frame + 5..frame + 9].copy_from_slice(&[high, low, high, low]);
        huge.extend([0xFF, 0xD9]);
        fs::write(root.file("huge.jpg"), &huge).expect("written");
        refused(&root.file("huge.jpg"))
    };
    assert!(claims([0x1F, 0x40]).contains("are too few for 8000x8000 pixels"));
    assert!(claims([0x59, 0xD8]).contains("23000x23000 pixels are too many"));
}

#[test]
fn traces_and_harmless_warnings_do_not_stop_the_jpeg_decoder() {
    let root = Root::new();
    root.image("a.jpg", 64, 48);
    let mut bytes = fs::read(root.file("a.jpg")).expect("read");
    let header = bytes.windows(5).position(|part| part == b"JFIF\0").expect("a JFIF header");
    // libjpeg warns of a JFIF version that it does not know
    bytes[header + 5] = 9;
    fs::write(root.file("newer.jpg"), &bytes).expect("written");
    let decoded = |name: &str| image(&root.file(name)).expect("decoded");
    assert_eq!(decoded("newer.jpg"), decoded("a.jpg"));

    // SAFETY: the struct has integers and nullable pointers.
    let mut info: mozjpeg_sys::jpeg_common_struct = unsafe { std::mem::zeroed() };
    for trace in [0, 1] {
        stop_at_corrupt_data(&mut info, trace);
    }
}

#[test]
fn the_longest_side_is_limited() {
    let root = Root::new();
    GrayImage::new(MAX_SIDE, 1).save(root.file("long.png")).expect("written");
    assert!(image(&root.file("long.png")).is_ok());
    GrayImage::new(1, MAX_SIDE + 1).save(root.file("longer.png")).expect("written");
    assert!(refused(&root.file("longer.png")).contains("has more than 131072 pixels on a side"));
}

#[test]
fn pipes_and_devices_are_no_images() {
    let root = Root::new();
    let pipe = root.file("pipe.png");
    let name = std::ffi::CString::new(pipe.to_str().expect("a path")).expect("no NUL");
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    for path in [pipe.as_path(), Path::new("/dev/zero")] {
        assert!(refused(path).contains("it is not a regular file"));
    }
}

#[test]
fn a_mask_with_several_labels_needs_a_choice() {
    let root = Root::new();
    root.mask("map.png", 40, 20, |x, _| [0, 5, 20, 20][x as usize / 10]);
    let error = mask(&root.file("map.png")).expect_err("two labels");
    let expected = "map.png: the mask has several labels: 5 (200 pixels), 20 (400 pixels)";
    assert!(error.to_string().ends_with(expected), "{error}");
    assert!(error.hint().contains("argument `labels=1,3`"));
    let count = |labels: &[u16]| {
        let labels = Labels::new(labels).expect("labels");
        let mask = labelled_mask(&root.file("map.png"), labels).expect("chosen");
        assert!(mask.iter().all(|value| [0, 255].contains(value)));
        mask.pixels().filter(|pixel| pixel.0 == [255]).count()
    };
    assert_eq!([count(&[5]), count(&[20]), count(&[5, 20]), count(&[7])], [200, 400, 600, 0]);
}

#[test]
fn labels_of_16_bit_masks_are_kept() {
    let root = Root::new();
    let deep = |values: [u16; 3]| {
        ImageBuffer::<Luma<u16>, _>::from_fn(30, 9, |x, _| Luma([values[x as usize / 10]]))
            .save(root.file("deep.png"))
            .expect("written");
        root.file("deep.png")
    };
    let path = deep([0, 100, 1000]);
    let error = mask(&path).expect_err("two labels").to_string();
    assert!(error.ends_with("several labels: 100 (90 pixels), 1000 (90 pixels)"), "{error}");
    let chosen = labelled_mask(&path, Labels::new(&[100]).expect("labels")).expect("chosen");
    assert_eq!(chosen.pixels().filter(|pixel| pixel.0 == [255]).count(), 90);
    for value in [1, 100, 300, 4095, 65_535] {
        let mask = mask(&deep([0, value, value])).expect("one label");
        let foreground = prsmed_data::image::foreground(&mask);
        assert_eq!(foreground.pixels().filter(|pixel| pixel.0 == [255]).count(), 180, "{value}");
    }
}

/// White is zero (also as fax), differences of neighbours in the byte order of the file, and four colours.
#[test]
fn files_of_public_reports_have_the_pixels_of_pillow() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reports");
    for (name, tolerance) in [
        ("white-is-zero-1.tif", 0),
        ("white-is-zero-fax4.tif", 0),
        ("white-is-zero-8.tif", 0),
        ("white-is-zero-16.tif", 0),
        ("big-endian-lzw.tif", 0),
        ("big-endian-deflate-tiles.tif", 0),
        ("big-endian-lzw-rgb.tif", 0),
        ("cmyk-adobe.jpg", 4),
        ("cmyk-plain.jpg", 4),
        ("ycck.jpg", 4),
    ] {
        let stem = name.split('.').next().unwrap_or_default();
        let [found, expected] = [name.to_owned(), format!("{stem}.expected.png")]
            .map(|name| image(&folder.join(name)).expect("decoded").into_rgb8());
        assert_eq!(found.dimensions(), (24, 16), "{name}");
        let largest = found.iter().zip(expected.iter()).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(largest <= Some(tolerance), "{name}: {largest:?}");
    }
}
