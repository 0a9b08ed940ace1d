//! Figure of an ablation: the difference of each arm to real images alone, with its intervals, as SVG.

use super::arms::{Arm, Segmenter};
use super::report::{AblationReport, ArmComparison};
use super::scores::Metric;
use crate::metrics::paired::Interval;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Sizes in pixels.
const MARK: f64 = 46.0;
const GROUP_GAP: f64 = 26.0;
const PANEL_HEIGHT: f64 = 200.0;
const LEFT: f64 = 66.0;
const TOP: f64 = 96.0;
const PANEL_TITLE: f64 = 26.0;
const PANEL_FOOT: f64 = 62.0;
const RIGHT: f64 = 18.0;
const LEAST_WIDTH: f64 = 330.0;

/// One panel: all arms of a segmenter on a set of rows.
struct Panel<'a> {
    title: String,
    /// Comparisons with real images alone, by number of real images.
    groups: Vec<(usize, Vec<&'a ArmComparison>)>,
}

impl Panel<'_> {
    fn width(&self) -> f64 {
        let marks: usize = self.groups.iter().map(|(_, marks)| marks.len()).sum();
        (marks as f64 * MARK + self.groups.len() as f64 * GROUP_GAP).max(LEAST_WIDTH)
    }
}

/// The figure as the text of an SVG file.
pub(super) fn svg(report: &AblationReport) -> String {
    let panels = panels(report);
    let widest = panels.iter().map(|row| row.first().map_or(0.0, Panel::width)).fold(0.0, f64::max);
    let columns = panels.first().map_or(0, Vec::len);
    let row_height = PANEL_TITLE + PANEL_HEIGHT + PANEL_FOOT;
    let width = columns as f64 * (LEFT + widest + RIGHT);
    let height = TOP + panels.len() as f64 * row_height;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut out, (LEFT, 24.0), "font-size=\"15\" font-weight=\"bold\"", "Difference to real images alone");
    let conclusion = report.sentence();
    let conclusion = conclusion.split([':', '.']).next().unwrap_or_default().to_owned();
    let facts = format!("{} steps, {} seeds; conclusion: {conclusion}", report.steps, report.seeds.len());
    text(&mut out, (LEFT, 42.0), "fill=\"#444\"", &facts);
    legend(&mut out);
    for (row, panels) in panels.iter().enumerate() {
        for (column, panel) in panels.iter().enumerate() {
            let left = column as f64 * (LEFT + widest + RIGHT) + LEFT;
            let top = TOP + row as f64 * row_height + PANEL_TITLE;
            draw(&mut out, panel, (left, top), widest, axis(report));
        }
    }
    out.push_str("</svg>\n");
    out
}

/// A row of panels for each segmenter and set, with a column for each metric.
fn panels(report: &AblationReport) -> Vec<Vec<Panel<'_>>> {
    let mut segmenters: Vec<Segmenter> = Vec::new();
    for condition in &report.conditions {
        if !segmenters.contains(&condition.segmenter) {
            segmenters.push(condition.segmenter);
        }
    }
    let mut rows = Vec::new();
    for &segmenter in &segmenters {
        for set in &report.sets {
            let panel = |metric: Metric| {
                let is_in_panel = |c: &&ArmComparison| {
                    c.segmenter == segmenter && c.set == set.name && c.metric == metric && c.baseline == Arm::Real
                };
                let all: Vec<&ArmComparison> = report.comparisons.iter().filter(is_in_panel).collect();
                let sizes: BTreeSet<usize> = all.iter().map(|c| c.real_images).collect();
                let of_size = |size| (size, all.iter().copied().filter(|c| c.real_images == size).collect());
                let groups = sizes.into_iter().map(of_size).collect();
                Panel { title: format!("{segmenter}, {} rows: {}", set.name, metric.name()), groups }
            };
            rows.push(Metric::ALL.map(panel).into());
        }
    }
    rows
}

/// Range of the axis: of all differences and bootstrap intervals, with 0. The t-intervals of few seeds are far wider
/// and are cut off.
fn axis(report: &AblationReport) -> (f64, f64) {
    let shown = report.comparisons.iter().filter(|c| c.baseline == Arm::Real).filter_map(ArmComparison::overall);
    let ends = shown.flat_map(|all| [all.bootstrap.low, all.bootstrap.high, all.difference]);
    let (low, high) = ends.fold((0.0_f64, 0.0_f64), |(low, high), end| (low.min(end), high.max(end)));
    let margin = (0.08 * (high - low)).max(0.005);
    (low - margin, high + margin)
}

fn draw(out: &mut String, panel: &Panel, (left, top): (f64, f64), width: f64, (low, high): (f64, f64)) {
    let y = |value: f64| top + (high - value.clamp(low, high)) / (high - low) * PANEL_HEIGHT;
    text(out, (left, top - 9.0), "font-weight=\"bold\"", &panel.title);
    for tick in ticks(low, high) {
        let stroke = if tick == 0.0 { "#444" } else { "#e4e4e4" };
        line(out, (left, y(tick)), (left + width, y(tick)), &format!("stroke=\"{stroke}\""));
        text(out, (left - 6.0, y(tick) + 4.0), "text-anchor=\"end\" fill=\"#444\"", &format!("{tick:+.2}"));
    }
    let _ = writeln!(
        out,
        "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{PANEL_HEIGHT}\" fill=\"none\" stroke=\"#999\"/>"
    );
    let mut x = left + GROUP_GAP / 2.0;
    for (number, (real_images, marks)) in panel.groups.iter().enumerate() {
        let start = x;
        if number > 0 {
            let border = x - GROUP_GAP / 2.0;
            line(out, (border, top), (border, top + PANEL_HEIGHT), "stroke=\"#c8c8c8\" stroke-dasharray=\"4 3\"");
        }
        for comparison in marks {
            mark(out, comparison, x + MARK / 2.0, &y);
            let ratio = comparison.arm.ratio().map_or_else(String::new, |ratio| ratio.to_string());
            let style = "text-anchor=\"middle\" fill=\"#444\" font-size=\"11\"";
            text(out, (x + MARK / 2.0, top + PANEL_HEIGHT + 15.0), style, &ratio);
            x += MARK;
        }
        let label = format!("{real_images} real images");
        let style = "text-anchor=\"middle\"";
        text(out, (f64::midpoint(start, x), top + PANEL_HEIGHT + 33.0), style, &label);
        x += GROUP_GAP;
    }
}

/// Difference and intervals of one comparison.
fn mark(out: &mut String, comparison: &ArmComparison, x: f64, y: &impl Fn(f64) -> f64) {
    let Some(all) = comparison.overall() else { return };
    let colour = colour(comparison.arm);
    let mut interval = |Interval { low, high }: Interval, width: f64| {
        let style = format!("stroke=\"{colour}\" stroke-width=\"{width}\"");
        line(out, (x, y(low)), (x, y(high)), &style);
    };
    all.over_seeds.into_iter().for_each(|over_seeds| interval(over_seeds, 1.2));
    interval(all.bootstrap, 5.0);
    let fill = if comparison.is_primary { "white" } else { colour };
    let _ = writeln!(
        out,
        "<circle cx=\"{x}\" cy=\"{}\" r=\"6\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"2.5\"/>",
        y(all.difference)
    );
}

fn colour(arm: Arm) -> &'static str {
    match arm {
        Arm::Real => "#444444",
        Arm::Classical => "#8a8a8a",
        Arm::Duplicates(_) => "#d98200",
        Arm::Synthetic(_) => "#1f6fb4",
    }
}

fn legend(out: &mut String) {
    let entries = [
        (Arm::Classical, "classical augmentation"),
        (Arm::Duplicates(crate::data::mixing_sampler::Ratio::All), "duplicated real rows"),
        (Arm::Synthetic(crate::data::mixing_sampler::Ratio::All), "synthetic pairs"),
    ];
    let mut x = LEFT;
    for (arm, name) in entries {
        let _ = writeln!(out, "<circle cx=\"{}\" cy=\"61\" r=\"6\" fill=\"{}\"/>", x + 6.0, colour(arm));
        text(out, (x + 17.0, 65.0), "", name);
        x += 190.0;
    }
    let note = "thick: bootstrap over images and seeds, thin: t over seeds (cut off at the frame), both 95 %; \
                white: decides; number below a mark: extra rows per real row";
    text(out, (LEFT, 84.0), "fill=\"#444\" font-size=\"11\"", note);
}

/// Round values in the range, at most about eight.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].into_iter().find(|step| (high - low) / step <= 8.0).unwrap_or(1.0);
    // a quotient of round numbers may be a little off
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    let mut ticks = Vec::new();
    let mut tick = first;
    while tick <= last {
        // no negative zero
        ticks.push(tick * step + 0.0);
        tick += 1.0;
    }
    ticks
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), style: &str) {
    let _ = writeln!(out, "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" {style}/>", from.0, from.1, to.0, to.1);
}

fn text(out: &mut String, at: (f64, f64), style: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" {style}>{words}</text>", at.0, at.1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_contain_zero() {
        assert_eq!(ticks(-0.021, 0.012), [-0.02, -0.01, 0.0, 0.01]);
        assert_eq!(ticks(-0.3, 0.35).len(), 7);
        for (low, high) in [(-0.9, 0.9), (-0.001, 0.006), (-0.2, 0.0)] {
            let found = ticks(low, high);
            assert!(found.contains(&0.0) && found.len() <= 9, "{found:?}");
        }
    }
}
