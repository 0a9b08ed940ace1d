//! Readings of process memory. They are in this test binary because no other test allocates at the same time here.

use super::*;
use prsmed::tensor::memory::{begin_window, read, release_cache};
use prsmed::tensor::{Kind, Tensor};

const MIB: u64 = 1 << 20;
/// Tolerance for allocations of libtorch and of the test's own threads.
const NOISE: u64 = MIB;

fn block(mib: i64) -> Tensor {
    Tensor::zeros([mib << 20], (Kind::Uint8, Device::Cpu))
}

fn about(bytes: Bytes, mib: u64) -> bool {
    bytes.0.abs_diff(mib * MIB) < NOISE
}

#[test]
fn each_window_has_its_own_peaks() {
    let _alone = ready();
    release_cache(Device::Cpu).unwrap();
    let before = read(Device::Cpu).unwrap();
    let above = |now: Bytes, before: Bytes| Bytes(now.0.saturating_sub(before.0));
    let overall = {
        let _huge = block(400);
        ledger::usage().allocated_peak
    };
    begin_window(Device::Cpu).unwrap();
    let first = {
        let _large = block(200);
        read(Device::Cpu).unwrap()
    };
    let second = read(Device::Cpu).unwrap();
    assert!(about(above(first.allocated, before.allocated), 200), "{first:?}");
    assert!(about(above(second.allocated, before.allocated), 0), "{second:?}");
    assert!(about(above(second.allocated_peak, before.allocated), 200), "{second:?}");
    let at_peak: u64 = second.categories_at_peak.iter().map(|(_, bytes)| bytes.0).sum();
    assert_eq!(at_peak, second.allocated_peak.0);
    assert!(ledger::usage().allocated_peak >= overall, "the overall peak is not reset");
    assert!(second.system.resident.0 > 0 && second.system.resident_peak >= second.system.resident);
}

#[test]
fn cached_blocks_are_reserved_until_they_are_released() {
    let _alone = ready();
    release_cache(Device::Cpu).unwrap();
    let before = read(Device::Cpu).unwrap();
    drop(block(300));
    let kept = read(Device::Cpu).unwrap();
    assert!(about(Bytes(kept.reserved.0 - before.reserved.0), 300), "{before:?} {kept:?}");
    assert!(kept.reserved >= kept.allocated && kept.reserved_peak >= kept.reserved);
    let released = release_cache(Device::Cpu).unwrap();
    assert!(about(released, 300), "{released}");
    let after = read(Device::Cpu).unwrap();
    assert!(about(Bytes(after.reserved.0.abs_diff(before.reserved.0)), 0), "{before:?} {after:?}");
}
