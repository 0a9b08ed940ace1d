use ::image::Luma;
use ::image::imageops::{flip_horizontal, rotate90, rotate180};

use super::*;
use crate::decode;
use crate::fixture::{row, shared};
use crate::manifest::{Manifest, Presence, Target};

/// 90x90 with blocks of `side` pixels at these corners.
fn blocks(side: u32, corners: &[(u32, u32)]) -> GrayImage {
    let inside =
        |x: u32, y: u32| corners.iter().any(|(u, v)| (*u..u + side).contains(&x) && (*v..v + side).contains(&y));
    GrayImage::from_fn(90, 90, |x, y| Luma([if inside(x, y) { 255 } else { 0 }]))
}

fn block(x: u32, y: u32) -> GrayImage {
    blocks(10, &[(x, y)])
}

fn relabelled(answer: &str, label: &str, old: &GrayImage, new: &GrayImage) -> RelabelResult<(String, String)> {
    relabel(&row("Where is it?", answer, Some(label)), old, new, None).map(|row| (row.answer, row.position.unwrap()))
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn locations_are_updated_in_the_vocabulary_of_the_row() {
    let (corner, middle, right, low) = (block(5, 5), block(40, 40), block(75, 40), block(40, 75));
    let cases = [
        (
            "It is in the upper left part of the image.",
            "upper left",
            &corner,
            &middle,
            "It is in the center of the image.",
            "center",
        ),
        (
            "It is in the center of the image: there.",
            "center",
            &middle,
            &corner,
            "It is in the upper left part of the image: there.",
            "upper left",
        ),
        (
            "Upper left part of this CT scan.",
            "Upper left",
            &corner,
            &right,
            "Center right part of this CT scan.",
            "Center right",
        ),
        (
            "In the upper-left corner of the scan",
            "upper left",
            &corner,
            &low,
            "In the lower center part of the scan",
            "lower center",
        ),
        (
            "In the upper left corner of the scan",
            "upper left",
            &corner,
            &block(75, 75),
            "In the lower right corner of the scan",
            "lower right",
        ),
        (
            "In the top left part of the image.",
            "top left",
            &corner,
            &block(60, 40),
            "In the top right part of the image.",
            "top right",
        ),
        (
            "In the top left of the image.",
            "top left",
            &corner,
            &block(10, 60),
            "In the bottom left of the image.",
            "bottom left",
        ),
        (
            "There are nodules. It is in the upper left part of the image.",
            "upper left",
            &corner,
            &corner,
            "There are nodules. It is in the upper left part of the image.",
            "upper left",
        ),
    ];
    for (answer, label, old, new, expected, expected_label) in cases {
        // the box of a block at (60, 40) does not contain the centre: its quadrant is the upper right
        assert_eq!(relabelled(answer, label, old, new), Ok((expected.into(), expected_label.into())), "{answer}");
    }
}

#[test]
fn without_a_label_the_location_is_read_from_the_answer() {
    let plain = row("Where?", "It lies in the lower center part of the image.", None);
    let moved = relabel(&plain, &block(40, 75), &block(5, 75), None).unwrap();
    assert_eq!((moved.answer.as_str(), moved.position), ("It lies in the lower left part of the image.", None));
    let sentence = row("Where?", "It is there.", Some("The tumour is in the top left part of the image"));
    let moved = relabel(&sentence, &block(5, 5), &block(75, 5), None).unwrap();
    assert_eq!(moved.position.as_deref(), Some("The tumour is in the top right part of the image"));
}

#[test]
fn the_location_rule_is_inferred_from_the_old_mask() {
    // (35, 20): upper center of the grid, top left quadrant
    let (old, new) = (block(35, 15), block(62, 45));
    let label = |label: &str| relabelled("There it is.", label, &old, &new).map(|relabelled| relabelled.1);
    assert_eq!(label("upper center"), Ok("center right".into()));
    assert_eq!(label("top left"), Ok("bottom right".into()));
    assert_eq!(label("upper left"), Ok("lower right".into()), "quadrants in other words");
    assert_eq!(label("lower left").unwrap_err(), RelabelError::NoRule(pure_label("lower left").unwrap()));
    // the middle is the same in both rules, its neighbour is not
    let relabelled = |zones| {
        let row = row("Where?", "In the center of the image.", Some("center"));
        relabel(&row, &block(40, 40), &block(50, 29), zones).map(|row| row.position.unwrap())
    };
    assert_eq!(relabelled(None), Err(RelabelError::TwoRules(pure_label("center").unwrap())));
    assert_eq!(relabelled(Some(Zones::Grid)), Ok("center".into()));
    assert_eq!(relabelled(Some(Zones::Quadrants)), Ok("top right".into()));
}

#[test]
fn closeness_percentages_and_counts_are_updated() {
    let (near, far) = (block(30, 30), block(5, 5));
    let text = |end: &str| format!("It is in the top left part of the image. It is {end} the middle of the image.");
    let relabelled_location = |answer: &str, old: &GrayImage, new: &GrayImage| {
        relabelled(answer, "top left", old, new).map(|relabelled| relabelled.0)
    };
    assert_eq!(relabelled_location(&text("close to"), &near, &far), Ok(text("far from")));
    assert_eq!(relabelled_location(&text("far from"), &far, &near), Ok(text("close to")));
    assert!(relabelled_location(&text("far from"), &near, &far).is_err(), "not correct for the old mask");
    let middle = relabelled_location(&text("close to"), &near, &blocks(14, &[(38, 38)]));
    assert_eq!(middle, Ok("It is in the center of the image.".into()));
    let longer =
        text("close to").replace("middle of the image", "middle of the image and covers about 1% of the image");
    assert!(
        relabelled_location(&longer, &near, &blocks(14, &[(38, 38)])).is_err(),
        "the sentence contains more than the closeness"
    );

    let share = "It lies in the upper left part of the image and covers about 1% of the image.";
    let large = blocks(25, &[(1, 1)]);
    let relabelled_share = |answer: &str, new: &GrayImage| {
        relabelled(answer, "upper left", &block(5, 5), new).map(|relabelled| relabelled.0)
    };
    assert_eq!(relabelled_share(share, &large), Ok(share.replace("about 1%", "about 8%")));
    assert_eq!(relabelled_share(share, &blocks(5, &[(1, 1)])), Ok(share.replace("about 1%", "less than 1%")));
    assert!(relabelled_share(&share.replace("1%", "7%"), &large).is_err());

    let areas = "It lies in the upper left part of the image. It consists of 2 separate areas, \
                 and this is the position of their overall center.";
    let (two, three) = (blocks(5, &[(0, 0), (20, 20)]), blocks(5, &[(0, 0), (20, 20), (0, 20)]));
    let relabelled_areas =
        |old: &GrayImage, new: &GrayImage| relabelled(areas, "upper left", old, new).map(|relabelled| relabelled.0);
    assert_eq!(relabelled_areas(&two, &three), Ok(areas.replace("2 sep", "3 sep")));
    let fewer = relabelled(&areas.replace("2 sep", "3 sep"), "upper left", &three, &two);
    assert_eq!(fewer.map(|relabelled| relabelled.0), Ok(areas.to_owned()));
    assert!(relabelled_areas(&two, &block(5, 5)).is_err() && relabelled_areas(&three, &two).is_err());
}

#[test]
fn sides_of_organs_stay_while_they_are_correct() {
    let lung = |new: &GrayImage| {
        let answer = "The left lung lies in the center right part of the image. \
                      The patient's left lung is shown on the right side of the image.";
        let row = row("Where is the left lung?", answer, Some("center right"));
        relabel(&row, &block(70, 40), new, None)
    };
    assert_eq!(lung(&block(60, 25)).unwrap().position.as_deref(), Some("center right"));
    let lower = lung(&block(70, 70)).unwrap();
    assert!(
        lower.answer.starts_with("The left lung lies in the lower right part of the image. The patient's left lung")
    );
    assert_eq!(lung(&block(10, 40)), Err(RelabelError::Words("left".into())));
    let shown = |new: &GrayImage| {
        let answer = "It lies in the center right part of the image. It is shown on the right side of the image.";
        relabelled(answer, "center right", &block(70, 40), new)
    };
    assert_eq!(shown(&block(60, 5)).unwrap().1, "upper right");
    assert_eq!(shown(&block(10, 40)), Err(RelabelError::Words("right".into())));
}

#[test]
fn uncertain_texts_are_not_relabelled() {
    let (old, new) = (block(5, 5), block(75, 75));
    for answer in [
        "the leftmost one in the upper left part of the image",
        "the left lesion in the upper left part of the image",
        "above the line, in the upper left part of the image",
        "in the upper left part and the lower right part of the image",
        "in an upper left part of the image",
        "in the upper left part of the image, 12 mm wide",
        "in the upper left part of the image, in the center",
        "in the upper left part of the image, 14% of cases",
        "in the upper left part of the image [5, 5, 15, 15]",
        "in the lower center part of the image",
    ] {
        assert!(matches!(relabelled(answer, "upper left", &old, &new), Err(RelabelError::Words(_))), "{answer}");
    }
    assert_eq!(relabelled("x", "upper left", &old, &GrayImage::new(9, 9)), Err(RelabelError::EmptyMask));
    let two = "one in the upper left part of the image and one in the lower right part of the image";
    assert_eq!(relabel(&row("q", two, None), &old, &new, None), Err(RelabelError::NoLocation));
    assert_eq!(relabel(&row("q", "a nevus", None), &old, &new, None), Err(RelabelError::NoLocation));
}

#[test]
fn rows_without_a_target_stay_if_no_word_depends_on_the_geometry() {
    let (old, new) = (GrayImage::new(9, 9), GrayImage::new(9, 9));
    for presence in [Presence::Absent, Presence::Unknown] {
        let targets = || Target::only("m.png".into(), presence);
        let row = |answer: &str, label| Row { targets: targets(), ..row("Is there a nevus?", answer, label) };
        let of = |answer: &str, label| relabel(&row(answer, label), &old, &new, None);
        let text = "There is no nevus in this image.";
        assert_eq!(of(text, None).unwrap().answer, text);
        for answer in ["None in the left part of the image.", "It is above the other.", "It covers 5% of the image."] {
            assert_eq!(of(answer, None), Err(RelabelError::Words(answer.to_owned())), "{answer}");
        }
        assert!(of(text, Some("upper left")).is_err());
    }
}

/// The grid label, which the real data set uses.
fn grid_label(mask: &GrayImage) -> String {
    position::grid(&position::whole(mask).unwrap(), mask.dimensions()).label(Zones::Grid)
}

/// The mask moved by an eighth of the width to the right and down; what leaves the image is cut off.
fn moved(mask: &GrayImage) -> GrayImage {
    let (dx, dy) = (mask.width() / 8, mask.height() / 8);
    GrayImage::from_fn(mask.width(), mask.height(), |x, y| match (x.checked_sub(dx), y.checked_sub(dy)) {
        (Some(x), Some(y)) => *mask.get_pixel(x, y),
        _ => Luma([0]),
    })
}

type Move = fn(&GrayImage) -> GrayImage;

#[test]
#[ignore = "needs shared data"]
fn shared_data_rows_of_the_real_data_set_are_relabelled_for_transformed_masks() {
    let folder = shared("data/real");
    let manifest = Manifest::open(&folder, None).unwrap();
    let moves: [(&str, Move); 5] = [
        ("same", Clone::clone),
        ("mirrored", flip_horizontal),
        ("quarter", rotate90),
        ("half", rotate180),
        ("moved", moved),
    ];
    let (mut done, mut alone) = ([0; 5], [0; 5]);
    // only every STEP-th row, because this is slow in debug builds
    for row in manifest.rows.iter().step_by(STEP) {
        let old = decode::mask(&row.target().mask_path).unwrap();
        assert_eq!(row.position.as_deref(), Some(grid_label(&old).as_str()));
        for (index, (name, change)) in moves.iter().enumerate() {
            let new = change(&old);
            alone[index] += usize::from(relabel(row, &old, &new, None).is_ok());
            let Ok(relabelled) = relabel(row, &old, &new, Some(Zones::Grid)) else { continue };
            done[index] += 1;
            let label = grid_label(&new);
            assert_eq!(relabelled.position.as_deref(), Some(label.as_str()), "{name}");
            let place = if label == "center" { "center".to_owned() } else { format!("{label} part") };
            let named = format!("he {place} of the image");
            assert!(relabelled.answer.contains(&named), "{name}: {}", relabelled.answer);
            assert!(*name != "same" || relabelled == *row, "{}", relabelled.answer);
        }
    }
    // the other rows name a lung or lobe that would be on the other side, or a centre that both rules give
    assert_eq!((done, alone), KNOWN);
}

const STEP: usize = 12;
/// Number of relabelled rows with a known rule, and with an inferred rule.
const KNOWN: ([usize; 5], [usize; 5]) = ([30, 26, 27, 25, 29], [30, 26, 27, 25, 27]);
