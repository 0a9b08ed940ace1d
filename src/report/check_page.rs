//! Page of the check of a data root: what is wrong, what to know before a training, and the images to look at.

use super::picture::Picture;
use super::{Page, data_check};
use crate::Result;
use crate::data::check::CheckReport;
use crate::data::check::balance::PatientRows;
use crate::data::check::targets::FEWEST_CELLS;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::BadRow;
use crate::data::split::spread;
use askama::Template;
use image::GrayImage;
use std::path::Path;

/// Most images of a group.
const SHOWN: usize = 8;
/// Most rows and patients of a table.
const LISTED: usize = 100;

/// Writes the page into a file. An image that cannot be read is left out, and the page says so.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn write(path: &Path, report: &CheckReport) -> Result<()> {
    super::write_file(path, &CheckPage::new(report))
}

#[derive(Template)]
#[template(path = "check.html")]
struct CheckPage<'a> {
    page: Page,
    report: &'a CheckReport,
    /// The first bad rows: file, line and reason.
    bad: Vec<[String; 3]>,
    warnings: Vec<String>,
    head: [&'static str; 8],
    classes: Vec<[String; 8]>,
    /// The patients with most rows: name, number of rows, and per cent of all.
    patients: Vec<[String; 3]>,
    groups: Vec<Group>,
}

struct Group {
    title: String,
    note: String,
    images: Vec<Shown>,
}

struct Shown {
    name: String,
    caption: String,
    picture: Picture,
}

impl<'a> CheckPage<'a> {
    fn new(report: &'a CheckReport) -> Self {
        let sizes = &report.target_sizes;
        let small =
            sizes.small.iter().map(|small| (small.image.as_path(), Some(small.mask.as_path()), cells(small.cells)));
        let cut = sizes.at_border.iter().map(|cut| (cut.image.as_path(), Some(cut.mask.as_path()), String::new()));
        let flat = report.findings.flat_images().map(|image| (image.as_path(), None, String::new()));
        let groups = [
            group(&format!("Targets of fewer than {FEWEST_CELLS} cells"), small.collect()),
            group("Targets that touch the border", cut.collect()),
            group("Images of one grey level or colour", flat.collect()),
        ];
        Self {
            page: Page::new("Check of a data root", &report.root.display().to_string()),
            report,
            bad: report.bad.iter().take(LISTED).map(bad_row).collect(),
            warnings: data_check::warnings(report),
            head: data_check::BALANCE_HEAD,
            classes: data_check::balance_rows(report),
            groups: groups.into_iter().filter(|group| !group.images.is_empty()).collect(),
            patients: report.balance.patients.iter().take(LISTED).map(patient_row).collect(),
        }
    }
}

fn bad_row(bad: &BadRow) -> [String; 3] {
    [bad.csv.display().to_string(), bad.line.to_string(), bad.reason.clone()]
}

fn patient_row(of: &PatientRows) -> [String; 3] {
    [of.patient.clone(), of.rows.to_string(), format!("{:.1}", 100.0 * of.frac)]
}

fn cells(count: f64) -> String {
    format!("{count:.2} cells")
}

/// Some of the images, spread over all of them.
fn group(title: &str, all: Vec<(&Path, Option<&Path>, String)>) -> Group {
    let count = all.len();
    let images: Vec<Shown> = spread(all, SHOWN).into_iter().map(shown).collect();
    let note = match images.len() {
        some if some < count => format!("{some} of {count}, spread over all of them."),
        _ => String::new(),
    };
    Group { title: title.to_owned(), note, images }
}

fn shown((image, mask, caption): (&Path, Option<&Path>, String)) -> Shown {
    let label = mask.map_or_else(|| Ok(GrayImage::new(1, 1)), |mask| decode::mask(mask).map(|mask| foreground(&mask)));
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Shown { name, caption, picture: Picture::of("Image", image, label.as_ref()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::check;
    use crate::data::check::targets::MaskGrid;
    use crate::data::image::Fit;
    use crate::data::labels::Labels;
    use crate::event::Silent;
    use image::{Luma, Rgb, RgbImage};

    /// A page of three images: a target of a single pixel, one at the border, and an image of one colour.
    #[test]
    fn a_page_shows_classes_advice_warnings_and_the_images_to_look_at() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["annotations", "ct/train_images", "ct/train_masks"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let mut csv = "image_path,question,answer,split,patient\n".to_owned();
        for (name, at, is_flat) in [("small", 20..21, false), ("border", 0..12, false), ("flat", 20..40, true)] {
            let grey = |x: u32, y: u32| if is_flat { 9 } else { u8::try_from(x * 3 + y).unwrap() };
            let image = RgbImage::from_fn(64, 64, |x, y| Rgb([grey(x, y); 3]));
            image.save(root.path().join(format!("ct/train_images/{name}.png"))).unwrap();
            let mask =
                GrayImage::from_fn(64, 64, |x, y| Luma([if at.contains(&x) && at.contains(&y) { 255 } else { 0 }]));
            mask.save(root.path().join(format!("ct/train_masks/{name}.png"))).unwrap();
            csv.push_str(&["ct/train_masks/", name, ".png,Where is <it>?,It is here.,train,P1\n"].concat());
        }
        std::fs::write(root.path().join("annotations/ct.csv"), csv).unwrap();
        let grid = Some(MaskGrid { side: 16, fit: Fit::Stretch });
        let report = check::check_with_extra((root.path(), None), &[], Labels::NONE, grid, &Silent).unwrap();
        assert_eq!((report.target_sizes.small.len(), report.target_sizes.at_border.len()), (1, 1));
        let file = root.path().join("check.html");
        write(&file, &report).unwrap();
        let page = std::fs::read_to_string(file).unwrap();
        for part in [
            "Targets of fewer than 2 cells",
            "small.png</strong> · 0.06 cells",
            "Targets that touch the border",
            "Images of one grey level or colour",
            "all rows are of one patient",
            "class `ct`: it has 1 patient: three splits need three patients",
            "16 x 16 cells",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert_eq!(page.matches("class=\"layer-image\"").count(), 3);
    }
}
