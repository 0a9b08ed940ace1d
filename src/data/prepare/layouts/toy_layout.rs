//! A layout of tests, by a regular expression on paths: `P1/train/a.scan.png` and its mask of spots `P1/train/a.spot.png`.

use std::path::Path;

use regex::Regex;

use super::super::table::{FileLayout, Pair, PairTable};
use super::volumes::files_in;
use crate::manifest::Split;
use prsmed_base::Result;

pub(super) const TOY: FileLayout =
    FileLayout { knows: |options| options.images[0].join("toy").is_dir(), table: |options| table(&options.images[0]) };

fn table(root: &Path) -> Result<PairTable> {
    let scan = Regex::new(r"(?<patient>[^/]+)/(?<split>[^/]+)/(?<name>[^/]+)\.scan\.png$").expect("valid");
    let mut table = PairTable::default();
    for path in files_in(root, true)? {
        let Some(found) = scan.captures(path.to_str().unwrap_or_default()) else { continue };
        let mask = path.with_file_name(format!("{}.spot.png", &found["name"]));
        table.rows.push(Pair {
            masks: vec![(Some("spot".into()), mask.clone())],
            patient: Some(found["patient"].to_owned()),
            split: Split::ALL.into_iter().find(|split| split.name() == &found["split"]),
            ..Pair::new(&found["name"], &path, mask)
        });
    }
    Ok(table)
}
