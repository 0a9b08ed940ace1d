//! Parity of NF4 with bitsandbytes: codes, scales, states and dense values are bit-identical.

use super::fixture::archive;
use prsmed::tensor::nf4::{Nf4, Quantization, STATE};
use prsmed::tensor::weights::Archive;
use prsmed::tensor::{Device, Kind, Shared, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MATRICES: [&str; 5] = ["whole", "blocks", "ragged", "odd", "thresholds"];
const SCHEMES: [(&str, bool); 2] = [("nf4", false), ("nf4-double", true)];
const KINDS: [(&str, Kind); 3] = [("bf16", Kind::BFloat16), ("fp16", Kind::Half), ("fp32", Kind::Float)];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/nf4")
}

fn state_of(bytes: &Tensor) -> Value {
    serde_json::from_slice(&Vec::<u8>::try_from(bytes).expect("bytes")).expect("JSON")
}

/// Calls `check` with every matrix of the file (by name) and our quantization of the same values.
fn each(mut check: impl FnMut(&str, &Nf4, &Archive)) {
    let inputs = archive(&folder().join("inputs.safetensors"));
    let expected = archive(&folder().join("expected.safetensors"));
    for name in MATRICES {
        let dense = inputs.read(name).expect("an input");
        let size = dense.size();
        for (scheme, is_double) in SCHEMES {
            let ours = Nf4::empty([size[0], size[1]], is_double, Device::Cpu);
            ours.quantize(&dense);
            check(&format!("{scheme}/{name}"), &ours, &expected);
        }
    }
}

#[test]
fn codes_scales_and_states_equal_bitsandbytes() {
    let mut compared = 0;
    each(|name, ours, expected| {
        for (key, piece) in ours.pieces() {
            let theirs = expected.read(&format!("{name}{key}")).unwrap();
            if key == STATE {
                assert_eq!(state_of(piece), state_of(&theirs), "{name}");
            } else {
                assert_eq!(piece, &theirs, "{name}{key}");
            }
            compared += 1;
        }
    });
    assert_eq!(compared, 5 * (4 + 6));
}

#[test]
fn dense_values_equal_bitsandbytes() {
    each(|name, ours, expected| {
        for (label, kind) in KINDS {
            let theirs = expected.read(&format!("{name}@{label}")).unwrap();
            assert_eq!(theirs.kind(), kind);
            assert_eq!(ours.dequantize(kind), theirs, "{name} in {label}");
            assert_eq!(ours.dequantize_by(kind, true), theirs, "{name} in {label}, by libtorch's operators");
        }
    });
}

/// Files of the package can be read, also into dense targets.
#[test]
fn files_of_bitsandbytes_are_read() {
    each(|name, ours, expected| {
        let [rows, columns] = ours.shape();
        let is_double = ours.scheme() == Quantization::Nf4Double;
        let read = Shared::new(Nf4::empty([rows, columns], is_double, Device::Cpu));
        let other = Shared::new(Nf4::empty([rows, columns], !is_double, Device::Cpu));
        let mut dense = [(name.to_owned(), Tensor::zeros([rows, columns], (Kind::Float, Device::Cpu)))];
        let mut none: [(String, Tensor); 0] = [];
        let matrix = [(name.to_owned(), read.clone())];
        let report = expected.load_with(&mut none, &matrix, |_| true).unwrap();
        assert!(report.is_clean(), "{report}");
        assert_eq!(report.loaded, [name]);
        expected.load_with(&mut none, &[(name.to_owned(), other.clone())], |_| true).unwrap();
        expected.load_with(&mut dense, &[], |_| true).unwrap();
        let values = ours.dequantize(Kind::Float);
        assert_eq!(read.dequantize(Kind::Float), values);
        assert_eq!(dense[0].1, values);
        // the other format has the same codes; its scales differ by less than one step of 8 bits
        assert_eq!(other.pieces()[0].1, ours.pieces()[0].1, "{name}");
        for ((key, a), (_, b)) in read.pieces().into_iter().zip(ours.pieces()).filter(|((key, _), _)| *key != STATE) {
            assert_eq!(a, b, "{name}{key}");
        }
    });
}
