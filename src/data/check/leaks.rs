//! Leaks: images and patients of rows that train, and of rows that are scored.
//!
//! A copy is known by the pixels of the image ([`crate::marks`]), whatever its name, format and metadata, and whichever
//! data root it is in. Patients are those of the column `patient`, whatever their spelling ([`crate::patient`]).

use crate::manifest::{Manifest, Row, Split};
use crate::marks::{Mark, Marks};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Leaks of one kind that a text names.
const NAMED: usize = 3;

/// How two images are known to be the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// By the bytes of their files.
    File,
    /// By their pixels: another format, or other metadata.
    Pixels,
}

/// An image that occurs in several splits. A score on it is not a score on unseen data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leak {
    /// How its files are known to show the same image.
    pub kind: Kind,
    /// The splits with this image.
    pub splits: Vec<Split>,
    /// Its files, those of the first split first.
    pub images: Vec<PathBuf>,
    /// A row of an extra data root has it.
    pub is_extra: bool,
}

/// A patient whose images occur in several splits. A score on them is not a score on unseen patients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PatientLeak {
    /// The patient, in the first spelling.
    pub patient: String,
    /// The splits with this patient.
    pub splits: Vec<Split>,
    /// Number of image files.
    pub images: usize,
    /// An image of the first and one of the last split.
    pub examples: [PathBuf; 2],
    /// A row of an extra data root has an image of the patient.
    pub is_extra: bool,
}

/// All leaks of a data root and its extra data roots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Images in several splits, by their first file.
    pub images: Vec<Leak>,
    /// Patients in several splits, by name.
    pub patients: Vec<PatientLeak>,
}

/// Leaks of one text: their splits, how images are known (`None` for patients), and whether an extra data root has them.
type Group<'a> = (&'a Vec<Split>, Option<Kind>, bool);

/// The rows of one image or patient.
#[derive(Default)]
struct Found<'a> {
    images: BTreeSet<(Split, &'a Path)>,
    is_extra: bool,
}

impl<'a> Found<'a> {
    fn add(&mut self, row: &'a Row) {
        self.images.insert((row.split, &row.image_path));
        self.is_extra |= row.synthetic;
    }

    /// The splits, if they are several.
    fn splits(&self) -> Option<Vec<Split>> {
        let splits: BTreeSet<Split> = self.images.iter().map(|(split, _)| *split).collect();
        (splits.len() > 1).then(|| splits.into_iter().collect())
    }

    /// The files in their order, each once.
    fn files(&self) -> Vec<PathBuf> {
        let mut known = BTreeSet::new();
        self.images.iter().filter(|(_, path)| known.insert(*path)).map(|(_, path)| (*path).to_owned()).collect()
    }
}

impl Leaks {
    /// The leaks among all rows of `manifest`. Images without a mark of their pixels are not compared.
    pub fn find(manifest: &Manifest, marks: &Marks) -> Self {
        let mut images: BTreeMap<Mark, Found> = BTreeMap::new();
        let mut patients: BTreeMap<&str, Found> = BTreeMap::new();
        for row in &manifest.rows {
            if let Some(pixels) = marks.get(&row.image_path).and_then(|marks| marks.pixels) {
                images.entry(pixels).or_default().add(row);
            }
            if let Some(patient) = &row.patient {
                patients.entry(patient).or_default().add(row);
            }
        }
        let leak = |found: Found| {
            let (splits, images) = (found.splits()?, found.files());
            let files: BTreeSet<_> = images.iter().map(|path| marks.get(path).map(|marks| marks.file)).collect();
            let kind = if files.len() == 1 { Kind::File } else { Kind::Pixels };
            Some(Leak { kind, splits, images, is_extra: found.is_extra })
        };
        let of_patient = |(patient, found): (&str, Found)| {
            let (splits, images) = (found.splits()?, found.files());
            let [first, last] = [found.images.first()?, found.images.last()?].map(|(_, path)| (*path).to_owned());
            let (patient, is_extra) = (patient.to_owned(), found.is_extra);
            Some(PatientLeak { patient, splits, images: images.len(), examples: [first, last], is_extra })
        };
        let mut images: Vec<Leak> = images.into_values().filter_map(leak).collect();
        images.sort_by(|a, b| a.images.cmp(&b.images));
        Self { images, patients: patients.into_iter().filter_map(of_patient).collect() }
    }

    /// Texts about the leaks from `train` into `test`: scores of these rows would not be those of new images. Each names a
    /// few files and says how many there are.
    pub fn errors(&self) -> Vec<String> {
        self.texts(is_error)
    }

    /// Texts about the other leaks: into `val`, which chooses the checkpoint, and from `val` into `test`.
    pub fn warnings(&self) -> Vec<String> {
        self.texts(|splits| !is_error(splits))
    }

    /// What removes the errors.
    pub fn remedy(&self) -> String {
        let mut images = self.images.iter().filter(|leak| is_error(&leak.splits)).map(|leak| leak.is_extra);
        let patients: Vec<bool> =
            self.patients.iter().filter(|leak| is_error(&leak.splits)).map(|leak| leak.is_extra).collect();
        let rows = if images.any(|is_extra| is_extra) || patients.contains(&true) {
            "remove these rows from the extra data root"
        } else {
            "move all rows of an image and of a patient into one split (`prsmed data prepare` keeps them together), or remove \
             the copies"
        };
        let names = if patients.is_empty() { "" } else { "; give different patients of one name different names" };
        format!("{rows}{names}")
    }

    fn texts(&self, is_meant: impl Fn(&[Split]) -> bool) -> Vec<String> {
        let mut groups: BTreeMap<Group, Vec<String>> = BTreeMap::new();
        for Leak { kind, splits, images, is_extra } in &self.images {
            let (first, last) = (&images[0], &images[images.len() - 1]);
            let files = if first == last { shown(first) } else { format!("{} = {}", shown(first), shown(last)) };
            groups.entry((splits, Some(*kind), *is_extra)).or_default().push(files);
        }
        for PatientLeak { patient, splits, images, examples: [a, b], is_extra } in &self.patients {
            let text = format!("`{patient}` ({} and {}, {images} images)", shown(a), shown(b));
            groups.entry((splits, None, *is_extra)).or_default().push(text);
        }
        let text = |((splits, kind, is_extra), found): (Group, Vec<String>)| {
            let splits: Vec<&str> = splits.iter().map(|split| split.name()).collect();
            let (one, several) = match kind {
                Some(Kind::File) => ("image (equal files)", "images (equal files)"),
                Some(Kind::Pixels) => {
                    ("image (equal pixels in different files)", "images (equal pixels in different files)")
                }
                None => ("patient", "patients"),
            };
            let count = found.len();
            let (what, are) = if count == 1 { (one, "is") } else { (several, "are") };
            let extra = if is_extra { ", by rows of an extra data root" } else { "" };
            let more = count.checked_sub(NAMED).filter(|more| *more > 0);
            let more = more.map_or_else(String::new, |more| format!("; and {more} more"));
            let named = found.into_iter().take(NAMED).collect::<Vec<_>>().join("; ");
            format!("{count} {what} {are} in {}{extra}: {named}{more}", splits.join(" and "))
        };
        groups.into_iter().filter(|((splits, ..), _)| is_meant(splits)).map(text).collect()
    }
}

/// Whether rows of these splits make scores on test images too good.
fn is_error(splits: &[Split]) -> bool {
    splits.contains(&Split::Train) && splits.contains(&Split::Test)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Root;
    use prsmed_base::event::Silent;

    /// How the second image is made from the first.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Copied {
        Bytes,
        Tiff,
        Metadata,
        Grey,
        OnePixel,
    }

    fn write_copy(root: &Root, other: &Root, copied: Copied) -> &'static str {
        let first = root.file("ct/train_images/a.png");
        if copied == Copied::Grey {
            ::image::GrayImage::from_fn(12, 8, |x, y| ::image::Luma([u8::try_from(x * y).expect("a byte")]))
                .save(&first)
                .expect("written");
        }
        let name = if copied == Copied::Tiff { "b.tif" } else { "b.png" };
        let second = other.file(&format!("ct/train_images/{name}"));
        let image = ::image::open(&first).expect("an image");
        match copied {
            Copied::Bytes => drop(std::fs::copy(&first, &second).expect("copied")),
            Copied::Tiff => image.save(&second).expect("written"),
            Copied::Grey => image.to_rgba8().save(&second).expect("written"),
            Copied::Metadata => {
                let mut bytes = std::fs::read(&first).expect("read");
                // an unknown chunk after the header
                let chunk = [0, 0, 0, 1, b't', b'e', b's', b't', 7];
                bytes.splice(33..33, chunk.into_iter().chain(crc32(&chunk[4..])));
                std::fs::write(&second, bytes).expect("written");
            }
            Copied::OnePixel => {
                let mut image = image.to_rgb8();
                image.get_pixel_mut(11, 7).0[2] ^= 1;
                image.save(&second).expect("written");
            }
        }
        name
    }

    fn crc32(bytes: &[u8]) -> [u8; 4] {
        let mut crc = u32::MAX;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0xedb8_8320 * (crc & 1));
            }
        }
        (!crc).to_be_bytes()
    }

    fn marked(manifest: &Manifest) -> Leaks {
        let mut marks = Marks::default();
        marks.add(manifest.rows.iter().map(|row| row.image_path.as_path()), &Silent);
        Leaks::find(manifest, &marks)
    }

    /// The leaks of an image `a` of one split and its copy `b` of another split or of an extra data root.
    fn leaks(copied: Copied, splits: [&str; 2], patients: [&str; 2], is_extra: bool) -> Leaks {
        let roots = [Root::new(), Root::new()];
        let [real, extra] = &roots;
        let other = if is_extra { extra } else { real };
        real.pair("ct", "train", "a");
        other.pair("ct", "train", "b");
        std::fs::remove_file(other.file("ct/train_images/b.png")).expect("removed");
        write_copy(real, other, copied);
        let header = "image_path,question,answer,split,patient\n";
        let row =
            |name: &str, which: usize| format!("ct/train_masks/{name}.png,q,a,{},{}\n", splits[which], patients[which]);
        if is_extra {
            real.csv("a.csv", &format!("{header}{}", row("a", 0)));
            extra.csv("b.csv", &format!("{header}{}", row("b", 1)));
        } else {
            real.csv("a.csv", &format!("{header}{}{}", row("a", 0), row("b", 1)));
        }
        let manifest = Manifest::open(real.path(), None).expect("good");
        if !is_extra {
            return marked(&manifest);
        }
        marked(&manifest.with_extra(Manifest::open(extra.path(), None).expect("good")).expect("train rows"))
    }

    #[test]
    fn copies_and_patients_are_found_in_every_way_and_kind() {
        use Copied::{Bytes, Grey, Metadata, OnePixel, Tiff};
        let kinds = [
            (Bytes, Some(Kind::File)),
            (Tiff, Some(Kind::Pixels)),
            (Metadata, Some(Kind::Pixels)),
            (Grey, Some(Kind::Pixels)),
            (OnePixel, None),
        ];
        for (is_extra, splits, is_error) in [
            (false, ["train", "test"], true),
            (false, ["test", "train"], true),
            (false, ["train", "val"], false),
            (false, ["val", "test"], false),
            (true, ["test", "train"], true),
            (true, ["val", "train"], false),
        ] {
            for (copied, kind) in kinds {
                let found = leaks(copied, splits, ["", ""], is_extra);
                let what = format!("{copied:?} {splits:?} {is_extra}");
                let counts = (found.errors().len(), found.warnings().len());
                let expected = if kind.is_none() { (0, 0) } else { (usize::from(is_error), usize::from(!is_error)) };
                assert_eq!((found.images.first().map(|leak| leak.kind), counts), (kind, expected), "{what}");
                assert!(found.images.iter().all(|leak| leak.is_extra == is_extra && leak.images.len() == 2), "{what}");
            }
            for (patients, is_known) in [
                (["p1", "p1"], true),
                (["p1", "P01"], true),
                (["7", "7.0"], true),
                (["007", "7"], true),
                (["p1", "p2"], false),
                (["nan", "nan"], false),
                (["-", "-"], false),
                (["", ""], false),
            ] {
                let found = leaks(OnePixel, splits, patients, is_extra);
                let counts = (found.errors().len(), found.warnings().len());
                let expected = if is_known { (usize::from(is_error), usize::from(!is_error)) } else { (0, 0) };
                assert_eq!(
                    (found.patients.len(), counts),
                    (usize::from(is_known), expected),
                    "{patients:?} {splits:?}"
                );
            }
        }
        // rows of one split, and two extra data roots with the same image, leak nothing
        assert_eq!(leaks(Bytes, ["train", "train"], ["p", "p"], false), Leaks::default());
        assert_eq!(leaks(Bytes, ["train", "train"], ["p", "p"], true), Leaks::default());
    }

    #[test]
    fn texts_name_both_sides_the_way_and_how_many() {
        let found = leaks(Copied::Tiff, ["test", "train"], ["P1", "p01"], true);
        let texts = found.errors();
        assert_eq!(texts.len(), 2);
        assert!(
            texts[1].starts_with(
                "1 image (equal pixels in different files) is in train and test, by rows of an extra data"
            )
        );
        assert!(texts[1].contains("b.tif = ") && texts[1].ends_with("a.png"), "{}", texts[1]);
        assert!(texts[0].starts_with("1 patient is in train and test") && texts[0].contains("`P1` ("), "{}", texts[0]);
        assert!(found.remedy().contains("extra data root"));
        let mut many = leaks(Copied::Bytes, ["train", "test"], ["", ""], false);
        many.images = vec![many.images[0].clone(); 5];
        let texts = many.errors();
        assert!(
            texts[0].starts_with("5 images (equal files) are in ") && texts[0].ends_with("; and 2 more"),
            "{texts:?}"
        );
        assert!(many.remedy().contains("one split"));
    }

    #[test]
    fn images_of_one_colour_and_images_that_cannot_be_read_leak_nothing() {
        let root = Root::new();
        for name in ["a", "b", "c", "d"] {
            root.pair("ct", "train", name);
        }
        for name in ["a", "b"] {
            ::image::GrayImage::new(12, 8).save(root.file(&format!("ct/train_images/{name}.png"))).expect("written");
        }
        for name in ["c", "d"] {
            std::fs::write(root.file(&format!("ct/train_images/{name}.png")), b"nothing").expect("written");
        }
        let rows = [("a", "train"), ("b", "test"), ("c", "train"), ("d", "test")]
            .map(|(name, split)| format!("ct/train_masks/{name}.png,q,a,{split}\n"));
        root.csv("a.csv", &format!("image_path,question,answer,split\n{}", rows.concat()));
        assert_eq!(marked(&Manifest::open(root.path(), None).expect("good")), Leaks::default());
    }
}
