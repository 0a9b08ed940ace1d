//! What the routes answer.

use std::io::{Cursor, Read};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, done, home, image_file, prsmed, trained};

const QUESTION: &str = "Where is the lesion?";

#[test]
fn an_answer_and_its_mask_are_those_of_predict() {
    let server = Server::start(&[]);
    let image = server.upload(&image_file());
    let events = server.ask(&image, &json!({ "question": QUESTION, "max_new_tokens": 12 }));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], names[1], *names.last().unwrap()), ("queued", "started", "result"), "{names:?}");
    assert_eq!(events[0].1["ahead"], 0);
    let result = &events.last().unwrap().1;
    let mask = home().join("predicted.png");
    let mut predict = prsmed();
    predict.args(["--json", "predict", "--question", QUESTION, "--max-new-tokens", "12", "--image"]).arg(image_file());
    let lines = done(predict.arg("--mask-out").arg(&mask).arg(trained()));
    let predicted: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    for name in ["answer", "new_tokens", "confidence", "mask_position", "answer_position", "positions_agree"] {
        assert_eq!(result[name], predicted[name], "{name}");
    }
    assert_eq!(
        (&result["area_frac"], &result["class"]["name"]),
        (&predicted["foreground_frac"], &predicted["modality"])
    );
    let url = format!("/api/images/{image}/answers/{}", result["id"].as_str().unwrap());
    let served = server.get(&format!("{url}/mask")).ok();
    assert_eq!(served.header("content-type"), "image/png");
    let served = image::load_from_memory(&served.bytes).unwrap().into_luma8();
    assert_eq!(served, image::open(mask).unwrap().into_luma8());
    let overlay = image::load_from_memory(&server.get(&format!("{url}/overlay")).ok().bytes).unwrap();
    assert_eq!((overlay.width(), overlay.height()), served.dimensions());

    // a second question uses the encoded image, and has the same answer
    let encoded = server.metric("prsmed_encoded_image_bytes");
    assert!(encoded > 1000.0, "{encoded}");
    let again = server.result(&image, QUESTION, 12);
    assert_eq!((&again["answer"], &again["confidence"]), (&result["answer"], &result["confidence"]));
    assert_eq!(server.metric("prsmed_encoded_image_bytes"), encoded);
    let shown = server.get(&format!("/api/images/{image}")).ok().json();
    assert_eq!(shown["answers"].as_array().unwrap().len(), 2);
    assert_eq!((&shown["width"], &shown["slices"], &shown["window"]), (&json!(64), &json!(1), &Value::Null));
}

#[test]
fn answers_say_whether_their_question_is_like_those_of_the_training() {
    let server = Server::start(&[]);
    let examples = server.get("/api/model").ok().json()["questions"].clone();
    let examples: Vec<String> = serde_json::from_value(examples).unwrap();
    assert!((1..=4).contains(&examples.len()), "{examples:?}");
    let image = server.upload(&image_file());
    let known = server.result(&image, &examples[0], 2);
    assert_eq!((&known["question_known"], &known["nearest_question"]), (&json!(true), &json!(examples[0])));
    assert_eq!(known["new_words"], json!([]));
    for question in ["Is it malignant?", "Wo ist die Läsion?", "Where is the kidney stone?"] {
        let answer = server.result(&image, question, 2);
        assert_eq!(answer["question_known"], json!(false), "{question}: {answer}");
        assert!(answer["nearest_question"].is_string() && answer["new_words"] != json!([]), "{answer}");
        assert!(answer["question_distance"].as_f64().unwrap() > 0.45, "{answer}");
    }
    let kept = server.get(&format!("/api/images/{image}")).ok().json();
    assert_eq!(kept["answers"].as_array().unwrap().iter().filter(|answer| answer["question_known"] == true).count(), 1);
}

#[test]
fn corrected_pairs_are_a_data_root() {
    let server = Server::start(&[]);
    let bytes = std::fs::read(image_file()).unwrap();
    let sent = server.send("POST", "/api/images?spacing_x_mm=0.5&spacing_y_mm=2", &[], &bytes).ok();
    let image = sent.json()["id"].as_str().unwrap().to_owned();
    assert_eq!((sent.status, sent.header("location")), (201, format!("images/{image}").as_str()));
    let first = server.result(&image, QUESTION, 4);
    server.result(&image, "Is there a lesion?", 4);
    let url = format!("/api/images/{image}/answers/{}", first["id"].as_str().unwrap());
    let model_mask = server.get(&format!("{url}/mask")).ok().bytes;

    let drawn = image::GrayImage::from_fn(64, 64, |x, y| image::Luma([if x > 40 && y > 30 { 255 } else { 0 }]));
    let mut png = Cursor::new(Vec::new());
    drawn.write_to(&mut png, image::ImageFormat::Png).unwrap();
    let corrected = server.send("PUT", &format!("{url}/mask"), &[], png.get_ref()).ok().json();
    assert_eq!((&corrected["corrected"], &corrected["area_frac"]), (&json!(true), &first["area_frac"]));
    let stored = server.get(&format!("{url}/mask")).ok().bytes;
    assert_eq!(image::load_from_memory(&stored).unwrap().into_luma8(), drawn);
    let text = "The lesion is at the lower right, \"large\".";
    let changed = server.json("PATCH", &url, &json!({ "corrected_answer": text })).ok().json();
    assert_eq!((&changed["corrected_answer"], &changed["answer"]), (&json!(text), &first["answer"]));

    let zip = server.get(&format!("/api/images/{image}/pairs.zip?class=brain_MRI")).ok();
    assert_eq!(zip.header("content-type"), "application/zip");
    let root = home().join("pairs");
    zip::ZipArchive::new(Cursor::new(zip.bytes)).unwrap().extract(&root).unwrap();
    let rows = std::fs::read_to_string(root.join("annotations/corrected.csv")).unwrap();
    assert!(rows.starts_with("image_path,question,answer,split,present,spacing_x_mm,spacing_y_mm\n"), "{rows}");
    let expected = "Where is the lesion?,\"The lesion is at the lower right, \"\"large\"\".\",train,1,0.5,2";
    assert!(rows.contains(expected), "{rows}");
    assert_eq!(rows.lines().count(), 3);
    let one = server.get(&format!("/api/images/{image}/pairs.zip?answer={}", first["id"].as_str().unwrap())).ok();
    let mut one = zip::ZipArchive::new(Cursor::new(one.bytes)).unwrap();
    let mut rows = String::new();
    one.by_name("annotations/corrected.csv").unwrap().read_to_string(&mut rows).unwrap();
    assert_eq!((one.len(), rows.lines().count()), (3, 2), "{rows}");
    let found = done(prsmed().args(["data", "check"]).arg(&root));
    assert!(found.contains("no bad rows"), "{found}");
    // known again if the upload becomes a test image
    let copy = root.join(format!("brain_MRI/train_images/{}.png", first["id"].as_str().unwrap()));
    let [copy, upload] = [copy, image_file()].map(|path| prsmed::data::marks::ImageMarks::of(&path).unwrap().pixels);
    assert!(copy.is_some() && copy == upload);
    let scored = home().join("scored");
    for (file, bytes) in [("images", &bytes), ("masks", png.get_ref())] {
        std::fs::create_dir_all(scored.join(format!("brain_MRI/test_{file}"))).unwrap();
        std::fs::write(scored.join(format!("brain_MRI/test_{file}/a.png")), bytes).unwrap();
    }
    std::fs::create_dir(scored.join("annotations")).unwrap();
    let rows = "image_path,question,answer,position,split\nbrain_MRI/test_masks/a.png,Where?,There.,lower right,test\n";
    std::fs::write(scored.join("annotations/brain_MRI.csv"), rows).unwrap();
    let check = prsmed().args(["data", "check"]).arg(&scored).arg("--extra").arg(&root).output().unwrap();
    let text = String::from_utf8(check.stdout).unwrap();
    assert!(check.status.code() == Some(1) && text.contains("train and test, by rows of an extra data root"), "{text}");

    let restored = server.send("DELETE", &format!("{url}/mask"), &[], &[]).ok().json();
    assert_eq!(restored["corrected"], false);
    assert_eq!(server.get(&format!("{url}/mask")).ok().bytes, model_mask);
    let back = server.json("PATCH", &url, &json!({ "corrected_answer": null })).ok().json();
    assert_eq!(back["corrected_answer"], Value::Null);
}

#[test]
fn an_emptied_mask_is_no_pair_with_words_that_name_a_place() {
    let server = Server::start(&[]);
    let image = server.upload(&image_file());
    let answer = server.result(&image, QUESTION, 2)["id"].as_str().unwrap().to_owned();
    let url = format!("/api/images/{image}/answers/{answer}");
    let mut empty = Cursor::new(Vec::new());
    image::GrayImage::new(64, 64).write_to(&mut empty, image::ImageFormat::Png).unwrap();
    server.send("PUT", &format!("{url}/mask"), &[], empty.get_ref()).ok();
    let write = |text: &str| server.json("PATCH", &url, &json!({ "corrected_answer": text })).ok();
    write("The lesion is in the lower right part of the image.");
    let pairs = format!("/api/images/{image}/pairs.zip");
    server.get(&pairs).is_error(409, "is empty, and its text names the location `lower right`");
    write("There is no lesion in this image.");
    server.get(&pairs).ok();
}

#[test]
fn images_and_answers_are_removed() {
    let sample = image_file();
    let server = Server::start(&["--max-images", "2", "--sample", sample.to_str().unwrap()]);
    assert_eq!(server.get("/api/sample").ok().bytes, std::fs::read(sample).unwrap());
    assert_eq!(server.get("/api/model").ok().json()["has_sample"], true);
    let image = server.upload(&image_file());
    let answer = server.result(&image, QUESTION, 2)["id"].as_str().unwrap().to_owned();
    let url = format!("/api/images/{image}/answers/{answer}");
    assert_eq!(server.get(&url).ok().json()["question"], QUESTION);
    assert_eq!(server.send("DELETE", &url, &[], &[]).status, 204);
    server.get(&url).is_error(404, "there is no such answer");
    server.get(&format!("/api/images/{image}/pairs.zip")).is_error(409, "no answers");
    let pixels = server.get(&format!("/api/images/{image}/pixels")).ok().bytes;
    let original = image::open(image_file()).unwrap();
    assert_eq!(image::load_from_memory(&pixels).unwrap().to_rgb8(), original.to_rgb8());
    assert_eq!(server.send("DELETE", &format!("/api/images/{image}"), &[], &[]).status, 204);
    server.get(&format!("/api/images/{image}")).is_error(404, "there is no such image");
    // the third image replaces the first
    let ids: Vec<String> = (0..3).map(|_| server.upload(&image_file())).collect();
    let status: Vec<u16> = ids.iter().map(|id| server.get(&format!("/api/images/{id}")).status).collect();
    assert_eq!(status, [404, 200, 200]);
    assert_eq!(server.metric("prsmed_images"), 2.0);
}

#[test]
fn images_expire() {
    let server = Server::start(&["--keep", "0.01"]);
    let image = server.upload(&image_file());
    server.get(&format!("/api/images/{image}")).ok();
    server.wait_for("prsmed_images", 0.0, Duration::from_secs(5));
    server.get(&format!("/api/images/{image}")).is_error(404, "there is no such image");
}

#[test]
fn health_model_metrics_page_and_openapi() {
    let server = Server::start(&["--log-requests"]);
    server.get("/api/sample").is_error(404, "there is no sample image");
    let mut unreadable = prsmed();
    unreadable.arg("serve").arg(trained()).args(["--port", "0", "--sample"]).arg(trained().join("config.toml"));
    let ran = unreadable.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && said.contains("config.toml: "), "{said}");
    assert_eq!(server.get("/api/health").ok().json(), json!({ "status": "ok" }));
    let model = server.get("/api/model").ok().json();
    let classes: Vec<&str> = model["classes"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    assert!(classes.len() == 6 && classes.contains(&"brain_MRI"), "{classes:?}");
    assert_eq!((&model["name"], &model["notice"]), (&json!("run"), &json!("research software, not a medical device")));
    assert!(model["calibration"]["temperature"].as_f64().is_some(), "{model}");
    let page = server.get("/").ok();
    let text = String::from_utf8(page.bytes.clone()).unwrap();
    assert!(text.contains("not a medical device"), "{text}");
    assert!(page.header("content-security-policy").starts_with("default-src 'none'; script-src 'self'"));
    assert_eq!((page.header("x-content-type-options"), page.header("cache-control")), ("nosniff", "no-store"));
    let scripts =
        ["main.js", "api.js", "viewer.js", "mask.js", "answers.js", "volume.js", "all-slices.js", "zip.js", "words.js"];
    for file in scripts.into_iter().chain(["page.css", "icon.svg"]) {
        assert!(!server.get(&format!("/page/{file}")).ok().bytes.is_empty(), "{file}");
    }
    for file in ["index.htm", "..%2fmod.rs", "%2e%2e/mod.rs", "none.js"] {
        assert_eq!(server.get(&format!("/page/{file}")).status, 404, "{file}");
    }
    let openapi = server.get("/api/openapi.json").ok().json();
    assert_eq!((&openapi["openapi"], openapi["paths"].as_object().unwrap().len()), (&json!("3.1.0"), 15));
    server.get("/api/nothing").is_error(404, "there is no such address");
    server.send("PUT", "/api/images", &[], b"x").is_error(405, "the method PUT is not possible here");
    assert_eq!(server.metric("prsmed_requests_total{method=\"GET\",route=\"/api/health\",status=\"200\"}"), 1.0);
    assert_eq!(server.metric("prsmed_requests_total{method=\"GET\",route=\"other\",status=\"404\"}"), 1.0);
    assert!(server.metric("process_resident_memory_bytes") > 1e7);
}

/// Every route of the description answers a request without a server error, with a body in the described form.
#[test]
fn every_described_route_exists() {
    let server = Server::start(&[]);
    let openapi = server.get("/api/openapi.json").ok().json();
    let mut count = 0;
    for (path, operations) in openapi["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys().filter(|key| *key != "parameters") {
            let url = path.replace("{image}", "none").replace("{answer}", "none");
            let answered =
                server.json(&method.to_uppercase(), &url, &json!({ "question": "q", "corrected_answer": "a" }));
            let described = &operations[method]["responses"][answered.status.to_string()];
            assert!(described.is_object(), "{method} {path}: {} is not described", answered.status);
            assert_ne!(answered.status, 405, "{method} {path}");
            if answered.status >= 400 {
                let value = answered.json();
                assert!(value["error"].is_string() && value["hint"].is_string(), "{value}");
                assert_ne!(value["error"], "there is no such address", "{method} {path}");
            }
            count += 1;
        }
    }
    assert_eq!(count, 20);
}
