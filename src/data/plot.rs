//! A picture of differences as SVG text: groups below each other, each with its mean and interval, and a line at 0.
//!
//! Black on white only, so that it survives a printer; every text is escaped.

use std::fmt::Write as _;

/// One row of a [`forest`].
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// What is compared, on the left.
    pub label: String,
    /// The mean difference.
    pub value: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end of its interval.
    pub high: f64,
    /// The verdict or count, on the right; may be empty.
    pub note: String,
    /// Drawn bold, behind a rule: the row over everything.
    pub total: bool,
}

const ROW_PX: f64 = 30.0;
const PLOT_PX: f64 = 420.0;
const TOP_PX: f64 = 56.0;
const BOTTOM_PX: f64 = 52.0;
const LETTER_PX: f64 = 8.4;
const MARGIN_PX: f64 = 16.0;

/// A forest plot: a square at each row's value, a whisker over its interval, a dashed line at 0, the unit below the axis.
/// The square is filled when the interval excludes 0. Rows with a value that is not finite say `no value`.
pub fn forest(title: &str, unit: &str, lines: &[Line]) -> String {
    let letters =
        |texts: &dyn Fn(&Line) -> &str| lines.iter().map(|line| texts(line).chars().count()).max().unwrap_or(0).min(60);
    let left = 2.0 * MARGIN_PX + LETTER_PX * count(letters(&|line| &line.label));
    let right = 2.0 * MARGIN_PX + LETTER_PX * count(letters(&|line| &line.note));
    let width = (left + PLOT_PX + right).max(2.0 * MARGIN_PX + 11.0 * count(title.chars().count()));
    let bottom = TOP_PX + ROW_PX * count(lines.len());
    let height = bottom + BOTTOM_PX;
    let axis = Axis::over(lines, left);

    let mut svg = String::new();
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\" \
         font-size=\"14\" fill=\"#000\" stroke=\"none\" role=\"img\">\n<title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>",
        escaped(title)
    )
    .expect("writing to a string");
    text(&mut svg, (MARGIN_PX, 28.0), "start", "font-size=\"18\" font-weight=\"bold\"", title);
    for tick in axis.ticks() {
        let x = axis.x(tick);
        line(&mut svg, (x, TOP_PX), (x, bottom), "stroke-opacity=\".18\"");
        text(&mut svg, (x, bottom + 18.0), "middle", "font-size=\"12\"", &axis.number(tick));
    }
    let zero = axis.x(0.0);
    line(&mut svg, (zero, TOP_PX), (zero, bottom), "stroke-width=\"1.5\" stroke-dasharray=\"6 4\"");
    line(&mut svg, (left, bottom), (left + PLOT_PX, bottom), "");
    text(&mut svg, (left + PLOT_PX / 2.0, bottom + 40.0), "middle", "", unit);
    for (i, row) in lines.iter().enumerate() {
        let y = TOP_PX + ROW_PX * (count(i) + 0.5);
        draw(&mut svg, row, y, left, &axis);
    }
    svg + "</svg>\n"
}

fn draw(svg: &mut String, row: &Line, y: f64, left: f64, axis: &Axis) {
    let weight = if row.total { "font-weight=\"bold\"" } else { "" };
    if row.total {
        line(svg, (MARGIN_PX, y - ROW_PX / 2.0), (left + PLOT_PX, y - ROW_PX / 2.0), "stroke-opacity=\".5\"");
    }
    text(svg, (left - MARGIN_PX, y + 5.0), "end", weight, &row.label);
    text(svg, (left + PLOT_PX + MARGIN_PX, y + 5.0), "start", weight, &row.note);
    if ![row.value, row.low, row.high].iter().all(|v| v.is_finite()) {
        text(svg, (left + PLOT_PX / 2.0, y + 5.0), "middle", "font-style=\"italic\"", "no value");
        return;
    }
    let (low, high) = (axis.x(row.low), axis.x(row.high));
    line(svg, (low, y), (high, y), "stroke-width=\"2\"");
    for end in [low, high] {
        line(svg, (end, y - 5.0), (end, y + 5.0), "stroke-width=\"2\"");
    }
    let fill = if row.low > 0.0 || row.high < 0.0 { "#000" } else { "#fff" };
    let side = if row.total { 13.0 } else { 10.0 };
    let hover = format!("{}: {} ({} to {})", row.label, row.value, row.low, row.high);
    writeln!(
        svg,
        "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{side}\" height=\"{side}\" fill=\"{fill}\" stroke=\"#000\" \
         stroke-width=\"2\"><title>{}</title></rect>",
        axis.x(row.value) - side / 2.0,
        y - side / 2.0,
        escaped(&hover)
    )
    .expect("writing to a string");
}

/// Where values lie on the picture.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
    left: f64,
}

impl Axis {
    /// Holds every finite end and 0, and begins and ends at a tick.
    fn over(lines: &[Line], left: f64) -> Self {
        let ends = lines.iter().flat_map(|line| [line.low, line.value, line.high]).filter(|v| v.is_finite());
        let (low, high) = ends.fold((0.0_f64, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)));
        let range = if high > low { high - low } else { 1.0 };
        let rough = range / 5.0;
        let power = 10.0_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|&s| s >= rough).unwrap_or(rough);
        let high = if high > low { high } else { low + step };
        Self { low: (low / step).floor() * step, high: (high / step).ceil() * step, step, left }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + PLOT_PX * (value - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> Vec<f64> {
        let mut ticks = Vec::new();
        while self.low + self.step * count(ticks.len()) <= self.high + self.step / 2.0 {
            ticks.push(self.low + self.step * count(ticks.len()));
        }
        ticks
    }

    /// With as many decimals as the step needs.
    fn number(&self, tick: f64) -> String {
        let decimals = (0..9_i32).find(|&d| self.step * 10.0_f64.powi(d) >= 0.999).unwrap_or(9);
        let tick = if tick.abs() < self.step / 2.0 { 0.0 } else { tick };
        format!("{tick:.*}", usize::try_from(decimals).unwrap_or(0))
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), look: &str) {
    writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#000\" {look}/>",
        from.0, from.1, to.0, to.1
    )
    .expect("writing to a string");
}

fn text(svg: &mut String, at: (f64, f64), anchor: &str, look: &str, words: &str) {
    let (x, y, words) = (at.0, at.1, escaped(words));
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {look}>{words}</text>")
        .expect("writing to a string");
}

#[expect(clippy::cast_precision_loss, reason = "counts of rows and letters")]
fn count(n: usize) -> f64 {
    n as f64
}

/// Text as it may stand in SVG and HTML; characters that XML forbids become U+FFFD.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\t' | '\n' | '\r' => safe.push(' '),
            '\0'..='\x1f' | '\u{fffe}' | '\u{ffff}' => safe.push('\u{fffd}'),
            _ => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(label: &str, low: f64, value: f64, high: f64) -> Line {
        Line { label: label.into(), value, low, high, note: "n 10".into(), total: false }
    }

    /// The number behind `name="` in the first line that holds `part`.
    fn attribute(svg: &str, part: &str, name: &str) -> f64 {
        let line = svg.lines().find(|line| line.contains(part)).unwrap();
        let rest = line.split(&format!(" {name}=\"")).nth(1).unwrap();
        rest.split('"').next().unwrap().parse().unwrap()
    }

    #[test]
    fn rows_lie_where_their_values_are() {
        let svg = forest("Gain", "Dice", &[row("a", 0.01, 0.02, 0.03), row("b", -0.02, 0.0, 0.02)]);
        let zero = attribute(&svg, "stroke-dasharray", "x1");
        assert!(attribute(&svg, "<title>a: ", "x") > zero, "{svg}");
        let size = attribute(&svg, "<title>b: ", "width");
        assert!((attribute(&svg, "<title>b: ", "x") + size / 2.0 - zero).abs() < 0.11, "{svg}");
        let filled = |name: &str| svg.lines().any(|l| l.contains(name) && l.contains("fill=\"#000\""));
        assert!(filled("<title>a: ") && !filled("<title>b: "), "only an interval without 0 is filled");
        for tick in ["-0.02", "0.00", "0.01", "0.03"] {
            assert!(svg.contains(&format!(">{tick}<")), "{tick} is missing: {svg}");
        }
    }

    #[test]
    fn text_is_escaped_and_nothing_breaks_it() {
        let svg = forest("<b>&", "a\"b", &[row("x<y", f64::NAN, 0.0, 1.0)]);
        assert!(svg.contains("&lt;b&gt;&amp;") && svg.contains("x&lt;y") && svg.contains("no value"), "{svg}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        for lines in [vec![], vec![row("zero", 0.0, 0.0, 0.0)], vec![row("far", -1e-9, 1e12, 1e12)]] {
            let svg = forest("t", "u", &lines);
            assert!(!svg.contains("NaN") && !svg.contains("inf") && svg.len() < 10_000, "{svg}");
        }
    }

    #[test]
    fn forbidden_characters_are_replaced() {
        assert_eq!(escaped("a\u{1}\n'"), "a\u{fffd} &#39;");
    }
}
