//! Names that people write in several ways: upper and lower case, composed and decomposed letters (as a Mac stores them),
//! blanks and invisible letters. [`key`] is the one form in which they are compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tokenizers::NormalizedString;

use prsmed_base::error::{Error, Result};

/// Text without invisible letters and without blanks around it; unusual blanks become common ones.
pub fn cleaned(text: &str) -> String {
    let visible = text.chars().filter(|letter| !is_invisible(*letter));
    let plain = visible.map(|letter| if letter.is_whitespace() { ' ' } else { letter });
    plain.collect::<String>().trim().to_owned()
}

/// Letters that take no room: byte order marks, joiners, marks of direction, soft hyphens.
fn is_invisible(letter: char) -> bool {
    matches!(letter, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// The form in which two names are compared.
pub fn key(name: &str) -> String {
    composed(&cleaned(name)).to_lowercase()
}

/// Text with composed letters (NFC).
fn composed(text: &str) -> String {
    if text.is_ascii() {
        return text.to_owned();
    }
    let mut text = NormalizedString::from(text);
    text.nfc();
    text.get().to_owned()
}

/// In what two names with one [`key`] differ.
pub fn difference(a: &str, b: &str) -> &'static str {
    if a.to_lowercase() == b.to_lowercase() {
        "upper and lower case"
    } else if composed(a).to_lowercase() == composed(b).to_lowercase() {
        "the Unicode form of their letters"
    } else {
        "blanks or invisible letters"
    }
}

/// A file in the folder of `missing` whose name differs in case, Unicode form or blanks only, and the difference in words.
pub fn similar(missing: &Path) -> Option<String> {
    let name = missing.file_name()?.to_string_lossy().into_owned();
    let wanted = key(&name);
    let parent = missing.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = std::fs::read_dir(parent).ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let found = names.into_iter().find(|found| key(found) == wanted)?;
    Some(format!("`{found}` differs from it in {}", difference(&name, &found)))
}

/// Files of two kinds with one name; the others stay.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// Name of the first file, and both files.
    pub pairs: Vec<(String, PathBuf, PathBuf)>,
    /// First files without a second one.
    pub first: Vec<PathBuf>,
    /// Second files without a first one.
    pub second: Vec<PathBuf>,
}

/// Matches files by their names: equal names, else names that differ in case, Unicode form or blanks only.
///
/// # Errors
/// [`Error::Data`] if several files have such a name and not each of them has its equal.
pub fn matched(first: BTreeMap<String, PathBuf>, mut second: BTreeMap<String, PathBuf>) -> Result<Matches> {
    let mut groups: BTreeMap<String, [Vec<PathBuf>; 2]> = BTreeMap::new();
    for (files, side) in [(&first, 0), (&second, 1)] {
        for (name, path) in files {
            groups.entry(key(name)).or_default()[side].push(path.clone());
        }
    }
    let mut found = Matches::default();
    let mut left = Vec::new();
    for (name, path) in first {
        match second.remove(&name) {
            Some(other) => found.pairs.push((name, path, other)),
            None => left.push((name, path)),
        }
    }
    for (name, path) in left {
        match groups.get(&key(&name)) {
            Some([_, others]) if others.is_empty() => found.first.push(path),
            Some([own, others]) => match (own.as_slice(), others.as_slice()) {
                ([_], [other]) => {
                    second.retain(|_, path| path != other);
                    found.pairs.push((name, path, other.clone()));
                }
                _ => return Err(ambiguous(own, others)),
            },
            None => found.first.push(path),
        }
    }
    for (name, path) in second {
        match groups.get(&key(&name)) {
            Some([own, others]) if !own.is_empty() => return Err(ambiguous(own, others)),
            _ => found.second.push(path),
        }
    }
    found.pairs.sort();
    Ok(found)
}

fn ambiguous(first: &[PathBuf], second: &[PathBuf]) -> Error {
    let several = if second.len() > 1 { second } else { first };
    let (a, b) = (&several[0], &several[several.len() - 1]);
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let reason = format!("`{}` has a name that differs in {} only", b.display(), difference(&name(a), &name(b)));
    Error::data(a, reason, "keep one of the two files, or give them names that differ more")
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPOSED: &str = "l\u{e9}sion";
    const DECOMPOSED: &str = "le\u{301}sion";

    fn files(names: &[&str], ending: &str) -> BTreeMap<String, PathBuf> {
        names.iter().map(|name| ((*name).to_owned(), PathBuf::from(format!("{name}{ending}")))).collect()
    }

    #[test]
    fn names_are_compared_without_case_form_and_blanks() {
        for (a, b, words) in [
            ("case0", "CASE0", "upper and lower case"),
            (COMPOSED, DECOMPOSED, "the Unicode form of their letters"),
            ("L\u{c9}SION", DECOMPOSED, "the Unicode form of their letters"),
            ("a b", "a\u{a0}b", "blanks or invisible letters"),
            ("a", "\u{feff}a ", "blanks or invisible letters"),
            ("a\u{200b}1", "a1", "blanks or invisible letters"),
        ] {
            assert_eq!((key(a), difference(a, b)), (key(b), words), "{a:?} {b:?}");
        }
        for (a, b) in [("a1", "a 1"), ("a", "\u{e0}"), ("case_1", "case-1")] {
            assert_ne!(key(a), key(b), "{a:?} {b:?}");
        }
    }

    #[test]
    fn equal_names_match_first_and_others_where_only_one_fits() {
        let of = |first: &[&str], second: &[&str]| matched(files(first, ".jpg"), files(second, ".png"));
        let found = of(&["a", "B", COMPOSED, "x"], &["A", "b", DECOMPOSED, "y"]).expect("matched");
        let names: Vec<&str> = found.pairs.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["B", "a", COMPOSED]);
        assert_eq!(found.pairs[1].2, PathBuf::from("A.png"));
        assert_eq!((found.first, found.second), (vec!["x.jpg".into()], vec!["y.png".into()]));
        let exact = of(&["a", "A"], &["A", "a"]).expect("each has its equal");
        assert_eq!(exact.pairs.len(), 2);
        assert_eq!(exact.pairs[0].2, PathBuf::from("A.png"));
    }

    #[test]
    fn several_files_that_fit_are_refused_by_name() {
        for (first, second, both) in [
            (&["a"][..], &["a", "A"][..], ["A.png", "a.png"]),
            (&["A "], &["a", "A"], ["A.png", "a.png"]),
            (&["a", "A"], &["a"], ["A.jpg", "a.jpg"]),
            (&[COMPOSED], &[COMPOSED, DECOMPOSED], [COMPOSED, DECOMPOSED]),
        ] {
            let error = matched(files(first, ".jpg"), files(second, ".png")).expect_err("ambiguous").to_string();
            assert!(both.iter().all(|name| error.contains(name)) && error.contains(" only"), "{error}");
        }
    }

    #[test]
    fn a_file_of_a_similar_name_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("Scan 1.PNG"), "").expect("written");
        let of = |name: &str| similar(&folder.path().join(name));
        assert_eq!(of("scan 1.png").expect("found"), "`Scan 1.PNG` differs from it in upper and lower case");
        assert_eq!(
            of("Scan\u{a0}1.PNG").expect("found"),
            "`Scan 1.PNG` differs from it in blanks or invisible letters"
        );
        assert_eq!(of("scan2.png"), None);
        assert_eq!(similar(Path::new("no/such/file.png")), None);
    }
}
