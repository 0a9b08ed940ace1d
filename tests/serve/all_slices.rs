//! A question about all slices of a volume: equal to `prsmed predict`, shown by slice, downloaded, cancelled, refused.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prsmed::data::volume::{Axis, labels};
use serde_json::{Value, json};

use crate::alone;
use crate::support::{Server, done, home, image_file, prsmed, trained, volume_file};

const QUESTION: &str = "Where is the lesion?";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes").join(name)
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

/// Segments a file with the command; the record, and the values of the mask.
fn predicted(file: &Path, flags: &[&str]) -> (Value, Vec<u8>) {
    let out = home().join("predicted.nii.gz");
    let mut command = prsmed();
    command.args(["--json", "predict", "--question", QUESTION, "--image"]).arg(file).arg("--out").arg(&out);
    let lines = done(command.args(flags).arg(trained()));
    let record = serde_json::from_str(lines.lines().last().expect("a record")).expect("JSON");
    (record, values(&out))
}

fn values(file: &Path) -> Vec<u8> {
    let labels = labels::open(file).expect("a mask");
    labels.mask(1)
}

/// The mask of a slice as the server shows it, 0 and 1.
fn shown(server: &Server, url: &str, slice: &str) -> Vec<u8> {
    let answered = server.get(&format!("{url}/mask?slice={slice}")).ok();
    let mask = image::load_from_memory(&answered.bytes).expect("an image").into_luma8();
    mask.iter().map(|value| u8::from(*value > 0)).collect()
}

#[test]
fn all_slices_have_the_masks_of_predict() {
    let server = Server::start(&[]);
    let file = fixture("axial.zip");
    let id = server.upload(&file);
    let cleanup = json!({ "fill_gaps": 1, "min_volume_ml": 0.0001, "largest_component": true });
    let volume = json!({ "axis": "axial", "slices": "0..4", "every": 2, "cleanup": cleanup });
    let events = server.ask(&id, &json!({ "question": QUESTION, "window": "lung", "volume": volume }));
    assert_eq!(names(&events), ["queued", "started", "progress", "progress", "progress", "result"], "{events:?}");
    assert_eq!(events[4].1, json!({ "done": 2, "total": 2 }));
    let result = &events[5].1;
    let flags = "--axis axial --slices 0..4 --every 2 --window lung --fill-gaps 1 --min-volume-ml 0.0001 \
                 --largest-component";
    let (record, mask) = predicted(&file, &flags.split_whitespace().collect::<Vec<_>>());
    for name in [
        "settings",
        "num_slices",
        "num_found",
        "slices",
        "raw_volume_ml",
        "volume_ml",
        "range",
        "answer",
        "answer_source",
        "answer_facts",
        "mask_position",
        "mask_position_slice",
    ] {
        assert_eq!(result[name], record[name], "{name}");
    }
    server.check_described("VolumeAnswer", result);
    server.check_described("AnswerFacts", &result["answer_facts"]);
    assert_eq!((&result["scope"], &result["num_slices"]), (&json!("volume"), &json!(2)));
    assert!(mask.contains(&1), "the untrained model paints something: {record}");
    for name in ["mask.nii.gz", "mask.dcm"] {
        let answered = server.get(&format!("/api/images/{id}/{name}?question=Where%20is%20the%20lesion%3F")).ok();
        let out = home().join(format!("all-{name}"));
        std::fs::write(&out, &answered.bytes).unwrap();
        let series = prsmed::data::volume::open(&file).unwrap();
        let found = labels::open(&out).unwrap().on_grid(&out, &series.grid, false).unwrap().mask(1);
        assert_eq!(found, mask, "{name}");
        let plane = series.plane(Axis::Axial);
        let url = format!("/api/images/{id}/answers/{}", result["id"].as_str().unwrap());
        for slice in 0..4 {
            assert_eq!(shown(&server, &url, &slice.to_string()), plane.values(&mask, slice).unwrap(), "slice {slice}");
        }
        for axis in Axis::ALL {
            let plane = series.plane(axis);
            for slice in 0..plane.num_slices {
                let view = format!("{slice}&axis={axis}");
                assert_eq!(shown(&server, &url, &view), plane.values(&mask, slice).unwrap(), "{view}");
            }
        }
    }
    let image = server.get(&format!("/api/images/{id}")).ok().json();
    assert_eq!(image["answers"][0], *result);
    assert_eq!((&image["axis"], &image["exports"]), (&json!("axial"), &json!(["mask.nii.gz", "mask.dcm"])));
}

#[test]
fn slices_of_another_axis_are_shown_in_the_right_place() {
    let server = Server::start(&[]);
    let file = volume_file("block.nii", 6);
    let id = server.upload(&file);
    let events = server.ask(&id, &json!({ "question": QUESTION, "volume": { "axis": "coronal" } }));
    let result = &events.last().unwrap().1;
    assert_eq!((&result["num_slices"], &result["settings"]["axis"]), (&json!(16), &json!("coronal")), "{result}");
    let (record, mask) = predicted(&file, &["--axis", "coronal"]);
    assert_eq!(result["volume_ml"], record["volume_ml"]);
    let grid = prsmed::data::volume::open(&file).unwrap();
    let plane = grid.plane(Axis::Axial);
    let url = format!("/api/images/{id}/answers/{}", result["id"].as_str().unwrap());
    let mut areas = Vec::new();
    for slice in 0..6 {
        let expected = plane.values(&mask, slice).unwrap();
        assert_eq!(shown(&server, &url, &slice.to_string()), expected, "slice {slice}");
        areas.push(expected.iter().map(|value| usize::from(*value)).sum::<usize>());
    }
    let most = areas.iter().max().unwrap();
    let largest = (*most > 0).then(|| areas.iter().position(|area| area == most).unwrap());
    assert_eq!(result["largest_slice"], json!(largest));
    let overlay = server.get(&format!("{url}/overlay?slice=3")).ok();
    let overlay = image::load_from_memory(&overlay.bytes).unwrap();
    assert_eq!((overlay.width(), overlay.height()), (20, 16));

    // only answers about one slice are corrected
    server.get(&format!("{url}/mask")).is_error(422, "names no slice");
    server.get(&format!("{url}/overlay?slice=6")).is_error(422, "there is no slice 6");
    server.get(&format!("{url}/mask?slice=x")).is_error(400, "slice");
    server.get(&format!("{url}/mask?slice=99&axis=coronal")).is_error(422, "there is no slice 99");
    server.get(&format!("{url}/mask?axis=coronal")).is_error(422, "names no slice");
    server.send("PUT", &format!("{url}/mask"), &[], b"x").is_error(409, "about all slices");
    server.send("DELETE", &format!("{url}/mask"), &[], &[]).is_error(409, "about all slices");
    server.json("PATCH", &url, &json!({ "corrected_answer": "a" })).is_error(409, "about all slices");
    server.get(&format!("/api/images/{id}/pairs.zip")).is_error(409, "no answers");
    server.get(&format!("/api/images/{id}/pairs.zip?answer={}", result["id"].as_str().unwrap())).is_error(409, "all");
    let one = server.result(&id, "Is there a lesion?", 2);
    let one_url = format!("/api/images/{id}/answers/{}", one["id"].as_str().unwrap());
    server.get(&format!("{one_url}/mask?slice=0")).ok();
    server.get(&format!("{one_url}/mask?slice=1")).is_error(422, "the answer is about slice 0");
    server.get(&format!("{one_url}/mask?slice=0&axis=coronal")).is_error(422, "slice 0 of the image only");
    server.get(&format!("/api/images/{id}/pairs.zip")).ok();
    assert_eq!(server.send("DELETE", &url, &[], &[]).status, 204);
    server.get(&format!("{url}/mask?slice=0")).is_error(404, "there is no such answer");
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let server = Server::start(&[]);
    let id = server.upload(&fixture("axial.zip"));
    let ask = |id: &str, value: &Value| server.json("POST", &format!("/api/images/{id}/questions"), value);
    let refused = |options: Value, reason: &str| {
        ask(&id, &json!({ "question": QUESTION, "volume": options })).is_error(422, reason);
    };
    refused(json!({ "axis": "diagonal" }), "unknown variant `diagonal`, expected one of `axial`, `coronal`");
    refused(json!({ "slices": "3..3" }), "`3..3` has no slices");
    refused(json!({ "slices": "4.." }), "`volume.slices`: `4..` has no slice: there are 4 axial slices");
    refused(json!({ "slices": "all" }), "is not a range of slices");
    refused(json!({ "every": 0 }), "`volume.every`: must be at least 1");
    refused(json!({ "cleanup": { "min_volume_ml": -1.0 } }), "must not be negative");
    refused(json!({ "cleanup": { "smooth": 1 } }), "unknown field `smooth`");
    refused(json!({ "step": 1 }), "unknown field `step`");
    let with = |name: &str, value: Value| {
        let mut asked = json!({ "question": QUESTION, "volume": {} });
        asked[name] = value;
        asked
    };
    ask(&id, &with("slice", json!(1))).is_error(422, "has no `slice`");
    ask(&id, &with("max_new_tokens", json!(1))).is_error(422, "has no `max_new_tokens`");
    let image = server.upload(&image_file());
    ask(&image, &json!({ "question": QUESTION, "volume": {} })).is_error(422, "the image is not a volume");
    assert_eq!(server.metric("prsmed_queue_length"), 0.0);
    // the window of the file is looked for while the model works
    let nifti = server.upload(&fixture("ras_i16.nii.gz"));
    let events = server.ask(&nifti, &json!({ "question": QUESTION, "window": "file", "volume": {} }));
    let (name, error) = events.last().unwrap();
    assert!(name == "error" && error["error"].as_str().unwrap().contains("the file has none"), "{error}");
    assert_eq!(error["status"], 422);
    assert_eq!(server.get(&format!("/api/images/{nifti}")).ok().json()["exports"], json!(["mask.nii.gz"]));
}

#[test]
fn a_question_about_all_slices_has_the_time_limit() {
    let server = Server::start(&["--time-limit", "0.01"]);
    let id = server.upload(&volume_file("late.nii", 400));
    let events = server.ask(&id, &json!({ "question": QUESTION, "volume": {} }));
    let (name, error) = events.last().unwrap();
    assert_eq!((name.as_str(), &error["status"]), ("error", &json!(504)), "{error}");
    assert!(error["hint"].as_str().unwrap().contains("fewer slices"), "{error}");
    let count = events.iter().filter(|(name, _)| name == "progress").count();
    assert!(count < 400, "stopped after {count} slices");
}

#[test]
#[expect(clippy::print_stdout, reason = "the measured time")]
fn a_client_that_leaves_stops_the_slices_within_a_second() {
    let _alone = alone();
    let server = Server::start(&["--queue", "1"]);
    let id = server.upload(&volume_file("many.nii", 5000));
    let body = json!({ "question": QUESTION, "volume": {} }).to_string();
    let head = format!(
        "POST /api/images/{id}/questions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = server.connect(head.as_bytes());
    let mut text = String::new();
    let mut piece = [0; 512];
    while !text.contains("\"done\":2,") {
        let count = stream.read(&mut piece).expect("progress");
        assert!(count > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    assert_eq!(server.metric("prsmed_questions_running"), 1.0);
    // the queue has one place: it is bounded as for other questions
    let waiting = server.connect(head.as_bytes());
    server.wait_for("prsmed_queue_length", 1.0, Duration::from_secs(5));
    let refused = server.json("POST", &format!("/api/images/{id}/questions"), &json!({ "question": QUESTION }));
    refused.is_error(429, "the queue is full");
    drop((stream, waiting));
    let took = server.wait_for("prsmed_questions_total{outcome=\"left\"}", 2.0, Duration::from_secs(1));
    assert_eq!(server.metric("prsmed_questions_running"), 0.0);
    assert_eq!(server.get(&format!("/api/images/{id}")).ok().json()["answers"], json!([]));
    println!("slices of a client that left stopped after {} ms", took.as_millis());
}

#[test]
fn a_removed_volume_ends_its_questions_within_a_second() {
    let _alone = alone();
    let server = Server::start(&[]);
    let id = server.upload(&volume_file("removed.nii", 5000));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.ask(&id, &json!({ "question": QUESTION, "volume": {} })));
        server.wait_for("prsmed_questions_running", 1.0, Duration::from_secs(5));
        let waiting = scope.spawn(|| server.ask(&id, &json!({ "question": QUESTION })));
        server.wait_for("prsmed_queue_length", 1.0, Duration::from_secs(5));
        let begin = Instant::now();
        server.send("DELETE", &format!("/api/images/{id}"), &[], &[]).ok();
        for (asked, begins_with) in [(running, "started"), (waiting, "error")] {
            let events = asked.join().unwrap();
            let (name, error) = events.last().unwrap();
            assert_eq!((events[1].0.as_str(), name.as_str()), (begins_with, "error"), "{error}");
            assert_eq!((&error["error"], &error["status"]), (&json!("there is no such image"), &json!(404)));
        }
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    });
    assert_eq!(server.metric("prsmed_questions_total{outcome=\"failed\"}"), 2.0);
    server.result(&server.upload(&image_file()), QUESTION, 1);
}
