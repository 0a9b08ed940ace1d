//! Tests of `check.rs` on data roots made for them.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::fixture::{Root, shared};
use crate::word_check::WordReport;
use prsmed_base::event::{Event, Silent};

#[test]
fn every_bad_row_is_reported_with_file_line_and_reason() {
    let root = Root::new();
    for name in ["good", "corrupt", "size", "empty"] {
        root.pair("ct", "train", name);
    }
    fs::write(root.file("ct/train_images/corrupt.png"), b"\x89PNG\r\n\x1a\nnothing").expect("written");
    root.mask("ct/train_masks/size.png", 11, 8, |_, _| 255);
    root.mask("ct/train_masks/empty.png", 12, 8, |_, _| 0);
    root.csv(
        "a.csv",
        "image_path,question,answer,split\n\
         ct/train_masks/good.png,q,a,train\n\
         ct/train_masks/corrupt.png,q,a,train\n\
         ct/train_masks/size.png,q,a,train\n\
         ct/train_masks/empty.png,q1,a,train\n\
         ct/train_masks/empty.png,q2,a,train\n\
         ct/train_masks/none.png,q,a,train\n\
         ct/train_masks/good.png,q,a,nothing\n\
         ct/train_masks/good.png,q2,a,test\n\
         ct/train_masks/good.png,,a,train\n\
         ct/train_masks/good.png,q,a,train\n",
    );
    let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
    let found: Vec<(u64, Problem)> = report.bad.iter().map(|bad| (bad.line, bad.problem)).collect();
    assert_eq!(
        found,
        [
            (3, Problem::UndecodableImage),
            (4, Problem::SizeMismatch),
            (5, Problem::EmptyMask),
            (6, Problem::EmptyMask),
            (7, Problem::MissingMask),
            (8, Problem::UnknownSplit),
            (10, Problem::EmptyCell),
            (11, Problem::Duplicate),
        ]
    );
    assert!(report.bad[0].reason.contains("corrupt.png: cannot be decoded: "), "{}", report.bad[0].reason);
    assert!(report.bad[1].reason.ends_with("size.png: the mask is 11x8 pixels but its image is 12x8"));
    assert!(report.bad[2].reason.ends_with("empty.png: the mask is empty"));
    assert_eq!(report.counts, [ModalityCounts { modality: "ct".into(), train: 1, val: 0, test: 1 }]);
    assert_eq!((report.rows, report.images, report.is_good()), (10, 4, false));
    let leak = &report.leaks[0];
    assert_eq!((leak.splits.as_slice(), leak.images.len()), ([Split::Train, Split::Test].as_slice(), 1));
    let json = serde_json::to_value(&report).expect("serializable");
    assert_eq!(json["bad"][0]["problem"], "undecodable_image");
    assert_eq!(json["counts"][0]["train"], 1);
}

#[test]
fn label_maps_narrow_images_and_missing_splits_are_reported() {
    let root = Root::new();
    for name in ["one", "map", "narrow"] {
        root.pair("ct", "train", name);
    }
    root.pair("mr", "train", "a");
    root.mask("ct/train_masks/map.png", 12, 8, |x, _| [0, 5, 20][x as usize / 4]);
    ::image::ImageBuffer::<::image::Luma<u16>, _>::from_fn(12, 8, |x, _| ::image::Luma([u16::from(x > 3) * 4095]))
        .save(root.file("ct/train_images/narrow.png"))
        .expect("written");
    root.csv(
        "a.csv",
        "image_path,question,answer,split\n\
         ct/train_masks/one.png,q,a,train\n\
         ct/train_masks/map.png,q,a,test\n\
         ct/train_masks/narrow.png,q,a,val\n\
         mr/train_masks/a.png,q,a,train\n",
    );
    let check =
        |labels: &[u16]| check(root.path(), None, Labels::new(labels).expect("labels"), &Silent).expect("readable");
    let report = check(&[]);
    assert_eq!((report.bad.len(), report.bad[0].line, report.bad[0].problem), (1, 3, Problem::SeveralLabels));
    let reason = &report.bad[0].reason;
    assert!(reason.contains("map.png: the mask has several labels: 5 (32 pixels), 20 (32 pixels); "), "{reason}");
    assert!(reason.contains("argument `labels=1,3`"), "{reason}");
    assert_eq!((report.depth.num_decoded, report.depth.narrow[0].max), (1, 4095));
    let uncovered: Vec<_> = report.uncovered.iter().map(|u| (u.split, u.classes.join(","))).collect();
    assert_eq!(uncovered, [(Split::Val, "mr".to_owned()), (Split::Test, "mr".to_owned())]);
    let report = check(&[5, 255]);
    assert_eq!(report.bad, []);
    let report = check(&[20]);
    assert_eq!(report.bad.iter().map(|bad| bad.line).collect::<Vec<_>>(), [2, 4, 5]);
    assert!(report.bad[0].reason.ends_with("one.png: the mask has no pixel of the labels 20; it has 255 (15 pixels)"));
}

#[test]
fn answers_that_place_an_absent_target_are_reported() {
    let root = Root::new();
    root.pair("ct", "train", "a");
    for name in ["b", "c"] {
        root.image(&format!("ct/train_images/{name}.png"), 12, 8);
    }
    root.csv(
        "a.csv",
        "image_path,question,answer,split,present\n\
         ct/train_masks/a.png,q,It is in the upper left part of the image.,train,1\n\
         ct/train_masks/b.png,q,It is in the upper left part of the image.,train,0\n\
         ct/train_masks/c.png,q,There is no lesion in this image.,train,0\n",
    );
    let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
    let texts = report.findings.texts();
    let [text] = &texts[..] else { panic!("{texts:?}") };
    assert!(text.starts_with("answers that name a location for a target that is not in the image: 1 ("), "{text}");
    assert!(text.ends_with("a.csv:3)") && report.is_good(), "{text}");
}

#[test]
fn images_in_several_splits_are_reported_in_the_order_of_their_paths() {
    let root = Root::new();
    let rows = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| {
        root.pair("ct", "train", name);
        format!("ct/train_masks/{name}.png,q,a,train\nct/train_masks/{name}.png,q2,a,test\n")
    });
    root.csv("a.csv", &format!("image_path,question,answer,split\n{}", rows.concat()));
    let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
    let images: Vec<&PathBuf> = report.leaks.iter().flat_map(|leak| &leak.images).collect();
    assert_eq!((images.len(), report.leaks.len()), (8, 8));
    assert!(images.is_sorted(), "{images:?}");
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_real_data_set_has_no_bad_rows() {
    struct Last(AtomicU64);
    impl Observer for Last {
        fn on(&self, event: &Event) {
            if let Event::Advanced { done } = event {
                assert_eq!(self.0.swap(*done, Ordering::Relaxed) + 1, *done, "progress advances by one");
            }
        }
    }
    let folder = shared("data/real");
    let observer = Last(AtomicU64::new(0));
    let report = check(&folder, None, Labels::NONE, &observer).expect("readable");
    assert_eq!(report.bad, []);
    // the texts were made from the masks
    assert_eq!(report.words, WordReport::default());
    assert_eq!((report.rows, report.images, report.counts.len()), (360, 180, 9));
    assert_eq!(observer.0.load(Ordering::Relaxed), 180);
    assert!(report.counts.iter().all(|count| count.train > 0 && count.test > 0));
}

/// A data root with rows about targets that are present, absent or unknown.
fn with_targets() -> Root {
    let root = Root::new();
    for name in ["a", "b", "c", "d", "e"] {
        root.pair("ct", "train", name);
    }
    root.mask("ct/train_masks/b.png", 12, 8, |_, _| 0);
    for name in ["c", "d"] {
        fs::remove_file(root.file(&format!("ct/train_masks/{name}.png"))).expect("removed");
    }
    root
}

#[test]
fn absent_and_unknown_targets_need_no_mask_but_no_foreground_either() {
    let root = with_targets();
    root.csv(
        "a.csv",
        "image_path,question,answer,split,position,present,patient,spacing_x_mm,spacing_y_mm\n\
         ct/train_masks/a.png,q,a,train,left,1,p1,0.5,0.75\n\
         ct/train_masks/b.png,q,a,train,,0,p1,,\n\
         ct/train_masks/c.png,q,a,train,,0,p2,,\n\
         ct/train_masks/d.png,q,a,test,,unknown,p1,,\n\
         ct/train_masks/e.png,q,a,train,,0,p2,,\n\
         ct/train_masks/e.png,q2,a,train,,unknown,p2,,\n\
         ct/train_masks/c.png,q2,a,train,,1,p2,,\n",
    );
    let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
    let found: Vec<(u64, Problem)> = report.bad.iter().map(|bad| (bad.line, bad.problem)).collect();
    assert_eq!(found, [(6, Problem::NotEmpty), (7, Problem::NotEmpty), (8, Problem::EmptyCell)]);
    assert!(
        report.bad[0]
            .reason
            .ends_with("has 15 pixels of foreground, but the row says that its target is not in the image")
    );
    assert!(report.bad[1].reason.ends_with("but the row says that its mask is unknown"), "{}", report.bad[1].reason);
    let [leak] = report.patient_leaks.as_slice() else { panic!("{:?}", report.patient_leaks) };
    assert_eq!((leak.patient.as_str(), leak.images, leak.is_extra), ("p1", 3, false));
    assert_eq!(leak.splits, [Split::Train, Split::Test]);
    assert_eq!(leak.examples, ["a", "d"].map(|name| root.path().join(format!("ct/train_images/{name}.png"))));
    let ct = &report.fingerprint[0];
    assert_eq!((ct.images, ct.patients, ct.present, ct.absent, ct.unknown), (4, Some(2), 1, 2, 1));
    let spacing = ct.spacing_mm.expect("the first row has one");
    assert_eq!((spacing.min, spacing.max), (0.5, 0.75));
    assert_eq!(ct.foreground_frac.expect("one mask").max, 15.0 / 96.0);
    assert_eq!(ct.labels, BTreeMap::from([(255, 1)]));
    let json = serde_json::to_value(&report).expect("serializable");
    assert_eq!((&json["patient_leaks"][0]["patient"], &json["fingerprint"][0]["absent"]), (&"p1".into(), &2.into()));
}

#[test]
fn bad_cells_of_the_optional_columns_are_reported() {
    let root = with_targets();
    let cases = [
        ("maybe,p,1,1", Problem::BadPresent, "present `maybe` is not one of `1`, `0`, `unknown`"),
        ("1,p,0,1", Problem::BadSpacing, "spacing `0` is not a positive number of mm"),
        ("1,p,wide,1", Problem::BadSpacing, "spacing `wide` is not a positive number of mm"),
        ("1,p,,1", Problem::BadSpacing, "only one of `spacing_x_mm` and `spacing_y_mm` is given"),
    ];
    let head = "image_path,question,answer,split,present,patient,spacing_x_mm,spacing_y_mm\n";
    for (cells, problem, reason) in cases {
        root.csv("a.csv", &format!("{head}ct/train_masks/a.png,q,a,train,{cells}\n"));
        let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
        assert_eq!((report.bad[0].problem, report.bad[0].reason.as_str()), (problem, reason), "{cells}");
    }
    // empty cells and words of other programs
    for cells in [",,,", "true,,,", "Yes, p ,0.5,0.5", "1,p,1e-3,2"] {
        root.csv("a.csv", &format!("{head}ct/train_masks/a.png,q,a,train,{cells}\n"));
        assert_eq!(check(root.path(), None, Labels::NONE, &Silent).expect("readable").bad, [], "{cells}");
    }
}

#[test]
fn copies_of_images_are_counted() {
    let root = Root::new();
    for name in ["a", "b", "c"] {
        root.pair("ct", "train", name);
    }
    fs::copy(root.file("ct/train_images/a.png"), root.file("ct/train_images/c.png")).expect("copied");
    let rows = ["a", "b", "c"].map(|name| format!("ct/train_masks/{name}.png,q,a,train\n"));
    root.csv("a.csv", &format!("image_path,question,answer,split\n{}", rows.concat()));
    let report = check(root.path(), None, Labels::NONE, &Silent).expect("readable");
    assert_eq!((report.copies, report.leaks.len()), (1, 0));
}
