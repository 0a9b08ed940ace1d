//! Result of a choice by segmenter: scores and comparisons of all candidates, as numbers and as text.

use super::pairs::Made;
use crate::augment::settings::Mode;
use crate::metrics::paired::{self, Comparison, Conclusion, Scores};
use crate::metrics::text_table::aligned;
use crate::trainer::candidates::Candidate;
use crate::{Result, trainer};
use std::fmt::Write as _;

/// Which candidate was chosen, and why.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct SelectionReport {
    /// Optimizer step of the chosen candidate, which is now `best/`.
    pub chosen_step: u64,
    /// Step of the candidate with the best validation score.
    pub best_step_by_metric: u64,
    /// Whether the pairs of any candidate improve the U-Net significantly over real images alone.
    pub any_candidate_helps: bool,
    /// Kind of the validation scores: `loss` or `KID`; a score is minus its value.
    pub metric: String,
    /// Mode of the pairs.
    pub pair_mode: Mode,
    /// Optimizer steps of each U-Net.
    pub unet_steps: u64,
    /// Synthetic rows per real row in their training.
    pub synthetic_ratio: f64,
    /// Their seeds.
    pub seeds: Vec<u64>,
    /// Rows of the validation images.
    pub val_rows: usize,
    /// Validation images; the scores of an image's rows are averaged.
    pub val_images: usize,
    /// Mean Dice of the U-Nets that were trained on real images alone, for each seed. Empty if no candidate made usable pairs.
    pub real: Vec<f64>,
    /// The candidates, the one with the best validation score first.
    pub candidates: Vec<CandidateReport>,
}

/// Pairs and scores of a candidate.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct CandidateReport {
    /// Its optimizer steps.
    pub step: u64,
    /// Its validation score; higher is better.
    pub score: f64,
    /// Pairs that it made.
    pub pairs: usize,
    /// Pairs that passed the pixel tests.
    pub accepted: usize,
    /// Why its pairs cannot be used, if so. Such a candidate has no scores.
    pub problem: Option<String>,
    /// Mean Dice for each seed.
    pub dice: Vec<f64>,
    /// Comparisons with real images alone, by class, and over all images in the last row.
    pub against_real: Vec<Comparison>,
    /// Comparison with the chosen candidate over all images; `None` for the chosen one.
    pub against_chosen: Option<Comparison>,
}

impl CandidateReport {
    /// Comparison with real images alone over all images.
    pub fn overall(&self) -> Option<&Comparison> {
        self.against_real.last()
    }

    /// Mean gain in Dice over real images alone.
    pub fn gain(&self) -> Option<f64> {
        self.overall().map(|all| all.difference)
    }
}

/// Scores by seed and image: `[seed][image]`.
pub(super) type Dice = Vec<Vec<f64>>;

/// What a report is made from.
pub(super) struct Results<'a> {
    pub(super) metric: String,
    pub(super) pair_mode: Mode,
    pub(super) unet_steps: u64,
    pub(super) synthetic_ratio: f64,
    pub(super) seeds: Vec<u64>,
    pub(super) val_rows: usize,
    /// Class of each validation image.
    pub(super) groups: &'a [String],
    /// Scores with real images alone; empty if no candidate made usable pairs.
    pub(super) real: Dice,
    /// The candidates with their pairs and scores, which are missing if their pairs cannot be used. The one with the best
    /// validation score first; at least one.
    pub(super) candidates: Vec<(Candidate, Made, Option<Dice>)>,
}

impl Results<'_> {
    /// Compares all candidates with real images alone and chooses the one with the largest gain; of equal ones the one
    /// with the better validation score. If none has usable pairs, the validation score chooses.
    ///
    /// # Errors
    /// As [`paired::compare`].
    pub(super) fn report(self) -> Result<SelectionReport> {
        let mut candidates = Vec::new();
        for (Candidate { step, score }, made, dice) in &self.candidates {
            let against_real = match dice {
                Some(dice) => self.compare(&self.real, dice)?,
                None => Vec::new(),
            };
            candidates.push(CandidateReport {
                step: *step,
                score: *score,
                pairs: made.pairs,
                accepted: made.accepted,
                problem: made.problem.clone(),
                dice: dice.as_ref().map_or_else(Vec::new, means),
                against_real,
                against_chosen: None,
            });
        }
        let chosen = chosen(&candidates);
        for (number, (_, _, dice)) in self.candidates.iter().enumerate() {
            if let (Some(dice), Some(best), true) = (dice, &self.candidates[chosen].2, number != chosen) {
                candidates[number].against_chosen = self.compare(best, dice)?.pop();
            }
        }
        let helps = |one: &CandidateReport| one.overall().is_some_and(|all| all.verdict == Conclusion::Gain);
        Ok(SelectionReport {
            chosen_step: candidates[chosen].step,
            best_step_by_metric: candidates[0].step,
            any_candidate_helps: candidates.iter().any(helps),
            real: means(&self.real),
            val_images: self.groups.len(),
            candidates,
            metric: self.metric,
            pair_mode: self.pair_mode,
            unet_steps: self.unet_steps,
            synthetic_ratio: self.synthetic_ratio,
            seeds: self.seeds,
            val_rows: self.val_rows,
        })
    }

    fn compare(&self, baseline: &Dice, other: &Dice) -> Result<Vec<Comparison>> {
        let bootstrap_seed = self.seeds.first().copied().unwrap_or(0);
        paired::compare(&Scores { groups: self.groups, baseline, other }, bootstrap_seed)
    }
}

/// Number of the candidate with the largest gain, the first of equal ones.
fn chosen(candidates: &[CandidateReport]) -> usize {
    let gain = |number: usize| candidates[number].gain().unwrap_or(f64::NEG_INFINITY);
    (0..candidates.len()).reduce(|best, next| if gain(next) > gain(best) { next } else { best }).unwrap_or(0)
}

/// Mean over the images, for each seed.
fn means(dice: &Dice) -> Vec<f64> {
    dice.iter().map(|images| images.iter().sum::<f64>() / images.len().max(1) as f64).collect()
}

impl SelectionReport {
    /// The chosen candidate.
    pub fn chosen(&self) -> Option<&CandidateReport> {
        self.candidates.iter().find(|one| one.step == self.chosen_step)
    }

    /// The result as text.
    pub fn table(&self) -> String {
        let mut out = format!(
            "choice by segmenter: {} candidates, pairs of mode {}, {} U-Nets of {} steps each, {} val images with {} rows\n",
            self.candidates.len(),
            self.pair_mode.name(),
            self.seeds.len(),
            self.unet_steps,
            self.val_images,
            self.val_rows
        );
        out.push_str(&self.rows());
        out.push_str("*: chosen; gain or harm: both intervals exclude 0\n");
        for one in &self.candidates {
            if let Some(problem) = &one.problem {
                let _ = writeln!(out, "step {} was not scored: {problem}", one.step);
            }
            if let Some(all) = &one.against_chosen {
                let _ = writeln!(
                    out,
                    "step {} against the chosen one: {:+.4} Dice (bootstrap {}), {}",
                    one.step, all.difference, all.bootstrap, all.verdict
                );
            }
        }
        out.push_str(&self.sentence());
        out.push('\n');
        out
    }

    fn rows(&self) -> String {
        let metric = if self.metric.is_empty() { "validation" } else { &self.metric };
        let header =
            ["pairs of", metric, "pairs", "accepted", "val Dice", "over real", "bootstrap 95 %", "t 95 %", "result"];
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let none = || "-".to_owned();
        let mut cells = Vec::new();
        if !self.real.is_empty() {
            let dice = format!("{:.4}", mean(&self.real));
            cells.push(vec!["real alone".into(), none(), none(), none(), dice, none(), none(), none(), none()]);
        }
        for one in &self.candidates {
            let mark = if one.step == self.chosen_step { " *" } else { "" };
            let mut row = vec![format!("step {}{mark}", one.step), format!("{:.5}", -one.score)];
            row.extend([one.pairs.to_string(), one.accepted.to_string()]);
            match one.overall() {
                Some(all) => row.extend([
                    format!("{:.4}", mean(&one.dice)),
                    format!("{:+.4}", all.difference),
                    all.bootstrap.to_string(),
                    all.over_seeds.map_or_else(none, |interval| interval.to_string()),
                    all.verdict.to_string(),
                ]),
                None => row.extend(std::iter::repeat_with(none).take(5)),
            }
            cells.push(row);
        }
        aligned(&header, &cells, None)
    }

    /// The choice in words.
    pub fn sentence(&self) -> String {
        let step = self.chosen_step;
        let Some(all) = self.chosen().and_then(CandidateReport::overall) else {
            return format!(
                "no candidate made usable pairs: `best/` is step {step}, which has the best validation score. Do not use \
                 these generators for pairs before you have looked at their images"
            );
        };
        let gain = format!("{:+.4} Dice over real images alone (95 % of draws {})", all.difference, all.bootstrap);
        if !self.any_candidate_helps {
            return format!(
                "no candidate helps significantly; `best/` is step {step}, the best of them: {gain}. Pairs of this generator \
                 may not be worth using; `prsmed augment ablation` decides"
            );
        }
        let but = if all.verdict == Conclusion::Gain { "" } else { ", which alone is not significant" };
        format!(
            "`best/` is step {step}, whose pairs help most: {gain}{but}. The choice makes this gain look larger than it is; \
             confirm it on test images with `prsmed augment ablation`"
        )
    }
}

/// Kind of score of a checkpoint that was chosen by segmenter.
pub(super) const SCORE_KIND: &str = "segmenter";

impl SelectionReport {
    /// The score of `best/` and its kind: the gain in Dice, or the validation score if no candidate made usable pairs.
    pub(super) fn best_score(&self, candidate: &trainer::candidates::Candidate) -> (f64, &str) {
        match self.chosen().and_then(CandidateReport::gain) {
            Some(gain) => (gain, SCORE_KIND),
            None => (candidate.score, &self.metric),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(accepted: usize) -> Made {
        let problem = (accepted == 0).then(|| "the pixel tests rejected all 8 pairs: blank 8".to_owned());
        Made { pairs: 8, accepted, problem }
    }

    /// Three seeds of four images around `mean`.
    fn dice(mean: f64) -> Dice {
        let seed = |seed: i32| (0..4).map(|image| mean + 0.001 * f64::from(seed * image)).collect();
        (0..3).map(seed).collect()
    }

    fn results(candidates: Vec<(Candidate, Made, Option<Dice>)>) -> Results<'static> {
        static GROUPS: std::sync::LazyLock<Vec<String>> = std::sync::LazyLock::new(|| vec!["skin".to_owned(); 4]);
        Results {
            metric: "loss".into(),
            pair_mode: Mode::KeepLesion,
            unet_steps: 10,
            synthetic_ratio: 0.5,
            seeds: vec![0, 1, 2],
            val_rows: 4,
            groups: &GROUPS,
            real: if candidates.iter().any(|one| one.2.is_some()) { dice(0.5) } else { Vec::new() },
            candidates,
        }
    }

    fn candidate(step: u64) -> Candidate {
        Candidate { step, score: -(step as f64) }
    }

    #[test]
    fn the_candidate_whose_pairs_help_most_is_chosen() {
        let all = vec![
            (candidate(1), made(8), Some(dice(0.4))),
            (candidate(2), made(0), None),
            (candidate(3), made(6), Some(dice(0.6))),
        ];
        let report = results(all).report().unwrap();
        assert_eq!((report.chosen_step, report.best_step_by_metric), (3, 1));
        assert!(report.any_candidate_helps);
        let against = report.candidates[0].against_chosen.as_ref().unwrap();
        assert!((against.difference + 0.2).abs() < 1e-9 && against.verdict == Conclusion::Harm, "{against:?}");
        assert!(report.candidates[2].against_chosen.is_none());
        let (score, kind) = report.best_score(&candidate(3));
        assert!((score - 0.1).abs() < 1e-9 && kind == SCORE_KIND, "{score} {kind}");
        let table = report.table();
        for words in ["step 3 *", "step 2 was not scored: the pixel tests rejected all 8", "whose pairs help most"] {
            assert!(table.contains(words), "{words}: {table}");
        }
    }

    #[test]
    fn the_best_is_chosen_and_said_to_be_useless_if_no_candidate_helps() {
        let report =
            results(vec![(candidate(1), made(8), Some(dice(0.3))), (candidate(2), made(8), Some(dice(0.4)))]).report();
        let report = report.unwrap();
        assert_eq!((report.chosen_step, report.any_candidate_helps), (2, false));
        assert!(report.sentence().starts_with("no candidate helps significantly; `best/` is step 2"));
    }

    #[test]
    fn without_usable_pairs_the_validation_score_chooses() {
        let report = results(vec![(candidate(1), made(0), None), (candidate(2), made(0), None)]).report().unwrap();
        assert_eq!((report.chosen_step, report.any_candidate_helps), (1, false));
        assert_eq!(report.best_score(&candidate(1)), (-1.0, "loss"));
        assert!(report.table().contains("no candidate made usable pairs"));
    }

    #[test]
    fn equal_gains_keep_the_order_of_the_validation_scores() {
        let report = results(vec![(candidate(5), made(8), Some(dice(0.5))), (candidate(2), made(8), Some(dice(0.5)))]);
        assert_eq!(report.report().unwrap().chosen_step, 5);
    }
}
