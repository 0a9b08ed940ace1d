//! Runs whose classes have different intensity windows: the question decides the window, or the client is asked.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Server, image_file, run_of_two_windows};

#[test]
fn the_question_decides_the_window_or_the_server_asks() {
    let server = Server::start_run(&run_of_two_windows("two-windows"), &[], &[]);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/axial.zip");
    let id = server.upload(&file);
    let image = server.get(&format!("/api/images/{id}")).ok().json();
    let windows: Vec<&Value> = image["window_choices"].as_array().unwrap().iter().map(|one| &one["window"]).collect();
    assert_eq!((&image["window"], windows), (&json!("soft-tissue"), vec![&json!("lung"), &json!("bone")]), "{image}");

    let url = format!("/api/images/{id}/questions");
    for question in [json!({ "question": "Is it malignant?" }), json!({ "question": "Is it malignant?", "volume": {} })]
    {
        let refused = server.json("POST", &url, &question);
        refused.is_error(
            422,
            "the question may be about classes whose training images have different windows: `lung` for",
        );
        let hint = refused.json()["hint"].as_str().unwrap().to_owned();
        assert_eq!(hint, "send `window`, or choose it in the menu Window of the page");
    }
    let ask = |question: Value| server.ask(&id, &question).pop().unwrap().1;
    let decided = ask(json!({ "question": "Where is the nodule?", "max_new_tokens": 1 }));
    let chosen = ask(json!({ "question": "Where is the nodule?", "max_new_tokens": 1, "window": "lung" }));
    for (answer, name) in [(&decided, "decided"), (&chosen, "chosen")] {
        assert_eq!((&answer["window"], &answer["view_differs"]), (&json!("lung"), &Value::Null), "{name}");
    }
    for key in ["answer", "class", "area_frac", "confidence", "image_distance"] {
        assert_eq!(decided[key], chosen[key], "{key}");
    }
    let whole = ask(json!({ "question": "Where is the nodule?", "volume": {} }));
    assert_eq!((&whole["settings"]["window"], &whole["view_differs"]), (&json!("lung"), &Value::Null), "{whole}");

    let other = ask(json!({ "question": "Where is the nodule?", "max_new_tokens": 1, "window": "brain" }));
    let expected = "axial slices with the window `brain`, and the training had axial slices with the window `lung` for";
    assert!(other["view_differs"].as_str().unwrap().starts_with(expected), "{other}");
    // either window is one of the training for a question that it does not have
    let open = ask(json!({ "question": "Is it malignant?", "max_new_tokens": 1, "window": "bone" }));
    assert_eq!((&open["window"], &open["view_differs"]), (&json!("bone"), &Value::Null));

    let id = server.upload(&image_file());
    assert_eq!(server.get(&format!("/api/images/{id}")).ok().json()["window_choices"], json!([]));
    let answer = server.result(&id, "Is it malignant?", 1);
    assert_eq!((&answer["window"], &answer["view_differs"]), (&Value::Null, &Value::Null));
}
