//! The page of `prsmed serve` on a phone, a tablet and a desktop: nothing is cut off, and axe finds no violation.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::driver::{Browser, key};
use super::server::{Server, image_file, volume_file};

/// Names of visible buttons and inputs that are outside of the window at the left or right, and the width of the page or
/// the list of answers if it is larger than its window. The page is never higher than its window: its parts scroll.
const CUT_OFF: &str = "(() => { const wide = document.documentElement.clientWidth; \
     const cut = [...document.querySelectorAll('button, input, select, textarea, label, h1')].filter(e => e.checkVisibility() && \
       !e.closest('.hidden')).filter(e => { const r = e.getBoundingClientRect(); \
       return r.width > 0 && (r.left < -1 || r.right > wide + 1); }).map(e => e.id || e.className || e.textContent); \
     if (document.documentElement.scrollWidth > wide) cut.push(`page of ${document.documentElement.scrollWidth}`); \
     const side = document.querySelector('aside'); if (side.scrollWidth > side.clientWidth) cut.push('aside'); \
     if (document.documentElement.scrollHeight > innerHeight) cut.push('height'); \
     return cut; })()";

/// The source of axe-core, if `scripts/setup --checks` has installed it.
fn axe() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools/pages/axe_playwright_python/axe.min.js");
    fs::read_to_string(&file)
        .unwrap_or_else(|error| panic!("{}: {error}; run `scripts/setup --checks`", file.display()))
}

/// Violations of accessibility rules, with the elements.
fn violations(browser: &Browser, axe: &str) -> String {
    browser.eval(&format!("(() => {{ window.violations = null; {axe}; axe.run().then(found => {{ window.violations = \
         found.violations.map(v => `${{v.id}}: ${{v.nodes.map(n => n.target.join(' ')).join(', ')}}`).join('\\n'); }}); \
         return true; }})()"));
    browser.wait_for("window.violations !== null");
    browser.eval("window.violations").as_str().expect("a text").to_owned()
}

fn ask(browser: &Browser, question: &str, cards: usize) {
    browser.type_text("#question", question);
    browser.type_text("#question", key::ENTER);
    browser.wait_for(&format!("document.querySelectorAll('.answer .actions:not([hidden])').length === {cards}"));
    browser.wait_for("!document.getElementById('send').disabled");
}

/// A window of so many pixels: a phone has a finger instead of a mouse.
fn show(browser: &Browser, width: u32, scheme: &str) {
    let is_phone = width < 600;
    let size = json!({ "width": width, "height": 844, "deviceScaleFactor": 1, "mobile": is_phone });
    browser.devtools("Emulation.setDeviceMetricsOverride", &size);
    browser.devtools("Emulation.setTouchEmulationEnabled", &json!({ "enabled": is_phone }));
    browser.prefer(scheme);
}

#[test]
#[ignore = "needs chromium"]
fn the_page_fits_every_window_and_axe_finds_no_violation() {
    let folder = std::env::var_os("PRSMED_SCREENSHOTS").map(PathBuf::from);
    let axe = axe();
    let server = Server::start(&["--max-new-tokens", "4"]);
    let browser = Browser::start();
    browser.open(&format!("http://{}/", server.address));
    browser.wait_for("document.getElementById('model').textContent.includes('brain_MRI')");
    let long =
        "Where is the lesion, how large is it compared with the whole organ, and is there a second one? ".repeat(6);
    let check = |state: &str| {
        for (width, scheme) in [(390, "light"), (768, "dark"), (1280, "light"), (390, "dark"), (1280, "dark")] {
            show(&browser, width, scheme);
            if let Some(folder) = &folder {
                browser.screenshot(&folder.join(format!("serve-{state}-{width}-{scheme}.png")));
            }
            assert_eq!(browser.eval(CUT_OFF), json!([]), "{state}, {width} pixels, {scheme}");
            assert_eq!(violations(&browser, &axe), "", "{state}, {width} pixels, {scheme}");
        }
        show(&browser, 1280, "light");
    };
    check("empty");
    browser.upload("#file", &[&image_file()]);
    browser.wait_for("!document.getElementById('question').disabled");
    ask(&browser, "Where is the lesion?", 1);
    ask(&browser, &long, 2);
    check("answers");
    browser.click(".answer:last-child .correct");
    check("correction");
    browser.click("#cancel");
    browser.click("#help-open");
    check("help");
    browser.click("#help .primary");
    browser.upload("#file", &[&volume_file("widths.nii.gz", 4)]);
    browser.wait_for("!document.getElementById('volume').hidden");
    browser.click("#all-slices");
    check("volume");
}
