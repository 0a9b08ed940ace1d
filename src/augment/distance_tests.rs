use super::*;
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;

/// Normal rows around `mean` (the same for each column).
fn normal(stream: &mut ChaCha8Rng, rows: i64, width: i64, mean: f64) -> Tensor {
    let count = usize::try_from(rows * width).unwrap();
    let mut value = || {
        let (u, v): (f64, f64) = (1.0 - stream.random::<f64>(), stream.random());
        mean + (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    let values: Vec<f64> = (0..count).map(|_| value()).collect();
    Tensor::from_slice(&values).view([rows, width])
}

/// The closed-form features of `scripts/fixtures/distances.py`.
fn waves(rows: i64, width: i64, step: f64, scale: f64, shift: f64) -> Tensor {
    let value = |i: i64| shift + scale * (step * (i * i % 9973) as f64).sin() + 0.3 * (0.11 * i as f64).cos();
    let values: Vec<f64> = (0..rows * width).map(value).collect();
    Tensor::from_slice(&values).view([rows, width])
}

#[test]
fn values_of_scipy_and_numpy() {
    let path = crate::fixture::checkout().join("tests/fixtures/distances.json");
    let fixture: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let integer = |key: &str| case[key].as_i64().unwrap();
        let number = |key: &str| case[key].as_f64().unwrap();
        let a = waves(integer("n"), integer("d"), 0.37, 1.0, 0.0);
        let b = waves(integer("m"), integer("d"), 0.53, 1.2, 0.25);
        let name = &case["name"];
        let (got, want) = (fid(&a, &b).unwrap(), number("fid"));
        assert!((got - want).abs() < 1e-3, "{name}: FID {got} instead of {want}");
        let got = kid(&a, &b, 0).unwrap();
        assert!((got.value - number("kid")).abs() < 1e-6, "{name}: KID {} instead of {}", got.value, case["kid"]);
        assert!(got.low < got.value && got.value < got.high);
        let got = mmd_rbf(&a, &b, 0).unwrap();
        assert!((got.value - number("mmd")).abs() < 1e-6, "{name}: MMD {} instead of {}", got.value, case["mmd"]);
    }
}

#[test]
fn both_forms_of_the_root_agree() {
    let mut stream = rng::stream(1, "test", &[]);
    for (n, m, d) in [(12, 9, 20), (30, 40, 8), (9, 40, 9)] {
        let (a, b) = (normal(&mut stream, n, d, 0.0), normal(&mut stream, m, d, 0.5));
        let (rows, columns) = (root_trace_by_rows(&a, &b), root_trace_by_columns(&a, &b));
        assert!((rows - columns).abs() < 1e-6 * rows, "{rows} and {columns}");
    }
}

#[test]
fn fid_of_few_images_is_much_too_high() {
    let mut stream = rng::stream(2, "test", &[]);
    let mut of = |n: i64| fid(&normal(&mut stream, n, 64, 0.0), &normal(&mut stream, n, 64, 0.0)).unwrap();
    let (few, many) = (of(50), of(2100));
    assert!(few > 20.0 && many < 2.0, "{few} {many}: the true distance is 0");
    let same = normal(&mut stream, 40, 64, 0.0);
    assert!(fid(&same, &same).unwrap() < 1e-9);
}

#[test]
fn subsets_are_used_above_their_size() {
    let mut stream = rng::stream(3, "test", &[]);
    let (a, b) = (normal(&mut stream, 1200, 4, 0.0), normal(&mut stream, 1100, 4, 0.0));
    let found = kid(&a, &b, 7).unwrap();
    assert!(found.low < 0.0 && found.high > 0.0, "{found:?}");
    assert_eq!(found, kid(&a, &b, 7).unwrap(), "the same seed gives the same subsets");
    assert_ne!(found.value, kid(&a, &b, 8).unwrap().value);
    let far = kid(&a, &(b + 0.5), 7).unwrap();
    assert!(far.low > 0.0, "{far:?}");
}

/// Fraction of intervals that contain `truth` (the mean of all estimates if `None`), and that mean divided by its
/// error.
fn coverage(
    estimate: impl Fn(&Tensor, &Tensor) -> Mmd,
    (n, m): (i64, i64),
    shift: f64,
    truth: Option<f64>,
) -> (f64, f64) {
    const TRIALS: u32 = 500;
    let mut stream = rng::stream(11, "coverage", &[n.unsigned_abs(), shift.to_bits()]);
    let found: Vec<Mmd> =
        (0..TRIALS).map(|_| estimate(&normal(&mut stream, n, 4, 0.0), &normal(&mut stream, m, 4, shift))).collect();
    let mean = found.iter().map(|f| f.value).sum::<f64>() / f64::from(TRIALS);
    let variance = found.iter().map(|f| (f.value - mean).powi(2)).sum::<f64>() / f64::from(TRIALS);
    let truth = truth.unwrap_or(mean);
    let held = found.iter().filter(|f| (f.low..=f.high).contains(&truth)).count();
    (f64::from(u32::try_from(held).unwrap()) / f64::from(TRIALS), mean / (variance / f64::from(TRIALS)).sqrt())
}

#[test]
fn intervals_hold_the_truth() {
    for (n, m) in [(40, 40), (30, 80)] {
        for shift in [0.0, 0.2, 0.8] {
            let truth = (shift == 0.0).then_some(0.0);
            for (name, (share, bias)) in [
                ("KID", coverage(|a, b| kid(a, b, 0).unwrap(), (n, m), shift, truth)),
                ("MMD", coverage(|a, b| mmd_rbf(a, b, 0).unwrap(), (n, m), shift, truth)),
            ] {
                // the width of an interval grows with the estimate, so it is not too narrow for equal distributions
                let most = if shift > 0.0 { 0.98 } else { 1.0 };
                assert!((0.90..=most).contains(&share), "{name}, {n} and {m} images, shift {shift}: {share}");
                assert!(shift > 0.0 || bias.abs() < 4.0, "{name} of one distribution is not 0 on average: {bias}");
            }
        }
    }
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let ones = |shape: [i64; 2]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
    for (a, b) in [([4, 3], [4, 2]), ([1, 3], [4, 3]), ([4, 0], [4, 0])] {
        assert!(matches!(fid(&ones(a), &ones(b)), Err(Error::Shape { .. })), "{a:?} {b:?}");
    }
    assert!(fid(&(ones([4, 3]) * f64::NAN), &ones([4, 3])).is_err());
    assert!(kid(&ones([3, 3]), &ones([4, 3]), 0).is_err());
    let equal = mmd_rbf(&ones([4, 3]), &ones([5, 3]), 0).unwrap();
    assert!(equal.value.abs() < 1e-12 && equal.low.is_finite(), "{equal:?}");
}
