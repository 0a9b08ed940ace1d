//! The reports of `eval` and `train` in a browser, from real runs on phantoms with hostile texts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::driver::{Browser, key};

/// A question that would run as a script if a page did not escape it.
const HOSTILE: &str =
    "<script>document.title = 'hacked'</script><img src=x onerror=\"document.title = 'hacked'\"> Where?";

/// A scored run, its comparison with another one, a training, and generated pairs.
const PAGES: [&str; 4] = ["compared/run/report.html", "compared/report.html", "run/report.html", "pairs/report.html"];

/// The folder of these tests.
fn home() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser-report")
}

fn prsmed(arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
    let output = command.current_dir(home()).env("OMP_NUM_THREADS", "1").args(arguments).output().expect("it starts");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Adds patients, pixel spacing and absent targets to the phantoms, and hostile texts to some rows.
fn extend(annotations: &Path) {
    let mut number = 0;
    let mut files: Vec<PathBuf> =
        fs::read_dir(annotations).expect("annotations").map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    for file in files {
        let mut reader = csv::Reader::from_path(&file).expect("a table");
        let mut header = reader.headers().expect("a header").clone();
        let column = |name: &str| header.iter().position(|found| found == name).expect("a column");
        let (question, mask) = (column("question"), column("image_path"));
        let records: Vec<csv::StringRecord> = reader.records().map(|record| record.expect("a row")).collect();
        let mut writer = csv::Writer::from_path(&file).expect("a table");
        for name in ["patient", "present", "spacing_x_mm", "spacing_y_mm"] {
            header.push_field(name);
        }
        writer.write_record(&header).expect("a line");
        for record in records {
            let mut cells: Vec<String> = record.iter().map(str::to_owned).collect();
            if number % 4 == 0 {
                cells[question] = format!("{HOSTILE} {number}");
            }
            let patient = format!("patient {}", number / 2);
            cells.extend([patient, "1".into(), "0.5".into(), "0.75".into()]);
            writer.write_record(&cells).expect("a line");
            if number % 3 == 0 {
                let last = cells.len();
                // an absent target in the same image; the file of its mask is missing
                cells[mask] = cells[mask].replace(".png", "_Segmentation.png");
                cells[question] = "Is there a second lesion?".into();
                cells[last - 3] = "0".into();
                writer.write_record(&cells).expect("a line");
            }
            number += 1;
        }
        writer.flush().expect("written");
    }
}

/// A folder with the reports of two runs and of their comparison, and that of a training.
fn reports() -> &'static Path {
    static REPORTS: OnceLock<PathBuf> = OnceLock::new();
    REPORTS.get_or_init(|| {
        let home = home();
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).expect("a folder");
        prsmed(&["data", "phantom", "--count", "16", "--image-size", "96", "--seed", "3", "data"]);
        prsmed(&[
            "train",
            "--preset",
            "tiny",
            "--data-root",
            "data",
            "--out",
            "run",
            "--set",
            "model.image_size=64",
            "--set",
            "train.micro_batch=2",
            "--set",
            "train.max_steps=6",
        ]);
        extend(&home.join("data/annotations"));
        prsmed(&[
            "eval", "run", "run/last", "--data-root", "data", "--split", "train", "--max-new-tokens", "4", "--out",
            "compared",
        ]);
        prsmed(&[
            "augment", "generate", "--preset", "tiny", "--data-root", "data", "--out", "pairs", "--per-image", "1",
        ]);
        home
    })
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
#[ignore = "needs chromium"]
fn layers_of_cases_can_be_toggled() {
    let browser = Browser::start();
    browser.open_file(&reports().join("compared/run/report.html"));
    let visible =
        |layer: &str| browser.eval(&format!("getComputedStyle(document.querySelector('.layer-{layer}')).visibility"));
    for layer in ["image", "prediction", "truth"] {
        assert_eq!(visible(layer), "visible");
        browser.click(&format!("#show-{layer}"));
        assert_eq!(visible(layer), "hidden");
        browser.type_text(&format!("#show-{layer}"), key::SPACE);
        assert_eq!(visible(layer), "visible", "with the keyboard too");
    }
    let sizes = "[...document.images].every((image) => image.complete && image.naturalWidth > 0)";
    assert_eq!(browser.eval(sizes), true, "every image can be decoded");
    let outside = "performance.getEntriesByType('resource').filter((entry) => !entry.name.startsWith('data:')).length";
    assert_eq!(browser.eval(outside), 0, "the page loads nothing");
    assert_eq!(browser.console_errors(), [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn the_table_of_questions_is_sorted_and_filtered() {
    let browser = Browser::start();
    browser.open_file(&reports().join("compared/run/report.html"));
    let column =
        "[...document.querySelectorAll('#questions-table tbody tr')].map((row) => row.children[4].dataset.sort)";
    let keys = || -> Vec<f64> {
        let cells = browser.eval(column);
        let cells: Vec<&str> = cells.as_array().expect("cells").iter().filter_map(Value::as_str).collect();
        let first_empty = cells.iter().position(|cell| cell.is_empty()).unwrap_or(cells.len());
        assert!(cells[first_empty..].iter().all(|cell| cell.is_empty()), "empty cells are last: {cells:?}");
        cells[..first_empty].iter().map(|cell| cell.parse().expect("a number")).collect()
    };
    let header = "#questions-table th:nth-child(5) button";
    browser.click(header);
    assert!(keys().is_sorted() && keys().len() > 8, "{:?}", keys());
    browser.type_text(header, key::ENTER);
    assert!(keys().iter().rev().is_sorted());
    assert_eq!(browser.eval("document.querySelector('#questions-table th:nth-child(5)').ariaSort"), "descending");
    let shown = || {
        number(
            &browser
                .eval("[...document.querySelectorAll('#questions-table tbody tr')].filter((r) => !r.hidden).length"),
        )
    };
    let all = shown();
    browser.type_text("#filter-text", "second LESION");
    let absent = shown();
    assert!(absent > 2.0 && absent < all, "{absent} of {all}");
    assert_eq!(browser.text(".filters output"), format!("{absent} of {all} questions"));
    browser.eval("document.querySelector('select[name=target]').value = 'present'");
    browser.type_text("#filter-text", " ");
    assert_eq!(shown(), 0.0, "no present target has that question");
    browser.clear("#filter-text");
    browser.type_text("#filter-text", " ");
    assert_eq!(shown(), all - absent);
    assert_eq!(browser.console_errors(), [""; 0]);
}

#[test]
#[ignore = "needs chromium"]
fn hostile_texts_are_shown_as_text() {
    for page in PAGES {
        let browser = Browser::start();
        browser.open_file(&reports().join(page));
        assert_ne!(browser.eval("document.title"), "hacked", "{page}");
        assert_eq!(browser.eval("document.querySelectorAll('img[onerror]').length"), 0);
        assert_eq!(browser.eval("document.scripts.length"), 1);
        if page.contains("run/") && page.contains("compared") {
            let text = browser.eval("document.querySelector('#questions-table').textContent");
            assert!(text.as_str().expect("a text").contains(HOSTILE));
        }
        assert_eq!(browser.console_errors(), [""; 0], "{page}");
    }
}

#[test]
#[ignore = "needs chromium"]
fn reports_can_be_read_without_javascript() {
    let browser = Browser::without_scripts();
    browser.open_file(&reports().join("compared/run/report.html"));
    for (selector, part) in [
        ("#summary", "Dice"),
        ("#scores table", "Surface Dice"),
        ("#classes table", "brain"),
        ("#questions-table", "second lesion"),
        ("#run table", "libtorch"),
    ] {
        assert!(browser.text(selector).contains(part), "{selector}");
    }
    // filters need a script; toggles do not
    assert_eq!(browser.text(".filters"), "");
    browser.click("#show-truth");
    browser.open_file(&reports().join("compared/report.html"));
    assert!(browser.text("table").contains("Dice"));
    browser.click("main a");
    assert!(browser.text("h1").starts_with("Evaluation of run"));
    browser.open_file(&reports().join("run/report.html"));
    assert!(browser.text("#curves").contains("Training loss"));
    browser.open_file(&reports().join("pairs/report.html"));
    assert!(browser.text("#tests").contains("Jump of the brightness"));
    assert!(browser.text("#pairs").contains("Where?"), "a hostile question is a text");
}

#[test]
#[ignore = "needs chromium"]
fn pages_are_accessible_and_fit_the_window() {
    let browser = Browser::start();
    let folder = std::env::var_os("PRSMED_SCREENSHOTS").map_or_else(|| home().join("screenshots"), PathBuf::from);
    fs::create_dir_all(&folder).expect("a folder");
    for page in PAGES {
        for scheme in ["light", "dark"] {
            browser.prefer(scheme);
            browser.resize(1280, 900);
            browser.open_file(&reports().join(page));
            browser.screenshot(&folder.join(format!("{}-{scheme}.png", page.replace('/', "-"))));
            assert!(number(&browser.eval(CONTRAST)) >= 4.5, "{page}, {scheme}: {}", browser.eval(CONTRAST));
            browser.resize(420, 800);
            let overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
            assert!(number(&browser.eval(overflow)) <= 0.0, "{page} is wider than a small window");
        }
        for (what, wrong) in ACCESSIBLE {
            assert_eq!(browser.eval(wrong), 0, "{page}: {what}");
        }
    }
    assert_eq!(browser.console_errors(), [""; 0]);
}

/// The number of elements that break a rule.
const ACCESSIBLE: [(&str, &str); 6] = [
    ("one heading of level 1", "Math.abs(document.querySelectorAll('h1').length - 1)"),
    (
        "no level of headings is skipped",
        "[...document.querySelectorAll('h1,h2,h3')].filter((h, i, all) => i > 0 && Number(h.tagName[1]) > Number(all[i - \
         1].tagName[1]) + 1).length",
    ),
    ("tables have captions", "document.querySelectorAll('table:not(:has(caption))').length"),
    (
        "images have a description",
        "document.querySelectorAll('img:not([alt]), svg:not([aria-label]):not([aria-hidden])').length",
    ),
    ("headers have a scope", "document.querySelectorAll('th:not([scope])').length"),
    (
        "inputs have labels",
        "[...document.querySelectorAll('input, select')].filter((i) => i.labels.length === 0).length",
    ),
];

/// The lowest contrast of text and background (WCAG 2) over the visible texts of the page.
const CONTRAST: &str = "(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let lowest = 21;
  for (const element of document.querySelectorAll('h1, h2, h3, p, th, td, td small, caption, li, figcaption, a, button, summary, .value')) {
    if (!element.checkVisibility() || element.textContent.trim() === '' || element.className === 'skip') continue;
    let behind = element;
    while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const back = light(parse(getComputedStyle(behind || document.body).backgroundColor));
    const front = light(parse(getComputedStyle(element).color));
    lowest = Math.min(lowest, (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05));
  }
  return lowest;
})()";
