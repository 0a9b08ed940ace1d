//! Nearest neighbours among feature vectors: to find images far from all real ones, or copies of one.

use super::distance::{checked, square_distances};
use crate::tensor::{Kind, Tensor, dims, guard, no_grad};
use prsmed_base::{Error, Result};

/// Rows per block of the distance matrix, which limits its memory.
const ROWS: i64 = 512;

/// For each row of `query [n, d]`: the mean Euclidean distance to its `k` nearest rows of `reference [m, d]`; without a
/// reference, to the nearest other rows of `query`.
///
/// # Errors
/// [`Error::Shape`] for different widths, no rows, `k` outside `1..=m`, or values that are not finite.
pub fn knn_distance(query: &Tensor, reference: Option<&Tensor>, k: i64) -> Result<Vec<f64>> {
    rows(query, reference, k, &|part, all, own| nearest(part, all, k, own))
}

/// For each row of `query [n, d]`: the largest cosine to a row of `reference [m, d]`, -1..=1; 0 for a row of zeros. Without a
/// reference, to another row of `query`.
///
/// # Errors
/// [`Error::Shape`] for different widths, no rows, or values that are not finite.
pub fn max_cosine(query: &Tensor, reference: Option<&Tensor>) -> Result<Vec<f64>> {
    rows(query, reference, 1, &largest_cosine)
}

/// `measure` of blocks of `query`, with the number of the first row if there is no `reference`.
fn rows(
    query: &Tensor,
    reference: Option<&Tensor>,
    k: i64,
    measure: &dyn Fn(&Tensor, &Tensor, Option<i64>) -> Tensor,
) -> Result<Vec<f64>> {
    let within = reference.is_none();
    let (query, reference) = checked(query, reference.unwrap_or(query), 1)?;
    let others = dims::<2>(&reference)[0] - i64::from(within);
    if !(1..=others).contains(&k) {
        let reason = format!("{k} neighbours were requested, but there are only {others} rows");
        return Err(Error::Shape { reason });
    }
    no_grad(|| {
        guard::guard(|| {
            let mut found = Vec::new();
            for first in (0..dims::<2>(&query)[0]).step_by(usize::try_from(ROWS).expect("small")) {
                let part = query.narrow(0, first, ROWS.min(dims::<2>(&query)[0] - first));
                let values = measure(&part, &reference, within.then_some(first));
                found.extend(Vec::<f64>::try_from(values).expect("a row of fp64"));
            }
            Ok(found)
        })
    })
}

fn nearest(query: &Tensor, reference: &Tensor, k: i64, own: Option<i64>) -> Tensor {
    let squares = without_own(square_distances(query, reference), own, f64::INFINITY);
    let (smallest, _) = squares.topk(k, 1, false, false);
    smallest.sqrt().mean_dim([1].as_slice(), false, Kind::Double)
}

fn largest_cosine(query: &Tensor, reference: &Tensor, own: Option<i64>) -> Tensor {
    let unit = |xs: &Tensor| xs / xs.norm_scalaropt_dim(2, [1], true).clamp_min(f64::MIN_POSITIVE);
    let cosines = unit(query).matmul(&unit(reference).tr()).clamp(-1.0, 1.0);
    without_own(cosines, own, f64::NEG_INFINITY).amax([1], false)
}

/// Sets the element of each row that compares the row with itself to `value`. Row `i` is column `own + i`.
fn without_own(matrix: Tensor, own: Option<i64>, value: f64) -> Tensor {
    let Some(first) = own else { return matrix };
    let _ = matrix.diagonal(first, 0, 1).fill_(value);
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[[f64; 2]]) -> Tensor {
        Tensor::from_slice(rows.as_flattened()).view([-1, 2])
    }

    #[test]
    fn distances_and_cosines_of_a_worked_example() {
        let reference = table(&[[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]);
        let query = table(&[[0.0, 0.0], [6.0, 8.0]]);
        assert_eq!(knn_distance(&query, Some(&reference), 1).unwrap(), [0.0, 5.0]);
        let two = knn_distance(&query, Some(&reference), 2).unwrap();
        assert!(
            (two[0] - 0.5).abs() < 1e-12 && (two[1] - f64::midpoint(5.0, 85.0_f64.sqrt())).abs() < 1e-12,
            "{two:?}"
        );
        let within = knn_distance(&reference, None, 1).unwrap();
        assert!((within[0] - 1.0).abs() < 1e-12 && (within[1] - 18.0_f64.sqrt()).abs() < 1e-12, "{within:?}");
        let cosines = max_cosine(&query, Some(&reference)).unwrap();
        assert!(cosines[0].abs() < 1e-12 && (cosines[1] - 1.0).abs() < 1e-12, "{cosines:?}");
        let within = max_cosine(&table(&[[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]), None).unwrap();
        assert!((within[0] - 0.5_f64.sqrt()).abs() < 1e-12 && (within[2] + 0.5_f64.sqrt()).abs() < 1e-12, "{within:?}");
    }

    #[test]
    fn the_block_size_does_not_change_the_result() {
        let values: Vec<f64> = (0..2 * 1300).map(|i| (f64::from(i) * 0.7).sin() * f64::from(i % 37)).collect();
        let all = Tensor::from_slice(&values).view([-1, 2]);
        let within = knn_distance(&all, None, 3).unwrap();
        assert_eq!(within.len(), 1300);
        let row = |i: usize| [values[2 * i], values[2 * i + 1]];
        for i in [0, 511, 512, 1299] {
            let [x, y] = row(i);
            let others = (0..1300).filter(|&j| j != i).map(|j| (row(j)[0] - x).hypot(row(j)[1] - y));
            let mut others: Vec<f64> = others.collect();
            others.sort_by(f64::total_cmp);
            let want = others[..3].iter().sum::<f64>() / 3.0;
            assert!((within[i] - want).abs() < 1e-6, "row {i}: {} instead of {want}", within[i]);
        }
    }

    #[test]
    fn features_that_cannot_be_compared_are_an_error() {
        let two = table(&[[0.0, 0.0], [1.0, 1.0]]);
        assert!(knn_distance(&two, Some(&two), 3).is_err() && knn_distance(&two, Some(&two), 0).is_err());
        assert!(knn_distance(&two, None, 2).is_err() && knn_distance(&two, None, 1).is_ok());
        assert!(max_cosine(&two, Some(&Tensor::from_slice(&[1.0]).view([1, 1]))).is_err());
        assert!(max_cosine(&two, Some(&table(&[[f64::NAN, 0.0]]))).is_err());
    }
}
