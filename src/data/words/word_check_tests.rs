use super::*;
use crate::fixture::row;
use crate::patient::Spellings;
use ::image::Luma;

/// A mask of 90x90 whose foreground is a box of 10 pixels in a cell of the grid.
fn cell(column: u32, line: u32) -> GrayImage {
    let inside = |at: u32, cell: u32| (30 * cell + 15..30 * cell + 25).contains(&at);
    GrayImage::from_fn(90, 90, |x, y| Luma([if inside(x, column) && inside(y, line) { 255 } else { 0 }]))
}

/// Answer, cell of the column `position`, and column and line of the cell of the mask.
type Texts<'a> = (&'a str, Option<&'a str>, (u32, u32));

fn manifest(rows: Vec<Row>) -> Manifest {
    Manifest {
        root: PathBuf::new(),
        rows,
        modalities: Vec::new(),
        num_leaking: 0,
        skipped: Vec::new(),
        spellings: Spellings::default(),
    }
}

/// The report of rows, from line 2 on.
fn report_of(rows: &[Texts]) -> WordReport {
    let question = "Where is the lesion in this image?";
    let all: Vec<Row> = (rows.iter().zip(2..))
        .map(|((answer, position, _), line)| Row { line, ..row(question, answer, *position) })
        .collect();
    let manifest = manifest(all);
    let compared = |(index, (.., at)): (usize, &Texts)| compare(&manifest, &[index], &cell(at.0, at.1));
    report(&manifest, rows.iter().enumerate().map(compared).collect())
}

fn says(report: &WordReport) -> Vec<(u64, String)> {
    report.wrong.iter().map(|wrong| (wrong.line, wrong.reason.clone())).collect()
}

#[test]
fn a_swapped_position_is_named_with_its_line() {
    let upper = "The lesion is in the upper left part of the image.";
    let lower = "The lesion is in the lower right part of the image.";
    let mut rows = vec![(upper, Some("upper left"), (0, 0)), (lower, Some("lower right"), (2, 2))];
    rows.extend([("Segment it: it lies in the center of the image.", Some("center"), (1, 1)); 3]);
    assert_eq!(report_of(&rows), WordReport::default());
    rows[1].0 = upper;
    let expected = "the answer says `upper left`, the mask lies in `lower right`".to_owned();
    assert_eq!(says(&report_of(&rows)), [(3, expected)]);
    rows[1] = (lower, Some("upper left"), (2, 2));
    let expected = "the column `position` says `upper left`, the mask lies in `lower right`".to_owned();
    assert_eq!(says(&report_of(&rows)), [(3, expected)]);
    // also a neighbouring cell, as all other texts follow the rule
    rows[1] = (lower, Some("lower center"), (2, 2));
    assert_eq!(says(&report_of(&rows)).len(), 1);
    let texts = report_of(&rows).texts();
    assert!(
        texts[0].starts_with("texts that name another location than their mask: 1: ") && texts[0].contains(":3: "),
        "{texts:?}"
    );
}

#[test]
fn words_about_the_patient_and_other_wordings_are_not_reported() {
    let rows = [
        ("There is an opacity in the left lung.", None, (2, 1)),
        ("A mass of the right upper lobe.", None, (0, 2)),
        ("It is on the patient's left side.", None, (2, 2)),
        ("It lies on the right side of the image.", None, (2, 0)),
        ("The nodule is at the top of the image, on the left.", None, (0, 0)),
        ("A nevus.", Some("left lung"), (2, 1)),
        ("A nevus, 30 % of the patients have one; 4 mm.", Some(""), (2, 1)),
        ("It covers about 1% of the image.", None, (2, 1)),
        ("It is close to the middle of the image.", None, (0, 0)),
    ];
    assert_eq!(report_of(&rows), WordReport::default());
}

#[test]
fn free_texts_are_reported_only_if_their_mask_contradicts_them() {
    // most do not follow the rule of the grid; only the last one is on the wrong side
    let near = ("It lies in the center left part of the image.", None, (0, 0));
    let rows = [near, near, near, near, ("It lies in the center left part of the image.", None, (2, 0))];
    let found = report_of(&rows);
    assert_eq!(says(&found).into_iter().map(|(line, _)| line).collect::<Vec<_>>(), [6], "{found:?}");
}

#[test]
fn sides_of_the_patient_are_one_sentence() {
    let left = ("It lies in the center left part of the image.", None, (2, 1));
    let right = ("It lies in the center right part of the image.", None, (0, 1));
    let found = report_of(&[left, right, left, right, left]);
    assert_eq!((found.wrong.len(), found.mirrored.len(), found.texts().len()), (0, 1, 1), "{found:?}");
}

#[test]
fn areas_counts_and_targets_are_compared() {
    for (answer, expected) in [
        ("It covers about 14% of the image.", "the answer says `14% of the image`, the mask covers 1.2%"),
        ("It covers less than 1% of the image.", ""),
        ("It covers about 2% of the image.", ""),
        (
            "It covers more than 20 % of this scan.",
            "the answer says `more than 20 % of this scan`, the mask covers 1.2%",
        ),
        ("It consists of 3 separate areas.", "the answer says `3 separate areas`, the mask has 1"),
        ("It consists of 1 separate areas.", ""),
    ] {
        let found = report_of(&[(answer, None, (1, 1))]);
        let reasons: Vec<String> = found.wrong.iter().map(|wrong| wrong.reason.clone()).collect();
        assert_eq!(reasons.join("; "), expected, "{answer}");
    }
    let class = |class: &str, target: &str, answer: &str| Row {
        modality: class.to_owned(),
        ..row(&format!("Where is the {target} in this image?"), answer, None)
    };
    let mut rows: Vec<Row> = (0..6).map(|_| class("skin", "skin lesion", "A nevus.")).collect();
    rows.extend((0..6).map(|_| class("endoscopy", "polyp", "The polyp is in the center of the image.")));
    rows.push(class("skin", "skin lesion", "The polyp is in the center of the image."));
    let manifest = manifest(rows);
    let found = report(&manifest, Vec::new());
    assert_eq!(found.wrong.len(), 1, "{found:?}");
    assert_eq!(found.wrong[0].reason, "the answer is about `polyp`, which the question does not ask about");
}
