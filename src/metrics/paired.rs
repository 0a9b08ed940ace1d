//! Paired comparison of two arms: is an arm better than the baseline on the same images with the same seeds?
//!
//! It computes two 95 % intervals, because each misses something. The *bootstrap* (Owen 2007, the "pigeonhole"
//! bootstrap) resamples seeds and images, but with three seeds it underestimates the spread between seeds. The
//! *t-interval* over the seeds' mean differences accounts for few seeds, but treats the images as fixed. A result other
//! than [`Conclusion::NoGain`] needs both to exclude 0 on the same side. With one seed there is only the bootstrap over
//! images; [`GroupComparison::images_only`] then says that another seed may give another result.
//!
//! All seeds use the same images, so one sample of images applies to all seeds. A sample per seed would make the
//! interval too narrow.

use prsmed_base::rng;
use prsmed_base::units::{fixed, signed};
use prsmed_base::{Error, Result};
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;
use std::fmt;

use super::order::quantile;
use super::text_table::aligned;

/// Number of bootstrap samples.
const DRAWS: usize = 2000;

/// Name of the row over all images.
pub const ALL: &str = "all images";

/// Scores of two arms on the same images.
#[derive(Debug, Clone, Copy)]
pub struct Scores<'a> {
    /// The group (modality) of each image.
    pub groups: &'a [String],
    /// `[seed][image]`, higher is better.
    pub baseline: &'a [Vec<f64>],
    /// Like `baseline`, with the same seeds in the same order.
    pub other: &'a [Vec<f64>],
}

/// A 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// Every interval is above 0.
    Gain,
    /// An interval contains 0, or the two disagree.
    NoGain,
    /// Every interval is below 0.
    Harm,
}

/// Comparison of one group.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GroupComparison {
    /// Name of the group, or [`ALL`].
    pub group: String,
    /// Number of seeds of each arm.
    pub seeds: usize,
    /// Number of images per seed.
    pub images: usize,
    /// Mean score of the baseline.
    pub baseline: f64,
    /// Mean score of the other arm.
    pub other: f64,
    /// `other - baseline`.
    pub difference: f64,
    /// Bootstrap interval over seeds and images.
    pub bootstrap: Interval,
    /// t-interval over the seeds' mean differences; `None` with one seed.
    pub over_seeds: Option<Interval>,
    /// Result of both intervals.
    pub verdict: Conclusion,
    /// True with one seed: the intervals do not include the spread between seeds.
    pub images_only: bool,
}

/// Compares each group, by name, and all images together (each image has the same weight), which is the last row.
///
/// `seed` is the seed of the bootstrap: equal scores and seeds give equal intervals.
///
/// # Errors
/// [`Error::Config`] if the arms differ in seeds or images, if there are none, or if a score is not finite.
pub fn compare(scores: &Scores, seed: u64) -> Result<Vec<GroupComparison>> {
    check(scores)?;
    let groups: BTreeSet<&str> = scores.groups.iter().map(String::as_str).collect();
    let of_group = |name: &str| (0..scores.groups.len()).filter(|&i| scores.groups[i] == name).collect::<Vec<usize>>();
    let mut found: Vec<GroupComparison> = groups.iter().map(|name| one(name, scores, &of_group(name), seed)).collect();
    found.push(one(ALL, scores, &(0..scores.groups.len()).collect::<Vec<_>>(), seed));
    Ok(found)
}

fn check(scores: &Scores) -> Result<()> {
    let wrong = |reason: String| {
        Err(Error::config("scores", reason, "score both arms on the same images, with the same seeds"))
    };
    let Scores { groups, baseline, other } = scores;
    if baseline.is_empty() || groups.is_empty() {
        return wrong("there are no scores to compare".into());
    }
    if baseline.len() != other.len() {
        return wrong(format!("{} seeds for the baseline and {} for the other arm", baseline.len(), other.len()));
    }
    for row in baseline.iter().chain(*other) {
        if row.len() != groups.len() {
            return wrong(format!("{} scores for {} images", row.len(), groups.len()));
        }
        if let Some(value) = row.iter().find(|value| !value.is_finite()) {
            return wrong(format!("{value} is not a score"));
        }
    }
    Ok(())
}

fn one(name: &str, scores: &Scores, images: &[usize], seed: u64) -> GroupComparison {
    let differences: Vec<Vec<f64>> = scores
        .baseline
        .iter()
        .zip(scores.other)
        .map(|(baseline, other)| images.iter().map(|&i| other[i] - baseline[i]).collect())
        .collect();
    let mean_of = |arm: &[Vec<f64>]| {
        mean(&arm.iter().map(|row| mean(&images.iter().map(|&i| row[i]).collect::<Vec<_>>())).collect::<Vec<_>>())
    };
    let by_seed: Vec<f64> = differences.iter().map(|row| mean(row)).collect();
    let bootstrap = bootstrap(&differences, &mut rng::stream(seed, "paired bootstrap", &[]));
    let over_seeds = t_interval(&by_seed);
    GroupComparison {
        group: name.to_owned(),
        seeds: differences.len(),
        images: images.len(),
        baseline: mean_of(scores.baseline),
        other: mean_of(scores.other),
        difference: mean(&by_seed),
        bootstrap,
        over_seeds,
        verdict: conclude(&[Some(bootstrap), over_seeds]),
        images_only: over_seeds.is_none(),
    }
}

fn conclude(intervals: &[Option<Interval>]) -> Conclusion {
    let all = |test: fn(&Interval) -> bool| intervals.iter().flatten().all(test);
    if all(|i| i.low > 0.0) {
        Conclusion::Gain
    } else if all(|i| i.high < 0.0) {
        Conclusion::Harm
    } else {
        Conclusion::NoGain
    }
}

/// The 2.5 % and 97.5 % quantiles of the mean of `differences[seed][image]`, with resampled seeds and images.
fn bootstrap(differences: &[Vec<f64>], stream: &mut ChaCha8Rng) -> Interval {
    let (seeds, images) = (differences.len(), differences[0].len());
    let mut weights = vec![0.0; images];
    let means: Vec<f64> = (0..DRAWS)
        .map(|_| {
            weights.fill(0.0);
            for _ in 0..images {
                weights[stream.random_range(0..images)] += 1.0;
            }
            let drawn: Vec<f64> = (0..seeds)
                .map(|_| {
                    let row = &differences[stream.random_range(0..seeds)];
                    row.iter().zip(&weights).map(|(d, w)| d * w).sum::<f64>() / count(images)
                })
                .collect();
            mean(&drawn)
        })
        .collect();
    let end = |q| quantile(&means, q).expect("finite draws");
    Interval { low: end(0.025), high: end(0.975) }
}

/// Student's interval around the mean; `None` for fewer than two values.
fn t_interval(values: &[f64]) -> Option<Interval> {
    let freedom = values.len().checked_sub(1).filter(|&freedom| freedom > 0)?;
    let middle = mean(values);
    let variance = values.iter().map(|v| (v - middle) * (v - middle)).sum::<f64>() / count(freedom);
    let half = t_975(freedom) * (variance / count(values.len())).sqrt();
    Some(Interval { low: middle - half, high: middle + half })
}

/// 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom.
fn t_975(freedom: usize) -> f64 {
    const FIRST: [f64; 8] = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060];
    const Z: f64 = 1.959_964;
    freedom.checked_sub(1).and_then(|i| FIRST.get(i)).copied().unwrap_or_else(|| {
        // expansion of Cornish and Fisher in 1/freedom, accurate to 1e-3 from 9 degrees of freedom on
        let v = count(freedom);
        let (z3, z5, z7) = (Z.powi(3), Z.powi(5), Z.powi(7));
        let second = (5.0 * z5 + 16.0 * z3 + 3.0 * Z) / 96.0;
        let third = (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * Z) / 384.0;
        Z + ((z3 + Z) / 4.0 + (second + third / v) / v) / v
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / count(values.len())
}

fn count(n: usize) -> f64 {
    n as f64
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} .. {}", signed(self.low, 4), signed(self.high, 4))
    }
}

impl fmt::Display for Conclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gain => "gain",
            Self::NoGain => "no gain",
            Self::Harm => "harm",
        })
    }
}

/// The comparisons as a text table.
pub fn table(rows: &[GroupComparison]) -> String {
    let header = ["group", "images", "seeds", "baseline", "other", "difference", "bootstrap 95 %", "t 95 %", "verdict"];
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.group.clone(),
                row.images.to_string(),
                row.seeds.to_string(),
                fixed(row.baseline, 4),
                fixed(row.other, 4),
                signed(row.difference, 4),
                row.bootstrap.to_string(),
                row.over_seeds.map_or_else(|| "-".into(), |i| i.to_string()),
                row.verdict.to_string(),
            ]
        })
        .collect();
    let mut text = aligned(&header, &cells, rows.len().checked_sub(1));
    text += "gain or harm: both intervals exclude 0\n";
    if rows.iter().any(|row| row.images_only) {
        text += "one seed: the intervals are over images only, another seed may give another result\n";
    }
    text
}

#[cfg(test)]
#[path = "paired_tests.rs"]
mod tests;
