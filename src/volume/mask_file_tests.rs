//! Tests of masks in files made for them.

use std::path::{Path, PathBuf};

use ::image::codecs::jpeg::JpegEncoder;
use ::image::{LumaA, Rgba, imageops};

use super::*;
use crate::decode;
use crate::fixture::Root;
use prsmed_data::image::foreground;

const SIDES: (u32, u32) = (90, 60);

/// A box of 480 pixels.
fn is_lesion(x: u32, y: u32) -> bool {
    (10..34).contains(&x) && (12..32).contains(&y)
}

/// A box of 200 pixels beside it.
fn is_organ(x: u32, y: u32) -> bool {
    (50..70).contains(&x) && (40..50).contains(&y)
}

/// 0, 1 or 2.
fn region(x: u32, y: u32) -> usize {
    usize::from(is_lesion(x, y)) + 2 * usize::from(is_organ(x, y))
}

fn saved<P>(root: &Root, name: &str, pixel: impl Fn(u32, u32) -> P) -> PathBuf
where
    P: ::image::Pixel + ::image::PixelWithColorType,
    [P::Subpixel]: ::image::EncodableLayout,
{
    let path = root.file(name);
    ImageBuffer::<P, Vec<P::Subpixel>>::from_fn(SIDES.0, SIDES.1, pixel).save(&path).expect("written");
    path
}

/// A PNG with a palette.
fn indexed(root: &Root, palette: &[[u8; 4]], bits: png::BitDepth, index: impl Fn(u32, u32) -> u8) -> PathBuf {
    let path = root.file("indexed.png");
    let file = std::fs::File::create(&path).expect("created");
    let mut encoder = png::Encoder::new(file, SIDES.0, SIDES.1);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(bits);
    encoder.set_palette(palette.iter().flat_map(|[r, g, b, _]| [*r, *g, *b]).collect::<Vec<u8>>());
    if palette.iter().any(|colour| colour[3] < 255) {
        encoder.set_trns(palette.iter().map(|colour| colour[3]).collect::<Vec<u8>>());
    }
    let bits = bits as usize;
    let mut packed = Vec::new();
    for y in 0..SIDES.1 {
        let mut row = vec![0_u8; (SIDES.0 as usize * bits).div_ceil(8)];
        for x in 0..SIDES.0 {
            let at = x as usize * bits;
            row[at / 8] |= index(x, y) << (8 - bits - at % 8);
        }
        packed.extend(row);
    }
    encoder.write_header().and_then(|mut writer| writer.write_image_data(&packed)).expect("written");
    path
}

/// Numbers of foreground pixels of the masks that training, `data prepare` and the server read.
fn count(path: &Path) -> u64 {
    let set = |mask: GrayImage| mask.iter().filter(|value| **value > 0).count() as u64;
    let trained = set(foreground(&decode::mask(path).unwrap_or_else(|error| panic!("{error}"))));
    let prepared = set(decode::stored_mask(path).expect("a mask").binary());
    // a soft border is cut at half of the largest value, or of the label
    assert!(trained.abs_diff(prepared) <= trained / 100, "{}: {trained} and {prepared}", path.display());
    trained
}

fn chosen(path: &Path, labels: &[u16]) -> usize {
    let mask =
        decode::labelled_mask(path, Labels::new(labels).expect("labels")).unwrap_or_else(|error| panic!("{error}"));
    mask.pixels().filter(|pixel| pixel.0 == [255]).count()
}

fn refused(path: &Path) -> String {
    decode::mask(path).expect_err("refused").to_string()
}

#[test]
fn transparency_is_the_mask_where_the_colour_is_the_same_everywhere() {
    let root = Root::new();
    let on = |x, y| if is_lesion(x, y) { u8::MAX } else { 0 };
    let deep = |x, y| u16::from(on(x, y)) * 257;
    let files = [
        saved(&root, "white.png", |x, y| Rgba([255, 255, 255, on(x, y)])),
        saved(&root, "black.png", |x, y| Rgba([0, 0, 0, on(x, y)])),
        saved(&root, "red.png", |x, y| Rgba([200, 10, 10, on(x, y)])),
        saved(&root, "grey.png", |x, y| LumaA([255, on(x, y)])),
        saved(&root, "deep.png", |x, y| Rgba([65_535, 65_535, 65_535, deep(x, y)])),
        saved(&root, "deep_grey.png", |x, y| LumaA([65_535, deep(x, y)])),
        saved(&root, "white.tif", |x, y| Rgba([255, 255, 255, on(x, y)])),
        indexed(&root, &[[255, 255, 255, 0], [255; 4]], png::BitDepth::One, |x, y| u8::from(is_lesion(x, y))),
    ];
    for path in &files {
        assert_eq!(count(path), 480, "{}", path.display());
        assert!(decode::stored_mask(path).expect("a mask").note.is_some_and(|note| note.contains("of one colour")));
    }
    assert_eq!(count(&saved(&root, "none.png", |_, _| Rgba([255_u8, 255, 255, 0]))), 0);
    let soft = saved(&root, "soft.png", |x, y| Rgba([255, 255, 255, on(x, y).max(on(x + 1, y) / 4)]));
    assert_eq!(count(&soft), 480, "a soft border");
    let two = saved(&root, "two.png", |x, y| Rgba([255, 255, 255, [0_u8, 100, 200][region(x, y)]]));
    assert!(refused(&two).ends_with("several labels: 100 (480 pixels), 200 (200 pixels)"), "{}", refused(&two));
}

#[test]
fn transparent_pixels_are_background() {
    let root = Root::new();
    let white_around =
        saved(
            &root,
            "a.png",
            |x, y| if is_lesion(x, y) { Rgba([200_u8, 0, 0, 255]) } else { Rgba([255_u8, 255, 255, 0]) },
        );
    let grey_around = saved(&root, "b.png", |x, y| LumaA(if is_lesion(x, y) { [255_u8, 255] } else { [90, 0] }));
    let deep =
        saved(&root, "c.png", |x, y| if is_lesion(x, y) { Rgba([65_535_u16; 4]) } else { Rgba([9000, 0, 0, 0]) });
    // left over colours under transparent pixels, and a visible background
    let remains = saved(&root, "d.png", |x, y| match (is_lesion(x, y), y > 40) {
        (true, _) => Rgba([255; 4]),
        (false, true) => Rgba([u8::try_from(x).expect("small"), 200, 7, 0]),
        (false, false) => Rgba([0, 0, 0, 255]),
    });
    let palette = [[0, 0, 255, 0], [255, 255, 0, 255]];
    let indexes = indexed(&root, &palette, png::BitDepth::Two, |x, y| u8::from(is_lesion(x, y)));
    for path in [white_around, grey_around, deep, remains, indexes] {
        assert_eq!(count(&path), 480, "{}", path.display());
        assert!(decode::stored_mask(&path).expect("a mask").note.is_some_and(|note| note.contains("background")));
    }
    // nothing to say where the colours are the same mask
    let black_around = saved(&root, "e.png", |x, y| Rgba(if is_lesion(x, y) { [255_u8; 4] } else { [0; 4] }));
    let opaque = saved(&root, "f.png", |x, y| LumaA([if is_lesion(x, y) { 255_u8 } else { 0 }, 255]));
    for path in [black_around, opaque] {
        assert_eq!((count(&path), decode::stored_mask(&path).expect("a mask").note), (480, None), "{}", path.display());
    }
}

#[test]
fn colours_that_contradict_the_transparency_are_refused() {
    let root = Root::new();
    let black_on_clear =
        saved(&root, "a.png", |x, y| Rgba(if is_lesion(x, y) { [0_u8, 0, 0, 255] } else { [255, 255, 255, 0] }));
    let reason = refused(&black_on_clear);
    assert!(reason.contains("4920 transparent pixels have one colour, 480 other pixels have one colour"), "{reason}");
    let remains = saved(&root, "b.png", |x, y| {
        let shade = u8::try_from(x + y).expect("small");
        LumaA(if is_lesion(x, y) { [255, 255] } else { [shade, 0] })
    });
    assert!(
        refused(&remains).contains("4920 transparent pixels have several colours, 480 other"),
        "{}",
        refused(&remains)
    );
    let all_clear = saved(&root, "c.png", |x, y| Rgba(if is_lesion(x, y) { [255_u8, 0, 0, 0] } else { [0; 4] }));
    assert!(refused(&all_clear).contains("all of its 5400 pixels are transparent, but they have 2 colours"));
}

#[test]
fn labels_of_a_palette_file_are_its_indexes() {
    let root = Root::new();
    let mut voc = vec![[0, 0, 0, 255]; 17];
    (voc[1], voc[16]) = ([128, 0, 0, 255], [0, 64, 0, 255]);
    let map = indexed(&root, &voc, png::BitDepth::Eight, |x, y| [0, 1, 16][region(x, y)]);
    let reason = refused(&map);
    assert!(reason.ends_with("the mask has several labels: 1 (480 pixels), 16 (200 pixels)"), "{reason}");
    assert_eq!([chosen(&map, &[1]), chosen(&map, &[16]), chosen(&map, &[1, 16])], [480, 200, 680]);
    let four_bits = indexed(&root, &voc[..16], png::BitDepth::Four, |x, y| u8::from(is_lesion(x, y)));
    assert_eq!((count(&four_bits), chosen(&four_bits, &[1])), (480, 480));
    // two grey labels, and no background
    let greys = [[0, 0, 0, 255], [90, 90, 90, 255], [200, 200, 200, 255]];
    let map = indexed(&root, &greys, png::BitDepth::Two, |x, y| [0, 1, 2][region(x, y)]);
    assert!(refused(&map).ends_with("1 (480 pixels), 2 (200 pixels)"), "{}", refused(&map));
    let map = indexed(&root, &voc, png::BitDepth::Eight, |x, y| if is_lesion(x, y) { 1 } else { 16 });
    assert!(refused(&map).ends_with("1 (480 pixels), 16 (4920 pixels)"), "{}", refused(&map));
}

#[test]
fn the_order_of_a_palette_does_not_invert_a_mask() {
    let root = Root::new();
    let (black, white, red) = ([0, 0, 0, 255], [255; 4], [255, 0, 0, 255]);
    let lesion = |x, y| u8::from(is_lesion(x, y));
    let usual = indexed(&root, &[black, white], png::BitDepth::One, lesion);
    assert_eq!(count(&usual), 480);
    let inverted = indexed(&root, &[white, black], png::BitDepth::One, |x, y| 1 - lesion(x, y));
    assert_eq!(count(&inverted), 480, "black is the background");
    let error = decode::labelled_mask(&inverted, Labels::new(&[1]).expect("labels")).expect_err("not clear");
    assert!(
        error
            .to_string()
            .ends_with("index 0 of the mask's palette is not the background, so that its labels are not clear")
    );
    let coloured = indexed(&root, &[red, black], png::BitDepth::Eight, |x, y| 1 - lesion(x, y));
    assert_eq!(count(&coloured), 480);
    let no_black = indexed(&root, &[[30, 60, 90, 255], red], png::BitDepth::Eight, lesion);
    assert_eq!(count(&no_black), 480, "index 0 is the background");
    let unclear = indexed(&root, &[red, white], png::BitDepth::Eight, |x, y| 1 - lesion(x, y));
    assert!(refused(&unclear).ends_with("several colours: #ff0000 (480 pixels), #ffffff (4920 pixels)"));
    let ramp: Vec<[u8; 4]> = (0..=255).map(|grey| [grey, grey, grey, 255]).collect();
    let soft = indexed(&root, &ramp, png::BitDepth::Eight, |x, y| 255 * lesion(x, y).max(lesion(x + 1, y) / 2));
    assert_eq!((count(&soft), chosen(&soft, &[255])), (480, 480), "indexes that are grey levels");
}

#[test]
fn colours_are_labels() {
    let root = Root::new();
    let map = |name: &str, colours: [[u8; 3]; 3]| saved(&root, name, |x, y| Rgb(colours[region(x, y)]));
    let organs = map("a.png", [[0; 3], [255, 0, 0], [0, 255, 0]]);
    assert!(
        refused(&organs).ends_with("several colours: #00ff00 (200 pixels), #ff0000 (480 pixels)"),
        "{}",
        refused(&organs)
    );
    let hint = decode::mask(&organs).expect_err("refused");
    assert!(hint.hint().contains("one mask for each colour"), "{}", hint.hint());
    assert_eq!(chosen(&organs, &[76]), 480, "76 is the grey value of red");
    let same_grey = map("b.png", [[0; 3], [128, 0, 0], [0, 64, 0]]);
    assert!(refused(&same_grey).ends_with("#004000 (200 pixels), #800000 (480 pixels)"), "{}", refused(&same_grey));
    let error = decode::labelled_mask(&same_grey, Labels::new(&[38]).expect("labels")).expect_err("two colours");
    assert!(error.to_string().ends_with("the colours #004000 and #800000 of the mask have the same grey value 38"));
    let thin =
        saved(
            &root,
            "c.png",
            |x, y| if x == 80 { Rgb([0, 0, 255]) } else { Rgb([u8::from(is_lesion(x, y)) * 255, 0, 0]) },
        );
    assert!(refused(&thin).ends_with("#0000ff (60 pixels), #ff0000 (480 pixels)"), "{}", refused(&thin));
    let dark = map("d.png", [[0; 3], [0, 0, 2], [0, 0, 2]]);
    assert_eq!(count(&dark), 680);
    // a scan with the lesion in a colour has no black background
    let around = map("e.png", [[90, 20, 20], [255, 0, 0], [255, 0, 0]]);
    assert!(refused(&around).contains("several colours: #5a1414"), "{}", refused(&around));
}

#[test]
fn one_colour_with_soft_borders_or_jpeg_noise_is_one_target() {
    let root = Root::new();
    for colour in [[255, 0, 0], [0, 200, 0], [30, 60, 220], [255, 255, 0], [255, 255, 255]] {
        let sharp = RgbImage::from_fn(SIDES.0, SIDES.1, |x, y| Rgb(if is_lesion(x, y) { colour } else { [0; 3] }));
        for filter in [imageops::FilterType::Triangle, imageops::FilterType::CatmullRom] {
            let path = root.file("soft.png");
            imageops::resize(&sharp, 180, 120, filter).save(&path).expect("written");
            let found = count(&path);
            assert!(found.abs_diff(4 * 480) < 60, "{colour:?} {filter:?}: {found}");
        }
        for quality in [10, 20, 50, 75, 95] {
            let found = count(&jpeg(&root, &sharp.clone().into(), quality));
            assert!(found.abs_diff(480) < 60, "{colour:?}, quality {quality}: {found}");
        }
    }
    let both = RgbImage::from_fn(SIDES.0, SIDES.1, |x, y| Rgb([[0; 3], [255, 0, 0], [0, 255, 0]][region(x, y)]));
    for quality in [50, 75, 95] {
        let reason = refused(&jpeg(&root, &both.clone().into(), quality));
        assert!(reason.contains("several colours: #0"), "quality {quality}: {reason}");
    }
}

fn jpeg(root: &Root, image: &DynamicImage, quality: u8) -> PathBuf {
    let path = root.file("mask.jpg");
    let file = std::fs::File::create(&path).expect("created");
    image.write_with_encoder(JpegEncoder::new_with_quality(file, quality)).expect("written");
    path
}

#[test]
fn levels_that_differ_by_jpeg_noise_are_one_label() {
    let root = Root::new();
    let mut num_noisy = 0;
    for (left, top) in [(3, 5), (8, 8), (10, 12), (16, 9)] {
        for quality in [5, 10, 15, 20, 30, 50, 75, 90] {
            let mask = GrayImage::from_fn(SIDES.0, SIDES.1, |x, y| {
                Luma([if (left..left + 24).contains(&x) && (top..top + 20).contains(&y) { 255 } else { 0 }])
            });
            let path = jpeg(&root, &mask.into(), quality);
            let found = count(&path);
            assert!(found.abs_diff(480) < 60, "at {left}, {top}, quality {quality}: {found}");
            let pixels = ::image::open(&path).expect("a JPEG").into_luma8();
            num_noisy += usize::from(labels::labels_of(pixels.as_raw(), SIDES.0 as usize, 0).len() > 1);
        }
    }
    assert!(num_noisy > 2, "{num_noisy} masks have levels that would be labels in a PNG file");
}

#[test]
fn levels_of_lossless_files_stay_labels_and_jpeg_label_maps_can_be_chosen_from() {
    let root = Root::new();
    let exact = saved(&root, "exact.png", |x, y| Luma([[0_u8, 253, 255][region(x, y)]]));
    assert!(refused(&exact).ends_with("253 (480 pixels), 255 (200 pixels)"), "{}", refused(&exact));
    let map = GrayImage::from_fn(SIDES.0, SIDES.1, |x, y| Luma([[0, 120, 250][region(x, y)]]));
    for quality in [50, 75, 95] {
        let path = jpeg(&root, &map.clone().into(), quality);
        let stored = decode::stored_mask(&path).expect("a mask");
        let found: Vec<u16> = stored.labels().iter().map(|(label, _)| *label).collect();
        assert!(matches!(found[..], [118..=122, 248..=252]), "quality {quality}: {found:?}");
        assert!(refused(&path).contains("several labels"));
        let [low, high] = [chosen(&path, &found[..1]), chosen(&path, &found[1..])];
        assert!(low.abs_diff(480) < 80 && high.abs_diff(200) < 30, "quality {quality}: {low} and {high}");
    }
}

/// A photograph or scan of 90x60 pixels: (shade, noise).
fn shades(root: &Root, name: &str, shade: impl Fn(u32, u32) -> u32) -> PathBuf {
    saved(root, name, |x, y| Luma([u8::try_from(shade(x, y) + (x * 7919 + y * 104_729) % 23).expect("small")]))
}

#[test]
fn photographs_and_scans_are_no_masks() {
    let root = Root::new();
    let noisy = shades(&root, "a.png", |x, y| 2 * x + y / 2);
    // a dark scan with a bright part
    let inside = |x: u32, y: u32| (20..70).contains(&x) && (15..45).contains(&y);
    let scan = saved(&root, "b.png", |x, y| {
        let noise = (x * x * 31 + y * y * 17 + x * y * 7) % 60;
        Luma([if inside(x, y) { u8::try_from(50 + x + noise).expect("small") } else { 0 }])
    });
    let ramp = saved(&root, "c.png", |x, y| Luma([u8::try_from(x * 2 + y).expect("small")]));
    let deep =
        saved(&root, "d.png", |x, y| Luma([u16::try_from(x * 300 + y * 177 + (x * y * 31) % 900).expect("small")]));
    let colour = saved(&root, "e.png", |x, y| {
        Rgb([x * 2 + 20, y * 3 + 10, (x * y) % 200].map(|v| u8::try_from(v).expect("small")))
    });
    for path in [&noisy, &scan, &ramp, &deep, &colour] {
        let Err(error) = decode::mask(path) else { panic!("{} is a mask", path.display()) };
        assert!(error.to_string().contains(" grey levels that fill no area, like a photograph"), "{error}");
        assert!(error.hint().contains("swapped"), "{}", error.hint());
    }
    let tall = jpeg(&root, &::image::open(&noisy).expect("an image"), 90);
    assert!(refused(&tall).contains("like a photograph"), "{}", refused(&tall));
}

#[test]
fn soft_masks_and_maps_of_many_labels_are_no_photographs() {
    let root = Root::new();
    let sharp = GrayImage::from_fn(180, 120, |x, y| Luma([if is_lesion(x / 2, y / 2) { 255 } else { 0 }]));
    for sigma in [1.0, 3.0, 6.0] {
        let path = root.file("soft.png");
        imageops::blur(&sharp, sigma).save(&path).expect("written");
        assert!(count(&path) > 1000, "sigma {sigma}");
    }
    // a heat map whose peak is the only bright pixel
    let heat = GrayImage::from_fn(180, 120, |x, y| {
        let square = (f64::from(x) - 90.0).powi(2) + (f64::from(y) - 60.0).powi(2);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=255")]
        Luma([(255.0 * (-square / 800.0).exp()) as u8])
    });
    let path = root.file("heat.png");
    heat.save(&path).expect("written");
    assert!(count(&path) > 100);
    // 150 cells
    let cells = ImageBuffer::<Luma<u16>, _>::from_fn(150, 100, |x, y| {
        Luma([u16::try_from(x / 10 + 15 * (y / 10)).expect("small")])
    });
    let path = root.file("cells.png");
    cells.save(&path).expect("written");
    assert_eq!(chosen(&path, &[40]), 100);
}

#[test]
fn an_index_as_black_as_index_0_is_not_dropped_without_a_choice() {
    let root = Root::new();
    let mut voc = vec![[0, 0, 0, 255]; 17];
    voc[1] = [128, 0, 0, 255];
    let map = indexed(&root, &voc, png::BitDepth::Eight, |x, y| [0, 1, 16][region(x, y)]);
    let error = decode::mask(&map).expect_err("refused");
    let reason = "index 0 (4720 pixels) and index 16 (200 pixels) of the mask's palette are both black, so that it is not clear \
                  whether 16 is background";
    assert!(
        error.to_string().ends_with(reason) && error.hint().contains("argument `labels=1,3`"),
        "{error}: {}",
        error.hint()
    );
    assert_eq!([chosen(&map, &[1]), chosen(&map, &[16])], [480, 200]);
    let all_black = indexed(&root, &[[0, 0, 0, 255]; 4], png::BitDepth::Two, |x, y| u8::from(is_lesion(x, y)));
    assert!(refused(&all_black).contains("index 0 (4920 pixels) and index 1 (480 pixels)"), "{}", refused(&all_black));
    assert_eq!(chosen(&all_black, &[1]), 480);
    // one grey label and the second black
    let greys = [[0, 0, 0, 255], [255; 4], [0, 0, 0, 255]];
    let map = indexed(&root, &greys, png::BitDepth::Two, |x, y| [0, 1, 2][region(x, y)]);
    assert!(refused(&map).contains("index 0 (4720 pixels) and index 2 (200 pixels)"), "{}", refused(&map));
    // without index 0, or with another colour there, black is the background
    let map = indexed(&root, &voc, png::BitDepth::Eight, |x, y| if is_lesion(x, y) { 1 } else { 16 });
    assert_eq!(count(&map), 480);
    let white_first = [[255; 4], [0, 0, 0, 255], [0, 0, 0, 255]];
    let map = indexed(&root, &white_first, png::BitDepth::Two, |x, y| [1, 0, 2][region(x, y)]);
    assert_eq!(count(&map), 480);
    // the noise of a palette of few colours
    let noisy = [[0, 0, 0, 255], [255; 4], [3, 2, 4, 255]];
    let map = indexed(&root, &noisy, png::BitDepth::Two, |x, y| [0, 1, 2][region(x, y)]);
    assert_eq!(count(&map), 480);
}

#[test]
fn indexes_of_one_colour_are_several_labels() {
    let root = Root::new();
    let bits = png::BitDepth::Eight;
    // the same grey, colour and white, and two colours of the grey value 38
    for [first, second] in [
        [[38; 3], [38; 3]],
        [[200, 0, 0], [200, 0, 0]],
        [[255; 3], [255; 3]],
        [[128, 0, 0], [0, 64, 0]],
        [[38; 3], [128, 0, 0]],
    ] {
        let mut palette = vec![[0, 0, 0, 255]; 17];
        for (index, [r, g, b]) in [(1, first), (16, second)] {
            palette[index] = [r, g, b, 255];
        }
        let map = indexed(&root, &palette, bits, |x, y| [0, 1, 16][region(x, y)]);
        let reason = refused(&map);
        assert!(
            reason.ends_with("the mask has several labels: 1 (480 pixels), 16 (200 pixels)"),
            "{first:?}: {reason}"
        );
        assert_eq!([chosen(&map, &[1]), chosen(&map, &[16]), chosen(&map, &[1, 16])], [480, 200, 680], "{first:?}");
    }
    // of 2 and 4 bits, beside a third label, and around a transparent background
    let grey = [90, 90, 90, 255];
    for (palette, bits) in [
        (vec![[0, 0, 0, 255], grey, grey, [200, 200, 200, 255]], png::BitDepth::Two),
        (vec![[0, 0, 0, 0], grey, grey, grey], png::BitDepth::Two),
        ([vec![[255, 255, 255, 0]], vec![grey; 15]].concat(), png::BitDepth::Four),
        ([vec![[90, 90, 90, 0]], vec![grey; 3]].concat(), png::BitDepth::Four),
        (vec![[60, 60, 60, 255], grey, grey, grey], png::BitDepth::Two),
    ] {
        let map = indexed(&root, &palette, bits, |x, y| [0, 1, 2][region(x, y)]);
        let reason = refused(&map);
        assert!(reason.ends_with("several labels: 1 (480 pixels), 2 (200 pixels)"), "{palette:?}: {reason}");
        assert_eq!([chosen(&map, &[1]), chosen(&map, &[2])], [480, 200], "{palette:?}");
    }
    // a palette that says nothing
    let map = indexed(&root, &[[255; 4]; 4], png::BitDepth::Two, |x, y| u8::from(is_lesion(x, y)));
    assert_eq!((count(&map), chosen(&map, &[1])), (480, 480));
}

#[test]
fn chosen_labels_of_grey_ramps_are_indexes() {
    let root = Root::new();
    let ramp =
        |count: u8| (0..count).map(move |index| [index * (255 / (count - 1)); 3]).map(|[r, g, b]| [r, g, b, 255]);
    // a thin line of another index beside the lesion
    let line = |x: u32, y: u32| u8::from(x == 80 && y < 20);
    for (count_of, bits) in [(4, png::BitDepth::Two), (16, png::BitDepth::Four), (16, png::BitDepth::Eight)] {
        let palette: Vec<[u8; 4]> = ramp(count_of).collect();
        let map = indexed(&root, &palette, bits, |x, y| if is_lesion(x, y) { 3 } else { line(x, y) });
        assert_eq!([chosen(&map, &[1]), chosen(&map, &[3])], [20, 480], "{count_of} greys of {bits:?}");
    }
    let palette: Vec<[u8; 4]> = ramp(2).collect();
    let map = indexed(&root, &palette, png::BitDepth::One, |x, y| u8::from(is_lesion(x, y)));
    assert_eq!((count(&map), chosen(&map, &[1])), (480, 480));
    // one target with a soft border: its brightest level, by its level and by its index
    let palette: Vec<[u8; 4]> = ramp(4).collect();
    let soft = indexed(&root, &palette, png::BitDepth::Two, |x, y| {
        (3 * u8::from(is_lesion(x, y))).max(u8::from(is_lesion(x + 1, y)))
    });
    assert_eq!([count(&soft), chosen(&soft, &[255]) as u64, chosen(&soft, &[3]) as u64], [480; 3]);
    // an identity palette
    let same: Vec<[u8; 4]> = (0..=255).map(|grey| [grey, grey, grey, 255]).collect();
    let map = indexed(&root, &same, png::BitDepth::Eight, |x, y| [0, 1, 16][region(x, y)]);
    assert!(refused(&map).ends_with("several labels: 1 (480 pixels), 16 (200 pixels)"), "{}", refused(&map));
}

#[test]
fn probabilities_below_one_half_and_thin_labels_are_no_masks() {
    let root = Root::new();
    let peak = |x: u32, y: u32, most: f64| {
        let square = (f64::from(x) - 40.0).powi(2) + (f64::from(y) - 30.0).powi(2);
        (most * (-square / 200.0).exp()).round()
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=65535")]
    let deep = |name: &str, most: f64| saved(&root, name, |x, y| Luma([peak(x, y, most) as u16]));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=255")]
    let flat = |name: &str, most: f64| saved(&root, name, |x, y| Luma([peak(x, y, most) as u8]));
    // layers of 2 pixels, touching, and squares of 2 pixels with gaps
    let layers = saved(&root, "layers.png", |_, y| {
        Luma([if (4..44).contains(&y) { u8::try_from(y / 2 - 1).expect("small") } else { 0 }])
    });
    let squares = saved(&root, "squares.png", |x, y| {
        let is_gap = x % 3 == 2 || y % 3 == 2;
        Luma([if is_gap { 0 } else { u8::try_from((x / 3 + 30 * (y / 3)) % 100 + 1).expect("small") }])
    });
    for (path, most) in [
        (deep("a.png", 7_864.0), "7864 of 65535"),
        (deep("b.png", 200.0), "200 of 65535"),
        (flat("c.png", 60.0), "60 of 255"),
        (flat("d.png", 127.0), "127 of 255"),
        (layers.clone(), "20 of 255"),
        (squares, "100 of 255"),
    ] {
        let Err(error) = decode::mask(&path) else { panic!("{} is a mask", path.display()) };
        assert!(error.to_string().contains(&format!("its largest value is {most}, ")), "{error}");
        assert!(error.hint().contains("threshold probabilities"), "{}", error.hint());
    }
    assert_eq!(chosen(&layers, &[3]), 180, "labels can be chosen");
    // above one half, the rest of the peak is background
    for path in [deep("e.png", 45_000.0), flat("f.png", 175.0)] {
        let expected = std::f64::consts::PI * 200.0 * (45_000.0_f64 / 32_767.5).ln();
        let found = count(&path);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an area")]
        let expected = expected as u64;
        assert!(found.abs_diff(expected) < 12, "{}: {found} instead of {expected}", path.display());
    }
}

#[test]
fn dim_masks_with_soft_borders_or_noise_stay_masks() {
    let root = Root::new();
    let trained = |path: &Path| -> u64 {
        let mask = decode::mask(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        foreground(&mask).iter().map(|value| u64::from(*value > 0)).sum()
    };
    for level in [20_u8, 60, 100, 127] {
        let sharp = GrayImage::from_fn(SIDES.0, SIDES.1, |x, y| Luma([if is_lesion(x, y) { level } else { 0 }]));
        let large = imageops::resize(&sharp, 250, 170, imageops::FilterType::Triangle);
        let path = root.file("soft.png");
        large.save(&path).expect("written");
        assert!(trained(&path).abs_diff(3778) < 150, "{level}: {}", trained(&path));
        let deep =
            ImageBuffer::<Luma<u16>, _>::from_fn(250, 170, |x, y| Luma([u16::from(large.get_pixel(x, y).0[0]) * 100]));
        deep.save(&path).expect("written");
        assert!(trained(&path).abs_diff(3778) < 150, "16 bits, {level}: {}", trained(&path));
        for quality in [10, 30, 50, 75, 95] {
            // as the JPEG, and saved again without loss; darker noise may be several labels
            let (noisy, again) = (jpeg(&root, &sharp.clone().into(), quality), root.file("again.png"));
            ::image::open(&noisy).expect("an image").into_luma8().save(&again).expect("written");
            for path in [noisy, again] {
                let error = decode::mask(&path).err().map(|error| error.to_string());
                if let Some(error) = error {
                    assert!(error.contains("several labels"), "{level}, quality {quality}: {error}");
                    continue;
                }
                let found = trained(&path);
                assert!(found.abs_diff(480) < 120, "{level}, quality {quality}: {found}");
            }
        }
    }
    let line = saved(&root, "line.png", |x, y| Luma([u16::from(x == y)]));
    assert_eq!(trained(&line), 60, "0 and 1 in 16 bits");
}

#[test]
fn many_objects_on_a_background_are_labels() {
    let root = Root::new();
    let cells = ImageBuffer::<Luma<u8>, _>::from_fn(150, 100, |x, y| {
        let is_gap = x % 10 > 7 || y % 10 > 7;
        Luma([if is_gap { 0 } else { u8::try_from(x / 10 + 15 * (y / 10) + 1).expect("small") }])
    });
    let path = root.file("cells.png");
    cells.save(&path).expect("written");
    assert!(refused(&path).contains("several labels: 1 (64 pixels), 2 (64 pixels)"), "{}", refused(&path));
    assert_eq!(chosen(&path, &[140]), 64);
}
