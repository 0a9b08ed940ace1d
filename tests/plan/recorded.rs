//! Traces of libtorch's caching allocator, replayed: every file of tests/plan/recorded, hand-worked or recorded on a card by
//! `scripts/record_allocator.py`.

use prsmed::plan::allocator::{CachingAllocator, Pool, Settings};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// A trace and what the real allocator said.
#[derive(serde::Deserialize)]
struct Recorded {
    /// Where it comes from.
    source: String,
    /// Settings of `PYTORCH_CUDA_ALLOC_CONF` that the replay knows.
    expandable_segments: bool,
    /// `alloc` and `free` with a block's number and bytes; `segment` with the bytes got from the device by the `alloc` that
    /// follows.
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
        let settings = Settings { expandable_segments: recorded.expandable_segments, ..Settings::default() };
        let mut allocator = CachingAllocator::new(settings);
        let mut live = HashMap::new();
        let mut expected_growth = 0;
        for (index, (what, block, bytes)) in recorded.events.iter().enumerate() {
            match what.as_str() {
                "segment" => expected_growth += bytes,
                "alloc" => {
                    let before = allocator.stats().reserved;
                    live.insert(*block, allocator.allocate(*bytes, 0, Pool::Default).unwrap());
                    let grown = allocator.stats().reserved - before;
                    assert_eq!(grown, expected_growth, "{name}: event {index}, {bytes} bytes");
                    expected_growth = 0;
                }
                "free" => allocator.free(live.remove(block).unwrap()),
                other => panic!("{name}: event {index} is `{other}`"),
            }
        }
        let stats = allocator.stats();
        assert_eq!(
            (stats.allocated_peak, stats.reserved_peak),
            (recorded.allocated_peak, recorded.reserved_peak),
            "{name}"
        );
    }
}
