//! Tests of `position.rs`, the last one on the real data set.

use image::{GrayImage, Luma};

use super::*;
use crate::fixture::shared;
use prsmed_base::location::first_location;

fn mask(width: u32, height: u32, boxes: &[(u32, u32, u32, u32)]) -> GrayImage {
    GrayImage::from_fn(width, height, |x, y| {
        Luma([u8::from(boxes.iter().any(|&(l, t, r, b)| (l..=r).contains(&x) && (t..=b).contains(&y)))])
    })
}

fn quadrant_of(width: u32, height: u32, bounds: (u32, u32, u32, u32)) -> (String, bool) {
    let mask = mask(width, height, &[bounds]);
    let zone = quadrant(&whole(&mask).unwrap(), mask.dimensions());
    (zone.position.label(Zones::Quadrants), zone.near)
}

#[test]
fn quadrants_depend_on_the_box() {
    assert_eq!(quadrant_of(100, 80, (5, 5, 10, 10)), ("top left".into(), false));
    assert_eq!(quadrant_of(100, 80, (80, 5, 90, 10)), ("top right".into(), false));
    assert_eq!(quadrant_of(100, 80, (5, 60, 10, 70)), ("bottom left".into(), false));
    assert_eq!(quadrant_of(100, 80, (40, 42, 44, 44)), ("bottom left".into(), true));
    assert_eq!(quadrant_of(100, 80, (52, 41, 60, 50)), ("bottom right".into(), true));
    // The box contains (50, 40).
    assert_eq!(quadrant_of(100, 80, (0, 0, 50, 40)), ("center".into(), true));
    // A box centre on the middle column counts as right, on the middle row as bottom.
    assert_eq!(quadrant_of(100, 80, (49, 0, 51, 4)), ("top right".into(), false));
}

#[test]
fn near_means_within_a_fifth_of_the_width() {
    assert!(!quadrant_of(100, 100, (30, 49, 30, 49)).1);
    assert!(quadrant_of(100, 100, (31, 49, 31, 49)).1);
}

#[test]
fn components_are_8_connected_and_in_reading_order() {
    let mask = mask(10, 10, &[(6, 1, 7, 2), (8, 3, 9, 3), (0, 2, 1, 8)]);
    let found = components(&mask);
    assert_eq!(found.iter().map(|r| r.area_px).collect::<Vec<_>>(), [6, 14]);
    assert_eq!(found[1].bounds, PixelBox { left: 0, top: 2, right: 1, bottom: 8 });
    assert_eq!(found[1].centroid_px, (0.5, 5.0));
    let labels: Vec<String> = found.iter().map(|r| component_zone(r, mask.dimensions()).label()).collect();
    assert_eq!(labels, ["top right", "bottom left"]);
    assert!(components(&GrayImage::new(4, 4)).is_empty());
}

#[test]
fn a_component_that_covers_the_centre_gets_the_suffix() {
    let mask = mask(100, 100, &[(10, 10, 55, 60)]);
    let label = component_zone(&components(&mask)[0], mask.dimensions()).label();
    assert_eq!(label, "top left center");
    assert_eq!(first_location(&label).unwrap().label(Zones::Quadrants), "top left");
}

#[test]
fn a_component_on_the_middle_lines_counts_as_bottom_right() {
    let mask = mask(100, 80, &[(49, 39, 51, 41)]);
    let component = &components(&mask)[0];
    assert_eq!(component.centroid_px, (50.0, 40.0));
    assert_eq!(component_zone(component, mask.dimensions()).label(), "bottom right center");
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_labels_match_masks_and_answers() {
    let root = shared("data/real");
    let (mut rows, mut wrong_masks, mut wrong_answers) = (0, Vec::new(), Vec::new());
    for file in std::fs::read_dir(root.join("annotations")).unwrap() {
        let mut csv = csv::Reader::from_path(file.unwrap().path()).unwrap();
        for row in csv.records() {
            let row = row.unwrap();
            let mask = image::open(root.join(&row[0])).unwrap().to_luma8();
            let zone = grid(&whole(&mask).unwrap(), mask.dimensions()).label(Zones::Grid);
            rows += 1;
            if zone != row[3] {
                wrong_masks.push(format!("{}: {zone}, said {}", &row[0], &row[3]));
            }
            if first_location(&row[2]).map(|p| p.to_string()).as_deref() != Some(&row[3]) {
                wrong_answers.push(format!("{}: {}", &row[0], &row[2]));
            }
        }
    }
    assert!(rows >= 180, "only {rows} rows were read");
    assert!(wrong_masks.len() * 100 <= rows, "{} of {rows}:\n{}", wrong_masks.len(), wrong_masks.join("\n"));
    assert!(wrong_answers.is_empty(), "{} of {rows}:\n{}", wrong_answers.len(), wrong_answers.join("\n"));
}
