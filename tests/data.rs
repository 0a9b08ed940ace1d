//! The public API of the data level: preprocessing compared with Pillow, and the loader.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use prsmed::data::classical::Augment;
use prsmed::data::decode;
use prsmed::data::features::{Dtype, FeatureLookup, FeatureShape, Features, key_of};
use prsmed::data::flip_rotate::Transform;
use prsmed::data::image::{Fit, MaskMode, PadOffset, PixelConfig, mask_pixels, sam_pixels, tower_pixels};
use prsmed::data::labels::Labels;
use prsmed::data::loader::{Loader, LoaderOptions, Source, TextEncoder, single_rows};
use prsmed::data::manifest::{Manifest, OpenOptions, REFERENCE_CLASSES, Row, Split};
use prsmed::data::sample::Pixels;
use prsmed::data::unreadable::Unreadable;
use prsmed::models::clip;
use prsmed::tensor::{Device, Tensor};
use prsmed::{Error, Result};
use safetensors::SafeTensors;

fn shared(name: &str) -> PathBuf {
    let root = std::env::var_os("PRSMED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let path = root.join(name);
    assert!(path.exists(), "`{}` does not exist (set PRSMED_SHARED)", path.display());
    path
}

/// Differences between computed and recorded pixels, in units of 1/255.
#[derive(Default)]
struct Differences {
    count: usize,
    off: usize,
    beyond: usize,
    most: f64,
}

impl Differences {
    fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut found = Self::default();
        for (ours, theirs) in pairs {
            let difference = (ours - theirs).abs();
            found.count += 1;
            found.off += usize::from(difference > 0.5);
            found.beyond += usize::from(difference > 1.01);
            found.most = found.most.max(difference);
        }
        found
    }

    fn bytes(ours: &[u8], theirs: &[u8]) -> Self {
        assert_eq!(ours.len(), theirs.len());
        Self::of(ours.iter().zip(theirs).map(|(&a, &b)| (f64::from(a), f64::from(b))))
    }

    /// Asserts that all differences are at most 1/255 and that the fraction `equal` of the pixels is equal.
    fn assert(&self, name: &str, equal: f64) {
        assert!(self.count > 0, "{name}: nothing was compared");
        let share =
            1.0 - f64::from(u32::try_from(self.off).expect("few")) / f64::from(u32::try_from(self.count).expect("few"));
        assert!(
            self.beyond == 0 && share >= equal,
            "{name}: {} of {} pixels differ, {} by more than 1/255, one by {}/255",
            self.off,
            self.count,
            self.beyond,
            self.most
        );
    }
}

/// Rows from 1 and columns from 2, every fourth, of planes of `side * side` bytes.
fn thinned(planes: &[u8], side: usize) -> Vec<u8> {
    let rows = planes.chunks(side).enumerate().filter(|(row, _)| row % side % 4 == 1);
    rows.flat_map(|(_, row)| row.iter().skip(2).step_by(4).copied()).collect()
}

/// Input of the vision tower: the model normalises the bytes on its device.
fn normalised(clip: &[u8], side: i64) -> Vec<f32> {
    let pixels = Tensor::from_slice(clip).view([1, 3, side, side]);
    let values = clip::normalise(&pixels, &clip::pixel_statistics(Device::Cpu));
    Vec::try_from(values.reshape([-1])).expect("flat fp32")
}

#[test]
fn normalisation_on_the_device_equals_normalisation_in_rust() {
    let bytes: Vec<u8> = (0..=255).cycle().take(3 * 16 * 16).collect();
    for (index, (byte, value)) in bytes.iter().zip(normalised(&bytes, 16)).enumerate() {
        let channel = index / 256;
        let expected = (f32::from(*byte) / 255.0 - clip::PIXEL_MEAN[channel]) / clip::PIXEL_STD[channel];
        assert!((value - expected).abs() <= 1e-6 * expected.abs().max(1.0), "byte {byte}: {value}, not {expected}");
    }
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_preprocessing_equals_tensors_recorded_from_the_original_code() {
    let folder = shared("reference/oracle/preprocess");
    let bytes = std::fs::read(folder.join("expected.safetensors")).expect("read");
    let expected = SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = folder.join("dataset/data");
    let manifest = Manifest::open_with(&data, Some(&folder.join("dataset/annotation")), OpenOptions { skip_bad: true })
        .expect("rows");
    let manifest = manifest.with_modalities(REFERENCE_CLASSES.map(str::to_owned).to_vec()).expect("the six");
    assert_eq!(manifest.rows.len(), 6);
    for row in &manifest.rows {
        let tensor = |name: &str| expected.tensor(&format!("{}.{name}", row.modality)).expect("recorded");
        let image = decode::image(&row.image_path).expect("decoded");

        let clip = tower_pixels(&image, 336, PadOffset::CentrePlusOne, clip::PADDING).expect("sized");
        let halves = tensor("clip_image");
        let theirs = halves.data().chunks(2).map(|pair| half::f16::from_le_bytes([pair[0], pair[1]]).to_f32());
        let scale = clip::PIXEL_STD.map(|std| 255.0 * f64::from(std));
        let ours = normalised(&clip, 336);
        let pairs = ours.into_iter().zip(theirs).enumerate().map(|(index, (ours, theirs))| {
            let scale = scale[index / (336 * 336)];
            (f64::from(ours) * scale, f64::from(theirs) * scale)
        });
        Differences::of(pairs).assert(&format!("{}.clip_image", row.modality), 1.0);

        let sam = sam_pixels(&image, 1024, Fit::Stretch).expect("sized");
        let theirs = tensor("sam_image_u8@rows1::4,cols2::4");
        Differences::bytes(&thinned(&sam, 1024), theirs.data()).assert(&format!("{}.sam_image", row.modality), 1.0);

        let mask = decode::mask(&row.target().mask_path).expect("decoded");
        let soft = mask_pixels(&mask, 1024, MaskMode::Soft, Fit::Stretch).expect("sized");
        let theirs = tensor("mask_u8@rows1::4,cols2::4");
        Differences::bytes(&thinned(&soft, 1024), theirs.data()).assert(&format!("{}.mask", row.modality), 1.0);

        let label = tensor("class_label").data().first().copied().map(usize::from);
        assert_eq!(manifest.label(&row.modality), label, "{}", row.modality);
    }
}

#[test]
fn preprocessing_of_odd_sizes_and_formats_equals_pillow() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/preprocess");
    let bytes = std::fs::read(folder.join("expected.safetensors")).expect("read");
    let expected = SafeTensors::deserialize(&bytes).expect("safetensors");
    let names: BTreeSet<&str> = expected.names().into_iter().filter_map(|name| name.strip_suffix(".sam")).collect();
    assert_eq!(names.len(), 16);
    for name in names {
        let tensor = |kind: &str| expected.tensor(&format!("{name}.{kind}")).expect("recorded").data().to_vec();
        let image = decode::image(&folder.join(name)).expect("decoded");
        let mask = decode::stored_mask(&folder.join(name)).expect("decoded").into_grey();
        // Pillow 13 resizes the columns first if that is cheaper; older versions and this program start with the rows.
        // The bytes between the passes are rounded, so some results differ by 1/255.
        let equal = if matches!(name, "grey_37x50.tiff" | "rgb_40x61.png") { 0.75 } else { 1.0 };
        let clip = tower_pixels(&image, 33, PadOffset::Centre, clip::PADDING).expect("sized");
        Differences::bytes(&clip, &tensor("clip")).assert(&format!("{name}.clip"), 1.0);
        Differences::bytes(&sam_pixels(&image, 32, Fit::Stretch).expect("sized"), &tensor("sam"))
            .assert(&format!("{name}.sam"), equal);
        // as a mask, a palette has labels instead of shades
        if !name.starts_with("palette") {
            let soft = mask_pixels(&mask, 32, MaskMode::Soft, Fit::Stretch).expect("sized");
            Differences::bytes(&soft, &tensor("mask")).assert(&format!("{name}.mask"), equal);
        }
    }
}

/// A data root with `count` coloured images of one class, three rows each.
fn images(count: usize) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    for folder in ["annotations", "ct/train_images", "ct/train_masks"] {
        std::fs::create_dir_all(root.path().join(folder)).expect("created");
    }
    let mut csv = "image_path,question,answer,position,split\n".to_owned();
    for index in 0..count {
        let tint = u8::try_from(index % 256).expect("a byte");
        let image = image::RgbImage::from_fn(24, 16, |x, y| {
            image::Rgb([tint, if x < 12 { 200 } else { 10 }, u8::try_from(y).expect("small")])
        });
        image.save(root.path().join(format!("ct/train_images/{index}.png"))).expect("written");
        let mask = image::GrayImage::from_fn(24, 16, |x, y| image::Luma([if x < 6 && y < 6 { 255 } else { 0 }]));
        mask.save(root.path().join(format!("ct/train_masks/{index}.png"))).expect("written");
        for question in 0..3 {
            let words = "where ".repeat(question + 1);
            writeln!(csv, "ct/train_masks/{index}.png,{words},In the upper left part of the image.,upper left,train")
                .expect("a string");
        }
    }
    std::fs::write(root.path().join("annotations/ct.csv"), csv).expect("written");
    root
}

/// One id for each byte; counts its calls, and fails or panics on request.
#[derive(Default)]
struct Bytes {
    num_calls: AtomicUsize,
    fails_at_line: Option<u64>,
    panics_at_line: Option<u64>,
}

impl TextEncoder for Bytes {
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)> {
        self.num_calls.fetch_add(1, Ordering::Relaxed);
        if self.fails_at_line == Some(row.line) {
            return Err(Error::weights("tokenizer.json", "no piece for this text", "train another tokenizer"));
        }
        assert_ne!(self.panics_at_line, Some(row.line), "a panic requested by the test");
        let mut ids = vec![1, -200];
        ids.extend(row.question.bytes().map(i64::from));
        let start = ids.len();
        ids.extend(row.answer.bytes().map(i64::from));
        Ok((ids, start))
    }
}

const CONFIG: PixelConfig = PixelConfig {
    tower_size: 28,
    padding: clip::PADDING,
    sam_size: 32,
    fit: Fit::Stretch,
    mask: MaskMode::Binary,
    pad_offset: PadOffset::Centre,
    labels: Labels::NONE,
};
const OPTIONS: LoaderOptions = LoaderOptions { workers: 2, prefetch: 2, epoch: 0, by_image: false, geometry: None };

fn source(root: &Path, encoder: Bytes) -> (Source, Arc<Bytes>) {
    let manifest = Manifest::open(root, None).expect("good rows");
    let encoder = Arc::new(encoder);
    (Source::new(Arc::new(manifest), Arc::clone(&encoder) as Arc<dyn TextEncoder>, CONFIG), encoder)
}

/// All contents of a batch, as text that can be compared.
fn contents(source: &Arc<Source>, batches: &[Vec<usize>], options: LoaderOptions) -> Vec<String> {
    let loader = Loader::start(Arc::clone(source), single_rows(batches.to_vec()), options).expect("started");
    loader
        .map(|batch| {
            let batch = batch.expect("good rows");
            assert!(batch.seen.is_empty(), "there is no vision feature cache");
            let pixels = [&batch.tower, &batch.sam, &batch.mask].map(|bytes| (bytes.len(), key_of(bytes)));
            format!("{:?} {:?} {:?} {:?} {pixels:?}", batch.rows, batch.texts, batch.answer_starts, batch.labels)
        })
        .collect()
}

#[test]
fn batches_depend_on_neither_workers_nor_cache_nor_prefetch() {
    let root = images(12);
    let rows: Vec<usize> = (0..36).rev().collect();
    let batches = prsmed::data::length_sampler::plain_batches(&rows, 5);
    for augment in [Augment::None, Augment::FlipRotate, Augment::Classical] {
        let make = |cache: usize| {
            let (source, _) = source(root.path(), Bytes::default());
            let source = source.with_augment(augment, 3);
            Arc::new(if cache > 0 { source.with_cache(cache) } else { source })
        };
        let plain = contents(&make(0), &batches, OPTIONS);
        assert_eq!(plain.len(), 8);
        for (workers, prefetch, cache) in [(1, 1, 0), (4, 7, 0), (2, 2, 20_000), (2, 2, 1 << 30)] {
            let options = LoaderOptions { workers, prefetch, ..OPTIONS };
            let source = make(cache);
            assert_eq!(
                contents(&source, &batches, options),
                plain,
                "{workers} workers, prefetch {prefetch}, cache {cache}"
            );
            assert_eq!(contents(&source, &batches, options), plain, "the second time, with a filled cache");
        }
        let later = contents(&make(0), &batches, LoaderOptions { epoch: 1, ..OPTIONS });
        assert_eq!(later != plain, augment != Augment::None, "only augmentation changes with the epoch");
    }
}

#[test]
fn cached_pixels_are_not_read_again_and_a_full_cache_keeps_its_entries() {
    let root = images(3);
    let (plain, _) = source(root.path(), Bytes::default());
    let sample = |source: &Source, image: usize| source.sample(3 * image, 0).map(|sample| sample.pixels);
    let expected: Vec<Arc<Pixels>> = (0..3).map(|image| sample(&plain, image).expect("good")).collect();
    let (cached, _) = source(root.path(), Bytes::default());
    // room for two of the three images
    let cached = cached.with_cache(2 * expected[0].bytes());
    for (image, pixels) in expected.iter().enumerate() {
        assert_eq!(sample(&cached, image).expect("good"), *pixels);
    }
    std::fs::remove_dir_all(root.path().join("ct/train_images")).expect("removed");
    for (image, pixels) in expected.iter().take(2).enumerate() {
        assert_eq!(sample(&cached, image).expect("from the cache"), *pixels);
    }
    let error = sample(&cached, 2).expect_err("the cache was full").to_string();
    assert!(error.contains("2.png: the file is missing"), "{error}");
}

#[test]
fn a_sample_has_the_label_of_its_own_row() {
    let root = images(2);
    let folders = ["train_images", "train_masks"];
    for folder in folders {
        std::fs::create_dir_all(root.path().join("xray").join(folder)).expect("created");
        let [from, to] = ["ct", "xray"].map(|class| root.path().join(class).join(folder).join("0.png"));
        std::fs::copy(from, to).expect("copied");
    }
    let csv = "image_path,question,answer,position,split\nxray/train_masks/0.png,where,here,upper left,train\n";
    std::fs::write(root.path().join("annotations/xray.csv"), csv).expect("written");
    let (source, _) = source(root.path(), Bytes::default());
    let source = Arc::new(source);
    // six rows of `ct`, one of `xray`
    let batches = single_rows(vec![vec![6, 0], vec![1, 6]]);
    for by_image in [false, true] {
        let loader = Loader::start(Arc::clone(&source), batches.clone(), LoaderOptions { by_image, ..OPTIONS });
        let labels: Vec<Vec<i64>> = loader.expect("started").map(|batch| batch.expect("good rows").labels).collect();
        assert_eq!(labels, [[1, 0], [0, 1]], "by image: {by_image}");
    }
}

#[test]
fn rows_of_one_image_share_its_pixels_and_augmentation() {
    let root = images(4);
    for augment in [Augment::None, Augment::FlipRotate, Augment::Classical] {
        let (source, _) = source(root.path(), Bytes::default());
        let source = Arc::new(source.with_augment(augment, 3));
        // three rows per image, in an order in which rows of one image are not adjacent
        let rows: Vec<usize> = (0..3).flat_map(|question| (0..4).map(move |image| 3 * image + question)).collect();
        let groups = source.by_image(&rows, 2);
        assert_eq!(groups[..5], [vec![0, 1], vec![3, 4], vec![6, 7], vec![9, 10], vec![2]]);
        let mut changed = 0;
        for epoch in 0..6 {
            for (whole, rest) in groups[..4].iter().zip(&groups[4..]) {
                let samples =
                    [source.group(whole, epoch).expect("good"), source.group(rest, epoch).expect("good")].concat();
                assert_eq!(
                    samples.iter().map(|sample| sample.row).collect::<Vec<_>>(),
                    [whole.as_slice(), rest].concat()
                );
                assert!(samples.iter().all(|sample| sample.pixels == samples[0].pixels), "{augment:?}");
                assert!(Arc::ptr_eq(&samples[0].pixels, &samples[1].pixels), "one copy for the rows of a group");
                let plain =
                    Pixels::load(&source.manifest().rows[whole[0]], &CONFIG, Transform::IDENTITY).expect("good");
                changed += usize::from(*samples[0].pixels != plain);
            }
        }
        assert_eq!(changed > 12, augment != Augment::None, "{changed} changed");
        let options = LoaderOptions { by_image: true, ..OPTIONS };
        let groups = source.by_image(&rows[..7], 2);
        let mut loader = Loader::start(Arc::clone(&source), vec![groups], options).expect("started");
        let batch = loader.next().expect("a batch").expect("good");
        assert_eq!((batch.groups, batch.rows), (vec![2, 2, 2, 1], vec![0, 1, 3, 4, 6, 7, 9]));
        let side = CONFIG.sam_size as usize;
        assert_eq!((batch.sam.len(), batch.mask.len()), (4 * 3 * side * side, 7 * side * side));
    }
}

#[test]
fn workers_respect_the_prefetch_limit_and_stop_when_dropped() {
    let root = images(30);
    let (source, encoder) = source(root.path(), Bytes::default());
    let batches = prsmed::data::length_sampler::plain_batches(&(0..90).collect::<Vec<_>>(), 1);
    let options = LoaderOptions { prefetch: 3, ..OPTIONS };
    let mut loader = Loader::start(Arc::new(source), single_rows(batches), options).expect("started");
    assert_eq!(loader.next().expect("a batch").expect("good").rows, [0]);
    std::thread::sleep(Duration::from_millis(300));
    let made = encoder.num_calls.load(Ordering::Relaxed);
    assert!((1..=4).contains(&made), "{made} samples were made for one batch taken and three prefetched");
    assert!(loader.waited() > Duration::ZERO);
    assert_eq!(loader.remaining(), 89);
    drop(loader);
    // A sample in progress may still be finished.
    std::thread::sleep(Duration::from_millis(100));
    let stopped = encoder.num_calls.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(encoder.num_calls.load(Ordering::Relaxed), stopped, "the workers continued after the drop");
}

/// The view of each image in the batches: new (`Ok`, the key of its pixels) or cached features (`Err`, their first
/// byte).
fn views(source: &Arc<Source>, epoch: u64) -> Vec<Result<[u8; 32], u8>> {
    let batches = prsmed::data::length_sampler::plain_batches(&(0..36).collect::<Vec<_>>(), 4);
    let loader =
        Loader::start(Arc::clone(source), single_rows(batches), LoaderOptions { epoch, ..OPTIONS }).expect("started");
    let mut views = Vec::new();
    for batch in loader {
        let batch = batch.expect("good rows");
        assert_eq!(batch.seen.len(), batch.groups.len(), "there is a vision feature cache");
        let mut images = batch.tower.chunks(3 * 28 * 28);
        for seen in batch.seen {
            views.push(match seen {
                FeatureLookup::New(key) => {
                    assert_eq!(key, key_of(images.next().expect("its pixels")));
                    Ok(key)
                }
                FeatureLookup::Features(features) => {
                    assert_eq!(features.len(), 12);
                    Err(features[0])
                }
            });
        }
        assert_eq!(images.next(), None, "no pixels of images with cached features");
    }
    views
}

#[test]
fn images_with_cached_features_are_loaded_without_pixels() {
    let root = images(12);
    let features = || Arc::new(Features::in_memory(FeatureShape { tokens: 2, width: 3, dtype: Dtype::F16 }, 1 << 20));
    for (augment, cache) in
        [(Augment::None, 0), (Augment::None, 1 << 30), (Augment::FlipRotate, 0), (Augment::Classical, 0)]
    {
        let feature_cache = features();
        let (source, _) = source(root.path(), Bytes::default());
        let source = source.with_augment(augment, 3).with_cache(cache).with_features(Arc::clone(&feature_cache));
        let source = Arc::new(source);
        let keys: Vec<[u8; 32]> = views(&source, 0).into_iter().map(|new| new.expect("nothing is cached")).collect();
        let distinct: BTreeSet<[u8; 32]> = keys.iter().copied().collect();
        // three questions about each of twelve images, each with its own augmentation
        assert!(
            if augment == Augment::None { distinct.len() == 12 } else { distinct.len() > 12 },
            "{}",
            distinct.len()
        );
        for (number, key) in keys.iter().enumerate() {
            feature_cache.put(key, &[u8::try_from(number).expect("36 rows"); 12]);
        }
        // the features come from the first question about an image
        let first =
            |key| keys.iter().position(|other| other == key).and_then(|at| u8::try_from(at).ok()).expect("kept");
        let known: Vec<_> = keys.iter().map(|key| Err(first(key))).collect();
        assert_eq!(views(&source, 0), known, "{augment:?}");
        if augment != Augment::None {
            assert!(views(&source, 1).iter().any(std::result::Result::is_ok), "an image augmented differently is new");
        }
    }
}

fn first_error(root: &Path, encoder: Bytes) -> (usize, Error) {
    let (source, _) = source(root, encoder);
    let batches = prsmed::data::length_sampler::plain_batches(&(0..12).collect::<Vec<_>>(), 2);
    let results: Vec<_> = Loader::start(Arc::new(source), single_rows(batches), OPTIONS).expect("started").collect();
    let good = results.len() - 1;
    let error = results.into_iter().find_map(std::result::Result::err).expect("an error");
    (good, error)
}

#[test]
fn errors_name_the_row_and_end_the_loader() {
    let root = images(4);
    std::fs::write(root.path().join("ct/train_images/2.png"), b"not an image").expect("written");
    let (good, error) = first_error(root.path(), Bytes::default());
    let text = error.to_string();
    assert_eq!(good, 3, "the rows before it are returned");
    assert!(
        text.contains("ct.csv:8: ") && text.ends_with("2.png: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"),
        "{text}"
    );
    assert_eq!(error.hint(), "convert it to PNG");

    let root = images(4);
    let (good, error) = first_error(root.path(), Bytes { fails_at_line: Some(4), ..Bytes::default() });
    let text = error.to_string();
    assert_eq!(good, 1);
    assert!(text.contains("ct.csv:4: tokenizer.json: no piece for this text"), "{text}");
    assert_eq!(error.hint(), "train another tokenizer");

    let (good, error) = first_error(root.path(), Bytes { panics_at_line: Some(6), ..Bytes::default() });
    assert_eq!(good, 2);
    assert!(error.to_string().contains("a data worker panicked: "), "{error}");
    assert!(error.to_string().contains("a panic requested by the test"), "{error}");

    let small = image::GrayImage::from_pixel(20, 16, image::Luma([255]));
    small.save(root.path().join("ct/train_masks/0.png")).expect("written");
    let (_, error) = first_error(root.path(), Bytes::default());
    assert!(error.to_string().ends_with("0.png: the mask is 20x16 pixels but its image is 24x16"), "{error}");
}

#[test]
fn text_lengths_are_those_of_the_encoder() {
    let root = images(1);
    let (source, encoder) = source(root.path(), Bytes::default());
    let by_closure =
        Source::new(Arc::new(source.manifest().clone()), Arc::new(move |row: &Row| encoder.encode(row)), CONFIG);
    assert_eq!(by_closure.text_lengths(&[2]).expect("encoded"), source.text_lengths(&[2]).expect("encoded"));
    let lengths: Vec<usize> = source.text_lengths(&[2, 0]).expect("encoded").iter().map(|t| t.tokens).collect();
    assert_eq!(lengths[0] - lengths[1], "where where ".len());
    let batch = source.sample(0, 0).expect("a sample");
    assert_eq!((batch.label, batch.ids.len(), batch.answer_start), (0, lengths[1], 2 + "where ".len()));
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_real_data_set_loads_completely() {
    let folder = shared("data/real");
    let (source, _) = source(&folder, Bytes::default());
    let rows = source.manifest().rows_of(Split::Test);
    assert!(rows.len() > 50, "{} test rows", rows.len());
    let lengths: Vec<usize> = source.text_lengths(&rows).expect("encoded").iter().map(|t| t.tokens).collect();
    let batches = prsmed::data::length_sampler::epoch_batches(&rows, &lengths, 0, 0, 8);
    let source = Arc::new(source);
    let mut loaded = Vec::new();
    for batch in Loader::start(Arc::clone(&source), single_rows(batches), OPTIONS).expect("started") {
        let batch = batch.expect("good rows");
        let mut masks = batch.mask.chunks(batch.mask.len() / batch.rows.len());
        assert!(masks.all(|mask| mask.iter().any(|&value| value > 0)), "an empty mask in {:?}", batch.rows);
        loaded.extend(batch.rows);
    }
    loaded.sort_unstable();
    assert_eq!(loaded, rows);
}

#[test]
fn samples_that_become_unreadable_are_skipped_named_and_limited() {
    let load = |root: &Path, limit, by_image| {
        let unreadable = Arc::new(Unreadable::new(limit));
        let (source, _) = source(root, Bytes::default());
        let source = Arc::new(source.skipping(Arc::clone(&unreadable)));
        // three questions about each of four images; the files change after the rows were read
        std::fs::remove_file(root.join("ct/train_images/1.png")).expect("removed");
        std::fs::write(root.join("ct/train_masks/2.png"), b"not an image").expect("written");
        let batches = if by_image {
            (0..4).map(|image| vec![(3 * image..3 * image + 3).collect()]).collect()
        } else {
            single_rows(prsmed::data::length_sampler::plain_batches(&(0..12).collect::<Vec<_>>(), 2))
        };
        let mut loader = Loader::start(source, batches, LoaderOptions { by_image, ..OPTIONS }).expect("started");
        let mut rows = Vec::new();
        while let Some(batch) = loader.next_or_skipped() {
            rows.push(batch.map(|batch| batch.map_or_else(Vec::new, |batch| batch.rows)));
        }
        (rows, unreadable)
    };
    for by_image in [false, true] {
        let root = images(4);
        let (rows, unreadable) = load(root.path(), 6, by_image);
        let rows: Vec<Vec<usize>> = rows.into_iter().map(|batch| batch.expect("six rows may be skipped")).collect();
        let expected: Vec<Vec<usize>> = if by_image {
            vec![vec![0, 1, 2], vec![], vec![], vec![9, 10, 11]]
        } else {
            vec![vec![0, 1], vec![2], vec![], vec![], vec![9], vec![10, 11]]
        };
        assert_eq!(rows, expected);
        let mut messages = unreadable.take_messages();
        messages.sort();
        assert_eq!((messages.len(), unreadable.count()), (6, 6), "{messages:?}");
        assert!(messages[0].contains("ct.csv:10: ") && messages[0].contains("2.png: is not a PNG"), "{messages:?}");
        assert!(messages[1].contains("ct.csv:5: ") && messages[1].contains("1.png"), "{messages:?}");

        let root = images(4);
        let (rows, _) = load(root.path(), 5, by_image);
        let error = rows.into_iter().find_map(std::result::Result::err).expect("one too many").to_string();
        assert!(error.contains("5 samples were skipped before"), "{error}");
    }
}
