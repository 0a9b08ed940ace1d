//! Reads a fixture and compares results with it. Every tensor of the fixture must be compared.

use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::weights::Archive;
use prsmed::tensor::{Kind, Tensor, no_grad};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const FORWARD: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;
/// Relative error that bfloat16 arithmetic may add.
pub(crate) const BF16: f64 = 3e-2;

/// libtorch has one random generator for all threads: tests that draw from it, seed it, or restore its state (recomputed
/// blocks do) hold this.
pub(crate) fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Fixture {
    folder: PathBuf,
    pub(crate) meta: Value,
    inputs: Archive,
    expected: Archive,
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity").join(name);
        let meta_path = folder.join("meta.json");
        let text =
            std::fs::read_to_string(&meta_path).unwrap_or_else(|e| panic!("fixture {}: {e}", meta_path.display()));
        let meta = serde_json::from_str(&text).unwrap_or_else(|e| panic!("fixture {}: {e}", meta_path.display()));
        let inputs = archive(&folder.join("inputs.safetensors"));
        let expected = archive(&folder.join("expected.safetensors"));
        Self { folder, meta, inputs, expected }
    }

    /// The model's sizes, as our config.
    pub(crate) fn config<T: serde::de::DeserializeOwned>(&self) -> T {
        serde_json::from_value(self.meta["config"].clone()).expect("meta.json contains this config")
    }

    /// The numbers `config.name` of the fixture, a list or a single one.
    pub(crate) fn numbers(&self, name: &str) -> Vec<f64> {
        let value = &self.meta["config"][name];
        let all = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        all.iter().map(|v| v.as_f64().unwrap_or_else(|| panic!("config.{name} is not a number"))).collect()
    }

    /// Like [`Fixture::numbers`], for four integers.
    pub(crate) fn four(&self, name: &str) -> [i64; 4] {
        let list = self.meta["config"][name].as_array().expect("a list");
        std::array::from_fn(|i| list[i].as_i64().expect("an integer"))
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// An input, in fp32 if it is floating point.
    pub(crate) fn input(&self, name: &str) -> Tensor {
        let tensor = self.inputs.read(name).unwrap_or_else(|e| panic!("input {name}: {e}"));
        if tensor.kind() == Kind::Half { tensor.to_kind(Kind::Float) } else { tensor }
    }

    pub(crate) fn has_input(&self, name: &str) -> bool {
        self.inputs.contains(name)
    }

    pub(crate) fn expected(&self, name: &str) -> Tensor {
        self.expected.read(name).unwrap_or_else(|e| panic!("expected {name}: {e}"))
    }

    /// Fills `store` from `weights.safetensors`. Only keys that start with an entry of `ignorable` may stay unused, and
    /// each entry must match a key.
    pub(crate) fn load(&self, store: &Store, ignorable: &[&str]) {
        load(store, &self.path("weights.safetensors"), ignorable);
    }

    /// Starts the comparison of the case `prefix`.
    pub(crate) fn case(&self, prefix: &str) -> Comparison<'_> {
        let names = self.expected.names().iter().filter(|n| n.starts_with(&format!("{prefix}.")));
        let open = names.map(|n| (n.split('@').next().unwrap_or(n).to_owned(), n.clone())).collect();
        Comparison { fixture: self, prefix: prefix.to_owned(), open, failures: Vec::new(), compared: 0 }
    }

    fn zero_gradients(&self) -> Vec<&str> {
        self.meta["zero_gradients"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    }

    fn tolerance(&self, name: &str) -> f64 {
        let (kind, most) = if name.contains(".grad.") { ("gradient", GRADIENT) } else { ("forward", FORWARD) };
        let base = self.meta["tolerance"][kind].as_f64().expect("a tolerance").min(most);
        let noise = self.meta["fp32_error"]["by_name"][name].as_f64().expect("the fp32 error of this tensor");
        base.max(4.0 * noise)
    }
}

pub(crate) fn archive(path: &Path) -> Archive {
    Archive::open(path).unwrap_or_else(|e| panic!("fixture {}: {e}", path.display()))
}

/// An empty store without initialisation: a tensor that is not loaded fails the test, and no random numbers are drawn.
pub(crate) fn store() -> Store {
    Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() })
}

/// Like [`Fixture::load`], from any file.
pub(crate) fn load(store: &Store, path: &Path, ignorable: &[&str]) {
    let mut targets: Vec<_> = store.entries().into_iter().map(|e| (e.name, e.tensor)).collect();
    let report = archive(path).load(&mut targets, |name| ignorable.iter().any(|i| name.starts_with(i)));
    let report = report.expect("weights can be read");
    assert!(report.is_clean(), "{}: {report}", path.display());
    for prefix in ignorable {
        assert!(
            report.ignored.iter().any(|n| n.starts_with(prefix)),
            "no stored key starts with {prefix}: do not ignore it"
        );
    }
}

/// Relative L2 distance in double precision; infinite if an element is not finite.
pub(crate) fn relative_error(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size(), "shapes differ");
    let (got, want) = (got.detach().to_kind(Kind::Double), want.detach().to_kind(Kind::Double));
    let error = (got - &want).norm().double_value(&[]) / want.norm().double_value(&[]).max(1e-300);
    if error.is_finite() { error } else { f64::INFINITY }
}

/// Square root of the sum of squares.
fn size(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).norm().double_value(&[])
}

/// Asserts that a bfloat16 result is near the fp32 one.
pub(crate) fn assert_near_in_bf16(what: &str, bf16: &Tensor, fp32: &Tensor, allowed: f64) {
    let error = relative_error(bf16, fp32);
    assert!(error <= allowed, "{what}: bf16 differs from fp32 by {error:.1e}, allowed {allowed:.0e}");
    assert!(error > 1e-5, "{what}: bf16 equals fp32 ({error:.1e}), so it did not run in bf16");
}

/// Asserts that `store` has at least one gradient and that all are finite.
pub(crate) fn assert_finite_gradients(store: &Store) {
    let mut some = false;
    store.for_each(|e| {
        let grad = e.tensor.grad();
        if grad.defined() {
            some = true;
            assert!(grad.isfinite().all().int64_value(&[]) == 1, "gradient of {} is not finite", e.name);
        }
    });
    assert!(some, "no gradient at all");
}

/// Comparison of one case. [`Comparison::finish`] reports all differences at once.
#[must_use]
pub(crate) struct Comparison<'a> {
    fixture: &'a Fixture,
    prefix: String,
    open: BTreeMap<String, String>,
    failures: Vec<String>,
    compared: usize,
}

impl Comparison<'_> {
    /// Compares `got` with the tensor `name` of the fixture.
    pub(crate) fn check(&mut self, name: &str, got: &Tensor) {
        let name = format!("{}.{name}", self.prefix);
        let Some(stored) = self.open.remove(&name) else {
            self.failures.push(format!("{name}: not in the fixture, or already compared"));
            return;
        };
        let got = match stored.split_once("@stride:") {
            Some((_, step)) => got.reshape([-1]).slice(0, None, None, step.parse().expect("a stride")),
            None => got.shallow_clone(),
        };
        let want = self.fixture.expected(&stored);
        self.compared += 1;
        if got.size() != want.size() {
            self.failures.push(format!("{name}: shape {:?}, expected {:?}", got.size(), want.size()));
            return;
        }
        let (error, allowed) = (relative_error(&got, &want), self.fixture.tolerance(&name));
        if error > allowed {
            self.failures.push(format!("{name}: relative error {error:.2e}, allowed {allowed:.1e}"));
        }
    }

    /// Marks a tensor of the fixture that the caller compared itself.
    pub(crate) fn compared_elsewhere(&mut self, name: &str) {
        assert!(self.open.remove(&format!("{}.{name}", self.prefix)).is_some(), "{name} is not in the fixture");
    }

    /// Compares the gradients of all trainable tensors. Exactly the tensors in `without` have no gradient.
    pub(crate) fn check_gradients(&mut self, store: &Store, without: &[&str]) {
        for entry in store.entries().iter().filter(|e| e.role == Role::Trainable) {
            let (name, grad) = (entry.name.as_str(), entry.tensor.grad());
            if grad.defined() == without.contains(&name) {
                self.failures.push(format!("{}.grad.{name}: has a gradient: {}", self.prefix, grad.defined()));
            } else if self.fixture.zero_gradients().contains(&format!("{}.grad.{name}", self.prefix).as_str()) {
                self.check_zero(store, name, &grad);
            } else if grad.defined() {
                self.check(&format!("grad.{name}"), &grad);
            }
        }
    }

    /// Checks a gradient that is 0 in exact arithmetic: it must be small relative to the gradient of the layer's
    /// weight.
    fn check_zero(&mut self, store: &Store, name: &str, grad: &Tensor) {
        let neighbour = name.replace(".bias", ".weight");
        let beside = size(&store.get(&neighbour).expect("a bias belongs to a weight").grad());
        self.compared += 1;
        let ratio = size(grad) / beside;
        if ratio.is_nan() || ratio > GRADIENT {
            self.failures.push(format!("{}.grad.{name}: {ratio:.1e} of {neighbour}'s, expected 0", self.prefix));
        }
    }

    /// Fails with every difference, and every tensor of the fixture that was not compared.
    pub(crate) fn finish(mut self) {
        self.failures.extend(self.open.keys().map(|name| format!("{name}: in the fixture, but never compared")));
        let name = self.fixture.meta["name"].as_str().unwrap_or_default();
        assert!(self.compared > 0, "{name}: nothing was compared");
        assert!(self.failures.is_empty(), "{name}: {} differences\n{}", self.failures.len(), self.failures.join("\n"));
    }
}

/// The scalar whose gradients are in the fixture: `sum(output * probe)`.
pub(crate) fn probed(output: &Tensor, probe: &Tensor) -> Tensor {
    (output.to_kind(Kind::Float) * probe).sum(Kind::Float)
}

/// A copy of `tensor` as a leaf with gradient.
pub(crate) fn leaf(tensor: &Tensor, kind: Kind) -> Tensor {
    no_grad(|| tensor.to_kind(kind).copy()).set_requires_grad(true)
}

#[test]
#[should_panic(expected = "absent/meta.json")]
fn a_missing_fixture_fails() {
    let _ = Fixture::open("absent");
}

#[test]
#[should_panic(expected = "3.param.bias: relative error 5.0")]
fn a_small_difference_fails() {
    let fixture = Fixture::open("adamw");
    let mut case = fixture.case("3");
    case.check("param.bias", &(fixture.expected("3.param.bias") * (1.0 + 5e-6)));
    case.finish();
}

#[test]
#[should_panic(expected = "3.param.late: in the fixture, but never compared")]
fn a_forgotten_tensor_fails() {
    let fixture = Fixture::open("adamw");
    let mut case = fixture.case("3");
    case.check("param.bias", &fixture.expected("3.param.bias"));
    case.finish();
}
