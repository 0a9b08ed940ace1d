//! Fuzz targets: one function for each parser of files and answers that somebody else may have made.
//!
//! A target must return for every input. It panics if the parser panics, needs too much memory, or does something that
//! `SECURITY.md` excludes. `fuzz_targets/` calls the functions from libFuzzer, and `tests/fuzz_replay.rs` calls them with
//! stored inputs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prsmed_base::event::Silent;
use prsmed_data::image::{Fit, MaskMode, PadOffset, mask_pixels, tower_pixels};
use prsmed_data::manifest::{Manifest, OpenOptions};
use prsmed_data::prepare::annotations::{AnnotationFile, AnnotationFiles};
use prsmed_data::text::clip_bpe::PromptTokenizer;
use prsmed_data::text::{Prompt, TextTokenizer, training_prompt};
use prsmed_data::volume::{self, Axis, Levels, SegmentMask, Volume, Window, labels, write};
use prsmed_data::{annotation, decode};
use prsmed_hub::{self as hub, Files, HubOptions, Timeouts};

/// Limit of the memory that a parser may take, whatever its input says.
pub(crate) const MAX_MEMORY: usize = 1 << 30;

/// Counts the memory of each thread.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // not there while a thread ends
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // the old and the new block may both exist during the call
        count(size.cast_signed());
        // SAFETY: the caller's contract.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        count(-layout.size().cast_signed());
        moved
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`, which must not take more than `max` bytes on this thread.
pub(crate) fn limited<T>(max: usize, work: impl FnOnce() -> T) -> T {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    let peak = (PEAK.get() - before).cast_unsigned();
    assert!(peak <= max, "{peak} bytes of memory; {max} are the limit");
    result
}

/// An empty folder in memory.
pub(crate) fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("prsmed-fuzz-").tempdir_in(parent).expect("a folder")
}

/// Writes a file and returns its path.
pub(crate) fn file(folder: &tempfile::TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("written");
    path
}

/// The parts of an input, which are separated by `byte`.
pub(crate) fn parts(bytes: &[u8], byte: u8, most: usize) -> impl Iterator<Item = &[u8]> {
    bytes.splitn(most, move |&other| other == byte)
}

/// An image and a mask: PNG, JPEG, TIFF, BMP, GIF, WebP, PGM or PPM.
pub fn image(bytes: &[u8]) {
    let folder = folder();
    let path = file(&folder, "image", bytes);
    if decode::is_tiff(bytes) {
        // several pages are slices
        read_volume(&path);
    }
    limited(MAX_MEMORY, || {
        let Ok(image) = decode::image(&path) else { return };
        for offset in [PadOffset::Centre, PadOffset::CentrePlusOne] {
            assert_eq!(tower_pixels(&image, 14, offset, [0; 3]).expect("an image has pixels").len(), 3 * 14 * 14);
        }
        drop(image);
        let Ok(stored) = decode::stored_mask(&path) else { return };
        let num_labels = stored.labels().len();
        if let Ok(mask) = decode::mask(&path) {
            assert!(num_labels < 2, "{num_labels} labels");
            for mode in [MaskMode::Binary, MaskMode::Soft] {
                assert_eq!(mask_pixels(&mask, 16, mode, Fit::Stretch).expect("a mask has pixels").len(), 16 * 16);
            }
        }
    });
}

/// Reads a file as a volume and as a label map. What can be read is shown as slices and written as a mask.
fn read_volume(path: &Path) {
    no_abort();
    limited(MAX_MEMORY, || {
        if let Ok(volume) = volume::open(path) {
            let grid = &volume.grid;
            assert_eq!(volume.voxels.len(), grid.num_voxels());
            for axis in [Axis::Axial, Axis::Coronal, Axis::Sagittal] {
                let plane = volume.plane(axis);
                assert_eq!(plane.size.iter().product::<usize>() * plane.num_slices, grid.num_voxels());
                let last = plane.num_slices - 1;
                let colours = volume.colour_slice(&plane, last, &Levels::new(0.0, 255.0));
                assert!(colours.is_ok());
                if let Ok(levels) = Window::Auto.levels(&volume) {
                    assert_eq!(volume.slice(&plane, last, &levels).is_ok(), !volume.is_colour());
                }
            }
            if grid.num_voxels() < 1 << 20 {
                let folder = folder();
                let mask = vec![1; grid.num_voxels()];
                for name in ["mask.nii", "mask.dcm", "mask.rtstruct.dcm", "mask.nrrd", "mask.mha"] {
                    let out = folder.path().join(name);
                    let segment = SegmentMask { name: "lesion", mask: &mask };
                    if write::segments(&out, &[segment], &volume).is_ok() {
                        let read = labels::open_for(&out, None, &volume).expect("a mask that was written can be read");
                        assert_eq!(read.values.iter().filter(|value| **value == 1).count(), mask.len());
                    }
                }
            }
        }
        if let Ok(map) = labels::open(path) {
            assert_eq!(map.values.len(), map.grid.num_voxels());
        }
    });
}

/// Decoders of DICOM images may panic where the program catches it. libFuzzer's hook would end the process before that;
/// a panic that nobody catches still ends it.
fn no_abort() {
    static REPLACED: OnceLock<()> = OnceLock::new();
    let print = |info: &std::panic::PanicHookInfo| drop(writeln!(std::io::stderr(), "{info}"));
    REPLACED.get_or_init(|| std::panic::set_hook(Box::new(print)));
}

/// A DICOM file, or a zip of a series.
pub fn dicom(bytes: &[u8]) {
    let folder = folder();
    read_volume(&file(&folder, "image", bytes));
}

/// An RTSTRUCT of the series `tests/fixtures/volumes/axial.zip`.
pub fn rtstruct(bytes: &[u8]) {
    static SERIES: OnceLock<Volume> = OnceLock::new();
    let folder = folder();
    let series = SERIES.get_or_init(|| {
        let series = file(&folder, "series.zip", include_bytes!("../fixtures/volumes/axial.zip"));
        volume::open(&series).expect("a series")
    });
    let path = file(&folder, "contours.dcm", bytes);
    limited(MAX_MEMORY, || {
        let Ok(map) = labels::open_for(&path, None, series) else { return };
        assert_eq!(map.values.len(), map.grid.num_voxels());
        let found: Vec<(Vec<u8>, usize)> =
            map.labels().into_iter().take(16).map(|(label, count)| (map.mask(label), count)).collect();
        if map.grid != series.grid || found.is_empty() {
            return;
        }
        let segments: Vec<_> = found.iter().map(|(mask, _)| SegmentMask { name: "lesion", mask }).collect();
        let out = folder.path().join("mask.rtstruct.dcm");
        write::segments(&out, &segments, series).expect("the masks of a series can be written");
        let read = labels::open_for(&out, None, series).expect("contours that were written can be read");
        for ((mask, count), number) in found.iter().zip(1..) {
            assert_eq!(mask.iter().map(|value| usize::from(*value)).sum::<usize>(), *count);
            assert_eq!(&read.mask(number), mask);
        }
    });
}

/// A NIfTI file, also compressed.
pub fn nifti(bytes: &[u8]) {
    let folder = folder();
    let name = if bytes.starts_with(&[0x1f, 0x8b]) { "image.nii.gz" } else { "image.nii" };
    read_volume(&file(&folder, name, bytes));
}

/// An NRRD file. A header without voxels may name the file `voxels.raw`.
pub fn nrrd(bytes: &[u8]) {
    let folder = folder();
    file(&folder, "voxels.raw", &[1; 64]);
    read_volume(&file(&folder, "image.nrrd", bytes));
}

/// A MetaImage file. A header without voxels may name the file `voxels.raw`.
pub fn meta_image(bytes: &[u8]) {
    let folder = folder();
    file(&folder, "voxels.raw", &[1; 64]);
    read_volume(&file(&folder, "image.mha", bytes));
}

/// Arrays of NumPy: an NPZ file, or an NPY file if it does not begin as a zip does.
pub fn npz(bytes: &[u8]) {
    let folder = folder();
    let name = if bytes.starts_with(b"PK") { "image.npz" } else { "image.npy" };
    read_volume(&file(&folder, name, bytes));
}

/// A data root with two images.
fn data_root() -> &'static Path {
    static ROOT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let root = folder();
        for name in ["ct/train_images", "ct/train_masks", "mr/val_images", "mr/val_masks"] {
            fs::create_dir_all(root.path().join(name)).expect("created");
        }
        for name in ["ct/train_images/a.jpg", "ct/train_masks/a.png", "mr/val_images/b.png", "mr/val_masks/b.png"] {
            file(&root, name, b"");
        }
        root
    });
    root.path()
}

/// A table of annotations (CSV).
pub fn csv(bytes: &[u8]) {
    let root = data_root();
    let folder = folder();
    let path = file(&folder, "a.csv", bytes);
    // 64 times the size: a row of a few bytes has several paths
    limited(256 * bytes.len() + (4 << 20), || {
        if let Ok((rows, bad)) = annotation::read(root, std::slice::from_ref(&path)) {
            for row in &rows {
                assert!(row.target().mask_path.starts_with(root) && row.image_path.starts_with(root), "{row:?}");
                let outside = |path: &Path| path.components().any(|part| part.as_os_str() == "..");
                assert!(!outside(&row.target().mask_path) && !outside(&row.image_path), "{row:?}");
            }
            assert!(bad.iter().all(|bad| !bad.reason.is_empty()));
        }
        if let Ok(manifest) = Manifest::open_with(root, Some(&path), OpenOptions { skip_bad: true }) {
            let _ = manifest.skipped_note();
        }
    });
}

/// A file with outlines: JSON of COCO or LabelMe, or else text of YOLO.
pub fn annotations(bytes: &[u8]) {
    let folder = folder();
    let is_json = bytes.starts_with(b"{") || bytes.starts_with(b"\xef\xbb\xbf{");
    let path = file(&folder, if is_json { "a.json" } else { "a.txt" }, bytes);
    limited(MAX_MEMORY, || {
        let Ok(annotated) = AnnotationFile::open(&path) else { return };
        for image in annotated.images().iter().take(2) {
            let small = |size: &(u32, u32)| size.0 <= 512 && size.1 <= 512;
            let size = image.size.filter(small).unwrap_or((64, 48));
            for label in [None].into_iter().chain(image.labels().into_iter().map(Some)).take(3) {
                let path = annotated.path_of(image, label);
                if let Ok(Some(drawn)) = AnnotationFiles::default().mask(&path, size) {
                    assert_eq!(drawn.mask.dimensions(), size);
                    assert!(drawn.mask.iter().all(|value| [0, 255].contains(value)));
                }
            }
        }
    });
}

/// A tokenizer: `tokenizer.json`, or `tokenizer.model` if the input does not start with `{`. If the input has a NUL
/// byte: CLIP's `vocab.json` before it and `merges.txt` after it.
pub fn tokenizer(bytes: &[u8]) {
    const TEXTS: [&str; 5] =
        ["", "a lesion", " \n\t<s>▁ <image></s>", "Größe 3.5 cm 🩻 \u{0}\u{200b}", "aaaaaaaaaaaaaaaaaaaaaaaa"];
    let folder = folder();
    let mut files = parts(bytes, 0, 2);
    let is_json = bytes.starts_with(b"{");
    if let (true, Some(vocab), Some(merges)) = (is_json, files.next(), files.next()) {
        file(&folder, "vocab.json", vocab);
        file(&folder, "merges.txt", merges);
    } else {
        file(&folder, if is_json { "tokenizer.json" } else { "tokenizer.model" }, bytes);
    }
    limited(MAX_MEMORY, || {
        if let Ok(tokenizer) = TextTokenizer::open(folder.path(), &Prompt::PUBLISHED) {
            for text in TEXTS {
                if let Ok(ids) = tokenizer.encode(text) {
                    assert!(ids.iter().all(|id| (0..tokenizer.vocab_size()).contains(id)), "{ids:?}");
                    let _ = tokenizer.decode(&ids).map(|text| Prompt::PUBLISHED.clean(&text));
                }
            }
            let ids: Vec<i64> = (-201..300).collect();
            let _ = tokenizer.decode(&ids);
            let _ = training_prompt(&tokenizer, "Where?", "There.", true);
            let _ = tokenizer.files();
        }
        if let Ok(tokenizer) = PromptTokenizer::open(folder.path()) {
            for text in TEXTS {
                let _ = tokenizer.encode(text).map(|ids| assert_eq!(ids.ids.len(), 77));
            }
        }
    });
}

/// The answers of a hub, separated by the byte 30: the listing, then header and content of each file. `//hub/` is the
/// address of the hub itself; other addresses are not allowed, so that no request leaves the machine.
pub fn hub(bytes: &[u8]) {
    let is_local = |at: usize| [b"hub/".as_slice(), b"localhost/"].iter().any(|host| bytes[at + 2..].starts_with(host));
    if (0..bytes.len().saturating_sub(1)).any(|at| bytes[at..at + 2] == *b"//" && !is_local(at)) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("a port");
    let own = format!("//{address}/");
    let answers: Vec<Vec<u8>> = parts(bytes, 30, 16).map(|part| with_address(part, own.as_bytes())).collect();
    let folder = folder();
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&listener, &answers, &has_ended));
        let wait = Duration::from_secs(1);
        let options = HubOptions {
            endpoint: format!("http://{address}"),
            token: Some("secret".into()),
            timeouts: Timeouts { connect: wait, response: wait, idle: wait },
            ..HubOptions::new(folder.path().join("cache"))
        };
        limited(256 * bytes.len() + (64 << 20), || {
            let found = hub::find("hub:o/n", &Files::All, &options, &Silent);
            if let Ok(located) = found {
                let _ = located.bytes();
                let _ = located.fetch(&options, &Silent);
            }
        });
        has_ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(address);
    });
    let names: Vec<_> =
        fs::read_dir(folder.path()).expect("listed").map(|entry| entry.expect("listed").path()).collect();
    assert!(names.is_empty() || names == [folder.path().join("cache")], "{names:?}");
}

/// An answer in which `//hub/` is the address of the server.
fn with_address(answer: &[u8], own: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(answer.len());
    let mut at = 0;
    while at < answer.len() {
        if answer[at..].starts_with(b"//hub/") {
            out.extend(own);
            at += b"//hub/".len();
        } else {
            out.push(answer[at]);
            at += 1;
        }
    }
    out
}

/// Answers one request after the other, then all others with 404.
fn serve(listener: &TcpListener, answers: &[Vec<u8>], has_ended: &AtomicBool) {
    let mut answers = answers.iter();
    while let Ok((mut stream, _)) = listener.accept() {
        if has_ended.load(Ordering::SeqCst) {
            return;
        }
        let mut request: Vec<u8> = Vec::new();
        let mut chunk = [0_u8; 4096];
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            match stream.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(count) => request.extend(&chunk[..count]),
            }
        }
        let missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".as_slice();
        let _ = stream.write_all(answers.next().map_or(missing, Vec::as_slice));
        let _ = stream.shutdown(Shutdown::Both);
    }
}
