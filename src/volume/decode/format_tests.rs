//! Tests of EXIF orientations and of TIFF files of all kinds.

use std::fs::{self, File};
use std::path::PathBuf;

use ::image::codecs::jpeg::JpegEncoder;
use ::image::codecs::png::PngEncoder;
use ::image::{ImageEncoder, Luma, Rgb};
use ::tiff::encoder::{TiffEncoder, TiffKindBig, TiffKindStandard, colortype};
use ::tiff::tags::Tag;

use super::codec::tiff_page;
use super::*;
use crate::fixture::Root;
use prsmed_data::image::foreground;

/// Where EXIF shows the first and the last pixel of the first stored row: whether at the right, whether at the bottom.
const CORNERS: [[(bool, bool); 2]; 8] = [
    [(false, false), (true, false)],
    [(true, false), (false, false)],
    [(true, true), (false, true)],
    [(false, true), (true, true)],
    [(false, false), (false, true)],
    [(true, false), (true, true)],
    [(true, true), (true, false)],
    [(false, true), (false, false)],
];

fn exif(orientation: u8) -> Vec<u8> {
    let entry = [0x12, 1, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0];
    [&b"II*\0\x08\0\0\0\x01\0"[..], &entry, &[0; 4]].concat()
}

/// 48x32 pixels, stored with an orientation: blocks of these values at both ends of the first row.
fn turned(root: &Root, extension: &str, orientation: u8, [first, last]: [u8; 2]) -> PathBuf {
    let stored = GrayImage::from_fn(48, 32, |x, y| {
        Luma([if y >= 8 || (8..40).contains(&x) {
            0
        } else if x < 8 {
            first
        } else {
            last
        }])
    });
    let path = root.file(&format!("turned.{extension}"));
    let file = File::create(&path).expect("created");
    let (bytes, grey) = (stored.as_raw(), ::image::ExtendedColorType::L8);
    match extension {
        "jpg" => {
            let mut encoder = JpegEncoder::new_with_quality(file, 95);
            encoder.set_exif_metadata(exif(orientation)).expect("accepted");
            encoder.write_image(bytes, 48, 32, grey).expect("written");
        }
        "png" => {
            let mut encoder = PngEncoder::new(file);
            encoder.set_exif_metadata(exif(orientation)).expect("accepted");
            encoder.write_image(bytes, 48, 32, grey).expect("written");
        }
        _ => {
            let mut encoder = TiffEncoder::new(file).expect("created");
            let mut page = encoder.new_image::<colortype::Gray8>(48, 32).expect("a page");
            page.encoder().write_tag(Tag::Orientation, u16::from(orientation)).expect("written");
            page.write_data(bytes).expect("written");
        }
    }
    path
}

/// The pixel in the middle of the block in a corner.
fn at_corner(image: &GrayImage, (right, bottom): (bool, bool)) -> u8 {
    let (width, height) = image.dimensions();
    image.get_pixel(if right { width - 5 } else { 4 }, if bottom { height - 5 } else { 4 }).0[0]
}

#[test]
fn images_and_masks_are_upright_in_every_format() {
    let root = Root::new();
    for extension in ["jpg", "png", "tif"] {
        for (number, [first, last]) in (1..).zip(CORNERS) {
            let path = turned(&root, extension, number, [250, 120]);
            let name = format!("{extension} with orientation {number}");
            let file = image_file(&path).expect("an image");
            let grey = file.pixels.into_luma8();
            let size = if number < 5 { (48, 32) } else { (32, 48) };
            assert_eq!((grey.dimensions(), dimensions(&path).expect("a size")), (size, size), "{name}");
            assert_eq!(file.is_turned, number > 1, "{name}");
            assert!(at_corner(&grey, first).abs_diff(250) < 12, "{name}: {}", at_corner(&grey, first));
            assert!(at_corner(&grey, last).abs_diff(120) < 12, "{name}: {}", at_corner(&grey, last));
            let path = turned(&root, extension, number, [255, 0]);
            let mask = foreground(&mask(&path).expect("a mask"));
            assert_eq!((mask.dimensions(), at_corner(&mask, first), at_corner(&mask, last)), (size, 255, 0), "{name}");
            assert_eq!(stored_mask(&path).expect("a mask").is_turned, number > 1, "{name}");
        }
        for invalid in [0, 9, 255] {
            let file = image_file(&turned(&root, extension, invalid, [250, 120])).expect("an image");
            assert_eq!((file.pixels.width(), file.is_turned), (48, false), "{extension} with orientation {invalid}");
        }
    }
}

#[test]
fn sizes_that_differ_by_a_turn_are_named() {
    assert_eq!(turned_by_90((40, 60), (60, 40)), "; one of them is turned by 90 degrees");
    assert_eq!([turned_by_90((40, 60), (61, 40)), turned_by_90((40, 40), (40, 40))], ["", ""]);
}

#[test]
fn big_tiff_is_read_like_tiff() {
    let root = Root::new();
    let path = root.file("big.tif");
    let encoder = || TiffEncoder::<_, TiffKindBig>::new_generic(File::create(&path).expect("created")).expect("a file");
    let values: Vec<u8> = (0..24).collect();
    encoder().write_image::<colortype::Gray8>(6, 4, &values).expect("written");
    assert_eq!(image(&path).expect("an image").as_luma8().expect("grey").as_raw(), &values);
    assert_eq!(dimensions(&path).expect("a size"), (6, 4));
    encoder().write_image::<colortype::RGB8>(4, 2, &values).expect("written");
    assert_eq!(image(&path).expect("an image").as_rgb8().expect("colour").as_raw(), &values);
    let deep: Vec<u16> = (0..24).map(|value| value * 257).collect();
    encoder().write_image::<colortype::Gray16>(6, 4, &deep).expect("written");
    let file = image_file(&path).expect("an image");
    assert_eq!((file.range, file.pixels.as_luma8().expect("grey").as_raw()), (Some([0, 23 * 257]), &values));
    let bytes = fs::read(&path).expect("read");
    assert!(is_image(&bytes));
    fs::write(&path, &bytes[..bytes.len() / 2]).expect("written");
    assert!(image(&path).expect_err("truncated").to_string().contains("cannot be decoded"));
}

#[test]
fn pixels_that_cannot_be_used_are_named_with_a_remedy() {
    let root = Root::new();
    let path = root.file("page.tif");
    let encoder =
        || TiffEncoder::<_, TiffKindStandard>::new_generic(File::create(&path).expect("created")).expect("a file");
    let refused = |expected: &str| {
        for error in [image(&path).expect_err("refused"), mask(&path).expect_err("refused")] {
            assert!(error.to_string().ends_with(expected), "{error}");
            assert!(error.hint().contains("PNG of 8 or 16 bits"), "{}", error.hint());
        }
    };
    encoder().write_image::<colortype::Gray32Float>(2, 2, &[0.0, 0.5, 1.0, 2.0]).expect("written");
    refused("page.tif: has 32-bit floating-point pixels");
    encoder().write_image::<colortype::Gray64Float>(2, 2, &[0.0, 0.5, 1.0, 2.0]).expect("written");
    refused("has 64-bit floating-point pixels");
    encoder().write_image::<colortype::RGB32Float>(1, 1, &[0.0, 0.5, 1.0]).expect("written");
    refused("has 32-bit floating-point pixels");
    encoder().write_image::<colortype::GrayI16>(2, 2, &[-1, 0, 1, 2]).expect("written");
    refused("has signed 16-bit pixels");
    encoder().write_image::<colortype::GrayI8>(2, 2, &[-1, 0, 1, 2]).expect("written");
    refused("has signed 8-bit pixels");
    encoder().write_image::<colortype::Gray32>(2, 2, &[0, 1, 2, 70_000]).expect("written");
    refused("has 32-bit pixels");
}

#[test]
fn palettes_of_tiff_files_are_colours_of_images_and_labels_of_masks() {
    let root = Root::new();
    let path = root.file("palette.tif");
    let saved = |colours: &[[u16; 3]], indexes: &[u8]| {
        let mut encoder = TiffEncoder::new(File::create(&path).expect("created")).expect("a file");
        let mut page = encoder.new_image::<colortype::Gray8>(6, 4).expect("a page");
        let channel =
            |channel: usize| (0..256).map(move |index| colours.get(index).map_or(0, |colour| colour[channel]));
        let map: Vec<u16> = (0..3).flat_map(channel).collect();
        page.encoder().write_tag(Tag::PhotometricInterpretation, 3_u16).expect("written");
        page.encoder().write_tag(Tag::ColorMap, &map[..]).expect("written");
        page.write_data(indexes).expect("written");
    };
    let indexes: Vec<u8> = (0..24).map(|at| if at < 6 { 2 } else { u8::from(at < 9) }).collect();
    saved(&[[0; 3], [38_036, 0, 0], [0, 16_448, 0]], &indexes);
    let rgb = image(&path).expect("an image").into_rgb8();
    assert_eq!(
        [rgb.get_pixel(0, 0).0, rgb.get_pixel(0, 1).0, rgb.get_pixel(0, 3).0],
        [[0, 64, 0], [148, 0, 0], [0; 3]]
    );
    let error = mask(&path).expect_err("two labels").to_string();
    assert!(error.ends_with("the mask has several labels: 1 (3 pixels), 2 (6 pixels)"), "{error}");
    let chosen = labelled_mask(&path, Labels::new(&[1]).expect("labels")).expect("a mask");
    assert_eq!(chosen.pixels().filter(|pixel| pixel.0 == [255]).count(), 3);
    // indexes of one colour, and of colours that differ in their lower bits only
    for colours in [[[0; 3], [9766; 3], [9766; 3]], [[0; 3], [9728; 3], [9900; 3]], [[0; 3], [38; 3], [38; 3]]] {
        saved(&colours, &indexes);
        let error = mask(&path).expect_err("two labels").to_string();
        assert!(error.ends_with("several labels: 1 (3 pixels), 2 (6 pixels)"), "{colours:?}: {error}");
        let chosen = labelled_mask(&path, Labels::new(&[2]).expect("labels")).expect("a mask");
        assert_eq!(chosen.pixels().filter(|pixel| pixel.0 == [255]).count(), 6);
    }
    // black is the background, wherever it is in the palette
    saved(&[[65_535; 3], [0; 3]], &[[0; 6], [1; 6], [1; 6], [1; 6]].concat());
    assert_eq!(mask(&path).expect("a mask").pixels().filter(|pixel| pixel.0 == [255]).count(), 6);
}

#[test]
fn an_orientation_is_found_in_both_byte_orders_and_behind_other_blocks() {
    let root = Root::new();
    let stored = GrayImage::from_fn(48, 32, |x, y| Luma([if x < 8 && y < 8 { 250 } else { 0 }]));
    let mut plain = Vec::new();
    let encoder = JpegEncoder::new_with_quality(&mut plain, 95);
    encoder.write_image(stored.as_raw(), 48, 32, ::image::ExtendedColorType::L8).expect("written");
    let block = |content: &[u8]| {
        let length = u16::try_from(content.len() + 2).expect("short").to_be_bytes();
        [&[0xff, 0xe1][..], &length, content].concat()
    };
    let little = block(&[&b"Exif\0\0"[..], &exif(3)].concat());
    let big = block(b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x03\0\0\0\0\0\0");
    let other = block(b"http://ns.adobe.com/xap/1.0/\0<x/>");
    let path = root.file("phone.jpg");
    for (blocks, is_turned) in
        [(little.clone(), true), (big, true), ([other.clone(), little].concat(), true), (other, false)]
    {
        // the blocks follow the start of the image
        fs::write(&path, [&plain[..2], &blocks, &plain[2..]].concat()).expect("written");
        let file = image_file(&path).expect("an image");
        assert_eq!(file.is_turned, is_turned);
        let grey = file.pixels.into_luma8();
        let [start, end] = [(false, false), (true, true)].map(|corner| at_corner(&grey, corner) > 200);
        assert_eq!((start, end), (!is_turned, is_turned));
    }
}

#[test]
fn files_of_several_pages_are_refused_and_thumbnails_are_not_pages() {
    let root = Root::new();
    let path = root.file("pages.tif");
    let mask_of = |value: u8| -> Vec<u8> { (0..24).map(|at| if at < 6 { value } else { 0 }).collect() };
    // the kind of each page: 1 for a reduced copy
    let written = |kinds: &[Option<u32>]| {
        let mut encoder = TiffEncoder::new(File::create(&path).expect("created")).expect("a file");
        for (kind, value) in kinds.iter().zip([255, 0, 255]) {
            let mut page = encoder.new_image::<colortype::Gray8>(6, 4).expect("a page");
            if let Some(kind) = kind {
                page.encoder().write_tag(Tag::NewSubfileType, *kind).expect("written");
            }
            page.write_data(&mask_of(value)).expect("written");
        }
    };
    for (kinds, num_pages) in [
        (&[None, None][..], 2),
        (&[Some(0), Some(1), Some(2)], 2),
        (&[None, Some(2), Some(2)], 3),
        // the first page is the copy
        (&[Some(1), Some(0)], 2),
    ] {
        written(kinds);
        for error in [image(&path).expect_err("refused"), mask(&path).expect_err("refused")] {
            assert!(
                error.to_string().ends_with(&format!("pages.tif: has {num_pages} pages instead of one")),
                "{error}"
            );
            assert!(error.hint().starts_with("save each page as a file of its own"), "{}", error.hint());
        }
    }
    for kinds in [&[None][..], &[Some(1)], &[Some(0), Some(1)], &[None, Some(1), Some(5)]] {
        written(kinds);
        assert_eq!(image(&path).expect("an image").as_luma8().expect("grey").as_raw(), &mask_of(255), "{kinds:?}");
    }
    // a thumbnail that the first page follows, or a pointer to nothing
    written(&[None, Some(1)]);
    let mut bytes = fs::read(&path).expect("read");
    let offset =
        |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let end = |bytes: &[u8], at: usize| at + 2 + 12 * usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let first = offset(&bytes, 4);
    let second = offset(&bytes, end(&bytes, first));
    let last = end(&bytes, second);
    assert_eq!(offset(&bytes, last), 0);
    let mut beyond = bytes.clone();
    beyond[last..last + 4].copy_from_slice(&0x7fff_fff0_u32.to_le_bytes());
    fs::write(&path, beyond).expect("written");
    assert!(image(&path).is_ok());
    bytes.copy_within(4..8, last);
    fs::write(&path, bytes).expect("written");
    assert!(image(&path).is_ok());
}

/// An RGB file with tiles, without compression.
struct Tiled {
    size: (u32, u32),
    tile: u32,
    bits: u32,
    /// The colours have tiles of their own.
    is_planar: bool,
    has_lzw: bool,
}

impl Tiled {
    fn bytes(&self, value: impl Fn(u32, u32, u32) -> u16) -> Vec<u8> {
        let Self { size: (width, height), tile, bits, is_planar, has_lzw } = *self;
        let (across, down) = (width.div_ceil(tile), height.div_ceil(tile));
        let num_tiles = across * down * if is_planar { 3 } else { 1 };
        let mut tiles = Vec::new();
        for index in 0..num_tiles {
            let (plane, place) = (index / (across * down), index % (across * down));
            let (left, top) = (place % across * tile, place / across * tile);
            let planes = if is_planar { plane..plane + 1 } else { 0..3 };
            let mut bytes = Vec::new();
            for (y, x) in (top..top + tile).flat_map(|y| (left..left + tile).map(move |x| (y, x))) {
                for plane in planes.clone() {
                    // what is outside of the image is not zero
                    let value = if x < width && y < height { value(x, y, plane) } else { 77 };
                    bytes.extend(&value.to_le_bytes()[..bits as usize / 8]);
                }
            }
            if has_lzw {
                let mut encoder = weezl::encode::Encoder::with_tiff_size_switch(weezl::BitOrder::Msb, 8);
                bytes = encoder.encode(&bytes).expect("packed");
            }
            tiles.push(bytes);
        }
        self.file(&tiles)
    }

    fn file(&self, tiles: &[Vec<u8>]) -> Vec<u8> {
        let Self { size: (width, height), tile, bits, is_planar, has_lzw } = *self;
        let num_tiles = u32::try_from(tiles.len()).expect("few");
        let entries = 13;
        let extra = 8 + 2 + 12 * entries + 4;
        let data = extra + 8 * num_tiles;
        let mut bytes = b"II*\0\x08\0\0\0".to_vec();
        bytes.extend(u16::try_from(entries).expect("few").to_le_bytes());
        let mut entry = |tag: u16, kind: u16, count: u32, value: u32| {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(kind.to_le_bytes());
            bytes.extend(count.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        };
        for (tag, value) in [(256, width), (257, height)] {
            entry(tag, 4, 1, value);
        }
        // one value stands for the bits of all samples
        for (tag, value) in [
            (258, bits),
            (259, if has_lzw { 5 } else { 1 }),
            (262, 2),
            (277, 3),
            (284, if is_planar { 2 } else { 1 }),
            (322, tile),
            (323, tile),
        ] {
            entry(tag, 3, 1, value);
        }
        entry(324, 4, num_tiles, extra);
        entry(325, 4, num_tiles, extra + 4 * num_tiles);
        entry(338, 3, 0, 0);
        entry(339, 3, 1, 1);
        bytes.extend([0; 4]);
        let mut at = data;
        for tile in tiles {
            bytes.extend(at.to_le_bytes());
            at += u32::try_from(tile.len()).expect("small");
        }
        for tile in tiles {
            bytes.extend(u32::try_from(tile.len()).expect("small").to_le_bytes());
        }
        bytes.extend(tiles.concat());
        bytes
    }
}

#[test]
fn tiff_files_with_tiles_for_each_colour_are_read() {
    let colour = |x: u32, y: u32, plane: u32| [x * 4, y * 5, (x + y) * 2][plane as usize] % 256;
    for (size, tile) in [((48, 64), 64), ((45, 61), 16), ((45, 64), 32), ((16, 16), 16), ((33, 17), 16)] {
        for (bits, times) in [(8, 1), (16, 257)] {
            let stored = |x, y, plane| u16::try_from(colour(x, y, plane) * times).expect("16 bits");
            let bytes = Tiled { size, tile, bits, is_planar: true, has_lzw: false }.bytes(stored);
            let decoded = image_of(&bytes, Path::new("a.tif"), u64::MAX).expect("an image").into_rgb8();
            assert_eq!(decoded.dimensions(), size);
            for (x, y, Rgb(found)) in decoded.enumerate_pixels() {
                let wanted = [0, 1, 2].map(|plane| u8::try_from(colour(x, y, plane)).expect("8 bits"));
                assert_eq!(*found, wanted, "{size:?}, tiles of {tile}, {bits} bits, at {x}, {y}");
            }
            let cut = &bytes[..bytes.len() / 2];
            assert!(image_of(cut, Path::new("a.tif"), u64::MAX).is_err(), "{size:?}: truncated");
        }
    }
}

/// The pixels decide whether the decoder reads such a file itself.
#[test]
fn tiff_files_with_tiles_in_lzw_are_read() {
    type Shade = fn(u32, u32, u32) -> u16;
    let shade = |value: u32| u16::try_from(value % 256).expect("8 bits");
    let patterns: [Shade; 4] = [
        |x, y, plane| u16::try_from((x * 4 + y * 5 * plane) % 256).expect("8 bits"),
        |x, _, plane| u16::from(x / 9 % 2 == plane % 2) * 200,
        |x, y, plane| u16::try_from((x * x * 31 + y * 17 + x * y * (plane + 3)) % 256).expect("8 bits"),
        |_, _, plane| u16::try_from(plane * 90).expect("8 bits"),
    ];
    let mut num_unpacked = 0;
    for pattern in patterns {
        for (size, tile) in [((77, 53), 32), ((77, 53), 16), ((45, 61), 16), ((64, 64), 32), ((33, 17), 16)] {
            for (is_planar, bits) in [(true, 8), (true, 16), (false, 8), (false, 16)] {
                let times = if bits == 8 { 1 } else { 257 };
                let stored = |x, y, plane| shade(pattern(x, y, plane).into()) * times;
                let file = Tiled { size, tile, bits, is_planar, has_lzw: true };
                let bytes = file.bytes(stored);
                num_unpacked += usize::from(tiff_page(&bytes, Palette::Expand).is_err());
                let decoded = image_of(&bytes, Path::new("a.tif"), u64::MAX).expect("an image").into_rgb8();
                for (x, y, Rgb(found)) in decoded.enumerate_pixels() {
                    let wanted = [0, 1, 2].map(|plane| u8::try_from(pattern(x, y, plane)).expect("8 bits"));
                    assert_eq!(*found, wanted, "{size:?}, tiles of {tile}, {bits} bits, {is_planar}, at {x}, {y}");
                }
                let cut = &bytes[..bytes.len() / 2];
                assert!(image_of(cut, Path::new("a.tif"), u64::MAX).is_err(), "{size:?}: truncated");
            }
        }
    }
    assert!(num_unpacked > 2, "{num_unpacked} files need another way");
}

/// Also in a thread of a pool.
#[test]
fn a_panic_of_a_decoder_ends_its_file_only() {
    let root = Root::new();
    let (good, bad) = (root.file("good.png"), root.file("panics.png"));
    for path in [&good, &bad] {
        GrayImage::from_pixel(4, 4, Luma([9])).save(path).expect("written");
    }
    let decoders: [fn(&Path) -> Option<Error>; 5] = [
        |path| image(path).err(),
        |path| image_file(path).err(),
        |path| stored_mask(path).err(),
        |path| mask(path).err(),
        |path| image_of(&fs::read(path).expect("bytes"), path, 100).err(),
    ];
    for decoder in decoders {
        let error =
            std::thread::scope(|scope| scope.spawn(|| decoder(&bad)).join()).expect("no panic").expect("an error");
        assert!(error.to_string().ends_with("panics.png: its decoder failed: a panic of a test"), "{error}");
        assert!(error.hint().contains("another program"), "{}", error.hint());
        assert!(decoder(&good).is_none());
    }
}
