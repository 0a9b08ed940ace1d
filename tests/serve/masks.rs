//! Masks that come before the words, and words that follow a mask of the client.

use std::io::Cursor;

use base64::Engine as _;
use image::{GrayImage, ImageFormat, Luma};
use serde_json::{Value, json};

use crate::support::{Answered, Server, events, image_file, reads_masks, volume_file};

const QUESTION: &str = "Where is the lesion?";

fn png(mask: &GrayImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    mask.write_to(&mut bytes, ImageFormat::Png).expect("an image");
    bytes.into_inner()
}

/// A square of a quarter of the image, in its upper left or lower right.
fn corner(is_upper: bool) -> GrayImage {
    GrayImage::from_fn(64, 64, |x, y| Luma([if ((x < 32) == is_upper) && ((y < 32) == is_upper) { 255 } else { 0 }]))
}

/// A form with fields of text, and a file in a field of this name.
fn form(fields: &[(&str, &str)], (name, file): (&str, &[u8])) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, text) in fields {
        let part = format!("--xx\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n");
        body.extend(part.into_bytes());
    }
    let head = format!("--xx\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"mask.png\"\r\n\r\n");
    body.extend(head.into_bytes());
    body.extend(file);
    body.extend(b"\r\n--xx--\r\n");
    body
}

fn ask(server: &Server, image: &str, fields: &[(&str, &str)], file: (&str, &[u8])) -> Answered {
    let kind = [("Content-Type", "multipart/form-data; boundary=xx")];
    server.send("POST", &format!("/api/images/{image}/questions"), &kind, &form(fields, file))
}

/// The events of a question with a mask.
fn events_of(server: &Server, image: &str, fields: &[(&str, &str)], mask: &GrayImage) -> Vec<(String, Value)> {
    let answered = ask(server, image, fields, ("mask", &png(mask))).ok();
    events(&String::from_utf8(answered.bytes).expect("text"))
}

fn mask_of(event: &Value) -> GrayImage {
    let png = event["png"].as_str().expect("a file");
    let png = base64::prelude::BASE64_STANDARD.decode(png).expect("base64");
    image::load_from_memory(&png).expect("a PNG").into_luma8()
}

#[test]
fn the_mask_comes_before_the_words_of_every_run() {
    let server = Server::start(&["--max-new-tokens", "6"]);
    let image = server.upload(&image_file());
    let events = server.ask(&image, &json!({ "question": QUESTION }));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..3], ["queued", "started", "mask"], "{names:?}");
    let (painted, result) = (&events[2].1, &events.last().unwrap().1);
    assert_eq!(painted["mask_position"], result["mask_position"]);
    assert_eq!(result["mask_given"], false);
    assert!(result["confidence"]["presence"].is_f64(), "{result}");
    server.check_described("SliceAnswer", result);
    let url = format!("/api/images/{image}/answers/{}/mask", result["id"].as_str().unwrap());
    assert_eq!(mask_of(painted), image::load_from_memory(&server.get(&url).ok().bytes).unwrap().into_luma8());
}

#[test]
fn words_follow_the_mask_of_a_question() {
    let server = Server::start_run(reads_masks(), &["--max-new-tokens", "24"], &[]);
    assert_eq!(server.get("/api/model").ok().json()["reads_masks"], true);
    let image = server.upload(&image_file());
    let fields = [("question", QUESTION), ("keep", "true")];
    let mut answers = Vec::new();
    for (mask, position) in [(corner(true), "upper left"), (corner(false), "lower right")] {
        let events = events_of(&server, &image, &fields, &mask);
        assert_eq!((events[2].0.as_str(), mask_of(&events[2].1)), ("mask", mask.clone()));
        let (name, result) = events.last().unwrap();
        assert_eq!((name.as_str(), &result["mask_given"]), ("result", &json!(true)), "{result}");
        // as `prsmed predict --json`
        assert_eq!(result["confidence"], Value::Null);
        server.check_described("SliceAnswer", result);
        assert_eq!((&result["mask_position"], &result["area_frac"]), (&json!(position), &json!(0.25)));
        assert_eq!(result["mask_warning"], Value::Null);
        let url = format!("/api/images/{image}/answers/{}/mask", result["id"].as_str().unwrap());
        assert_eq!(image::load_from_memory(&server.get(&url).ok().bytes).unwrap().into_luma8(), mask);
        answers.push(result["answer"].as_str().unwrap().to_owned());
    }
    assert_ne!(answers[0], answers[1], "the words follow the mask");

    // an answer that is not kept is the same
    let fields = [("question", QUESTION), ("slice", "0"), ("keep", "false")];
    let events = events_of(&server, &image, &fields, &corner(true));
    let result = &events.last().unwrap().1;
    assert_eq!((&result["id"], &result["answer"]), (&Value::Null, &json!(answers[0])), "{result}");
    let kept = server.get(&format!("/api/images/{image}")).ok().json()["answers"].clone();
    assert_eq!(kept.as_array().unwrap().len(), 2);

    // the mask that the model painted has the words that the model wrote
    let painted = server.ask(&image, &json!({ "question": QUESTION }));
    let (mask, answer) = (mask_of(&painted[2].1), &painted.last().unwrap().1["answer"]);
    assert!(mask.iter().any(|value| *value > 0), "the model paints");
    let again = events_of(&server, &image, &fields, &mask);
    assert_eq!(&again.last().unwrap().1["answer"], answer);
}

#[test]
fn masks_that_words_cannot_follow_are_refused_with_what_to_do() {
    let server = Server::start_run(reads_masks(), &["--max-new-tokens", "2", "--max-upload", "0.1"], &[]);
    let image = server.upload(&image_file());
    let labels = GrayImage::from_fn(64, 64, |x, y| Luma([if y < 9 { u8::try_from(x / 22).unwrap() } else { 0 }]));
    let question = [("question", QUESTION)];
    for (file, status, expected) in [
        (b"garbage".to_vec(), 422, "the field `mask`: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"),
        (Vec::new(), 422, "the field `mask`: is not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM image"),
        (png(&corner(true))[..60].to_vec(), 422, "the field `mask`: cannot be decoded"),
        (png(&GrayImage::new(63, 64)), 422, "the field `mask`: the mask is 63x64 pixels but its image is 64x64"),
        (png(&GrayImage::new(64, 64)), 422, "the field `mask`: the mask is empty"),
        (png(&labels), 422, "several labels"),
        (vec![0; 200_000], 413, "too large: at most 0.1 MiB are allowed"),
    ] {
        let refused = ask(&server, &image, &question, ("mask", &file));
        refused.is_error(status, expected);
        assert!(!refused.json()["hint"].as_str().unwrap().is_empty(), "{expected}");
    }
    let mask = png(&corner(true));
    for (fields, name, expected) in [
        (&[("question", " ")][..], "mask", "the question is empty"),
        (&[], "mask", "missing field `question`"),
        (&question, "image", "the form has the file `image`"),
        (&[("question", QUESTION), ("mask", "x")], "mask", "the field `mask` is a text"),
        (&[("question", QUESTION), ("slice", "1")], "mask", "there is no slice 1"),
        (&[("question", QUESTION), ("volume", "{}")], "mask", "has no `mask`"),
    ] {
        ask(&server, &image, fields, (name, &mask)).is_error(422, expected);
    }
    assert_eq!(server.metric("prsmed_questions_total{outcome=\"failed\"}"), 0.0, "the model does not run");
    let send = |parts: &[&str]| {
        let head = |part: &&str| format!("--xx\r\nContent-Disposition: form-data; {part}\r\n\r\n").into_bytes();
        let parts = parts.iter().flat_map(|part| [head(part), mask.clone(), b"\r\n".to_vec()].concat());
        let body: Vec<u8> = parts.chain(*b"--xx--\r\n").collect();
        let kind = [("Content-Type", "multipart/form-data; boundary=xx")];
        server.send("POST", &format!("/api/images/{image}/questions"), &kind, &body)
    };
    let nameless = send(&["name=\"mask\""]);
    nameless.is_error(400, "the field `mask` of the form has no file name and is not UTF-8 text");
    let two = send(&["name=\"mask\"; filename=\"a.png\"", "name=\"image\"; filename=\"b.png\""]);
    two.is_error(400, "the form has several files");
    for refused in [nameless, two] {
        let hint = refused.json()["hint"].as_str().unwrap().to_owned();
        assert!(hint.contains("mask=@mask.png") && !hint.contains("file=@"), "{hint}");
    }
    let wrong = json!({ "question": QUESTION, "slice": "first" });
    let refused = server.json("POST", &format!("/api/images/{image}/questions"), &wrong);
    refused.is_error(422, "expected a whole number from 0");
    let volume = server.upload(&volume_file("mask.nii.gz", 3));
    let about = json!({ "question": QUESTION, "volume": {}, "keep": false });
    server.json("POST", &format!("/api/images/{volume}/questions"), &about).is_error(422, "has no `keep`");
    let wide = GrayImage::from_pixel(20, 16, Luma([1]));
    let fields = [("question", QUESTION), ("slice", "2")];
    let result = events_of(&server, &volume, &fields, &wide).pop().unwrap().1;
    assert_eq!((&result["slice"], &result["mask_given"]), (&json!(2), &json!(true)), "{result}");
    let warning = result["mask_warning"].as_str().unwrap();
    assert!(warning.starts_with("the mask covers 100.00 % of the image") && warning.contains("inverted"), "{warning}");
}

#[test]
fn a_run_whose_words_follow_no_mask_says_so() {
    let server = Server::start(&["--max-new-tokens", "2"]);
    assert_eq!(server.get("/api/model").ok().json()["reads_masks"], false);
    let image = server.upload(&image_file());
    let refused = ask(&server, &image, &[("question", QUESTION)], ("mask", &png(&corner(true))));
    refused.is_error(422, "the field `mask`: the words of this run do not follow a mask");
    assert!(refused.json()["hint"].as_str().unwrap().contains("model.answer_reads_mask=true"));
    // a form without a mask is a question
    let kind = [("Content-Type", "multipart/form-data; boundary=xx")];
    let body = "--xx\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nWhere?\r\n--xx--";
    let asked = server.send("POST", &format!("/api/images/{image}/questions"), &kind, body.as_bytes()).ok();
    assert_eq!(events(&String::from_utf8(asked.bytes).unwrap()).pop().unwrap().0, "result");
}
