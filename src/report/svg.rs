//! Charts as SVG: spread by class, reliability curve, lines over steps. Colours come from the page's style
//! sheet, so that they fit light and dark pages.

use super::spread::{ScoreSpread, round_up};
use crate::metrics::reliability::ReliabilityCurve;
use askama::filters::{Escaper, Html};
use std::fmt::Write as _;

/// Size of a chart and of its margins, in units of the view box.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 40.0;

/// An axis: ends and label.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChartAxis<'a> {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) label: &'a str,
}

/// A chart that is being drawn.
struct Chart<'a> {
    text: String,
    x: ChartAxis<'a>,
    y: ChartAxis<'a>,
    height: f64,
    left: f64,
}

impl<'a> Chart<'a> {
    /// Starts a chart with its description for people who cannot see it.
    fn new(description: &str, x: ChartAxis<'a>, y: ChartAxis<'a>, height: f64, left: f64) -> Self {
        let description = escaped(description);
        let text = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{description}\">\
             <title>{description}</title>"
        );
        Self { text, x, y, height, left }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + (value - self.x.low) / (self.x.high - self.x.low) * (WIDTH - self.left - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.height - BOTTOM - (value - self.y.low) / (self.y.high - self.y.low) * (self.height - TOP - BOTTOM)
    }

    fn add(&mut self, part: std::fmt::Arguments) {
        self.text.write_fmt(part).expect("writing to a string");
    }

    /// Ticks and labels of the horizontal axis, `distance` from each other.
    fn x_axis(&mut self, distance: f64) {
        let bottom = self.height - BOTTOM;
        let ticks = (0_u32..).map(|i| self.x.low + f64::from(i) * distance);
        let ticks: Vec<f64> = ticks.take_while(|value| *value <= self.x.high + 1e-9 * distance).collect();
        for value in ticks {
            let at = self.x(value);
            self.add(format_args!("<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"));
            let label = tick(value);
            self.add(format_args!(
                "<text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                bottom + 15.0
            ));
        }
        let (middle, label) = (f64::midpoint(self.left, WIDTH - RIGHT), escaped(self.x.label));
        self.add(format_args!(
            "<text class=\"label\" x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            self.height - 6.0
        ));
    }

    /// Ticks and labels of the vertical axis.
    fn y_axis(&mut self, steps: usize) {
        let (left, right) = (self.left, WIDTH - RIGHT);
        for i in 0..=steps {
            let value = self.y.low + (self.y.high - self.y.low) * i as f64 / steps as f64;
            let at = self.y(value);
            self.add(format_args!("<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"));
            let label = tick(value);
            self.add(format_args!(
                "<text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                left - 6.0,
                at + 4.0
            ));
        }
        let (middle, label) = (f64::midpoint(TOP, self.height - BOTTOM), escaped(self.y.label));
        self.add(format_args!(
            "<text class=\"label\" transform=\"translate(11 {middle}) rotate(-90)\" text-anchor=\"middle\">{label}</text>"
        ));
    }

    fn end(mut self) -> String {
        self.text += "</svg>";
        self.text
    }
}

/// Quartiles of a score by class: a box from the first to the third quartile, a line at the median, whiskers to the
/// ends.
pub(super) fn spreads(spreads: &[ScoreSpread], axis: ChartAxis) -> String {
    const ROW: f64 = 30.0;
    const NAMES: f64 = 150.0;
    let description = format!("{} by class: quartiles, median and ends", axis.label);
    let height = TOP + BOTTOM + ROW * spreads.len() as f64;
    let y = ChartAxis { low: 0.0, high: 1.0, label: "" };
    let mut chart = Chart::new(&description, axis, y, height, NAMES);
    chart.x_axis((axis.high - axis.low) / 5.0);
    for (i, ScoreSpread { name, count, five }) in spreads.iter().enumerate() {
        let middle = TOP + ROW * (i as f64 + 0.5);
        let [low, first, median, third, high] = five.map(|value| chart.x(value.clamp(axis.low, axis.high)));
        let short: String = name.chars().take(18).collect();
        let mark = if name.chars().count() > 18 { "…" } else { "" };
        let (name, short) = (escaped(name), escaped(&short));
        chart.add(format_args!(
            "<g><title>{name}: median {:.3}, quartiles {:.3} and {:.3}, {count} masks</title>\
             <text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{short}{mark} ({count})</text>\
             <line class=\"whisker\" x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle}\" y2=\"{middle}\"/>\
             <rect class=\"box\" x=\"{first:.1}\" y=\"{}\" width=\"{:.1}\" height=\"16\" rx=\"2\"/>\
             <line class=\"median\" x1=\"{median:.1}\" x2=\"{median:.1}\" y1=\"{}\" y2=\"{}\"/></g>",
            five[2],
            five[1],
            five[3],
            NAMES - 8.0,
            middle + 4.0,
            middle - 8.0,
            (third - first).max(1.0),
            middle - 8.0,
            middle + 8.0
        ));
    }
    chart.end()
}

/// Reliability curves over the diagonal, with a CSS class for each.
pub(super) fn reliability(curves: &[(&str, &ReliabilityCurve)]) -> String {
    let x = ChartAxis { low: 0.0, high: 1.0, label: "probability of foreground" };
    let y = ChartAxis { low: 0.0, high: 1.0, label: "share of foreground" };
    let mut chart = Chart::new("Reliability curve of the pixel probabilities", x, y, 340.0, LEFT);
    chart.y_axis(5);
    chart.x_axis(0.2);
    let (left, right, low, high) = (chart.x(0.0), chart.x(1.0), chart.y(0.0), chart.y(1.0));
    chart.add(format_args!("<line class=\"diagonal\" x1=\"{left}\" y1=\"{low}\" x2=\"{right}\" y2=\"{high}\"/>"));
    for (class, curve) in curves {
        let points: Vec<(f64, f64, u64)> = (curve.bins.iter())
            .filter_map(|bin| Some((chart.x(bin.probability?), chart.y(bin.foreground?), bin.pixels)))
            .collect();
        let path: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
        chart.add(format_args!("<polyline class=\"line {class}\" points=\"{}\"/>", path.join(" ")));
        for (x, y, pixels) in points {
            chart.add(format_args!(
                "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"><title>{pixels} pixels</title></circle>"
            ));
        }
    }
    chart.end()
}

/// One curve of [`lines`].
#[derive(Debug, Clone)]
pub(super) struct Series {
    /// Name in the legend.
    pub(super) name: String,
    /// Step and value; values that are not finite leave a gap.
    pub(super) points: Vec<(f64, Option<f64>)>,
}

/// Curves over steps. The curves have the CSS classes `series-0`, `series-1` and so on.
pub(super) fn lines(series: &[Series], label: &str) -> String {
    let values = || series.iter().flat_map(|series| series.points.iter().filter_map(|point| point.1));
    let steps = series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    let last = steps.fold(1.0, f64::max);
    let (low, high) = values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    let low = if low >= 0.0 || !low.is_finite() { 0.0 } else { -round_up(-low) };
    let high = if high > 0.0 { round_up(high) } else { low + 1.0 };
    let description = format!("{label} over {last} steps");
    let x = ChartAxis { low: 0.0, high: last, label: "step" };
    let mut chart = Chart::new(&description, x, ChartAxis { low, high, label }, HEIGHT, LEFT);
    chart.y_axis(5);
    chart.x_axis(round_up(last / 5.0).ceil());
    for (index, series) in series.iter().enumerate() {
        let class = index % 4;
        for run in series.points.split(|point| point.1.is_none()) {
            let place = |point: &(f64, Option<f64>)| (chart.x(point.0), chart.y(point.1.unwrap_or_default()));
            match run {
                [] => {}
                [one] => {
                    let (x, y) = place(one);
                    chart.add(format_args!(
                        "<circle class=\"dot series-{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>"
                    ));
                }
                many => {
                    let path: Vec<String> = many.iter().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                    chart.add(format_args!("<polyline class=\"line series-{class}\" points=\"{}\"/>", path.join(" ")));
                }
            }
        }
    }
    chart.end()
}

/// A number beside an axis.
fn tick(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 || (size > 0.0 && size < 0.001) {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// A text for HTML.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    Html.write_escaped_str(&mut out, text).expect("writing to a string");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_text() {
        let spread = ScoreSpread::new("<script>alert(1)</script>", &[0.1, 0.9]).unwrap();
        let chart = spreads(&[spread], ChartAxis { low: 0.0, high: 1.0, label: "Dice \"<b>\"" });
        assert!(!chart.contains("<script") && !chart.contains("<b>"), "{chart}");
        assert!(chart.contains("&#60;script&#62;"), "{chart}");
    }

    #[test]
    fn curves_have_gaps_where_values_are_missing() {
        let series = Series {
            name: "loss".into(),
            points: vec![(1.0, Some(2.0)), (2.0, Some(1.0)), (3.0, None), (4.0, Some(0.5))],
        };
        let chart = lines(&[series], "loss");
        assert_eq!((chart.matches("<polyline").count(), chart.matches("<circle").count()), (1, 1), "{chart}");
        assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
        assert!(!lines(&[], "nothing").contains("NaN"));
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!([tick(0.0), tick(0.25), tick(12000.0), tick(-0.0)], ["0", "0.25", "1e4", "0"]);
    }
}
