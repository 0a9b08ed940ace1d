//! The page of a scan: its numbers, and a few pairs with their masks drawn over the images.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::{DynamicImage, GrayImage, Luma, RgbImage};

use super::super::annotations::AnnotationFiles;
use super::super::item::Skipped;
use super::super::layouts::file_name;
use super::super::table::Pair;
use super::report::ScanReport;
use super::series::{series_head, series_rows};
use crate::decode;
use crate::sheet;
use crate::volume::{self, Axis, LabelMap, Window, labels};
use prsmed_base::{Error, Result};

/// Most pairs with a picture; volumes are read completely for it.
const MAX_PAIRS: usize = 8;
/// Side of a picture in pixels.
const SIDE: u32 = 320;
/// Most files that a list names.
const MAX_LISTED: usize = 200;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}\
                     table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}\
                     figure{display:inline-block;margin:0 1rem 1rem 0;max-width:20rem}figcaption{font-size:.85rem;overflow-wrap:anywhere}";

/// Text of a page.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page as HTML without references to other files.
pub(super) fn page(report: &ScanReport) -> String {
    let title = format!("Scan of {}", report.root.display());
    let title = escaped(&title);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n<table>\n"
    );
    for (name, value) in report.summary() {
        let _ = writeln!(html, "<tr><th>{}</th><td>{}</td></tr>", escaped(&name), escaped(&value));
    }
    html.push_str("</table>\n");
    let rows = &report.table.rows;
    let step = rows.len().div_ceil(MAX_PAIRS).max(1);
    if !rows.is_empty() {
        html.push_str("<h2>Some pairs</h2>\n");
    }
    let outlines = AnnotationFiles::default();
    for pair in rows.iter().step_by(step) {
        let shown = picture(pair, &outlines).and_then(|image| sheet::encode(&image, Path::new("pair.png")));
        let picture = match shown {
            Ok(png) => format!("<img alt=\"\" src=\"data:image/png;base64,{}\">", BASE64_STANDARD.encode(png)),
            Err(error) => format!("<p>{}</p>", escaped(&error.to_string())),
        };
        let _ = writeln!(html, "<figure>{picture}<figcaption>{}</figcaption></figure>", escaped(&caption(pair)));
    }
    let list = |name: &str, lines: Vec<String>| {
        if lines.is_empty() {
            return String::new();
        }
        let items = lines.iter().take(MAX_LISTED).map(|line| format!("<li>{}</li>", escaped(line)));
        let items = items.collect::<Vec<_>>().join("\n");
        let more = lines.len().saturating_sub(MAX_LISTED);
        let more = if more > 0 { format!("<p>and {more} more, see scan.json</p>\n") } else { String::new() };
        format!("<h2>{name}</h2>\n<ul>\n{items}\n</ul>\n{more}")
    };
    let path = |path: &Path| path.strip_prefix(&report.root).unwrap_or(path).display().to_string();
    let skipped = |all: &[Skipped]| all.iter().map(|skip| format!("{}: {}", path(&skip.path), skip.reason)).collect();
    let ambiguous = report.ambiguous.iter().map(|found| format!("{}: {}", found.name, found.reason)).collect();
    let copies = report.copies.iter().map(|files| files.iter().map(|file| path(file)).collect::<Vec<_>>().join(", "));
    html.push_str(&series_table(report));
    html.push_str(&list("Ambiguous", ambiguous));
    html.push_str(&list("Problems", skipped(&report.problems)));
    html.push_str(&list("Copies", copies.collect()));
    html.push_str(&list("Unmatched", skipped(&report.unmatched)));
    html.push_str(&list("Notes", report.notes.clone()));
    html.push_str("</body></html>\n");
    html
}

/// The DICOM series of folders; empty without any.
fn series_table(report: &ScanReport) -> String {
    let rows = series_rows(report);
    if rows.is_empty() {
        return String::new();
    }
    let cells = |kind: &str, row: &[String]| {
        row.iter().map(|cell| format!("<{kind}>{}</{kind}>", escaped(cell))).collect::<Vec<_>>().concat()
    };
    let mut html =
        "<h2>DICOM series</h2>\n<p>Descriptions and dates are those of the DICOM headers, which may say who a patient \
                    is: share this page as you share the files.</p>\n<table>\n"
            .to_owned();
    let _ = writeln!(html, "<tr>{}</tr>", cells("th", &series_head()));
    for row in rows.iter().take(MAX_LISTED) {
        let _ = writeln!(html, "<tr>{}</tr>", cells("td", row));
    }
    let more = rows.len().saturating_sub(MAX_LISTED);
    html + "</table>\n" + &if more > 0 { format!("<p>and {more} more, see scan.json</p>\n") } else { String::new() }
}

fn caption(pair: &Pair) -> String {
    let masks: Vec<String> = pair.masks.iter().take(4).map(|(_, path)| file_name(path)).collect();
    let more = if pair.masks.len() > 4 { ", .." } else { "" };
    format!("{}: {} with {}{more}", pair.name, file_name(&pair.image), masks.join(", "))
}

/// An image with its masks drawn over it.
fn picture(pair: &Pair, outlines: &AnnotationFiles) -> Result<DynamicImage> {
    let (image, mask) = if pair.is_image() { of_image(pair, outlines)? } else { of_volume(pair)? };
    let (width, height) = image.dimensions();
    let drawn = DynamicImage::from(sheet::overlay(&image, &mask, None)?);
    Ok(if width.max(height) > SIDE { drawn.thumbnail(SIDE, SIDE) } else { drawn })
}

fn of_image(pair: &Pair, outlines: &AnnotationFiles) -> Result<(RgbImage, GrayImage)> {
    let image = decode::image(&pair.image)?.to_rgb8();
    let (width, height) = image.dimensions();
    let mut mask = GrayImage::new(width, height);
    for (_, path) in &pair.masks {
        let drawn = outlines.mask(path, (width, height))?.map(|drawn| drawn.mask);
        let own = drawn.map_or_else(|| Ok(decode::stored_mask(path)?.binary()), Ok::<_, Error>)?;
        if own.dimensions() != (width, height) {
            return Err(Error::data(path, "has another size than its image", ""));
        }
        mask.iter_mut().zip(own.iter()).for_each(|(all, own)| *all |= own);
    }
    Ok((image, mask))
}

/// The axial slice with most voxels of the masks.
fn of_volume(pair: &Pair) -> Result<(RgbImage, GrayImage)> {
    let volume = volume::open(&pair.image)?;
    let on_grid = |(_, path): &(Option<String>, PathBuf)| labels::open(path)?.on_grid(path, &volume.grid, true);
    // one file for each structure may be many
    let maps: Vec<LabelMap> = pair.masks.iter().take(4).map(on_grid).collect::<Result<_>>()?;
    let plane = volume.plane(Axis::Axial);
    let [columns, rows] = plane.size;
    let is_set = |slice, x, y| {
        let voxel = plane.index(slice, x, y);
        maps.iter().any(|map| map.values[voxel] > 0)
    };
    let count = |slice: usize| (0..rows).map(|y| (0..columns).filter(|x| is_set(slice, *x, y)).count()).sum::<usize>();
    let slice = (0..plane.num_slices).max_by_key(|slice| (count(*slice), std::cmp::Reverse(*slice))).unwrap_or(0);
    let levels = Window::Auto.levels(&volume)?;
    let image = DynamicImage::from(volume.slice(&plane, slice, &levels)?).to_rgb8();
    let mask = GrayImage::from_fn(image.width(), image.height(), |x, y| {
        Luma([if is_set(slice, x as usize, y as usize) { 255 } else { 0 }])
    });
    Ok((image, mask))
}
