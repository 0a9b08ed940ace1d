//! Words in the names of files and folders that say which of them are masks, and what is left of the names.

use super::super::scan::tree::Tree;
use super::names::{MASK_WORDS, is_among, is_mask_word, without_number, without_suffix};

/// Names of folders and files of images; they say nothing else.
pub(super) const IMAGE_WORDS: [&str; 14] = [
    "image", "images", "img", "imgs", "imaging", "scan", "scans", "volume", "volumes", "original", "originals",
    "input", "inputs", "picture",
];

/// Whether a name of a folder says nothing but that it is of images or of masks.
pub(super) fn is_word(name: &str) -> bool {
    is_mask_word(name) || is_among(name, &IMAGE_WORDS)
}

/// A name without a word at its end or its beginning; `None` without one.
fn without_word<'a>(name: &'a str, words: &[&str]) -> Option<&'a str> {
    let between = [' ', '_', '-', '.'];
    let end = name.rsplit_once(between).filter(|(_, word)| is_among(word, words)).map(|(head, _)| head);
    let start = || name.split_once(between).filter(|(word, _)| is_among(word, words)).map(|(_, tail)| tail);
    end.or_else(start).map(|rest| rest.trim_matches(between)).filter(|rest| !rest.is_empty())
}

/// What the name of a file and of its folders says.
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct NameWords {
    pub(super) file: usize,
    pub(super) is_mask: bool,
    /// A folder says that it is a mask.
    pub(super) is_of_folder: bool,
    pub(super) is_numbered: bool,
    /// The name is nothing but a word.
    pub(super) is_bare: bool,
    /// Folders, and the name, without words.
    pub(super) parts: Vec<String>,
    /// As `parts`, with the whole name of a file in a folder of masks.
    pub(super) whole: Vec<String>,
}

impl NameWords {
    pub(super) fn new(file: usize, tree: &Tree) -> Self {
        let (folders, stem) = tree.files[file].parts();
        let (mut parts, mut is_of_folder, mut is_of_images) = (Vec::new(), false, false);
        for folder in folders {
            if is_mask_word(folder) {
                is_of_folder = true;
            } else if is_among(folder, &IMAGE_WORDS) {
                is_of_images = true;
            } else if let Some(rest) = without_word(folder, &MASK_WORDS) {
                is_of_folder = true;
                parts.push(rest.to_owned());
            } else if let Some(rest) = without_word(folder, &IMAGE_WORDS) {
                is_of_images = true;
                parts.push(rest.to_owned());
            } else {
                parts.push(folder.to_owned());
            }
        }
        let whole: Vec<String> = parts.iter().cloned().chain([stem.to_owned()]).collect();
        let suffixed = without_suffix(stem).or_else(|| without_word(stem, &MASK_WORDS));
        let numbered = without_number(stem).filter(|_| suffixed.is_none());
        let says_mask = is_mask_word(stem) || suffixed.is_some() || numbered.is_some();
        let is_mask = is_of_folder || (says_mask && !is_of_images) || tree.files[file].masks.is_some();
        let name = suffixed.or(numbered).filter(|_| is_mask).unwrap_or(stem);
        let is_bare = is_among(name, &IMAGE_WORDS) || (is_mask && is_mask_word(name));
        let name = without_word(name, &IMAGE_WORDS).unwrap_or(name);
        parts.extend((!is_bare).then(|| name.to_owned()));
        Self { file, is_mask, is_of_folder, is_numbered: numbered.is_some() && is_mask, is_bare, parts, whole }
    }
}
