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
