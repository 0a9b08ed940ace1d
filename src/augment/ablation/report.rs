//! Comparisons of the arms, the verdict, and the report as text.
//!
//! The comparison that decides is fixed by the settings, before any training: the first ratio, on the test rows.
//! Synthetic pairs help only if they gain over real images
//! alone *and* over the duplicated real rows. Each of the two must hold, so they need no correction for their number.
//! All other comparisons are secondary.

use super::Ablation;
use super::arms::{Arm, RunKey};
use super::probe::{FalsePositives, MOST_TIMES, ProbeCounts};
use super::rows::ArmRows;
use super::scores::{RowScore, TestSet};
use crate::Result;
use crate::metrics::paired::{self, Conclusion, GroupComparison, Interval, Scores};
use crate::metrics::text_table::aligned;
use crate::units::signed;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Results of an ablation.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct AblationReport {
    /// Optimizer steps of every training.
    pub steps: u64,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// The sets of scored rows.
    pub sets: Vec<SetReport>,
    /// Real training images.
    pub real_images: usize,
    /// Synthetic training images, all made from these real images.
    pub synthetic_images: usize,
    /// Mean scores of every run.
    pub runs: Vec<ArmMeans>,
    /// Probes for the shortcut; empty if the pairs have no decoys.
    pub probes: Vec<ProbeReport>,
    /// All comparisons.
    pub comparisons: Vec<ArmComparison>,
    /// Conclusion of the primary comparisons: do synthetic pairs improve on real images alone and on duplicated ones?
    pub verdict: Conclusion,
}

/// A set of scored rows.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SetReport {
    /// `test` or `external`.
    pub name: &'static str,
    /// Number of rows.
    pub rows: usize,
    /// Images of these rows. The scores of an image's rows are averaged before arms are compared.
    pub images: usize,
}

/// Mean scores of the runs of one arm.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ArmMeans {
    /// The set of rows.
    pub set: &'static str,
    /// The arm.
    pub arm: Arm,
    /// Mean over the images, for each seed.
    pub by_seed: Vec<f64>,
}

/// False positives of the runs of one arm, added over seeds.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ProbeReport {
    /// The arm.
    pub arm: Arm,
    /// In the background of synthetic images.
    pub synthetic: ProbeCounts,
    /// In the background of the real test rows.
    pub real: FalsePositives,
    /// True for a synthetic arm whose rate inside decoys is more than 1.5 times its rate on real background.
    pub is_suspicious: bool,
}

/// A comparison of two arms.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ArmComparison {
    /// The set of rows.
    pub set: &'static str,
    /// The arm that is compared.
    pub arm: Arm,
    /// The arm that it is compared with.
    pub baseline: Arm,
    /// True for the comparisons that the verdict depends on.
    pub is_primary: bool,
    /// By class, and overall in the last row.
    pub groups: Vec<GroupComparison>,
}

impl ArmComparison {
    /// The comparison over all images.
    pub fn overall(&self) -> Option<&GroupComparison> {
        self.groups.last()
    }
}

/// Scores of one run.
pub(super) struct RunScores {
    /// For each set, the scores of its rows.
    pub(super) sets: Vec<Vec<RowScore>>,
    pub(super) probe: Option<ProbeCounts>,
}

/// What a report is made from.
pub(super) struct AblationRuns<'a> {
    pub(super) ablation: &'a Ablation<'a>,
    pub(super) rows: &'a ArmRows,
    pub(super) sets: &'a [TestSet<'a>],
    /// By the name of the run.
    pub(super) runs: &'a HashMap<String, RunScores>,
}

impl AblationRuns<'_> {
    /// Compares all arms.
    ///
    /// # Errors
    /// As [`paired::compare`].
    pub(super) fn report(&self) -> Result<AblationReport> {
        let comparisons: Vec<Vec<_>> = (0..self.sets.len()).map(|set| self.compare(set)).collect::<Result<_>>()?;
        let comparisons = comparisons.concat();
        let primary = || comparisons.iter().filter(|c| c.is_primary).filter_map(ArmComparison::overall);
        let verdict = if primary().any(|all| all.images_only) {
            // the intervals of one seed do not contain the variation between trainings
            Conclusion::NoGain
        } else {
            conclude(&primary().map(|all| all.verdict).collect::<Vec<_>>())
        };
        let of_set = |set: &TestSet| SetReport { name: set.name, rows: set.rows.len(), images: set.groups().len() };
        Ok(AblationReport {
            steps: self.ablation.steps,
            seeds: self.ablation.seeds(),
            sets: self.sets.iter().map(of_set).collect(),
            real_images: self.rows.num_images,
            synthetic_images: self.rows.num_pairs,
            runs: self.means(),
            probes: Arm::all(&self.ablation.ratios).into_iter().filter_map(|arm| self.probe(arm)).collect(),
            comparisons,
            verdict,
        })
    }

    fn runs_of(&self, arm: Arm) -> impl Iterator<Item = &RunScores> {
        let limit_real = self.ablation.real_images;
        let run = move |seed| self.runs.get(&RunKey { limit_real, arm, seed }.to_string());
        self.ablation.seeds().into_iter().filter_map(run)
    }

    /// Dice of each image for each seed.
    fn scores(&self, arm: Arm, set: usize) -> Vec<Vec<f64>> {
        self.runs_of(arm).map(|run| self.sets[set].by_image(&run.sets[set])).collect()
    }

    fn compare(&self, set: usize) -> Result<Vec<ArmComparison>> {
        let groups = self.sets[set].groups();
        let mut pairs = vec![(Arm::Real, Arm::Classical, false)];
        for (number, &ratio) in self.ablation.ratios.iter().enumerate() {
            let (duplicates, synthetic) = (Arm::Duplicates(ratio), Arm::Synthetic(ratio));
            let is_primary = set == 0 && number == 0;
            pairs.extend([
                (Arm::Real, duplicates, false),
                (Arm::Real, synthetic, is_primary),
                (duplicates, synthetic, is_primary),
                (Arm::Classical, synthetic, false),
            ]);
        }
        let seeds = self.ablation.seeds();
        let compare = |(baseline, arm, is_primary): (Arm, Arm, bool)| {
            let [base, other] = [baseline, arm].map(|arm| self.scores(arm, set));
            let scores = Scores { groups: &groups, baseline: &base, other: &other };
            let groups = paired::compare(&scores, seeds.first().copied().unwrap_or(0))?;
            Ok(ArmComparison { set: self.sets[set].name, arm, baseline, is_primary, groups })
        };
        pairs.into_iter().map(compare).collect()
    }

    /// Mean scores of the runs of each arm.
    fn means(&self) -> Vec<ArmMeans> {
        let mean = |scores: &Vec<f64>| scores.iter().sum::<f64>() / scores.len().max(1) as f64;
        let arms = Arm::all(&self.ablation.ratios);
        let of_set = |(number, set): (usize, &TestSet)| {
            let by_seed = |arm| self.scores(arm, number).iter().map(mean).collect();
            arms.iter().map(|&arm| ArmMeans { set: set.name, arm, by_seed: by_seed(arm) }).collect::<Vec<_>>()
        };
        self.sets.iter().enumerate().flat_map(of_set).collect()
    }

    fn probe(&self, arm: Arm) -> Option<ProbeReport> {
        let (mut synthetic, mut real) = (ProbeCounts::default(), FalsePositives::default());
        for run in self.runs_of(arm) {
            synthetic += run.probe?;
            for score in run.sets.first()? {
                real += FalsePositives { predicted: score.false_positives, pixels: score.background };
            }
        }
        // the real arm never saw a synthetic image: its rate shows how hard decoys are without a shortcut
        let is_suspicious = matches!(arm, Arm::Synthetic(_)) && synthetic.decoys.rate() > MOST_TIMES * real.rate();
        Some(ProbeReport { arm, synthetic, real, is_suspicious })
    }
}

/// A gain needs a gain in every primary comparison. Harm over real images alone, the first of them, is harm.
fn conclude(primary: &[Conclusion]) -> Conclusion {
    match primary.first() {
        Some(Conclusion::Harm) => Conclusion::Harm,
        Some(Conclusion::Gain) if primary.iter().all(|&one| one == Conclusion::Gain) => Conclusion::Gain,
        _ => Conclusion::NoGain,
    }
}

impl AblationReport {
    /// The results as text.
    pub fn table(&self) -> String {
        let mut out = format!("{} steps, {} seeds", self.steps, self.seeds.len());
        for set in &self.sets {
            let _ = write!(out, ", {} {} images with {} rows", set.images, set.name, set.rows);
        }
        out.push('\n');
        let _ = writeln!(out, "{} real and {} synthetic training images", self.real_images, self.synthetic_images);
        for comparison in self.of_primary_arms() {
            let _ = writeln!(out, "\n{}, Dice:", title(comparison));
            out.push_str(&paired::table(&comparison.groups));
        }
        out.push_str(
            "\nall comparisons, over all images (*: decides, the others are secondary and not corrected for their number):\n",
        );
        out.push_str(&self.overview());
        out.push('\n');
        out.push_str(&self.probes());
        out.push_str(&self.sentence());
        out
    }

    /// The comparisons of Dice on the test rows of all arms up to the first ratio.
    fn of_primary_arms(&self) -> impl Iterator<Item = &ArmComparison> {
        let last = self.comparisons.iter().rposition(|c| c.is_primary).map_or(0, |last| last + 2);
        // the comparison with classical augmentation follows the primary ones
        self.comparisons.iter().take(last)
    }

    fn overview(&self) -> String {
        let header = ["arm", "against", "rows", "difference", "bootstrap 95 %", "t 95 %", "result"];
        let cells: Vec<Vec<String>> = self
            .comparisons
            .iter()
            .filter_map(|comparison| Some((comparison, comparison.overall()?)))
            .map(|(comparison, all)| {
                vec![
                    format!("{}{}", comparison.arm, if comparison.is_primary { " *" } else { "" }),
                    comparison.baseline.to_string(),
                    comparison.set.to_owned(),
                    signed(all.difference, 4),
                    all.bootstrap.to_string(),
                    all.over_seeds.map_or_else(|| "-".into(), |interval| interval.to_string()),
                    result_of(all),
                ]
            })
            .collect();
        aligned(&header, &cells, None)
    }

    /// The probes for the shortcut, one line each.
    fn probes(&self) -> String {
        let mut out = String::new();
        for ProbeReport { arm, synthetic, real, is_suspicious } in &self.probes {
            let rate = |of: FalsePositives| format!("{:.3} %", 100.0 * of.rate());
            let _ = writeln!(
                out,
                "false positives of {arm}: {} of the pixels inside decoys, {} of generated background, {} of real background{}",
                rate(synthetic.decoys),
                rate(synthetic.generated),
                rate(*real),
                if *is_suspicious { ": camera noise may be taken for a lesion" } else { "" }
            );
        }
        if out.is_empty() {
            out.push_str("no probe for false positives: the pairs have no decoys\n");
        }
        out.push('\n');
        out
    }

    fn primary(&self, baseline: &str) -> Option<&GroupComparison> {
        self.comparisons.iter().find(|c| c.is_primary && c.baseline.kind() == baseline)?.overall()
    }

    /// True if no gain was shown because the intervals are too wide to show one. It is false if one comparison is precise:
    /// its effect is small.
    pub fn is_too_imprecise(&self) -> bool {
        let primary = self.comparisons.iter().filter(|c| c.is_primary).filter_map(ArmComparison::overall);
        let mut open = primary.filter(|all| all.verdict != Conclusion::Gain).peekable();
        self.verdict == Conclusion::NoGain && open.peek().is_some() && open.all(|all| half_width(all) > WIDEST)
    }

    /// The conclusion in a few sentences; the first one ends at a colon or a full stop.
    pub fn sentence(&self) -> String {
        let (Some(real), Some(duplicates)) = (self.primary("real"), self.primary("duplicates")) else {
            return "nothing was compared".into();
        };
        let change = |all: &GroupComparison, over: &str| {
            let Interval { low, high } = all.bootstrap;
            let [difference, low, high] = [all.difference, low, high].map(|value| signed(value, 4));
            format!("{difference} Dice over {over} (95 % of draws {low} to {high}).")
        };
        let (seeds, images) = (self.seeds.len(), real.images);
        let too_few = || {
            let width = half_width(real).max(half_width(duplicates));
            format!(
                "cannot tell: {images} test images and {seeds} seeds are too few. The 95 % intervals reach up to {width:.2} Dice \
                 to each side, and effects of interest are smaller than {WIDEST}"
            )
        };
        let conclusion = match (self.verdict, real.verdict) {
            (Conclusion::Gain, _) => "synthetic pairs help".to_owned(),
            (Conclusion::Harm, _) => "synthetic pairs harm".to_owned(),
            _ if real.images_only => {
                "no gain was shown: one seed does not show the variation between trainings".to_owned()
            }
            _ if self.is_too_imprecise() => too_few(),
            (Conclusion::NoGain, Conclusion::Gain) => {
                "no gain was shown: duplicated real rows may explain the gain over real images alone".to_owned()
            }
            (Conclusion::NoGain, _) => "no gain was shown: an interval contains 0".to_owned(),
        };
        let classical = self.comparisons.iter().find(|c| c.baseline == Arm::Classical).and_then(ArmComparison::overall);
        let classical = classical.map_or("", |all| match all.verdict {
            Conclusion::Gain => " Classical augmentation gains less.",
            Conclusion::NoGain => " No difference to classical augmentation was shown.",
            Conclusion::Harm => " Classical augmentation alone does better.",
        });
        let (real, duplicates) = (change(real, "real images alone"), change(duplicates, "duplicated real rows"));
        format!("{conclusion}. {real} {duplicates} {seeds} seeds, {images} test images.{classical}")
    }
}

/// The conclusion of one comparison. A wide interval that contains 0 tells nothing.
fn result_of(all: &GroupComparison) -> String {
    let is_open = all.verdict == Conclusion::NoGain && half_width(all) > WIDEST;
    if is_open { "cannot tell".to_owned() } else { all.verdict.to_string() }
}

/// Largest half-width of a 95 % interval, in Dice, that can show that there is no gain of interest.
const WIDEST: f64 = 0.05;

/// Half of the wider interval.
fn half_width(all: &GroupComparison) -> f64 {
    let widths =
        std::iter::once(all.bootstrap).chain(all.over_seeds).map(|interval| (interval.high - interval.low) / 2.0);
    widths.fold(0.0, f64::max)
}

/// The arms of a comparison in words.
fn title(comparison: &ArmComparison) -> String {
    let name = |arm: Arm| match arm {
        Arm::Real => "real alone",
        Arm::Classical => "classical augmentation",
        Arm::Duplicates(_) => "duplicated real rows",
        Arm::Synthetic(_) => "synthetic pairs",
    };
    format!("{} against {}", name(comparison.arm), name(comparison.baseline))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_must_hold_over_duplicates_too() {
        use Conclusion::{Gain, Harm, NoGain};
        for (primary, expected) in [
            ([Gain, Gain], Gain),
            ([Gain, NoGain], NoGain),
            ([Gain, Harm], NoGain),
            ([NoGain, Gain], NoGain),
            ([Harm, Gain], Harm),
        ] {
            assert_eq!(conclude(&primary), expected, "{primary:?}");
        }
        assert_eq!(conclude(&[]), NoGain);
    }
}
