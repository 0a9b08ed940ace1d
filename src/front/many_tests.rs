use std::io::Cursor;
use std::sync::Mutex;

use super::*;
use crate::event::Silent;
use crate::front::image_list::jobs;

#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Observer for Notes {
    fn on(&self, event: &Event) {
        if let Event::Note(note) = event {
            self.0.lock().expect("no panic").push(note.clone());
        }
    }
}

/// A folder with these files.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        std::fs::write(path, bytes).expect("written");
    }
    folder
}

/// The DICOM files of a zip of the fixtures.
fn series(name: &str) -> Vec<Vec<u8>> {
    let path = crate::fixture::checkout().join("tests/fixtures/volumes").join(name);
    let mut archive = zip::ZipArchive::new(Cursor::new(std::fs::read(path).expect("a fixture"))).expect("a zip");
    (0..archive.len())
        .map(|index| {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut archive.by_index(index).expect("a file"), &mut bytes).expect("read");
            bytes
        })
        .filter(|bytes| bytes.get(128..132) == Some(b"DICM"))
        .collect()
}

fn asked(path: &Path) -> (Result<Vec<ImageQuestion>>, Vec<String>) {
    let notes = Notes::default();
    let found = jobs(path, &["Where?".to_owned()], &[], &notes);
    (found, notes.0.into_inner().expect("no panic"))
}

const NIFTI: &[u8] = b"\x5c\x01\0\0";
const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

#[test]
fn volumes_that_a_folder_has_beside_its_images_are_named() {
    let four = folder(&[
        ("a.png", PNG),
        ("v.nii.gz", b"\x1f\x8b"),
        ("sub/w.nii", NIFTI),
        ("sub/x.nrrd", b"NRRD0004\n"),
        ("y.MHA", b""),
        ("notes.txt", b"x"),
        (".hidden.nii", NIFTI),
    ]);
    let (found, notes) = asked(four.path());
    assert_eq!(found.expect("jobs").len(), 1);
    assert_eq!(
        notes,
        [
            "files that may be volumes are left out (4): `sub/w.nii`, `sub/x.nrrd`, `v.nii.gz` and 1 more; segment a volume \
          with the arguments `image=FILE out=mask.nii.gz`"
        ]
    );
    let (found, notes) = asked(folder(&[("v.nii.gz", b"\x1f\x8b")]).path());
    let text = found.expect_err("no image").to_string();
    assert!(text.contains("no file that ends in .png") && text.contains("left out (1): `v.nii.gz`"), "{text}");
    assert!(notes.is_empty());
    let (found, notes) = asked(folder(&[("a.png", PNG), ("notes.txt", b"x")]).path());
    assert!(found.expect("jobs").len() == 1 && notes.is_empty(), "{notes:?}");
}

#[test]
fn slices_of_a_series_are_not_answered_one_by_one_without_a_note() {
    let [axial, two] = ["axial.zip", "two_series.zip"].map(series);
    let of = |all: &[(&str, &[Vec<u8>])]| {
        let names: Vec<(String, &[u8])> = all
            .iter()
            .flat_map(|(name, files)| files.iter().zip(0..).map(move |(file, n)| (format!("{name}{n}.dcm"), &**file)))
            .collect();
        let folder = folder(&names.iter().map(|(name, file)| (name.as_str(), *file)).collect::<Vec<_>>());
        let (found, notes) = asked(folder.path());
        assert_eq!(found.expect("jobs").len(), names.len());
        notes
    };
    let notes = of(&[("a", &axial)]);
    assert!(notes.len() == 1 && notes[0].starts_with(&format!("{} DICOM files belong to one series", axial.len())));
    assert!(
        notes[0].contains("a0.dcm`") && notes[0].contains("the arguments `image=FOLDER out=mask.nii.gz`"),
        "{notes:?}"
    );
    let notes = of(&[("b/", &two)]);
    assert!(notes[0].starts_with(&format!("{} DICOM files belong to 2 series", two.len())), "{notes:?}");
    // one file of each
    assert_eq!(of(&[("a", &axial[..1])]), [""; 0]);
}

#[test]
fn tables_of_excel_are_read() {
    let text = "image;question\r\na.png;Où est la lésion, ici?\r\n";
    let utf16 = |text: &str| std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    let files: [Vec<u8>; 5] = [
        text.as_bytes().to_vec(),
        format!("\u{feff}{text}").into_bytes(),
        utf16(&text.replace(';', "\t")),
        utf16(text),
        b"image,question\na.png,\"O\xc3\xb9 est la l\xc3\xa9sion, ici?\"\n".to_vec(),
    ];
    for bytes in files {
        let folder = folder(&[("a.png", PNG), ("q.csv", &bytes)]);
        let found = asked(&folder.path().join("q.csv")).0.expect("jobs");
        assert_eq!((found[0].name.as_str(), found[0].question.as_str()), ("a.png", "Où est la lésion, ici?"));
    }
    let latin: Vec<u8> = text.chars().map(|letter| u8::try_from(letter).expect("Latin-1")).collect();
    let error = asked(&folder(&[("a.png", PNG), ("q.csv", &latin)]).path().join("q.csv")).0.expect_err("Windows-1252");
    assert!(error.hint().contains("`CSV UTF-8`"), "{error}: {}", error.hint());
}

#[test]
fn files_without_a_journal_are_not_replaced() {
    let made = || Made {
        version: "1".into(),
        model: "m".into(),
        max_new_tokens: 1,
        always_paint: false,
        overlays: false,
        window: "auto".into(),
        images: "a".into(),
        geometry: None,
    };
    for name in ["masks/a.png", "results.csv", "overlays/sub/b.png"] {
        let folder = folder(&[(name, b"of the user")]);
        let error = ResultsFolder::open(folder.path(), made(), false, &Silent).expect_err(name);
        assert!(error.to_string().contains("`results.jsonl`, which would name its origin, does not"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
    let folder = folder(&[("other.txt", b"x")]);
    std::fs::create_dir(folder.path().join("masks")).expect("created");
    drop(ResultsFolder::open(folder.path(), made(), true, &Silent).expect("free names"));
    // images of another folder have other results
    let notes = Notes::default();
    let other = Made { images: "b".into(), ..made() };
    ResultsFolder::open(folder.path(), other.clone(), false, &notes).expect("a note");
    assert!(notes.0.into_inner().expect("no panic")[0].contains("all images are asked again"));
    assert!(ResultsFolder::open(folder.path(), made(), true, &Silent).is_err());
    ResultsFolder::open(folder.path(), other, true, &Silent).expect("the same");
}

#[test]
fn zips_and_dicom_files_without_an_ending_are_named_for_a_folder_only() {
    let slices = series("axial.zip");
    let folder = folder(&[
        ("a.png", PNG),
        ("b.JPG", b"\xff\xd8\xff"),
        ("IM0001", &slices[0]),
        ("deep/IM0002", &slices[1]),
        ("s.zip", b"PK\x03\x04"),
        ("q.csv", b"image,question\na.png,Where?\n"),
    ]);
    let (found, notes) = asked(folder.path());
    let names: Vec<String> = found.expect("jobs").into_iter().map(|job| job.name).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].starts_with("files that may be volumes are left out (3): "), "{notes:?}");
    assert!(["`IM0001`", "`deep/IM0002`", "`s.zip`"].iter().all(|name| notes[0].contains(name)), "{notes:?}");
    // a table names its images itself
    let (found, notes) = asked(&folder.path().join("q.csv"));
    assert_eq!((found.expect("jobs").len(), notes), (1, Vec::new()));
}

#[test]
fn images_of_other_formats_are_named() {
    let folder = folder(&[
        ("a.png", PNG),
        ("b.avif", b"\0\0\0\x18ftypavif"),
        ("c.HEIC", b"\0\0\0\x18ftypheic"),
        ("sub/d.jp2", b"\0\0\0\x0cjP  "),
        ("e.jp2", b"\0\0\0\x0cjP  "),
        ("f.nii", NIFTI),
        ("notes.txt", b"x"),
    ]);
    let (found, notes) = asked(folder.path());
    assert_eq!(found.expect("jobs").len(), 1);
    assert!(
        notes.len() == 2 && notes[0].starts_with("files that may be volumes are left out (1): `f.nii`"),
        "{notes:?}"
    );
    assert_eq!(
        notes[1],
        "images of formats that cannot be read are left out (4): `b.avif`, `c.HEIC`, `e.jp2` and 1 more; convert them to PNG"
    );
    std::fs::remove_file(folder.path().join("a.png")).expect("removed");
    let error = asked(folder.path()).0.expect_err("no image").to_string();
    assert!(error.contains("no file that ends in .png") && error.contains("left out (1)"), "{error}");
    assert!(error.contains("left out (4): `b.avif`"), "{error}");
}
