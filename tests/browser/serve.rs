//! The page of `prsmed serve`: upload, two questions, two masks, brush, keyboard, download, errors.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::driver::{Browser, key};
use super::server::{Server, done, home, image_file, reads_masks, run_of_two_windows, run_with, trained, volume_file};

/// Number of pixels of the canvas that have a colour; images of the tests are grey.
const COLOURED: &str = "(() => { const c = document.getElementById('view'); \
     const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0; \
     for (let i = 0; i < d.length; i += 4) if (Math.abs(d[i] - d[i + 2]) > 40) n++; return n; })()";

fn open(server: &Server) -> Browser {
    let browser = Browser::start();
    browser.resize(1366, 768);
    browser.open(&format!("http://{}/", server.address));
    browser.wait_for("document.getElementById('model').textContent.includes('brain_MRI')");
    browser
}

fn ask(browser: &Browser, question: &str, cards: usize) {
    browser.type_text("#question", question);
    browser.type_text("#question", key::ENTER);
    browser.wait_for(&format!("document.querySelectorAll('.answer .actions:not([hidden])').length === {cards}"));
    browser.wait_for("!document.getElementById('send').disabled");
}

#[test]
#[ignore = "needs chromium"]
fn an_image_is_opened_asked_about_corrected_and_downloaded() {
    let sample = image_file();
    let server = Server::start(&["--max-new-tokens", "6", "--sample", sample.to_str().unwrap()]);
    let browser = open(&server);
    browser.click("#try-sample");
    browser.wait_for("!document.getElementById('question').disabled");
    assert_eq!(browser.eval("document.activeElement.id"), "question");
    ask(&browser, "Where is the lesion?", 1);
    ask(&browser, "Is there a lesion?", 2);
    assert_eq!(browser.eval("document.querySelectorAll('.answer .shown:checked').length"), 2);
    assert!(browser.text(".answer .facts").contains("Presence"));
    browser.eval("document.activeElement.blur()");

    // the brush on the first question, with the keyboard alone
    browser.click(".answer:last-child .correct");
    assert_eq!(browser.eval("document.activeElement.id"), "view");
    let before = browser.eval(COLOURED).as_u64().unwrap();
    browser.type_text("#view", "a");
    for _ in 0..3 {
        browser.type_text("#view", key::SPACE);
    }
    browser.wait_for("!document.getElementById('undo').disabled");
    browser.wait_for(&format!("{COLOURED} >= {before}"));
    browser.click("#save");
    browser.wait_for("document.querySelector('.answer:last-child .facts').textContent.includes('Area (corrected)')");
    let shown = server.metric(
        "prsmed_requests_total{method=\"PUT\",route=\"/api/images/{image}/answers/{answer}/mask\",status=\"200\"}",
    );
    assert_eq!(shown, 1.0);

    // every mask can be hidden
    browser.type_text("#view", "12");
    browser.wait_for(&format!("{COLOURED} === 0"));
    browser.type_text("#view", "12");

    let folder = downloads(&browser, "pairs");
    browser.click("#pairs");
    let file = folder.join("prsmed-pairs.zip");
    wait_for_file(&file);
    let zip = zip::ZipArchive::new(std::fs::File::open(file).unwrap()).unwrap();
    assert_eq!(zip.len(), 5);
    // the tests read the canvas, the page does not
    let mut errors = browser.console_errors();
    errors.retain(|error| !error.contains("willReadFrequently"));
    assert_eq!(errors, [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn a_question_unlike_those_of_the_training_is_not_green() {
    let server = Server::start(&["--max-new-tokens", "4"]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    // a question of the training, by its button
    let example = browser.text("#examples button");
    browser.click("#examples button");
    assert_eq!(browser.eval("document.getElementById('question').value"), example.as_str());
    browser.type_text("#question", key::ENTER);
    browser.wait_for("document.querySelectorAll('.answer .actions:not([hidden])').length === 1");
    let styled = |style: &str| format!("document.querySelectorAll('.answer .facts .{style}').length");
    let found = |browser: &Browser| browser.eval(&format!("{} + {}", styled("yes"), styled("no")));
    assert_eq!(found(&browser), 1);
    assert_eq!(browser.eval("document.querySelector('.answer .unlike').hidden"), true);
    ask(&browser, "Is it malignant?", 2);
    assert_eq!(found(&browser), 1, "only the first answer has a style");
    let warning = browser.eval("[...document.querySelectorAll('.answer .unlike')].map(p => p.innerText).join('')");
    let warning = warning.as_str().unwrap();
    assert!(warning.contains("unlike those of the training (no training question has: "), "{warning}");
    assert!(warning.contains("malignant") && warning.contains("The nearest training question is: "), "{warning}");
    // a question of the training about a photograph
    let photograph = home().join("photograph.png");
    let mut image = image::open(image_file()).expect("an image").to_rgb8();
    image.pixels_mut().for_each(|pixel| pixel.0[2] /= 2);
    image.save(&photograph).expect("written");
    browser.upload("#file", &[&photograph]);
    browser.wait_for("document.querySelectorAll('.answer').length === 0");
    ask(&browser, &example, 1);
    assert_eq!(found(&browser), 0);
    assert_eq!(
        browser.text(".answer .unlike"),
        "This image looks unlike those of the training (most of all its colours). Do not rely on the answer and the mask."
    );
}

/// The text and the note of the answer that is corrected.
const TEXT: &str = "document.querySelector('.editing textarea').value";
const NOTE: &str = "document.querySelector('.editing .words-note').textContent";

#[test]
#[ignore = "needs chromium"]
fn words_follow_a_corrected_mask_unless_the_user_typed_them() {
    let server = Server::start_run(reads_masks(), &["--max-new-tokens", "24"], &[]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    ask(&browser, "Where is the lesion?", 1);
    browser.eval("document.activeElement.blur()");
    browser.click(".answer .correct");
    let first = browser.eval(TEXT);
    let set = |value: u32| {
        let size = "document.getElementById('brush-size')";
        browser.eval(&format!("({size}.value = {value}, {size}.dispatchEvent(new Event('input')))"));
    };
    let is = |what: &str, text: &serde_json::Value| browser.wait_for(&format!("{what} === {text}"));
    let note = |start: &str| browser.wait_for(&format!("{NOTE}.startsWith('{start}')"));
    note("The model writes this text anew");

    // erase all, in rows
    let side = browser.eval("document.getElementById('view').clientHeight").as_i64().unwrap();
    let place = |x: i64, y: i64| [side * x / 100, side * y / 100];
    let rows: Vec<[i64; 2]> =
        (-45..=45).step_by(10).flat_map(|y| [place(-49, y), place(49, y), place(-49, y)]).collect();
    set(100);
    browser.type_text("#view", "x");
    browser.draw("#view", &rows);
    note("The mask is empty");
    is(TEXT, &first);
    // paint in a corner
    browser.type_text("#view", "a");
    browser.draw("#view", &[place(30, 30), place(40, 30), place(40, 40)]);
    browser.wait_for(&format!("{TEXT} !== {first}"));
    note("The model writes this text anew");
    let words = browser.eval(TEXT);
    browser.click("#save");
    browser.wait_for("document.getElementById('correction').hidden");
    is("document.querySelector('.answer .text').textContent", &words);

    // text of the user stays, unless the button is clicked
    browser.click(".answer .correct");
    is(TEXT, &words);
    browser.type_text(".editing textarea", " Mine.");
    note("This is your text");
    let mine = browser.eval(TEXT);
    browser.draw("#view", &[place(-40, -40), place(-30, -40)]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    is(TEXT, &mine);
    browser.click(".editing .write");
    note("The model writes this text anew");
    assert_ne!(browser.eval(TEXT), mine);
    // the model's mask comes back with the model's words
    browser.click("#restore");
    browser.wait_for("document.getElementById('correction').hidden");
    is("document.querySelector('.answer .text').textContent", &first);
    let mut errors = browser.console_errors();
    errors.retain(|error| !error.contains("willReadFrequently"));
    assert_eq!(errors, [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn an_answer_to_a_mask_that_a_program_sent_has_no_confidence() {
    let server = Server::start_run(reads_masks(), &["--max-new-tokens", "24"], &[]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    ask(&browser, "Where is the lesion?", 1);
    let sent = browser.eval(
        "(async () => { const image = `api/images/${sessionStorage.getItem('prsmed-image')}`; \
         const { answers } = await (await fetch(image)).json(); const form = new FormData(); \
         form.set('question', 'Where is the lesion?'); \
         form.set('mask', await (await fetch(`${image}/answers/${answers[0].id}/mask`)).blob(), 'mask.png'); \
         return (await fetch(`${image}/questions`, { method: 'POST', body: form })).text(); })()",
    );
    assert!(sent.as_str().unwrap().contains("\"mask_given\":true"), "{sent}");
    browser.eval("location.reload()");
    browser.wait_for("document.querySelectorAll('.answer .actions:not([hidden])').length === 2");
    let facts = |card: &str| browser.text(&format!(".answer:{card}-child .facts"));
    assert!(facts("last").contains("Presence") && facts("last").contains("Mean probability"), "{}", facts("last"));
    assert!(!facts("first").contains("Presence") && !facts("first").contains("Mean probability"), "{}", facts("first"));
    assert!(facts("first").contains("Area"), "{}", facts("first"));
    assert_eq!(browser.console_errors(), [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn the_mask_is_shown_before_the_words() {
    let server = Server::start(&["--max-new-tokens", "200"]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    // the facts of the card at each change, and whether the answer is not complete
    browser.eval(
        "(window.seen = [], new MutationObserver(() => { const part = (name) => document.querySelector('.answer ' + name); \
         seen.push([part('.facts').textContent, part('.actions').hidden]); })\
         .observe(document.getElementById('answers'), { childList: true, subtree: true, characterData: true }))",
    );
    ask(&browser, "Where?", 1);
    let early = "seen.some(([facts, isOpen]) => isOpen && facts.startsWith('Position of the mask'))";
    assert_eq!(browser.eval(early), true, "{}", browser.eval("seen"));
    browser.wait_for(&format!("{COLOURED} > 0"));
    // no text follows a mask of this run
    browser.click(".answer .correct");
    assert_eq!(browser.eval("document.querySelector('.editing .write').hidden"), true);
    assert!(browser.text(".editing .words-note").starts_with("The brush changes the mask and not this text."));
}

/// A copy of the run as an earlier version wrote it: without the questions of its training.
fn run_without_questions() -> PathBuf {
    let run = home().join("run-without-questions");
    done(Command::new("cp").arg("-r").arg(trained()).arg(&run));
    for folder in ["best", "last"].map(|name| run.join(name)) {
        std::fs::remove_file(folder.join("questions.json")).expect("questions");
        let file = folder.join("checksums.json");
        let mut sums: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).expect("read")).expect("JSON");
        sums["files"].as_object_mut().expect("an object").remove("questions.json").expect("a checksum");
        std::fs::write(file, sums.to_string()).expect("written");
    }
    run
}

#[test]
#[ignore = "needs chromium"]
fn no_question_is_green_if_those_of_the_training_are_not_known() {
    let server = Server::start_run(&run_without_questions(), &["--max-new-tokens", "4"], &[]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    ask(&browser, "Where is the lesion?", 1);
    assert!(browser.text(".answer .facts").contains("Presence"));
    assert_eq!(browser.eval("document.querySelectorAll('.answer .facts .yes, .answer .facts .no').length"), 0);
    assert_eq!(
        browser.text(".answer .unlike"),
        "The questions of the training are not known. The page cannot say whether this question is like those of the \
         training."
    );
}

#[test]
#[ignore = "needs chromium"]
fn the_window_of_a_volume_is_that_of_the_question_or_is_chosen() {
    let server = Server::start_run(&run_of_two_windows("two-windows"), &["--max-new-tokens", "2"], &[]);
    let browser = open(&server);
    browser.upload("#file", &[&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/axial.zip")]);
    browser.wait_for("!document.getElementById('question').disabled");
    let window = "document.getElementById('window-preset').value";
    assert_eq!(browser.eval(window), "by the question");
    let note = browser.text("#window-note");
    assert!(note.contains("have different windows: lung for ") && note.contains("choose the window"), "{note}");
    let width = "document.getElementById('window-width').placeholder";
    browser.wait_for(&format!("{width} === '400'"));
    // a question about one class
    ask(&browser, "Where is the nodule?", 1);
    browser.wait_for(&format!("{width} === '1500'"));
    assert_eq!(browser.eval(window), "by the question");
    // another one
    browser.type_text("#question", "Is it malignant?");
    browser.type_text("#question", key::ENTER);
    browser.wait_for("!document.getElementById('alert').hidden");
    assert!(browser.text("#alert").contains("different windows"), "{}", browser.text("#alert"));
    assert!(browser.text("#alert-hint").contains("in the menu Window"), "{}", browser.text("#alert-hint"));
    let choose = |name: &str| {
        browser.eval(&format!(
            "(menu => {{ menu.value = '{name}'; menu.dispatchEvent(new Event('change')); }})\
             (document.getElementById('window-preset'))"
        ))
    };
    choose("bone");
    browser.type_text("#question", key::ENTER);
    browser.wait_for("document.querySelectorAll('.answer .actions:not([hidden])').length === 2");
    assert!(!browser.text("#answers").contains("The model saw"), "{}", browser.text("#answers"));
    choose("brain");
    ask(&browser, "Where is the nodule?", 3);
    let warning = browser.text(".answer .unlike");
    let expected =
        "The model saw axial slices with the window `brain`, and the training had axial slices with the window `lung`";
    assert!(warning.starts_with(expected) && !warning.contains("This image looks"), "{warning}");
    assert_eq!(browser.eval("document.querySelectorAll('.answer:first-child .facts .yes').length"), 0);
}

/// A folder for the downloads of one test: the tests run beside each other, and their files have equal names.
fn downloads(browser: &Browser, test: &str) -> PathBuf {
    let folder = home().join("downloads").join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder for downloads");
    let parameters = serde_json::json!({ "behavior": "allow", "downloadPath": folder });
    browser.devtools("Browser.setDownloadBehavior", &parameters);
    folder
}

fn wait_for_file(file: &Path) {
    for _ in 0..200 {
        if file.is_file() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("`{}` was not downloaded", file.display());
}

#[test]
#[ignore = "needs chromium"]
fn errors_are_shown_with_what_to_do() {
    let server = Server::start(&[]);
    let browser = open(&server);
    let file = home().join("no-image.png");
    std::fs::write(&file, "text").unwrap();
    browser.upload("#file", &[&file]);
    browser.wait_for("!document.getElementById('alert').hidden");
    assert!(browser.text("#alert-text").contains("is not a PNG"), "{}", browser.text("#alert-text"));
    assert!(!browser.text("#alert-hint").is_empty());
    browser.click("#alert-close");
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    assert_eq!(browser.eval("document.getElementById('alert').hidden"), true);
}

#[test]
#[ignore = "needs chromium"]
fn the_page_asks_for_the_token() {
    let server = Server::start(&["--token", "correct-horse-battery"]);
    let browser = Browser::start();
    browser.open(&format!("http://{}/", server.address));
    browser.wait_for("document.getElementById('token').open");
    browser.type_text("#token-text", "correct-horse-battery");
    browser.type_text("#token-text", key::ENTER);
    browser.wait_for("document.getElementById('model').textContent.includes('brain_MRI')");
}

#[test]
#[ignore = "needs chromium"]
fn the_files_of_a_dicom_series_are_opened_shown_asked_about_and_downloaded() {
    let server = Server::start(&["--max-new-tokens", "4"]);
    let browser = open(&server);
    let series = home().join("series");
    let zip = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/axial.zip");
    let mut archive = zip::ZipArchive::new(std::fs::File::open(zip).unwrap()).unwrap();
    archive.extract(&series).unwrap();
    let files = ["sub/2.dcm", "sub/0.dcm", "IM003", "IM001"].map(|name| series.join(name));
    browser.upload("#file", &files.each_ref().map(PathBuf::as_path));
    browser.wait_for("!document.getElementById('question').disabled");
    assert!(browser.text("#image-facts").contains("4 slices"));
    assert_eq!(browser.eval("document.getElementById('window-preset').value"), "soft-tissue");
    assert_eq!(browser.text("#slice-number"), "2 / 4");
    browser.eval(
        "(() => { const slice = document.getElementById('slice'); slice.value = 3; \
         slice.dispatchEvent(new Event('input')); const window = document.getElementById('window-preset'); \
         window.value = 'lung'; window.dispatchEvent(new Event('change')); })()",
    );
    browser.wait_for("document.getElementById('slice-number').textContent === '4 / 4'");
    // a click in another plane moves the slice; its slider moves the cross
    let painted = |canvas: &str| {
        browser.wait_for(&format!(
            "(() => {{ const c = document.getElementById('{canvas}'); return c.width > 0 && \
             new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer).some(v => v); }})()"
        ));
    };
    assert_eq!(browser.text("#plane-0-name"), "coronal");
    painted("plane-0");
    painted("plane-1");
    browser.click("#plane-0");
    // the middle is the border of two slices, and of two columns
    browser.wait_for("['2 / 4', '3 / 4'].includes(document.getElementById('slice-number').textContent)");
    assert!(["2", "3"].contains(&browser.eval("document.getElementById('plane-1-slice').value").as_str().unwrap()));
    browser.click("#planes-shown");
    assert_eq!(browser.eval("document.getElementById('planes').checkVisibility()"), false);
    browser.click("#planes-shown");
    go_to_slice(&browser, 4);
    ask(&browser, "Where is the lesion?", 1);
    let folder = downloads(&browser, "slice");
    for (button, name) in [("#nifti", "mask.nii.gz"), ("#seg", "mask.dcm")] {
        browser.click(button);
        wait_for_file(&folder.join(name));
    }
    let mask = prsmed::data::volume::labels::open(&folder.join("mask.nii.gz")).unwrap();
    assert_eq!(mask.grid.size, [6, 5, 4]);

    // a series with a missing slice is refused, and the page goes on
    let gap = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/gap.zip");
    browser.upload("#file", &[&gap]);
    browser.wait_for("!document.getElementById('alert').hidden");
    assert!(browser.text("#alert").contains("missing"), "{}", browser.text("#alert"));
    browser.click("#alert-close");
    ask(&browser, "Is there a lesion?", 2);
    let mut errors = browser.console_errors();
    errors.retain(|error| !error.contains("422") && !error.contains("willReadFrequently"));
    assert_eq!(errors, [""; 0]);
}

/// The slice of the slider, from 1, is shown.
fn go_to_slice(browser: &Browser, slice: usize) {
    browser.eval(&format!(
        "(() => {{ const slider = document.getElementById('slice'); slider.value = {}; \
         slider.dispatchEvent(new Event('input')); }})()",
        slice - 1
    ));
    browser.wait_for(&format!("document.getElementById('slice-number').textContent.startsWith('{slice} /')"));
}

#[test]
#[ignore = "needs chromium"]
fn a_question_about_all_slices_shows_its_progress_and_stops() {
    let server = Server::start(&[]);
    let browser = open(&server);
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    assert_eq!(browser.eval("document.getElementById('scope').hidden"), true, "an image has one slice");
    browser.upload("#file", &[&volume_file("long.nii.gz", 5000)]);
    browser.wait_for("!document.getElementById('scope').hidden");
    browser.wait_for("document.getElementById('image-facts').textContent.includes('5000 slices')");
    assert_eq!(browser.eval("document.getElementById('seg').hidden"), true, "a NIfTI file has no DICOM SEG");
    // with the keyboard alone
    browser.type_text("#view", "s");
    assert_eq!(browser.text("#question-label"), "Question about all slices");
    browser.type_text("#question", "Where is the lesion?");
    browser.type_text("#question", key::ENTER);
    browser.wait_for("document.getElementById('progress-bar').value >= 2");
    assert!(browser.text("#progress-text").ends_with("of 5000 slices"));
    browser.type_text("body", key::ESCAPE);
    browser.wait_for("document.getElementById('stop').hidden && document.getElementById('progress').hidden");
    assert_eq!(browser.eval("document.querySelectorAll('.answer').length"), 0);
    server.wait_for("prsmed_questions_total{outcome=\"left\"}", 1.0, std::time::Duration::from_secs(5));

    // the same question about some slices; a range that does not exist is an error with what to do
    browser.type_text("#all-first", "6000");
    browser.type_text("#question", key::ENTER);
    browser.wait_for("!document.getElementById('alert').hidden");
    assert!(browser.text("#alert").contains("has no slice"), "{}", browser.text("#alert"));
    browser.clear("#all-first");
    browser.type_text("#all-first", "11");
    browser.type_text("#all-last", "20");
    browser.type_text("#question", key::ENTER);
    browser.wait_for("document.querySelectorAll('.answer .actions:not([hidden])').length === 1");
    let text = browser.text(".answer .text");
    let starts = ["The target has a volume of ", "The mask is empty: "];
    assert!(starts.iter().any(|start| text.starts_with(start)) && text.contains("slices"), "{text}");
    let source = browser.text(".answer .source");
    let expected = "The axial slices from 11 to 20. A template wrote this text from the mask, not the model.";
    assert!(source.starts_with(expected), "{source}");
    let facts = browser.text(".answer .facts");
    assert!(facts.contains("of 10 slices") && facts.contains(" ml"), "{facts}");
    // all-slices answers come back when the page is loaded again
    browser.eval("location.reload()");
    browser.wait_for("document.querySelectorAll('.answer .actions:not([hidden])').length === 1");
    assert_eq!(browser.text(".answer .facts"), facts);
    let mut errors = browser.console_errors();
    errors.retain(|error| !error.contains("422") && !error.contains("willReadFrequently"));
    assert_eq!(errors, [""; 0]);
}

/// The files of the real DICOM series of `PRSMED_SHARED`.
fn real_series() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shared = std::env::var_os("PRSMED_SHARED").map_or_else(|| root.join("../shared"), PathBuf::from);
    let folder = shared.join("data/volumes/ct_dicom");
    let entries = std::fs::read_dir(&folder)
        .unwrap_or_else(|_| panic!("`{}` does not exist (set PRSMED_SHARED)", folder.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

#[test]
#[ignore = "needs chromium and the data of PRSMED_SHARED"]
fn shared_data_a_real_series_is_segmented_in_all_slices() {
    let server = Server::start(&[]);
    let browser = open(&server);
    let files = real_series();
    browser.upload("#file", &files.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    browser.wait_for("!document.getElementById('question').disabled");
    assert!(browser.text("#image-facts").contains("512 × 512"), "{}", browser.text("#image-facts"));
    assert!(browser.text("#image-facts").contains("20 slices"), "{}", browser.text("#image-facts"));
    assert_eq!(browser.eval("document.getElementById('window-preset').value"), "soft-tissue");
    assert_eq!(browser.text("#slice-number"), "10 / 20");
    go_to_slice(&browser, 12);
    browser.eval(
        "(() => { const window = document.getElementById('window-preset'); window.value = 'liver'; \
         window.dispatchEvent(new Event('change')); })()",
    );
    browser.click("#all-slices");
    browser.type_text("#all-first", "3");
    browser.type_text("#all-last", "18");
    browser.click("#all-largest");
    ask(&browser, "Where is the liver?", 1);
    let facts = browser.text(".answer .facts");
    assert!(facts.contains("of 16 slices") && facts.contains(" ml"), "{facts}");
    browser.click(".answer .go-to");
    browser.wait_for(&format!("{COLOURED} > 100"));
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        browser.screenshot(&home().join(format!("all-slices-{scheme}.png")));
    }
    // no mask outside of the slices
    go_to_slice(&browser, 1);
    browser.wait_for(&format!("{COLOURED} === 0"));
    let folder = downloads(&browser, "series");
    for (button, name) in [(".answer .get-nifti", "mask.nii.gz"), (".answer .get-seg", "mask.dcm")] {
        browser.click(button);
        let file = folder.join(name);
        wait_for_file(&file);
        let mask = prsmed::data::volume::labels::open(&file).expect("a mask");
        assert_eq!([mask.grid.size[0], mask.grid.size[1]], [512, 512], "{name}");
        assert!(mask.grid.size[2] <= 20 && mask.mask(1).contains(&1), "{name}");
    }
    let mut errors = browser.console_errors();
    errors.retain(|error| !error.contains("willReadFrequently"));
    assert_eq!(errors, [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn each_sequence_has_a_place_and_may_be_missing() {
    let run = run_with("run-of-sequences-on-the-page", |intensity| {
        let sequences = ["T1", "FLAIR"].map(|name| serde_json::json!({ "name": name, "window": "0..255" }));
        *intensity = serde_json::json!({ "axis": "axial", "window": "0..255", "sequences": sequences });
    });
    let server = Server::start_run(&run, &["--max-new-tokens", "2"], &[]);
    let browser = open(&server);
    browser.wait_for("document.querySelectorAll('.sequence').length === 2");
    browser.click("#choose");
    browser.wait_for("document.getElementById('sequences').open");
    assert!(browser.text(".sequence:first-child").contains("T1"));
    let volume = volume_file("t1-of-the-page.nii.gz", 3);
    browser.upload(".sequence:first-child input[type=file]", &[&volume]);
    assert_eq!(browser.eval("document.getElementById('sequences-open').disabled"), true, "FLAIR is not said");
    browser.click(".sequence:last-child input[type=checkbox]");
    browser.click("#sequences-open");
    browser.wait_for("!document.getElementById('question').disabled");
    assert!(
        browser.text("#image-facts").ends_with("3 slices, T1 red, FLAIR green"),
        "{}",
        browser.text("#image-facts")
    );
    ask(&browser, "Where is the lesion?", 1);
    assert_eq!(browser.console_errors(), Vec::<String>::new());
}
