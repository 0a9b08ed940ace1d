//! `data scan`, and `data prepare` of what it finds.

use std::fs;

use image::{GrayImage, Luma};

use crate::support::{done, folder, objects, prsmed, run};

#[test]
fn a_folder_of_patients_is_scanned_and_prepared() {
    let home = folder("scanned");
    for number in 0_u8..4 {
        let patient = home.join(format!("hospital/P {number}"));
        fs::create_dir_all(&patient).unwrap();
        GrayImage::from_fn(12, 8, |x, _| Luma([u8::try_from(x).unwrap() * 9 + number]))
            .save(patient.join("Scan.PNG"))
            .unwrap();
        let mask = GrayImage::from_fn(12, 8, |x, y| Luma([if x < 5 && y < 3 { 255 } else { 0 }]));
        mask.save(patient.join("Scan Mask.png")).unwrap();
    }
    let scanned = done(prsmed().current_dir(&home).args(["data", "scan", "hospital"]));
    assert!(scanned.contains("layout      names (4)") && scanned.contains("patients    4"), "{scanned}");
    assert!(scanned.contains("next: prsmed data prepare --pairs scan-hospital/pairs.csv --modality NAME"), "{scanned}");
    let mut prepare = prsmed();
    prepare.current_dir(&home).args(["data", "prepare", "--pairs", "scan-hospital/pairs.csv", "--out", "data"]);
    let text = done(prepare.args(["--modality", "xray"]));
    assert!(text.contains("4 images of 4 patients"), "{text}");
    let text =
        done(prsmed().current_dir(&home).args(["data", "prepare", "hospital", "--modality", "xray", "--out", "d2"]));
    assert!(text.contains("4 images of 4 patients"), "{text}");
    assert_eq!(
        fs::read(home.join("data/annotations/xray.csv")).unwrap(),
        fs::read(home.join("d2/annotations/xray.csv")).unwrap()
    );
    // a second mask
    fs::copy(home.join("hospital/P 1/Scan Mask.png"), home.join("hospital/P 1/Scan_seg.png")).unwrap();
    let ran = run(prsmed().current_dir(&home).args(["--json", "data", "scan", "hospital", "--out", "again"]));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let reason = objects(&ran.stdout).last().unwrap()["ambiguous"][0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("2 masks fit the image"), "{reason}");
    // a table that somebody has corrected stays
    let table = home.join("again/pairs.csv");
    fs::write(&table, "image,mask\n").unwrap();
    let ran = run(prsmed().current_dir(&home).args(["data", "scan", "hospital", "--out", "again"]));
    assert!(ran.code == Some(2) && ran.stderr.contains("may have corrections"), "{}", ran.stderr);
    assert_eq!(fs::read_to_string(&table).unwrap(), "image,mask\n");
    let ran = run(prsmed().current_dir(&home).args(["data", "prepare", "hospital", "--modality", "x", "--out", "d3"]));
    assert!(ran.code == Some(2) && ran.stderr.contains("2 masks fit the image"), "{}", ran.stderr);
    assert!(ran.stderr.contains("`--pairs`"), "{}", ran.stderr);
    assert!(!home.join("d3").exists());
}
