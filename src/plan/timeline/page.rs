//! The picture in a page with a readout under the pointer; nothing is loaded from elsewhere.

use serde_json::json;

use super::draw::escaped;
use super::{Column, Timeline, columns, svg};

/// A page with the picture of [`svg`], light or dark as the reader's system, and a readout of phase and categories.
///
/// Where the trace is longer than the picture has columns, the readout shows the highest point of the column.
pub fn html(timeline: &Timeline) -> String {
    let columns = columns(timeline);
    let kib = |column: &Column| {
        let bytes = &timeline.points[column.highest].bytes;
        (0..timeline.categories.len()).map(|index| bytes.get(index).map_or(0, |bytes| bytes.div_ceil(1024))).collect()
    };
    let data = json!({
        "categories": timeline.categories,
        "phases": timeline.phases,
        "points": timeline.points.len(),
        "first": columns.iter().map(|column| column.first).collect::<Vec<_>>(),
        "kib": columns.iter().map(kib).collect::<Vec<Vec<u64>>>(),
    });
    // No string may end the script element.
    let data = data.to_string().replace('<', "\\u003c");
    // Filled in one pass: a name that looks like a place is no place.
    let mut page = String::new();
    for part in include_str!("page.html").split("{{") {
        let (place, rest) = part.split_once("}}").unwrap_or(("", part));
        page += match place {
            "title" => escaped(&timeline.title),
            "data" => data.clone(),
            "picture" => svg(timeline),
            _ => String::new(),
        }
        .as_str();
        page += rest;
    }
    page
}
