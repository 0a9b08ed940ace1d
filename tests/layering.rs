//! Modules name modules of lower levels only, by the level table in `src/lib.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn levels() -> BTreeMap<String, u32> {
    let lib = fs::read_to_string("src/lib.rs").expect("src/lib.rs");
    lib.lines()
        .filter_map(|line| line.strip_prefix("//! | "))
        .filter_map(|row| row.split_once(" | "))
        .filter_map(|(level, modules)| Some((level.trim().parse::<u32>().ok()?, modules)))
        .flat_map(|(level, modules)| {
            modules.split('`').skip(1).step_by(2).map(move |m| (m.to_owned(), level)).collect::<Vec<_>>()
        })
        .collect()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("source folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}

fn module_of(path: &Path) -> String {
    let inside = path.strip_prefix("src").expect("inside src");
    let first = inside.components().next().expect("a component").as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

#[test]
fn every_module_has_a_level() {
    let levels = levels();
    let mut seen = 0;
    for file in rust_files(Path::new("src")) {
        let module = module_of(&file);
        if module == "lib" || module == "main" {
            continue;
        }
        assert!(levels.contains_key(&module), "`{module}` is missing from the level table in src/lib.rs");
        seen += 1;
    }
    assert!(seen > 10, "only {seen} source files were found");
}

#[test]
fn arrows_point_down_only() {
    let levels = levels();
    let mut wrong = Vec::new();
    for file in rust_files(Path::new("src")) {
        let module = module_of(&file);
        let Some(&own) = levels.get(&module) else { continue };
        let text = fs::read_to_string(&file).expect("source file");
        for (number, line) in text.lines().enumerate() {
            for part in line.split("crate::").skip(1) {
                let name: String = part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name != module && levels.get(&name).is_some_and(|&level| level >= own) {
                    wrong.push(format!("{}:{}: `{module}` names `{name}`", file.display(), number + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "upward or sideways imports:\n{}", wrong.join("\n"));
}

#[test]
fn tch_is_named_in_tensor_only() {
    for file in rust_files(Path::new("src")) {
        if module_of(&file) != "tensor" {
            let text = fs::read_to_string(&file).expect("source file");
            // `batch::` is no `tch::`.
            let named = text
                .match_indices("tch::")
                .any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            assert!(!named, "{} names tch directly", file.display());
        }
    }
}
