//! The few shapes of a picture, as SVG text. Looks are attributes; their classes let a page restyle them.

use std::fmt::Write as _;

pub(super) use crate::data::plot::escaped;

/// Okabe and Ito's colours, a grey and a violet, so ordered that neighbours differ in brightness too.
const COLOURS: [&str; 9] =
    ["#0072b2", "#f0e442", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c", "#e69f00", "#6a3d9a"];
/// Textures over the colours: none, falling lines, dots, level lines.
const TEXTURES: [&str; 4] = [
    "",
    "<path d=\"M-2 2L2 -2M0 8L8 0M6 10L10 6\" stroke=\"#000\" stroke-opacity=\".35\"/>",
    "<circle cx=\"4\" cy=\"4\" r=\"1.2\" fill-opacity=\".45\"/>",
    "<path d=\"M0 4H8\" stroke=\"#000\" stroke-opacity=\".3\"/>",
];

/// How much wider bold text is.
pub(super) const BOLD: f64 = 1.17;

/// Attributes of a class outside a page.
fn look(class: &str) -> &'static str {
    match class {
        "ink title" => "fill=\"#111\" font-size=\"19\" font-weight=\"bold\"",
        "ink strong" => "fill=\"#111\" font-size=\"14\" font-weight=\"bold\"",
        "ink small" => "fill=\"#111\" font-size=\"13\"",
        "dim" => "fill=\"#555\" font-size=\"12\"",
        "band" => "fill=\"#000\" fill-opacity=\".06\"",
        "gap" => "fill=\"#000\" fill-opacity=\".015\"",
        "grid" => "stroke=\"#000\" stroke-opacity=\".13\"",
        "axis" => "stroke=\"#000\" stroke-opacity=\".4\"",
        "tick" => "stroke=\"#000\" stroke-opacity=\".3\"",
        "border" => "stroke=\"#000\" stroke-opacity=\".5\" stroke-dasharray=\"1 3\"",
        "pointer" => "stroke=\"#000\" stroke-opacity=\".6\"",
        "budget" => "stroke=\"#000\" stroke-width=\"2\" stroke-dasharray=\"9 5\"",
        _ => "fill=\"none\"",
    }
}

/// A picture in the making.
pub(super) struct Canvas {
    body: String,
    categories: usize,
}

impl Canvas {
    pub(super) fn new(categories: usize) -> Self {
        Self { body: String::new(), categories }
    }

    fn add(&mut self, element: std::fmt::Arguments) {
        self.body.write_fmt(element).expect("writing to a string");
        self.body.push('\n');
    }

    pub(super) fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let (look, text) = (look(class), escaped(text));
        self.add(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\" {look}>{text}</text>"
        ));
    }

    /// A text over a patch of the background, readable on any area.
    pub(super) fn boxed(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        let wide = width(text, BOLD * 14.0) + 10.0;
        let left = if anchor == "end" { x - wide + 5.0 } else { x - 5.0 };
        self.add(format_args!(
            "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{wide:.1}\" height=\"19\" rx=\"3\" class=\"patch\" fill=\"#fff\" \
             fill-opacity=\".88\"/>",
            y - 14.0
        ));
        self.text(x, y, anchor, "ink strong", text);
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let look = look(class);
        self.add(format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" class=\"{class}\" {look}/>",
            from.0, from.1, to.0, to.1
        ));
    }

    pub(super) fn titled_rect(&mut self, at: (f64, f64), size: (f64, f64), class: &str, title: &str) {
        let (look, title) = (look(class), escaped(title));
        self.add(format_args!(
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" class=\"{class}\" {look}>\
             <title>{title}</title></rect>",
            at.0, at.1, size.0, size.1
        ));
    }

    pub(super) fn dot(&mut self, x: f64, y: f64) {
        self.add(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"#fff\" stroke=\"#000\" stroke-width=\"2.5\"/>"
        ));
    }

    /// The area below `steps` (each holds until the next one's x, the last until `right`).
    pub(super) fn area(
        &mut self,
        category: usize,
        steps: impl Iterator<Item = (f64, f64)>,
        right: f64,
        bottom: f64,
        title: &str,
    ) {
        let mut path = String::new();
        let mut level = String::new();
        for (x, y) in steps {
            let next = format!("{y:.1}");
            if path.is_empty() {
                write!(path, "M{x:.1} {bottom:.1}V{next}").expect("writing to a string");
            } else if next != level {
                write!(path, "H{x:.1}V{next}").expect("writing to a string");
            }
            level = next;
        }
        let title = escaped(title);
        self.add(format_args!(
            "<path d=\"{path}H{right:.1}V{bottom:.1}Z\" fill=\"url(#c{category})\"><title>{title}</title></path>"
        ));
    }

    pub(super) fn swatch(&mut self, category: usize, x: f64, y: f64) {
        self.add(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"20\" height=\"14\" fill=\"url(#c{category})\" stroke=\"#000\" \
             stroke-opacity=\".4\"/>"
        ));
    }

    pub(super) fn finish(self, width: f64, height: f64, title: &str) -> String {
        let mut svg = String::with_capacity(self.body.len() + 4096);
        write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\" \
             role=\"img\">\n<title>{}</title>\n<defs>\n",
            escaped(title)
        )
        .expect("writing to a string");
        for category in 0..self.categories {
            let colour = COLOURS[category % COLOURS.len()];
            let texture = TEXTURES[(category % COLOURS.len() + category / COLOURS.len()) % TEXTURES.len()];
            writeln!(
                svg,
                "<pattern id=\"c{category}\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
                 <rect width=\"8\" height=\"8\" fill=\"{colour}\"/>{texture}</pattern>"
            )
            .expect("writing to a string");
        }
        svg + "</defs>\n<rect width=\"100%\" height=\"100%\" class=\"paper\" fill=\"#fff\"/>\n"
            + &self.body
            + "</svg>\n"
    }
}

/// Bytes in binary units: `1.50 GiB`.
pub(super) fn amount(bytes: u64) -> String {
    crate::units::Bytes(bytes).to_string()
}

#[expect(clippy::cast_precision_loss, reason = "a thousandth of a pixel does not show")]
pub(super) fn float(value: u64) -> f64 {
    value as f64
}

/// About how many pixels a sans-serif text takes.
pub(super) fn width(text: &str, size: f64) -> f64 {
    let em = |c: char| match c {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | '(' | ')' | ' ' => 0.32,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 0.9,
        'A'..='Z' | '_' | '+' | '<' | '>' | '=' | '&' => 0.7,
        _ if c.is_ascii() => 0.57,
        _ => 1.0,
    };
    text.chars().map(em).sum::<f64>() * size
}

/// The beginning of a text that fits into `room` pixels.
pub(super) fn fitting(text: &str, room: f64, size: f64) -> String {
    if width(text, size) <= room {
        return text.into();
    }
    let mut short: String = text.into();
    while !short.is_empty() && width(&short, size) + size > room {
        short.pop();
    }
    short + "\u{2026}"
}

/// The end of a text that fits into `room` pixels.
pub(super) fn tail(text: &str, room: f64, size: f64) -> String {
    if width(text, size) <= room {
        return text.into();
    }
    let mut rest = text;
    while !rest.is_empty() && width(rest, size) + size > room {
        rest = rest.strip_prefix(|_: char| true).unwrap_or_default();
    }
    format!("\u{2026}{rest}")
}
