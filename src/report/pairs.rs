//! Report of a data root of generated pairs: how many were accepted, which tests rejected the others, and pictures.

use super::Page;
use super::picture::Picture;
use crate::Result;
use crate::augment::export::{Export, Record};
use crate::augment::filter::Thresholds;
use crate::augment::pipeline_config::RANDOM_DIGEST;
use crate::augment::settings::word;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::split::spread;
use askama::Template;
use std::collections::{BTreeMap, BTreeSet};

/// Most accepted pairs that are shown, and most rejected ones.
const SHOWN: usize = 12;

const SIGMA: &str = "standard deviations from real images, at most filter.sigma";
/// The tests of the filter, in the order of their use: name, what it measures, what a pair needs to pass.
const TESTS: [[&str; 3]; 10] = [
    ["spread", "Standard deviation of the brightness, 0 to 1. A blank image has 0.", "at least filter.spread_min"],
    [
        "clipped_more",
        "Part of the image that is black or white, beyond that of the source.",
        "at most filter.clipped_max",
    ],
    ["median", "Median brightness inside the label.", SIGMA],
    ["repainted", "Part of the image that was painted anew.", "at least 0.01"],
    ["seam_jump", "Jump of the brightness at the border of the painted region.", SIGMA],
    ["seam_step", "Change of the brightness from pixel to pixel there.", SIGMA],
    ["dice", "Dice of the label and of the mask that a filter model finds, 0 to 1.", "at least filter.dice_min"],
    [
        "outside",
        "Part of the image that a filter model marks outside of the label, such as a second lesion.",
        "at most filter.outside_max",
    ],
    [
        "knn_distance",
        "Distance of the image's features to the nearest real images.",
        "at most this quantile between real images: filter.knn_quantile",
    ],
    [
        "cosine",
        "Largest similarity of its features to a training image, -1 to 1. A copy has 1.",
        "at most this quantile between real images: filter.cosine_quantile",
    ],
];

/// Writes `report.html` into the folder of the pairs. A picture whose file cannot be read is left out, and the page
/// says so.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub fn write(export: &Export, limits: &Thresholds) -> Result<()> {
    super::write(&export.root, &PairsPage::new(export, limits))
}

#[derive(Template)]
#[template(path = "pairs.html")]
struct PairsPage<'a> {
    page: Page,
    is_noise: bool,
    accepted: usize,
    rejected: usize,
    /// Pairs and accepted pairs of each class.
    classes: BTreeMap<&'a str, (usize, usize)>,
    tests: Vec<TestRow<'a>>,
    groups: Vec<Group<'a>>,
}

struct TestRow<'a> {
    name: &'a str,
    measures: &'a str,
    needs: String,
    failed: usize,
}

struct Group<'a> {
    title: &'static str,
    note: String,
    pairs: Vec<PairView<'a>>,
}

struct PairView<'a> {
    record: &'a Record,
    /// The source and the generated image.
    pictures: [Picture; 2],
}

impl<'a> PairsPage<'a> {
    fn new(export: &'a Export, limits: &Thresholds) -> Self {
        let records = &export.journal.records;
        let group = |title, is_accepted: bool| {
            let all: Vec<usize> = (0..records.len()).filter(|&i| records[i].accepted == is_accepted).collect();
            let count = all.len();
            let pairs: Vec<PairView> =
                spread(all, SHOWN).into_iter().map(|i| PairView::new(export, &records[i])).collect();
            let note = match count {
                count if count > pairs.len() => format!("{} of {count}, spread over all of them.", pairs.len()),
                _ => String::new(),
            };
            Group { title, note, pairs }
        };
        let accepted = records.iter().filter(|record| record.accepted).count();
        Self {
            page: Page::new("Generated pairs", &made_by(records)),
            is_noise: records.iter().any(|record| record.model_sha256 == RANDOM_DIGEST),
            accepted,
            rejected: records.len() - accepted,
            classes: classes(records),
            tests: tests(records, limits),
            groups: [group("Accepted pairs", true), group("Rejected pairs", false)]
                .into_iter()
                .filter(|group| !group.pairs.is_empty())
                .collect(),
        }
    }
}

/// Modes and generators of the pairs.
fn made_by(records: &[Record]) -> String {
    let ways: BTreeSet<String> =
        records.iter().map(|record| format!("{} by {}", word(record.mode), record.model)).collect();
    Vec::from_iter(ways).join(", ")
}

fn classes(records: &[Record]) -> BTreeMap<&str, (usize, usize)> {
    let mut counts = BTreeMap::new();
    for record in records {
        let (pairs, accepted) = counts.entry(record.class.as_str()).or_default();
        *pairs += 1;
        *accepted += usize::from(record.accepted);
    }
    counts
}

/// The tests that gave a score or rejected a pair, also those of other versions, without their words.
fn tests<'a>(records: &'a [Record], limits: &Thresholds) -> Vec<TestRow<'a>> {
    let limits = serde_json::to_value(limits).unwrap_or_default();
    let failed = |record: &Record, name: &str| record.reason.split("; ").any(|r| r.split(' ').next() == Some(name));
    let row = |[name, measures, needs]: [&'a str; 3]| TestRow {
        name,
        measures,
        needs: match needs.split_once(" filter.") {
            Some((words, key)) => format!("{words} {} (filter.{key})", limits[key]),
            None => needs.to_owned(),
        },
        failed: records.iter().filter(|record| failed(record, name)).count(),
    };
    let used: BTreeSet<&str> = records.iter().flat_map(|record| record.scores.keys().map(String::as_str)).collect();
    let others = used.iter().filter(|name| TESTS.iter().all(|test| test[0] != **name)).map(|name| [*name, "", ""]);
    TESTS.into_iter().filter(|test| used.contains(test[0])).chain(others).map(row).collect()
}

impl<'a> PairView<'a> {
    fn new(export: &Export, record: &'a Record) -> Self {
        let (image, mask) = export.paths(record);
        let label = decode::mask(&mask).map(|mask| foreground(&mask));
        let pictures = [("Source image", &record.source_image), ("Generated image", &image)];
        Self { record, pictures: pictures.map(|(shows, image)| Picture::of(shows, image, label.as_ref())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::export::{MaskSource, record};
    use crate::augment::filter::pixels::REPAINTED_MIN;
    use crate::report::REPORT_FILE;
    use image::{GrayImage, Luma, Rgb, RgbImage};

    #[test]
    fn a_page_shows_the_pairs_their_scores_and_why_some_were_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source.png");
        RgbImage::from_pixel(900, 600, Rgb([90, 60, 40])).save(&source).unwrap();
        let mask = GrayImage::from_fn(900, 600, |x, y| Luma([if x.abs_diff(400) + y < 300 { 255 } else { 0 }]));
        let mut export = Export::open(&folder.path().join("pairs")).unwrap();
        for index in 0..30 {
            let accepted = index % 2 == 0;
            let source_image = if index == 28 { "gone.png".into() } else { source.clone() };
            let made = Record { source_image, prompt: "a <b>".into(), ..record(index, "polyp_endoscopy", accepted) };
            export.write(&RgbImage::new(900, 600), MaskSource::Made(&mask), made).unwrap();
        }
        let repainted = TESTS.iter().find(|test| test[0] == "repainted").expect("a test");
        assert_eq!(repainted[2], format!("at least {REPAINTED_MIN}"));
        write(&export, &Thresholds::default()).unwrap();
        let page = std::fs::read_to_string(export.root.join(REPORT_FILE)).unwrap();
        for part in [
            "12 of 15, spread over all of them.",
            "rejected: dice 0.1 is below 0.8",
            "at least 0.8 (filter.dice_min)</td><td class=\"number\">15</td>",
            "Prompt: a &#60;b&#62;",
            "<td class=\"number\">0.900</td>",
            "Answer: Here, &#34;there&#34;",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert_eq!(page.matches("Source image of pair").count(), 24, "12 accepted and 12 rejected ones");
        assert!(!page.contains("random weights") && !page.contains("seam_jump") && !page.contains("<b>"));
        assert!(page.len() < 24 * 40_000, "{} bytes", page.len());
        // sources may be on another machine
        std::fs::remove_file(&source).unwrap();
        write(&export, &Thresholds::default()).unwrap();
        let page = std::fs::read_to_string(export.root.join(REPORT_FILE)).unwrap();
        assert!(page.contains("<p>Source image: ") && page.contains("Generated image of pair"));
    }
}
