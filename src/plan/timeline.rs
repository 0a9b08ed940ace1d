//! Memory over a step as a picture: [`svg`] for any viewer, [`html`] with a readout under the pointer.
//!
//! Areas are stacked by category and told apart by colour (Okabe and Ito's palette), texture and the order of the
//! legend, so that the picture works without colour vision and in print.

mod draw;
mod page;

pub use page::html;

use draw::{BOLD, Canvas, amount, fitting, float, tail, width};

/// What is drawn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    /// Memory after each event, in time order.
    pub points: Vec<Point>,
    /// Names of the categories, the lowest area first.
    pub categories: Vec<String>,
    /// Names of the phases with the index of the first point of each, ascending.
    pub phases: Vec<(String, usize)>,
    /// Headline.
    pub title: String,
    /// What the device offers, bytes.
    pub budget: Option<u64>,
    /// The highest point.
    pub peak: Peak,
}

/// Memory after one event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Point {
    /// Bytes of each category, in the order of [`Timeline::categories`]; missing ones are 0.
    pub bytes: Vec<u64>,
}

impl Point {
    /// Bytes of all categories.
    pub fn total(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

/// The highest point and what happened around it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peak {
    /// Index of the point.
    pub at: usize,
    /// Operation, module scope and change of memory in bytes, in time order.
    pub ops: Vec<(String, String, i64)>,
}

/// Columns that a long trace is reduced to.
const COLUMNS: usize = 1500;
/// Rows of the table of operations.
const OPS: usize = 16;
/// Rows for the names of phases above the plot.
const PHASE_ROWS: usize = 3;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 76.0;
const PLOT_WIDTH: f64 = 840.0;
const PLOT_HEIGHT: f64 = 400.0;
const LEGEND: f64 = LEFT + PLOT_WIDTH + 24.0;
const RIGHT: f64 = WIDTH - 16.0;

/// A span of points, shown by its highest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Column {
    /// First point of the span.
    first: usize,
    /// The point with the largest total.
    highest: usize,
}

/// At most [`COLUMNS`] equal spans of the points.
fn columns(timeline: &Timeline) -> Vec<Column> {
    let (points, count) = (timeline.points.len(), timeline.points.len().min(COLUMNS));
    let column = |index: usize| {
        let (first, end) = (index * points / count, (index + 1) * points / count);
        // The first of equals, but the peak itself where it is one of them.
        let total = |point: usize| (timeline.points[point].total(), point == timeline.peak.at, usize::MAX - point);
        Column { first, highest: (first..end).max_by_key(|point| total(*point)).unwrap_or(first) }
    };
    (0..count).map(column).collect()
}

/// Where things are.
struct Scale {
    points: f64,
    top: f64,
    max: f64,
}

impl Scale {
    fn x(&self, point: usize) -> f64 {
        LEFT + PLOT_WIDTH * (float(point as u64) / self.points).min(1.0)
    }

    fn y(&self, bytes: u64) -> f64 {
        self.top + PLOT_HEIGHT * (1.0 - float(bytes) / self.max)
    }

    fn bottom(&self) -> f64 {
        self.top + PLOT_HEIGHT
    }
}

/// A self-contained SVG picture, white on any background; below about 1 MB for traces of any length.
pub fn svg(timeline: &Timeline) -> String {
    let columns = columns(timeline);
    let peak = timeline.peak.at.min(timeline.points.len().saturating_sub(1));
    let highest = timeline.points.get(peak).map_or(0, Point::total);
    let top = columns.iter().map(|column| timeline.points[column.highest].total()).max().unwrap_or(0).max(highest);
    // A budget far above the memory in use would flatten the picture.
    let budget = timeline.budget.filter(|budget| *budget / 2 <= top);
    let names = phase_labels(timeline);
    let rows = names.iter().map(|label| label.row + 1).max().unwrap_or(0);
    let scale = Scale {
        points: float(timeline.points.len().max(1) as u64),
        top: 56.0 + 17.0 * float(rows as u64),
        max: float(top.max(budget.unwrap_or(0)).max(1)) * 1.1,
    };

    let mut canvas = Canvas::new(timeline.categories.len());
    canvas.text(LEFT, 30.0, "start", "ink title", &fitting(&timeline.title, RIGHT - LEFT, BOLD * 19.0));
    canvas.titled_rect((LEFT, scale.top), (PLOT_WIDTH, PLOT_HEIGHT), "plot", "");
    bands(&mut canvas, &scale, timeline, &names);
    axes(&mut canvas, &scale, timeline.points.len());
    if timeline.points.is_empty() {
        let middle = (LEFT + PLOT_WIDTH / 2.0, scale.top + PLOT_HEIGHT / 2.0);
        canvas.text(middle.0, middle.1, "middle", "dim", "no allocations recorded");
    } else {
        areas(&mut canvas, &scale, timeline, &columns);
        for (_, first) in timeline.phases.iter().filter(|(_, first)| *first > 0 && *first < timeline.points.len()) {
            canvas.line((scale.x(*first), scale.top), (scale.x(*first), scale.bottom()), "border");
        }
    }
    // In the middle of the point's step.
    let peak_x = f64::midpoint(scale.x(peak), scale.x(peak + 1));
    limit(&mut canvas, &scale, timeline.budget, budget, peak_x > LEFT + PLOT_WIDTH / 2.0);
    if !timeline.points.is_empty() {
        mark(&mut canvas, &scale, peak_x, highest, budget);
    }
    let legend = legend(&mut canvas, &scale, timeline, peak);
    let table = operations(&mut canvas, scale.bottom() + 62.0, &timeline.peak.ops);
    canvas.finish(WIDTH, legend.max(table).max(scale.bottom() + 56.0) + 16.0, &timeline.title)
}

/// The name of a phase, placed.
struct Label<'a> {
    name: &'a str,
    first: usize,
    x: f64,
    row: usize,
}

/// Names above their bands, in as many rows as needed; a name that finds no room keeps its band's tooltip.
fn phase_labels(timeline: &Timeline) -> Vec<Label<'_>> {
    let points = timeline.points.len().max(1);
    let x = |point: usize| LEFT + PLOT_WIDTH * float(point.min(points) as u64) / float(points as u64);
    let mut ends = [f64::NEG_INFINITY; PHASE_ROWS];
    let mut labels = Vec::new();
    for (index, (name, first)) in timeline.phases.iter().enumerate() {
        let end = timeline.phases.get(index + 1).map_or(points, |(_, next)| *next);
        let (from, to, wide) = (x(*first), x(end), width(name, 13.0));
        let start = if wide <= to - from { f64::midpoint(from, to) - wide / 2.0 } else { from };
        let start = start.min(LEFT + PLOT_WIDTH - wide).max(LEFT);
        if let Some(row) = (0..PHASE_ROWS).find(|row| ends[*row] + 10.0 <= start) {
            ends[row] = start + wide;
            labels.push(Label { name, first: *first, x: start, row });
        }
    }
    labels
}

fn bands(canvas: &mut Canvas, scale: &Scale, timeline: &Timeline, labels: &[Label]) {
    let points = timeline.points.len();
    for (index, (name, first)) in timeline.phases.iter().enumerate() {
        let end = timeline.phases.get(index + 1).map_or(points, |(_, next)| *next);
        let (from, to) = (scale.x(*first), scale.x(end));
        let class = if index % 2 == 0 { "band" } else { "gap" };
        canvas.titled_rect((from, scale.top), ((to - from).max(0.0), PLOT_HEIGHT), class, name);
    }
    let rows = labels.iter().map(|label| label.row).max().unwrap_or(0);
    for label in labels {
        let y = scale.top - 8.0 - 17.0 * float((rows - label.row) as u64);
        canvas.line((scale.x(label.first), y + 3.0), (scale.x(label.first), scale.top), "tick");
        canvas.text(label.x, y, "start", "ink small", label.name);
    }
}

fn axes(canvas: &mut Canvas, scale: &Scale, points: usize) {
    let (step, unit, name) = tick(scale.max);
    let mut value = 0.0;
    while value * unit <= scale.max {
        let y = scale.bottom() - PLOT_HEIGHT * value * unit / scale.max;
        canvas.line((LEFT, y), (LEFT + PLOT_WIDTH, y), "grid");
        canvas.text(LEFT - 8.0, y + 4.0, "end", "dim", &format!("{value} {name}"));
        value += step;
    }
    for part in 0..=4 {
        let point = points * part / 4;
        let anchor = ["start", "middle", "middle", "middle", "end"][part];
        canvas.text(scale.x(point), scale.bottom() + 18.0, anchor, "dim", &point.to_string());
    }
    let middle = LEFT + PLOT_WIDTH / 2.0;
    canvas.text(middle, scale.bottom() + 36.0, "middle", "dim", "allocations and releases, in order");
}

/// Distance of the ticks in a unit, the unit's bytes and its name, for an axis up to `max` bytes.
fn tick(max: f64) -> (f64, f64, &'static str) {
    let units = [(1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1024.0, "KiB")];
    let (unit, name) = units.into_iter().find(|(unit, _)| max >= *unit).unwrap_or((1.0, "B"));
    let rough = (max / unit / 7.0).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|nice| nice * power).find(|step| *step >= rough);
    (step.unwrap_or(rough), unit, name)
}

/// From the top of the stack down, each area reaches to the bottom and is covered by the ones below it.
fn areas(canvas: &mut Canvas, scale: &Scale, timeline: &Timeline, columns: &[Column]) {
    for category in (0..timeline.categories.len()).rev() {
        let up_to = |column: &Column| {
            let bytes = &timeline.points[column.highest].bytes;
            scale.y(bytes.iter().take(category + 1).fold(0, |sum, bytes| sum.saturating_add(*bytes)))
        };
        let steps = columns.iter().map(|column| (scale.x(column.first), up_to(column)));
        canvas.area(category, steps, LEFT + PLOT_WIDTH, scale.bottom(), &timeline.categories[category]);
    }
}

/// The budget: a dashed line, or a remark when it is far above everything.
fn limit(canvas: &mut Canvas, scale: &Scale, budget: Option<u64>, drawn: Option<u64>, peak_at_right: bool) {
    let Some(bytes) = budget else { return };
    let (x, anchor) = if peak_at_right { (LEFT + 8.0, "start") } else { (LEFT + PLOT_WIDTH - 8.0, "end") };
    if drawn.is_none() {
        return canvas.boxed(x, scale.top + 16.0, anchor, &format!("budget {}, far above", amount(bytes)));
    }
    let y = scale.y(bytes);
    canvas.line((LEFT, y), (LEFT + PLOT_WIDTH, y), "budget");
    canvas.boxed(x, y - 7.0, anchor, &format!("budget {}", amount(bytes)));
}

/// The peak with its value, above the areas unless the line of the budget runs there.
fn mark(canvas: &mut Canvas, scale: &Scale, x: f64, bytes: u64, budget: Option<u64>) {
    let y = scale.y(bytes);
    let taken = |y: f64| (y - 30.0..y + 6.0).contains(&budget.map_or(f64::INFINITY, |budget| scale.y(budget)));
    let text_y = if taken(y - 12.0) || y - 32.0 < scale.top { y + 26.0 } else { y - 12.0 };
    let (text_x, anchor) = if x > LEFT + PLOT_WIDTH / 2.0 { (x + 5.0, "end") } else { (x - 5.0, "start") };
    canvas.line((x, y), (x, scale.bottom()), "pointer");
    canvas.dot(x, y);
    canvas.boxed(text_x, text_y, anchor, &format!("peak {}", amount(bytes)));
}

/// Categories in the order of the stack with their bytes at the peak; returns where it ends.
fn legend(canvas: &mut Canvas, scale: &Scale, timeline: &Timeline, peak: usize) -> f64 {
    let mut y = scale.top + 12.0;
    canvas.text(LEGEND, y, "start", "ink strong", "at the peak");
    let point = timeline.points.get(peak);
    for (category, name) in timeline.categories.iter().enumerate().rev() {
        y += 24.0;
        let value = amount(point.and_then(|point| point.bytes.get(category)).copied().unwrap_or(0));
        canvas.swatch(category, LEGEND, y - 11.0);
        let room = RIGHT - LEGEND - 30.0 - width(&value, 13.0) - 8.0;
        canvas.text(LEGEND + 28.0, y, "start", "ink small", &fitting(name, room, 13.0));
        canvas.text(RIGHT, y, "end", "ink small", &value);
    }
    let total = point.map_or(0, Point::total);
    y += 12.0;
    canvas.line((LEGEND, y), (RIGHT, y), "axis");
    let mut row = |name: &str, value: &str| {
        y += 21.0;
        canvas.text(LEGEND, y, "start", "ink small", name);
        canvas.text(RIGHT, y, "end", "ink strong", value);
    };
    row("total", &amount(total));
    if let Some(budget) = timeline.budget {
        row("budget", &amount(budget));
        let name = if budget >= total { "free" } else { "over the budget" };
        row(name, &amount(budget.abs_diff(total)));
    }
    y
}

/// The operations around the peak below the plot; returns where the table ends.
fn operations(canvas: &mut Canvas, top: f64, ops: &[(String, String, i64)]) -> f64 {
    if ops.is_empty() {
        return top - 20.0;
    }
    canvas.text(LEFT, top, "start", "ink strong", "operations around the peak");
    let mut y = top + 22.0;
    for (x, anchor, name) in [(LEFT + 96.0, "end", "change"), (LEFT + 116.0, "start", "operation")] {
        canvas.text(x, y, anchor, "dim", name);
    }
    canvas.text(LEFT + 420.0, y, "start", "dim", "module");
    for (op, scope, change) in ops.iter().take(OPS) {
        y += 19.0;
        let sign = if *change < 0 { '\u{2212}' } else { '+' };
        canvas.text(LEFT + 96.0, y, "end", "ink small", &format!("{sign}{}", amount(change.unsigned_abs())));
        canvas.text(LEFT + 116.0, y, "start", "ink small", &fitting(op, 290.0, 13.0));
        canvas.text(LEFT + 420.0, y, "start", "ink small", &tail(scope, RIGHT - LEFT - 420.0, 13.0));
    }
    if ops.len() > OPS {
        y += 19.0;
        canvas.text(LEFT + 116.0, y, "start", "dim", &format!("and {} more", ops.len() - OPS));
    }
    y
}

#[cfg(test)]
#[path = "timeline_tests.rs"]
mod tests;
