//! Pages in a headless Chromium. `scripts/check` runs these tests; `scripts/setup --checks` installs the browser.

mod driver;
mod report;
mod serve;
#[path = "../serve/support.rs"]
#[expect(dead_code, reason = "the tests of the server use more of it")]
mod server;
mod widths;

use driver::{Browser, key};

#[test]
#[ignore = "needs chromium"]
fn the_driver_opens_types_clicks_and_reads_errors() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let file = folder.path().join("a b.txt");
    std::fs::write(&file, "x").unwrap();
    std::fs::write(
        &page,
        "<!doctype html><title>t</title><input id=text><input id=file type=file>\
         <button onclick='this.textContent = document.getElementById(\"text\").value; throw new Error(\"wrong\")'>press</button>\
         <p id=dark>light</p><script>if (matchMedia('(prefers-color-scheme: dark)').matches) dark.textContent = 'dark'</script>",
    )
    .unwrap();
    let browser = Browser::start();
    browser.open_file(&page);
    assert!(browser.console_errors().is_empty());
    browser.type_text("#text", "hello");
    browser.type_text("#text", key::ESCAPE);
    browser.upload("#file", &[&file]);
    browser.type_text("button", key::ENTER);
    browser.wait_for("document.querySelector('button').textContent === 'hello'");
    assert_eq!(browser.eval("document.getElementById('file').files[0].name"), "a b.txt");
    let errors = browser.console_errors();
    assert!(errors.len() == 1 && errors[0].contains("wrong"), "{errors:?}");
    browser.clear("#text");
    browser.click("button");
    browser.wait_for("document.querySelector('button').textContent === ''");
    browser.prefer("dark");
    browser.open_file(&page);
    assert_eq!(browser.text("#dark"), "dark");
    browser.resize(500, 400);
    let shot = folder.path().join("shot.png");
    browser.screenshot(&shot);
    assert!(image::open(&shot).unwrap().width() > 300);
    drop(browser);
    let browser = Browser::without_scripts();
    browser.open_file(&page);
    browser.prefer("dark");
    assert_eq!(browser.text("#dark"), "light", "scripts of the page do not run");
}
