//! Replays traces of libtorch's caching allocator: the files of tests/plan/recorded, which were worked out by hand or
//! recorded on a GPU by `scripts/record_allocator.py`.

use prsmed::replay::caching::CachingAllocator;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// A trace and the counters of the real allocator.
#[derive(serde::Deserialize)]
struct Recorded {
    /// Origin of the trace.
    source: String,
    /// `alloc` and `free` with a block's number and bytes; `segment` with the bytes that the following `alloc` takes
    /// from the device.
    events: Vec<(String, u64, u64)>,
    allocated_peak: u64,
    reserved_peak: u64,
}

#[test]
fn recorded_traces_replay_to_the_byte() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plan/recorded");
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} holds no trace", folder.display());
    for file in files {
        let recorded: Recorded = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let name = format!("{} ({})", file.display(), recorded.source);
        let mut allocator = CachingAllocator::default();
        let mut live = HashMap::new();
        let (mut expected_growth, mut allocated_peak) = (0, 0);
        for (index, (what, block, bytes)) in recorded.events.iter().enumerate() {
            match what.as_str() {
                "segment" => expected_growth += bytes,
                "alloc" => {
                    let before = allocator.reserved();
                    live.insert(*block, allocator.allocate(*bytes));
                    let grown = allocator.reserved() - before;
                    allocated_peak = allocated_peak.max(allocator.allocated());
                    assert_eq!(grown, expected_growth, "{name}: event {index}, {bytes} bytes");
                    expected_growth = 0;
                }
                "free" => allocator.free(live.remove(block).unwrap()),
                other => panic!("{name}: event {index} is `{other}`"),
            }
        }
        let peaks = (allocated_peak, allocator.reserved());
        assert_eq!(peaks, (recorded.allocated_peak, recorded.reserved_peak), "{name}");
    }
}
