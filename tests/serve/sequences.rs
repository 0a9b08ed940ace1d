//! Images of several sequences: a field for each, volumes and flat images.

use std::fs;

use serde_json::json;

use crate::support::{Server, home, run_with, volume_file};

/// A form of files and texts by the names of their fields.
fn form(fields: &[(&str, &[u8], bool)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, content, is_file) in fields {
        let file = if *is_file { "; filename=\"a\"" } else { "" };
        body.extend(format!("--xx\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n").bytes());
        body.extend(*content);
        body.extend(b"\r\n");
    }
    body.extend(b"--xx--\r\n");
    body
}

#[test]
fn each_sequence_has_a_field_and_the_answers_say_their_names() {
    let run = run_with("run-of-sequences", |intensity| {
        let sequences =
            [("T1", "0..255"), ("FLAIR", "0..100")].map(|(name, window)| json!({ "name": name, "window": window }));
        *intensity = json!({ "axis": "axial", "window": "0..255", "sequences": sequences });
    });
    let server = Server::start_run(&run, &[], &[]);
    assert_eq!(server.get("/api/model").ok().json()["sequences"], json!(["T1", "FLAIR"]));
    let file = fs::read(volume_file("sequence.nii.gz", 3)).unwrap();
    let send = |fields: &[(&str, &[u8], bool)]| {
        server.send("POST", "/api/images", &[("Content-Type", "multipart/form-data; boundary=xx")], &form(fields))
    };
    let image = send(&[("image.FLAIR", &file, true), ("image.T1", &file, true)]).ok().json();
    server.check_described("Image", &image);
    assert_eq!((&image["sequences"][1]["name"], &image["window"]), (&json!("FLAIR"), &json!(null)));
    let id = image["id"].as_str().unwrap();
    let pixel = |id: &str| {
        let bytes = server.get(&format!("/api/images/{id}/pixels?slice=1")).ok().bytes;
        image::load_from_memory(&bytes).expect("an image").into_rgb8().get_pixel(0, 0).0
    };
    // 20 of 255 and of 100
    assert_eq!(pixel(id), [20, 51, 0]);
    let result = server.result(id, "Where is the lesion?", 2);
    assert_eq!(result["slice"], 0);
    let events = server.ask(id, &json!({ "question": "Where is the lesion?", "volume": {} }));
    assert_eq!(events.last().unwrap().0, "result", "{events:?}");
    // one that is missing is said, and is 0
    let image = send(&[("image.T1", b"none", false), ("image.FLAIR", &file, true)]).ok().json();
    assert!(image["notes"].to_string().contains("missing: T1"), "{}", image["notes"]);
    assert_eq!(pixel(image["id"].as_str().unwrap()), [0, 51, 0]);
    // flat images
    let png = home().join("sequence.png");
    image::GrayImage::from_pixel(9, 7, image::Luma([77])).save(&png).unwrap();
    let png = fs::read(png).unwrap();
    let image = send(&[("image.T1", &png, true), ("image.FLAIR", &png, true)]).ok().json();
    assert_eq!(pixel_of_flat(&server, image["id"].as_str().unwrap()), [77, 77, 0]);

    let other = fs::read(volume_file("other-sequence.nii.gz", 4)).unwrap();
    for (fields, expected) in [
        (vec![("image.T1", &file[..], true)], "no field `image.FLAIR`"),
        (vec![("image.T1", &file, true), ("image.T2", &file, true)], "`image.T2` is no sequence of this run"),
        (vec![("image.T1", &file, true), ("image.T1", &file, true)], "`image.T1` several times"),
        (vec![("image.T1", b"none", false), ("image.FLAIR", b"none", false)], "all sequences are missing"),
        (vec![("image.T1", &file, true), ("image.FLAIR", b"/etc/passwd", false)], "is a text and no file"),
        (
            vec![("image.T1", &file, true), ("image.FLAIR", &other, true)],
            "image.FLAIR: its grid is not that of `image.T1`",
        ),
        (vec![("image.T1", &file, true), ("image.FLAIR", b"text", true)], "image.FLAIR: "),
        (vec![("image.T1", &png, true), ("image.FLAIR", &file, true)], "image.FLAIR"),
    ] {
        send(&fields).is_error(422, expected);
    }
    let one = server.send("POST", "/api/images", &[], &file);
    one.is_error(422, "one file does not say which sequence it is");
    let hint = one.json()["hint"].as_str().unwrap().to_owned();
    assert!(hint.contains("-F 'image.T1=@FILE' -F 'image.FLAIR=@FILE'"), "{hint}");
}

fn pixel_of_flat(server: &Server, id: &str) -> [u8; 3] {
    let bytes = server.get(&format!("/api/images/{id}/pixels")).ok().bytes;
    image::load_from_memory(&bytes).expect("an image").into_rgb8().get_pixel(0, 0).0
}
