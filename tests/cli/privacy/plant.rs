//! DICOM and NIfTI files with identifiers in every place that a header has for text, dates and UIDs.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dicom_core::dictionary::{DataDictionary, DataDictionaryEntry, VirtualVr};
use dicom_core::value::{DataSetSequence, PrimitiveValue};
use dicom_core::{DataElement, Tag, VR};
use dicom_dictionary_std::{StandardDataDictionary, tags};
use dicom_object::{DefaultDicomObject, InMemDicomObject, OpenFileOptions};
use prsmed::data::volume::{self, SegmentMask, write};

use crate::support::fixture;

/// Start of all planted UIDs.
pub(super) const UIDS: &str = "1.3.6.1.4.1.98765.4711";
pub(super) const NAME: &str = "Zyxwvut^Qwentzyn";
pub(super) const ID: &str = "ZQ-4711-XK";
pub(super) const DATE: &str = "19330307";
pub(super) const TIME: &str = "041133.331";
pub(super) const WEIGHT: &str = "83.571936";

/// Attributes that a reader must understand.
const KEPT: [Tag; 5] = [
    tags::SPECIFIC_CHARACTER_SET,
    tags::MODALITY,
    tags::PHOTOMETRIC_INTERPRETATION,
    tags::SOP_CLASS_UID,
    tags::RESCALE_TYPE,
];

/// What is planted into an attribute with this value representation.
fn planted(tag: Tag, vr: VR) -> Option<String> {
    let text = match vr {
        VR::PN => NAME,
        VR::LO | VR::SH | VR::ST | VR::LT | VR::UT | VR::UC => ID,
        VR::CS | VR::AE => "ZQ_4711_XK",
        VR::UR => "http://zyxwvut/ZQ-4711-XK",
        VR::DA => DATE,
        VR::DT => "19330307041133.331",
        VR::TM => TIME,
        VR::DS if [tags::PATIENT_WEIGHT, tags::PATIENT_SIZE].contains(&tag) => WEIGHT,
        VR::UI => return Some(format!("{UIDS}.{}.{}", tag.group(), tag.element())),
        _ => return None,
    };
    Some(text.to_owned())
}

/// Every attribute of the standard's dictionary before the pixel data that can have a planted value.
fn attributes() -> &'static [(Tag, VR)] {
    static ALL: OnceLock<Vec<(Tag, VR)>> = OnceLock::new();
    ALL.get_or_init(all_attributes)
}

fn all_attributes() -> Vec<(Tag, VR)> {
    let groups = (0x0008..=0x0100).chain(0x3000..=0x3020).chain([0x0400, 0x2100, 0x2200, 0x4008, 0x4010]);
    let all = groups
        .step_by(1)
        .filter(|group| group % 2 == 0)
        .flat_map(|group| (1..=u16::MAX).map(move |element| Tag(group, element)));
    let with_vr = all.filter_map(|tag| match StandardDataDictionary.by_tag(tag)?.vr() {
        VirtualVr::Exact(vr) => Some((tag, vr)),
        _ => None,
    });
    with_vr.filter(|(tag, vr)| !KEPT.contains(tag) && planted(*tag, *vr).is_some()).collect()
}

fn put(object: &mut InMemDicomObject, tag: Tag, vr: VR, value: &str) {
    object.put(DataElement::new(tag, vr, PrimitiveValue::from(value)));
}

fn item() -> InMemDicomObject {
    let mut item = InMemDicomObject::new_empty();
    let person = [tags::PATIENT_NAME, tags::REFERRING_PHYSICIAN_NAME, tags::PATIENT_ID, tags::STUDY_INSTANCE_UID];
    for (tag, vr) in person.into_iter().zip([VR::PN, VR::PN, VR::LO, VR::UI]) {
        put(&mut item, tag, vr, &planted(tag, vr).expect("a value"));
    }
    item
}

/// A fixture of `scripts/fixtures/volumes.py`, parsed.
pub(super) fn parse(bytes: &[u8]) -> DefaultDicomObject {
    OpenFileOptions::new().from_reader(bytes).expect("a DICOM file")
}

/// Plants into the attributes of a file; `number` distinguishes the files of a series.
pub(super) fn plant(object: &mut DefaultDicomObject, number: usize) {
    for &(tag, vr) in attributes() {
        put(object, tag, vr, &planted(tag, vr).expect("a value"));
    }
    put(object, tags::SOP_INSTANCE_UID, VR::UI, &format!("{UIDS}.{}", number + 1));
    for tag in [tags::OTHER_PATIENT_I_DS_SEQUENCE, tags::REQUEST_ATTRIBUTES_SEQUENCE, tags::REFERENCED_STUDY_SEQUENCE] {
        object.put(DataElement::new(tag, VR::SQ, DataSetSequence::from(vec![item()])));
    }
    for group in [0x0009, 0x0011, 0x0029] {
        put(object, Tag(group, 0x0010), VR::LO, ID);
        put(object, Tag(group, 0x1001), VR::PN, NAME);
        let wide: Vec<u8> = NAME.encode_utf16().flat_map(u16::to_le_bytes).collect();
        object.put(DataElement::new(Tag(group, 0x1002), VR::OB, PrimitiveValue::from(wide)));
    }
    put(object, Tag(0x6000, 0x1500), VR::LO, ID);
    object.put(DataElement::new(tags::DATA_SET_TRAILING_PADDING, VR::OB, PrimitiveValue::from(NAME.as_bytes())));
    let instance = format!("{UIDS}.{}", number + 1);
    object.update_meta(|meta| {
        meta.media_storage_sop_instance_uid = instance;
        meta.implementation_version_name = Some("ZQ_4711_XK".into());
        meta.source_application_entity_title = Some("ZQ_4711_XK".into());
        meta.private_information_creator_uid = Some(format!("{UIDS}.99"));
        meta.private_information = Some(NAME.as_bytes().to_vec());
    });
}

/// The file with a name in its preamble.
pub(super) fn encode(object: &DefaultDicomObject) -> Vec<u8> {
    let mut bytes = Vec::new();
    object.write_all(&mut bytes).expect("a DICOM file");
    bytes[..NAME.len()].copy_from_slice(NAME.as_bytes());
    bytes
}

/// Files of a zipped series, with plain names.
pub(super) fn series(name: &str) -> BTreeMap<String, Vec<u8>> {
    let mut archive = zip::ZipArchive::new(fs::File::open(fixture(name)).unwrap()).unwrap();
    let mut files = BTreeMap::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        if bytes.get(128..132) == Some(b"DICM") {
            files.insert(format!("slice{index}"), bytes);
        }
    }
    files
}

/// A series with planted values, changed by `change`.
pub(super) fn planted_series(name: &str, change: impl Fn(&mut DefaultDicomObject, usize)) -> BTreeMap<String, Vec<u8>> {
    let with_values = |(number, (name, bytes)): (usize, (String, Vec<u8>))| {
        let mut object = parse(&bytes);
        plant(&mut object, number);
        change(&mut object, number);
        (name, encode(&object))
    };
    series(name).into_iter().enumerate().map(with_values).collect()
}

pub(super) fn write_folder(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::create_dir_all(folder).unwrap();
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

pub(super) fn zipped(files: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    use std::io::Write;
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    archive.set_comment(ID);
    for (name, bytes) in files {
        archive.start_file(name.as_str(), zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

/// One fixture file with planted values, changed by `change`.
pub(super) fn planted_file(name: &str, change: impl Fn(&mut DefaultDicomObject)) -> Vec<u8> {
    let mut object = parse(&fs::read(fixture(name)).unwrap());
    plant(&mut object, 0);
    change(&mut object);
    encode(&object)
}

/// Text fields of a NIfTI-1 header: offset and length. After the header, an extension with a comment and one with a
/// DICOM header.
pub(super) fn planted_nifti(bytes: &[u8]) -> Vec<u8> {
    let mut header = bytes[..348].to_vec();
    for (offset, length) in [(4, 10), (14, 18), (148, 80), (228, 24), (328, 16)] {
        let text: Vec<u8> = NAME.bytes().cycle().take(length.min(NAME.len())).collect();
        header[offset..offset + text.len()].copy_from_slice(&text);
    }
    let offset = f32::from_le_bytes(bytes[108..112].try_into().unwrap());
    assert_eq!(offset, 352.0);
    header.extend([1, 0, 0, 0]);
    for code in [6_i32, 2] {
        header.extend(48_i32.to_le_bytes());
        header.extend(code.to_le_bytes());
        let mut text = format!("{NAME} {ID}").into_bytes();
        text.resize(40, b' ');
        header.extend(text);
    }
    header[108..112].copy_from_slice(&448_f32.to_le_bytes());
    header.extend(&bytes[352..]);
    header
}

/// A folder with volumes and one with their label maps, all with planted values: a series as folder and as zip, a
/// multi-frame file, a NIfTI file; label maps as NIfTI and as DICOM SEG.
pub(super) fn study(root: &Path) -> [PathBuf; 2] {
    let [volumes, labels] = ["volumes", "labels"].map(|name| root.join(name));
    for folder in [&volumes, &labels] {
        fs::create_dir_all(folder).unwrap();
    }
    let files = planted_series("axial.zip", |_, _| ());
    write_folder(&volumes.join("P1"), &files);
    // other pixels: copies of a patient's images would be in one split
    let others = planted_series("axial.zip", |object, _| put(object, tags::RESCALE_INTERCEPT, VR::DS, "-7"));
    fs::write(volumes.join("P2.zip"), zipped(&others)).unwrap();
    fs::write(volumes.join("P3.dcm"), planted_file("enhanced.dcm", |_| ())).unwrap();
    let series = volume::open(&volumes.join("P1")).unwrap();
    let count = series.grid.num_voxels();
    let grey: Vec<u8> = (0..count).map(|index| u8::try_from(index * 7 % 250).unwrap()).collect();
    write::nifti_labels(&volumes.join("P4.nii"), &grey, &series.grid).unwrap();
    let plain = fs::read(volumes.join("P4.nii")).unwrap();
    fs::write(volumes.join("P4.nii"), planted_nifti(&plain)).unwrap();
    let mask: Vec<u8> = (0..count).map(|index| u8::from(index % 6 < 3 && index / 6 % 5 < 3)).collect();
    for name in ["P1", "P2", "P3", "P4"] {
        let found = ["", ".zip", ".dcm", ".nii"].map(|ending| volumes.join(format!("{name}{ending}")));
        let path = found.iter().find(|path| path.exists()).unwrap();
        let volume = volume::open(path).unwrap();
        if name == "P2" {
            let file = labels.join("P2.dcm");
            write::segments(&file, &[SegmentMask { name: "Zyxwvut", mask: &mask }], &volume).unwrap();
            let mut object = parse(&fs::read(&file).unwrap());
            for (tag, vr) in [tags::PATIENT_NAME, tags::PATIENT_ID].into_iter().zip([VR::PN, VR::LO]) {
                put(&mut object, tag, vr, &planted(tag, vr).unwrap());
            }
            fs::write(&file, encode(&object)).unwrap();
            continue;
        }
        let file = labels.join(format!("{name}.nii"));
        write::nifti_labels(&file, &mask, &volume.grid).unwrap();
        let plain = fs::read(&file).unwrap();
        fs::write(&file, planted_nifti(&plain)).unwrap();
    }
    [volumes, labels]
}

/// Files that no command can read, by name: each has planted values, some of them where the reader looks.
pub(super) fn broken(folder: &Path) -> Vec<PathBuf> {
    let text = |tag: Tag, vr: VR| move |object: &mut DefaultDicomObject| put(object, tag, vr, ID);
    let good = planted_file("explicit_le.dcm", |_| ());
    let mut files: BTreeMap<&str, Vec<u8>> = BTreeMap::from([
        ("cut.dcm", good[..good.len() - 30].to_vec()),
        ("photometric.dcm", planted_file("explicit_le.dcm", text(tags::PHOTOMETRIC_INTERPRETATION, VR::CS))),
        ("rows.dcm", planted_file("explicit_le.dcm", text(tags::ROWS, VR::LO))),
        ("slope.dcm", planted_file("rle.dcm", text(tags::RESCALE_SLOPE, VR::DS))),
        ("samples.dcm", planted_file("rle.dcm", text(tags::SAMPLES_PER_PIXEL, VR::LO))),
        ("bits.dcm", planted_file("jpeg_2000_lossless.dcm", text(tags::BITS_STORED, VR::LO))),
        ("frames.dcm", planted_file("enhanced.dcm", text(tags::NUMBER_OF_FRAMES, VR::IS))),
        ("palette.dcm", planted_file("palette.dcm", text(tags::RED_PALETTE_COLOR_LOOKUP_TABLE_DATA, VR::LO))),
        ("cine.dcm", planted_file("cine.dcm", |_| ())),
        ("syntax.dcm", with_private_syntax(&good)),
        ("gap.zip", {
            let mut files = planted_series("axial.zip", |_, _| ());
            files.remove("slice3");
            zipped(&files)
        }),
        ("two.zip", {
            zipped(&planted_series("axial.zip", |object, number| {
                put(object, tags::SERIES_INSTANCE_UID, VR::UI, &format!("{UIDS}.{}", number % 2));
                put(object, tags::SERIES_NUMBER, VR::IS, ID);
            }))
        }),
        ("orientations.zip", zipped(&planted_series("orientations.zip", |_, _| ()))),
        ("position.zip", { zipped(&planted_series("axial.zip", text_of_slice(tags::IMAGE_POSITION_PATIENT))) }),
        ("nan.nii", {
            let mut bytes = Vec::new();
            let packed = fs::File::open(fixture("nan.nii.gz")).unwrap();
            flate2::read::GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
            planted_nifti(&bytes)
        }),
    ]);
    if !cfg!(feature = "jpeg-ls") {
        files.insert("jpeg_ls.dcm", planted_file("jpeg_ls.dcm", |_| ()));
    }
    files.insert("text.dcm", format!("{NAME} {ID} {UIDS}").into_bytes());
    fs::create_dir_all(folder).unwrap();
    files
        .into_iter()
        .map(|(name, bytes)| {
            let path = folder.join(name);
            fs::write(&path, bytes).unwrap();
            path
        })
        .collect()
}

/// A file whose transfer syntax is a private UID.
fn with_private_syntax(file: &[u8]) -> Vec<u8> {
    let element = b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.1\0";
    let at = file.windows(element.len()).position(|found| found == element).unwrap();
    let private = [b"\x02\x00\x10\x00UI\x16\x00".as_slice(), UIDS.as_bytes()].concat();
    let mut bytes = [&file[..at], &private, &file[at + element.len()..]].concat();
    // the length of the file meta
    bytes[140] += 2;
    bytes
}

fn text_of_slice(tag: Tag) -> impl Fn(&mut DefaultDicomObject, usize) {
    move |object, _| put(object, tag, VR::DS, ID)
}
