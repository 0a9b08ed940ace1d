//! COCO files: the objects of many images in one JSON file, as outlines or run lengths.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use super::rle::Counts;
use super::shape::{Outline, Shape};
use super::{AnnotatedImage, Object};
use prsmed_base::{Error, Result};

#[derive(Deserialize)]
pub(super) struct Coco {
    images: Vec<ImageEntry>,
    annotations: Vec<AnnotationEntry>,
    categories: Vec<Category>,
}

#[derive(Deserialize)]
struct ImageEntry {
    id: Id,
    file_name: String,
    width: Option<u32>,
    height: Option<u32>,
}

#[derive(Deserialize)]
struct AnnotationEntry {
    id: Option<Id>,
    image_id: Id,
    category_id: Id,
    #[serde(default, deserialize_with = "segmentation")]
    segmentation: Option<Shape>,
    #[serde(default)]
    iscrowd: Flag,
}

#[derive(Deserialize)]
struct Category {
    id: Id,
    name: String,
}

/// A number; some programs write text.
#[derive(Deserialize, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(untagged, expecting = "an id is neither a whole number nor text")]
enum Id {
    Number(i64),
    #[serde(deserialize_with = "whole_number")]
    Whole(i64),
    Text(Box<str>),
}

fn whole_number<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    let value = f64::deserialize(from)?;
    #[expect(clippy::cast_possible_truncation, reason = "checked")]
    let whole = value as i64;
    if whole as f64 == value { Ok(whole) } else { Err(D::Error::custom("an id is a whole number")) }
}

impl Id {
    /// The number 1 and the number 1.0 are one id.
    fn settled(self) -> Self {
        match self {
            Self::Whole(number) => Self::Number(number),
            other => other,
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) | Self::Whole(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`iscrowd` is neither 0 nor 1")]
enum Flag {
    Bool(bool),
    Number(f64),
    Nothing(()),
}

impl Default for Flag {
    fn default() -> Self {
        Self::Bool(false)
    }
}

/// Outlines as lists of numbers, or run lengths; nothing for an empty list, as programs write it for boxes.
fn segmentation<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Shape>, D::Error> {
    struct Segmentation;
    #[derive(Deserialize)]
    #[serde(field_identifier, rename_all = "lowercase")]
    enum Key {
        Counts,
        Size,
        #[serde(other)]
        Other,
    }
    impl<'de> Visitor<'de> for Segmentation {
        type Value = Option<Shape>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of outlines, or run lengths with `counts` and `size`")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut outlines: Vec<Outline> = Vec::new();
            while let Some(numbers) = seq.next_element::<Vec<f64>>()? {
                if numbers.len() % 2 == 1 {
                    let reason = format!("an outline has {} numbers; they are pairs of x and y", numbers.len());
                    return Err(A::Error::custom(reason));
                }
                outlines.push(numbers.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect());
            }
            Ok((!outlines.is_empty()).then_some(Shape::Outlines(outlines)))
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut counts, mut size) = (None, None);
            while let Some(key) = map.next_key()? {
                match key {
                    Key::Counts => counts = Some(map.next_value::<RunLengths>()?),
                    Key::Size => size = Some(map.next_value::<[u32; 2]>()?),
                    Key::Other => drop(map.next_value::<de::IgnoredAny>()?),
                }
            }
            let [height, width] = size.ok_or_else(|| A::Error::missing_field("size"))?;
            let counts = match counts.ok_or_else(|| A::Error::missing_field("counts"))? {
                RunLengths::Numbers(numbers) => Counts::Numbers(numbers),
                RunLengths::Text(text) => Counts::Text(text),
            };
            Ok(Some(Shape::Runs((width, height), counts)))
        }
    }
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "`counts` are neither whole numbers from 0 on nor text")]
    enum RunLengths {
        Numbers(Vec<u64>),
        Text(Box<str>),
    }
    from.deserialize_any(Segmentation)
}

impl Coco {
    /// The images with their objects.
    ///
    /// # Errors
    /// [`Error::Data`] for ids that occur twice or nowhere, and for a file that names no image or has boxes only.
    pub(super) fn images(self, path: &Path) -> Result<Vec<AnnotatedImage>> {
        let refuse = |reason: String, hint: &str| Err(Error::data(path, reason, hint));
        let mut labels: BTreeMap<Id, Arc<str>> = BTreeMap::new();
        for Category { id, name } in self.categories {
            if let Some(other) = labels.insert(id.clone().settled(), name.as_str().into()) {
                let reason = format!("has two categories with the id {id}: `{other}` and `{name}`");
                return refuse(reason, "give each category an id of its own");
            }
        }
        let mut images = Vec::new();
        let mut numbers = BTreeMap::new();
        for ImageEntry { id, file_name, width, height } in self.images {
            if numbers.insert(id.clone().settled(), images.len()).is_some() {
                return refuse(format!("has two images with the id {id}"), "give each image an id of its own");
            }
            images.push(AnnotatedImage { name: file_name, size: width.zip(height), objects: Vec::new() });
        }
        if images.is_empty() {
            return refuse("names no images".to_owned(), "export the annotations again, with their images");
        }
        for (number, entry) in self.annotations.into_iter().enumerate() {
            let name = entry.id.map_or_else(|| format!("number {}", number + 1), |id| id.to_string());
            let name = format!("annotation {name}");
            let (image, label) = (entry.image_id.settled(), entry.category_id.settled());
            let Some(image) = numbers.get(&image) else {
                return refuse(format!("{name} is of the image {image}, which is not in the file"), "export it again");
            };
            let Some(label) = labels.get(&label) else {
                let hint = "add the category to `categories` with its name, or remove the annotation";
                return refuse(format!("{name} is of the category {label}, which is not in the file"), hint);
            };
            let is_crowd =
                matches!(entry.iscrowd, Flag::Bool(true)) || matches!(entry.iscrowd, Flag::Number(flag) if flag != 0.0);
            let shape = entry.segmentation.unwrap_or(Shape::Box);
            images[*image].objects.push(Object { label: label.clone(), name: name.into(), shape, is_crowd });
        }
        let mut objects = images.iter().flat_map(|image| &image.objects).peekable();
        if objects.peek().is_some() && objects.all(|object| object.shape == Shape::Box) {
            let hint = "export outlines (instance segmentation): boxes are no masks";
            return refuse("has boxes only, and no `segmentation`".to_owned(), hint);
        }
        Ok(images)
    }
}
