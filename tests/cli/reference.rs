//! `docs/reference/` is what the code says.

use std::fs;
use std::path::Path;

use crate::support::{done, path, prsmed};

#[test]
fn the_reference_is_not_stale() {
    let written = path("reference");
    done(prsmed().arg("reference").arg(&written));
    for name in ["settings.md", "commands.md"] {
        let generated = fs::read_to_string(written.join(name)).unwrap();
        let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference").join(name);
        let committed = fs::read_to_string(committed).unwrap_or_default();
        assert!(committed == generated, "docs/reference/{name} is stale: run `scripts/reference`");
        assert!(generated.lines().all(|line| line.chars().count() <= 120), "{name} has a line over 120 columns");
    }
}

/// Every flag and setting is one more thing to read: raising a limit here is a decision, not an accident.
#[test]
fn flags_and_settings_stay_few() {
    let read = |name: &str| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference").join(name);
        fs::read_to_string(file).unwrap()
    };
    let (commands, settings) = (read("commands.md"), read("settings.md"));
    let is_own = |line: &&str| {
        let line = line.trim_start();
        let flag = line.find("--").filter(|&start| start == 0 || (line.starts_with('-') && start == 4));
        flag.is_some_and(|start| {
            !["--json", "--quiet", "--help"].iter().any(|shared| line[start..].starts_with(shared))
        })
    };
    let flags = commands.lines().filter(|line| line.starts_with("  ")).filter(is_own).count();
    let titles = commands.lines().filter(|line| line.trim_start_matches('#').starts_with(" prsmed")).count();
    let declared = settings.lines().filter(|line| line.starts_with("### `")).count();
    assert!(flags > 200 && titles > 20 && declared > 100, "{flags} {titles} {declared}: the files have another form");
    assert!(titles <= 27, "{titles} commands");
    assert!(flags <= 266, "{flags} flags");
    assert!(declared <= 120, "{declared} settings");
}
