//! DICOM series and NIfTI volumes: slices, windows, masks of a volume, and files that are refused.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Server, home, image_file};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes").join(name)
}

fn shown(server: &Server, id: &str) -> Value {
    server.get(&format!("/api/images/{id}")).ok().json()
}

fn pixels(server: &Server, id: &str, query: &str) -> image::GrayImage {
    let answered = server.get(&format!("/api/images/{id}/pixels?{query}")).ok();
    image::load_from_memory(&answered.bytes).expect("an image").into_luma8()
}

#[test]
fn a_dicom_series_has_slices_a_window_and_a_mask_on_its_grid() {
    let server = Server::start(&[]);
    let id = server.upload(&fixture("axial.zip"));
    let image = shown(&server, &id);
    assert_eq!((&image["width"], &image["height"], &image["slices"]), (&json!(6), &json!(5), &json!(4)));
    assert_eq!((&image["window"], &image["spacing_mm"][0]), (&json!("soft-tissue"), &json!(0.5)));
    // values of the second slice are -700, -695, ...
    let wide = pixels(&server, &id, "slice=1&window=-1000..100");
    assert!((i16::from(wide.get_pixel(0, 0)[0]) - 70).abs() <= 1, "{wide:?}");
    assert_eq!(pixels(&server, &id, "slice=1").get_pixel(0, 0)[0], 0);
    assert_eq!(pixels(&server, &id, "slice=1&window=2000/-700"), pixels(&server, &id, "slice=1&window=-1700..300"));
    let window =
        |query: &str| server.get(&format!("/api/images/{id}/pixels?{query}")).header("prsmed-window").to_owned();
    assert_eq!(["slice=1", "window=-1000..100", "window=2000/-700"].map(window), ["400/40", "1100/-450", "2000/-700"]);
    server.get(&format!("/api/images/{id}/pixels?slice=4")).is_error(422, "there is no slice 4, the image has 4");
    server.get(&format!("/api/images/{id}/pixels?window=0/40")).is_error(400, "window");

    let asked = json!({ "question": "Where is the lesion?", "slice": 2, "window": "lung", "max_new_tokens": 2 });
    let events = server.ask(&id, &asked);
    let result = &events.last().unwrap().1;
    assert_eq!((&result["slice"], &result["window"]), (&json!(2), &json!("lung")));
    let url = format!("/api/images/{id}/answers/{}/mask", result["id"].as_str().unwrap());
    // a mask that a user draws is in the right place of the volume
    let drawn = image::GrayImage::from_fn(6, 5, |x, y| image::Luma([if (x, y) == (1, 3) { 255 } else { 0 }]));
    let mut png = std::io::Cursor::new(Vec::new());
    drawn.write_to(&mut png, image::ImageFormat::Png).unwrap();
    server.send("PUT", &url, &[], png.get_ref()).ok();
    for (name, is_dicom) in [("mask.nii.gz", false), ("mask.dcm", true)] {
        let answered = server.get(&format!("/api/images/{id}/{name}")).ok();
        assert!(answered.header("content-disposition").contains(name));
        let file = home().join(name);
        std::fs::write(&file, &answered.bytes).unwrap();
        let series = prsmed::data::volume::open(&fixture("axial.zip")).unwrap();
        let labels = prsmed::data::volume::labels::open(&file).unwrap();
        let on_series = labels.on_grid(&file, &series.grid, false).unwrap().mask(1);
        let plane = series.plane(prsmed::data::volume::Axis::Axial);
        for slice in 0..4 {
            let values = plane.values(&on_series, slice).unwrap();
            let set: Vec<usize> = (0..values.len()).filter(|index| values[*index] != 0).collect();
            let expected: &[usize] = if slice == 2 { &[3 * 6 + 1] } else { &[] };
            assert_eq!(set, expected, "{name}, slice {slice}, DICOM SEG: {is_dicom}");
        }
    }
    let error = server.get(&format!("/api/images/{id}/mask.nii.gz?question=other"));
    error.is_error(409, "no such answers");
}

#[test]
fn the_three_planes_of_a_volume_show_the_same_voxels() {
    let server = Server::start(&[]);
    for name in ["axial.zip", "ras_i16.nii.gz"] {
        let id = server.upload(&fixture(name));
        let image = shown(&server, &id);
        let directions = image["directions"].as_array().unwrap();
        assert_eq!(directions.len(), 3, "{image}");
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
        let sizes = ["width", "height", "slices"].map(|key| number(&image[key]));
        let window = "window=-1000..1000";
        let own: Vec<image::GrayImage> =
            (0..sizes[2]).map(|slice| pixels(&server, &id, &format!("slice={slice}&{window}"))).collect();
        assert!(own.iter().any(|slice| slice.iter().any(|value| *value != slice.as_raw()[0])), "{name} has structure");
        for direction in directions {
            let axis = direction["axis"].as_str().unwrap();
            for slice in 0..number(&direction["slices"]) {
                let plane = pixels(&server, &id, &format!("slice={slice}&axis={axis}&{window}"));
                assert_eq!(plane.dimensions(), (number(&direction["width"]), number(&direction["height"])));
                for (x, y, value) in plane.enumerate_pixels() {
                    let mut at = [0; 3];
                    for (along, value) in direction["along"].as_array().unwrap().iter().zip([x, y, slice]) {
                        let place = number(&along["place"]) as usize;
                        at[place] = if along["backwards"] == true { sizes[place] - 1 - value } else { value };
                    }
                    assert_eq!(value, own[at[2] as usize].get_pixel(at[0], at[1]), "{name}, {axis} {slice}: {x}, {y}");
                }
            }
        }
        let error = server.get(&format!("/api/images/{id}/pixels?axis=coronal&slice=99"));
        error.is_error(422, "there is no slice 99");
    }
    let id = server.upload(&image_file());
    assert_eq!(shown(&server, &id)["directions"], json!([]));
    server.get(&format!("/api/images/{id}/pixels?axis=coronal")).is_error(422, "is not a volume");
}

#[test]
fn nifti_files_are_volumes_and_images_have_no_volume_mask() {
    let server = Server::start(&[]);
    for name in ["ras_i16.nii.gz", "lps_u8.nii", "monochrome1.dcm"] {
        let id = server.upload(&fixture(name));
        let image = shown(&server, &id);
        assert!(image["slices"].as_u64().unwrap() >= 1 && image["window"].is_string(), "{name}: {image}");
        pixels(&server, &id, "slice=0");
    }
    let id = server.upload(&image_file());
    server.result(&id, "Where is the lesion?", 2);
    server.get(&format!("/api/images/{id}/mask.nii.gz")).is_error(422, "is not a volume");
    server.get(&format!("/api/images/{id}/pixels?window=lung")).is_error(422, "no intensity window");
}

#[test]
fn series_that_cannot_be_read_are_refused_with_a_reason_and_the_server_goes_on() {
    let server = Server::start(&[]);
    let send = |name: &str| server.send("POST", "/api/images", &[], &std::fs::read(fixture(name)).unwrap());
    for (name, reason) in [
        ("gap.zip", "missing"),
        ("orientations.zip", "orientation"),
        ("sizes.zip", "size"),
        ("nan.nii.gz", "NaN"),
        ("four.nii.gz", "4-D"),
    ] {
        let answered = send(name);
        let text = answered.json().to_string();
        assert!(answered.status == 422 && text.contains(reason), "{name}: {text}");
        // neither a path of the server nor a name of the file
        assert!(!text.contains("/tmp") && !text.contains(name), "{name}: {text}");
    }
    let whole = std::fs::read(fixture("axial.zip")).unwrap();
    let cut = server.send("POST", "/api/images", &[], &whole[..whole.len() / 2]);
    assert_eq!(cut.status, 422, "{}", cut.json());
    server.upload(&fixture("axial.zip"));
    server.get("/api/health").ok();
}
