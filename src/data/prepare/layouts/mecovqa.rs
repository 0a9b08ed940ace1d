//! MeCoVQA of MedPLIB: questions with the masks that their answers show, on images of SA-Med2D.
//!
//! Source: <https://github.com/ShawnHuang497/MedPLIB>, `datasets/LazySupervisedDataset.py`: a list of objects with `image` and
//! `conversations`. An answer names its mask as `<mask>PATH</mask>`. Questions about a given region have no target.

use std::io::{BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::item::Skipped;
use super::super::scan::tree::{FileKind, Tree};
use super::super::table::PairText;
use super::matching::{Known, Meant, Parts, parts};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in};
use prsmed_base::{Error, Result, files};

pub(super) const MECOVQA: Layout = Layout {
    name: "mecovqa",
    about: "MeCoVQA: `train/MeCoVQA-Grounding.json`, and `images/ct_00--SET--CASE--x_0001.png` and `masks/` of SA-Med2D",
    find: Some(find),
    ..NO_LAYOUT
};

#[derive(Deserialize)]
struct Entry {
    image: Option<String>,
    #[serde(default)]
    conversations: Vec<Map<String, Value>>,
}

/// Whether a JSON file has conversations with masks, by its first bytes.
fn is_conversations(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = files::open(path).and_then(|file| file.take(64 << 10).read_to_end(&mut start));
    let text = String::from_utf8_lossy(&start);
    let has = |words: [&str; 2]| words.iter().all(|word| text.contains(word));
    read.is_ok() && text.trim_start().starts_with('[') && has(["\"conversations\"", "<mask>"])
}

fn read(path: &Path) -> Result<Vec<Entry>> {
    let file = files::open(path).map_err(Error::io(path, "read"))?;
    let hint = "it must be a list of objects with `image` and `conversations`";
    serde_json::from_reader(BufReader::new(file)).map_err(|error| Error::data(path, error.to_string(), hint))
}

/// A text without `<image>` and `<SEG>`, which stand for the image and for the mask.
fn plain(text: &str) -> String {
    let text = text.replace("<image>", " ").replace("<SEG>", " ");
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace(" .", ".")
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let mut found = Groups::default();
    let is_image = |file: &usize| free[*file] && tree.files[*file].kind == FileKind::Image;
    let images: Vec<usize> = (0..tree.files.len()).filter(is_image).collect();
    let is_list = |path: &&Path| path.extension().is_some_and(|ending| ending == "json") && is_conversations(path);
    let lists: Vec<&Path> = tree.others.iter().map(|skip| skip.path.as_path()).filter(is_list).collect();
    if images.is_empty() || lists.is_empty() {
        return found;
    }
    let names: Vec<Parts> = images.iter().map(|file| parts(&tree.files[*file].name, true)).collect();
    let known = Known::new(&names);
    let mut num_without = 0;
    for path in lists {
        let Ok(entries) = read(path).map_err(|error| _ = found.refused.insert(error)) else { return found };
        let split = split_in(&path.strip_prefix(&tree.root).unwrap_or(path).to_string_lossy());
        for entry in entries {
            let texts: Vec<_> = entry.conversations.chunks(2).filter_map(pair).collect();
            num_without += usize::from(texts.is_empty());
            let Some(image) = entry.image.filter(|_| !texts.is_empty()) else { continue };
            let mut file = |name: &str| {
                if let Meant::File(number) = known.meant(&parts(name, true)) {
                    return Some(images[number]);
                }
                let reason = format!("`{name}` is named, and missing or not unique");
                found.missing.push(Skipped { path: path.to_owned(), reason });
                None
            };
            let masks: Vec<_> = texts.into_iter().filter_map(|(mask, text)| Some((file(&mask)?, text))).collect();
            let Some(image) = file(&image).filter(|_| !masks.is_empty()) else { continue };
            let group = found.groups.entry(tree.files[image].name.clone()).or_insert_with(|| group(image, tree));
            group.set_split(split);
            for (mask, text) in masks {
                let number = group.masks.iter().position(|known| known.file == mask).unwrap_or(group.masks.len());
                let target = Some(format!("target {}", number + 1));
                if number == group.masks.len() {
                    group.masks.push(GroupMask { file: mask, target: target.clone(), is_numbered: false, path: None });
                }
                let is_whole = !text.question.is_empty() && !text.answer.is_empty();
                group.texts.extend(is_whole.then_some(PairText { target, ..text }));
            }
        }
    }
    if num_without > 0 {
        found.notes.push(format!("{num_without} entries of its lists have no mask in an answer, and are left out"));
    }
    found
}

/// Mask, question and answer of two turns; `None` without a mask.
fn pair(turns: &[Map<String, Value>]) -> Option<(String, PairText)> {
    let [question, answer] = turns else { return None };
    let (question, answer) = (question.get("value")?.as_str()?, answer.get("value")?.as_str()?);
    let (before, rest) = answer.split_once("<mask>")?;
    let (mask, after) = rest.split_once("</mask>")?;
    let text = PairText { target: None, question: plain(question), answer: plain(&format!("{before} {after}")) };
    Some((mask.trim().to_owned(), text))
}

/// The image with what its name says: modality, data set, case and slice.
fn group(file: usize, tree: &Tree) -> Group {
    let (_, stem) = tree.files[file].parts();
    let named = <[&str; 4]>::try_from(stem.split("--").collect::<Vec<_>>()).ok();
    let class = named.and_then(|[class, ..]| Some(class.rsplit_once('_')?.0.to_owned()));
    let patient = named.map(|[_, set, case, _]| format!("{set}--{case}"));
    let images = vec![GroupImage { file, channel: None, part: None }];
    Group { name: stem.to_owned(), images, class, patient, ..Group::default() }
}
