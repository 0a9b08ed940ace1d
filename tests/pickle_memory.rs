//! Memory for reading pickles, measured with a counting allocator. Files from elsewhere must not use up all memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use prsmed::tensor::weights::Archive;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        PEAK.fetch_max(held, Ordering::SeqCst);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Opens a PyTorch archive with this pickle. Returns whether it could be read, and the peak of memory for it.
fn open(folder: &Path, pickle: &[u8]) -> (bool, usize) {
    let path = folder.join("model.pth");
    let mut zip = zip::ZipWriter::new(std::fs::File::create(&path).expect("created"));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, content) in [("a/data.pkl", pickle), ("a/data/0", [0; 4].as_slice())] {
        zip.start_file(name, stored).expect("started");
        zip.write_all(content).expect("written");
    }
    zip.finish().expect("finished");
    let before = HELD.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    let opened = Archive::open(&path);
    (opened.is_ok(), PEAK.load(Ordering::SeqCst) - before)
}

fn text(text: &str) -> Vec<u8> {
    [b"X".as_slice(), &u32::try_from(text.len()).expect("short").to_le_bytes(), text.as_bytes()].concat()
}

/// The arguments of a tensor without the final call: function, storage, offset, and a memoized shape (1) as strides too.
fn tensor(dimensions: usize) -> (Vec<u8>, Vec<u8>) {
    let storage = [b"(".as_slice(), &text("storage"), b"ctorch\nFloatStorage\n", &text("0"), &text("cpu"), b"K\x01tQ"];
    let setup = [b"(".as_slice(), &b"K\x01".repeat(dimensions), b"tq\x010", &storage.concat(), b"q\x020"].concat();
    (setup, b"ctorch._utils\n_rebuild_tensor_v2\n(h\x02K\0h\x01h\x01tR".to_vec())
}

/// The counters are those of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn no_pickle_needs_more_than_64_times_its_size() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let count = 1 << 18;
    let (setup, call) = tensor(60);
    let (_, long_call) = tensor(1);
    let memoized_call = [b"ctorch._utils\n_rebuild_tensor_v2\nq\x030(h\x02K\0h\x01h\x01tq\x040".as_slice()].concat();
    let list = [b"](".as_slice(), &b"K\x01K\x02\x86".repeat(4096), b"eq\x050"].concat();
    let pickles: [(&str, Vec<u8>); 9] = [
        ("values", b"N".repeat(count)),
        ("lists", b"]".repeat(count)),
        ("memo", [b"N".as_slice(), &b"\x94".repeat(count)].concat()),
        ("marks", b"(".repeat(count)),
        ("empty strings", b"\x8c\0".repeat(count)),
        ("tensors that share a shape", [setup.as_slice(), &call.repeat(count / 50)].concat()),
        ("calls that share arguments", [setup.as_slice(), &memoized_call, &b"h\x03h\x04R".repeat(count)].concat()),
        (
            "copies of a list",
            [list, b"ccollections\nOrderedDict\nq\x060".to_vec(), b"h\x06h\x05\x85R".repeat(4096)].concat(),
        ),
        ("names that are shared", {
            let name = [text(&"n".repeat(1 << 16)), b"q\x070".to_vec()].concat();
            let start = [setup.as_slice(), &long_call, b"q\x080"].concat();
            [start, name, b"}(".to_vec(), b"h\x07h\x08".repeat(1 << 14), b"u".to_vec()].concat()
        }),
    ];
    for (name, start) in pickles {
        let pickle = [b"\x80\x02".as_slice(), &start, b"."].concat();
        let (_, peak) = open(folder.path(), &pickle);
        let limit = 64 * pickle.len() + (4 << 20);
        assert!(peak <= limit, "{name}: {peak} bytes for a pickle of {} bytes", pickle.len());
    }
}

#[test]
fn state_dicts_of_many_tensors_are_read() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let (setup, call) = tensor(4);
    let mut pickle = [b"\x80\x02".as_slice(), &setup, b"}("].concat();
    for layer in 0..20_000 {
        pickle.extend(text(&format!("layer.{layer}.weight")));
        pickle.extend(&call);
    }
    pickle.extend(b"u.");
    assert!(open(folder.path(), &pickle).0);
}
