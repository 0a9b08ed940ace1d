//! LabelMe files: the shapes of one image in a JSON file.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::shape::Shape;
use super::{AnnotatedImage, Object};
use prsmed_base::{Error, Result};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LabelMe {
    shapes: Vec<ShapeEntry>,
    image_path: Option<String>,
    image_width: Option<u32>,
    image_height: Option<u32>,
}

#[derive(Deserialize)]
struct ShapeEntry {
    label: String,
    points: Vec<[f64; 2]>,
    #[serde(default = "polygon")]
    shape_type: String,
    mask: Option<String>,
}

/// The type of shapes in files of early versions, which do not name it.
fn polygon() -> String {
    "polygon".to_owned()
}

impl LabelMe {
    /// The image with its objects.
    ///
    /// # Errors
    /// [`Error::Data`] for a shape that is not what its type says.
    pub(super) fn image(self, path: &Path) -> Result<AnnotatedImage> {
        let mut objects = Vec::new();
        for (number, entry) in self.shapes.into_iter().enumerate() {
            let name = format!("shape {}", number + 1);
            let label = entry.label.clone();
            let shape = entry.shape().map_err(|reason| {
                let hint = "correct it in the annotation program, and save it again";
                Error::data(path, format!("{name} (`{label}`) {reason}"), hint)
            })?;
            objects.push(Object { label: label.into(), name: name.into(), shape, is_crowd: false });
        }
        let name = self.image_path.unwrap_or_default();
        Ok(AnnotatedImage { name, size: self.image_width.zip(self.image_height), objects })
    }
}

impl ShapeEntry {
    fn shape(self) -> Result<Shape, String> {
        let count = self.points.len();
        let two = |what: &str| match self.points.as_slice() {
            [first, second] => Ok([*first, *second]),
            _ => Err(format!("is a {what} with {count} points instead of two")),
        };
        match self.shape_type.as_str() {
            "polygon" => Ok(Shape::Outlines(vec![self.points])),
            // some programs store four corners
            "rectangle" | "oriented_rectangle" | "rotation" if count == 4 => Ok(Shape::Outlines(vec![self.points])),
            "rectangle" => {
                let [[a, b], [c, d]] = two("rectangle")?;
                Ok(Shape::Outlines(vec![vec![[a, b], [c, b], [c, d], [a, d]]]))
            }
            "circle" => two("circle").map(|[centre, edge]| Shape::Circle(centre, edge)),
            "mask" => {
                let corners = two("mask")?;
                let text = self.mask.as_deref().ok_or("is a mask without pixels: its field `mask` is empty")?;
                let png = STANDARD.decode(text).map_err(|error| format!("has a mask that is no base64: {error}"))?;
                // LabelMe drops the fractions too
                #[expect(clippy::cast_possible_truncation, reason = "outside of all images, it is refused later")]
                let [first, last] = corners.map(|point| point.map(|value| value as i64));
                Ok(Shape::Patch { first, last, png })
            }
            "point" | "points" | "line" | "linestrip" => Ok(Shape::WithoutArea(self.shape_type)),
            other => Err(format!("has the type `{other}`; polygon, rectangle, circle and mask are read")),
        }
    }
}
