//! Trees of twelve patients in the layout of each data set: from the folders as they are to a trained and scored model.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use image::{GrayImage, Luma, Rgb, RgbImage};
use prsmed::data::prepare::layouts;
use prsmed::data::volume::{self, Affine, Grid, SegmentMask, write};
use serde_json::{Value, json};

use crate::support::{done, fixture, folder, objects, prsmed, train};

/// Patients of a tree.
const PATIENTS: usize = 12;
/// Sides of an image and of a volume.
const SIDE: usize = 32;
const DEPTH: usize = 3;

/// Files of a layout. In their names, `{n}` and `{nn}` are the number of the patient, `{split}` is `train`, `val` or `test`.
struct Tree {
    layout: &'static str,
    image: &'static str,
    masks: &'static [&'static str],
    /// Writes what describes the data set; of a layout without files of masks, also these.
    more: fn(&Path),
}

const fn tree(layout: &'static str, image: &'static str, masks: &'static [&'static str]) -> Tree {
    Tree { layout, image, masks, more: |_| {} }
}

const TREES: &[Tree] = &[
    tree("busi", "benign/benign ({n}).png", &["benign/benign ({n})_mask.png"]),
    tree("isic", "images/ISIC_00000{nn}.jpg", &["truth/ISIC_00000{nn}_segmentation.png"]),
    tree(
        "lgg",
        "TCGA_CS_49{nn}_19960909/TCGA_CS_49{nn}_19960909_1.tif",
        &["TCGA_CS_49{nn}_19960909/TCGA_CS_49{nn}_19960909_1_mask.tif"],
    ),
    tree("kits", "case_000{nn}/imaging.nii.gz", &["case_000{nn}/segmentation.nii.gz"]),
    tree("lits", "volume-{n}.nii", &["segmentation-{n}.nii"]),
    tree(
        "brats",
        "BraTS20_Training_0{nn}/BraTS20_Training_0{nn}_flair.nii.gz",
        &["BraTS20_Training_0{nn}/BraTS20_Training_0{nn}_seg.nii.gz"],
    ),
    tree(
        "acdc",
        "training/patient0{nn}/patient0{nn}_frame01.nii.gz",
        &["training/patient0{nn}/patient0{nn}_frame01_gt.nii.gz"],
    ),
    tree(
        "totalsegmentator",
        "s00{nn}/ct.nii.gz",
        &["s00{nn}/segmentations/kidney_left.nii.gz", "s00{nn}/segmentations/liver.nii.gz"],
    ),
    tree("drive", "training/images/{nn}_training.tif", &["training/1st_manual/{nn}_manual1.gif"]),
    tree("chase", "Image_{nn}L.jpg", &["Image_{nn}L_1stHO.png"]),
    Tree { more: voc_lists, ..tree("voc", "JPEGImages/{n}.jpg", &["SegmentationClass/{n}.png"]) },
    Tree {
        more: |root| dataset_json(root, "channel_names"),
        ..tree("nnunet", "imagesTr/a_{nn}_0000.nii.gz", &["labelsTr/a_{nn}.nii.gz"])
    },
    Tree {
        more: |root| dataset_json(root, "modality"),
        ..tree("decathlon", "imagesTr/liver_{n}.nii.gz", &["labelsTr/liver_{n}.nii.gz"])
    },
    tree("kvasir", "images/cju{n}.jpg", &["masks/cju{n}.jpg"]),
    tree(
        "bids",
        "sub-{nn}/anat/sub-{nn}_T1w.nii.gz",
        &["derivatives/manual/sub-{nn}/anat/sub-{nn}_label-lesion_mask.nii.gz"],
    ),
    tree("biomedparse", "{split}/p{nn}_CT_lung.png", &["{split}_mask/p{nn}_CT_lung_lung+nodule.png"]),
    Tree { more: prsmed_table, ..tree("prsmed", "lung_CT/{split}_images/{n}.png", &["lung_CT/{split}_masks/{n}.png"]) },
    Tree { more: arrays, ..tree("medsam", "MedSAM_train/CT_Abd/CT_Abd_{nn}.npz", &[]) },
    Tree { more: dicom, ..tree("dicom", "P{nn}/CT", &[]) },
    Tree {
        more: conversations,
        ..tree(
            "mecovqa",
            "SAMed2Dv1/images/ct_00--SET--Case_{nn}--x_0001.png",
            &["SAMed2Dv1/masks/ct_00--SET--Case_{nn}--x_0001--0001_000.png"],
        )
    },
    tree("names", "P{nn}/image.png", &["P{nn}/mask.png"]),
    Tree { more: coco, ..tree("coco", "{split}/a{n}.jpg", &[]) },
    Tree { more: labelme, ..tree("labelme", "P{nn}/a.jpg", &[]) },
    Tree { more: yolo, ..tree("yolo", "images/{split}/a{n}.png", &[]) },
];

fn split(patient: usize) -> &'static str {
    if patient <= 8 {
        "train"
    } else if patient <= 10 {
        "val"
    } else {
        "test"
    }
}

fn name(pattern: &str, patient: usize) -> String {
    let name = pattern.replace("{nn}", &format!("{patient:02}")).replace("{n}", &patient.to_string());
    name.replace("{split}", split(patient))
}

/// A path below the root, whose folder is made.
fn file(root: &Path, name: &str) -> PathBuf {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}

/// Left, top, right and bottom of the mask of a patient.
fn corners(patient: usize) -> [usize; 4] {
    let at = 1 + patient;
    [at, at / 2 + 2, at + 12, at / 2 + 12]
}

fn is_inside(x: usize, y: usize, patient: usize) -> bool {
    let [left, top, right, bottom] = corners(patient);
    (left..right).contains(&x) && (top..bottom).contains(&y)
}

fn byte(value: usize) -> u8 {
    u8::try_from(value % 251).unwrap()
}

fn image_bytes(is_mask: bool, patient: usize) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let (at, side) = (|value: u32| usize::try_from(value).unwrap(), u32::try_from(SIDE).unwrap());
    if is_mask {
        let value = |x, y| Luma([if is_inside(at(x), at(y), patient) { 255 } else { 0 }]);
        GrayImage::from_fn(side, side, value).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    } else {
        let value = |x, y| Rgb([byte(at(x) * 7), byte(at(y) * 5), byte(patient * 20)]);
        RgbImage::from_fn(side, side, value).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    }
    bytes.into_inner()
}

/// Voxels of a volume or of its label map; the mask is in the middle slice.
fn voxels(is_mask: bool, patient: usize) -> Vec<u8> {
    let all = (0..DEPTH).flat_map(|z| (0..SIDE).flat_map(move |y| (0..SIDE).map(move |x| (x, y, z))));
    let value = |(x, y, z): (usize, usize, usize)| {
        if is_mask { u8::from(z == 1 && is_inside(x, y, patient)) } else { byte(x * 5 + y * 3 + z * 40 + patient * 9) }
    };
    all.map(value).collect()
}

fn write_file(path: &Path, is_mask: bool, patient: usize) {
    if !path.to_string_lossy().contains(".nii") {
        fs::write(path, image_bytes(is_mask, patient)).unwrap();
        return;
    }
    let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], [0.0; 3]);
    let (grid, voxels) = (Grid { size: [SIDE, SIDE, DEPTH], affine }, voxels(is_mask, patient));
    if is_mask {
        write::nifti_labels(path, &voxels, &grid).unwrap();
    } else {
        let voxels: Vec<i16> = voxels.into_iter().map(i16::from).collect();
        write::nifti_i16(path, &voxels, &grid).unwrap();
    }
}

fn of_split(wanted: &str) -> impl Iterator<Item = usize> {
    (1..=PATIENTS).filter(move |patient| split(*patient) == wanted)
}

fn voc_lists(root: &Path) {
    for list in ["train", "val", "test"] {
        let ids: Vec<String> = of_split(list).map(|patient| patient.to_string()).collect();
        fs::write(file(root, &format!("ImageSets/Segmentation/{list}.txt")), ids.join("\n")).unwrap();
    }
}

fn dataset_json(root: &Path, channels: &str) {
    let text = json!({ channels: {"0": "CT"}, "labels": {"background": 0, "nodule": 1} }).to_string();
    // the Decathlon has numbers first
    let text = if channels == "modality" {
        text.replace(r#""background":0,"nodule":1"#, r#""0":"background","1":"nodule""#)
    } else {
        text
    };
    fs::write(root.join("dataset.json"), text).unwrap();
}

fn prsmed_table(root: &Path) {
    let mut text = "image_path,question,answer,position,split\n".to_owned();
    for patient in 1..=PATIENTS {
        let split = split(patient);
        writeln!(text, "lung_CT/{split}_masks/{patient}.png,Where is it?,At the top left.,top left,{split}").unwrap();
    }
    fs::write(file(root, "annotations/lung_CT.csv"), text).unwrap();
}

fn arrays(root: &Path) {
    let array = |bytes: &[u8]| {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({DEPTH}, {SIDE}, {SIDE}), }}");
        let header = format!("{header:<117}\n");
        let length = u16::try_from(header.len()).unwrap().to_le_bytes();
        [&b"\x93NUMPY\x01\0"[..], &length[..], header.as_bytes(), bytes].concat()
    };
    for patient in 1..=PATIENTS {
        let path = file(root, &format!("MedSAM_train/CT_Abd/CT_Abd_{patient:02}.npz"));
        let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
        for (name, is_mask) in [("imgs.npy", false), ("gts.npy", true)] {
            zip.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
            std::io::Write::write_all(&mut zip, &array(&voxels(is_mask, patient))).unwrap();
        }
        zip.finish().unwrap();
    }
}

/// A series for each patient, with a SEG beside its slices or an RTSTRUCT in another folder.
fn dicom(root: &Path) {
    for patient in 1..=PATIENTS {
        let folder = format!("P{patient:02}/CT");
        let mut archive = zip::ZipArchive::new(fs::File::open(fixture("axial.zip")).unwrap()).unwrap();
        for index in 0..archive.len() {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut archive.by_index(index).unwrap(), &mut bytes).unwrap();
            // UIDs of the patient's own, and slices of other values
            let uids: Vec<usize> = (0..bytes.len() - 6).filter(|at| bytes[*at..].starts_with(b"8.498.")).collect();
            for at in uids {
                bytes[at + 3..at + 5].copy_from_slice(format!("{patient:02}").as_bytes());
            }
            if volume::dicom::is_dicom(&bytes) {
                *bytes.last_mut().unwrap() ^= u8::try_from(patient).unwrap();
                fs::write(file(root, &format!("{folder}/{index}.dcm")), bytes).unwrap();
            }
        }
        let series = volume::open(&root.join(&folder)).unwrap();
        let [width, height, depth] = series.grid.size;
        let mask: Vec<u8> =
            (0..width * height * depth).map(|at| u8::from(at / (width * height) == 1 && at % width < 3)).collect();
        let segments = [SegmentMask { name: "nodule", mask: &mask }];
        let name = if patient % 2 == 0 { format!("{folder}/9.dcm") } else { format!("RS/{patient}.rtstruct.dcm") };
        write::segments(&file(root, &name), &segments, &series).unwrap();
    }
}

fn conversations(root: &Path) {
    let entry = |patient: usize| {
        let stem = format!("ct_00--SET--Case_{patient:02}--x_0001");
        let answer = format!("It is <SEG>.<mask>masks/{stem}--0001_000.png</mask>");
        let turns =
            json!([{"from": "human", "value": "<image>\nWhere is the liver?"}, {"from": "gpt", "value": answer}]);
        json!({"image": format!("images/{stem}.png"), "conversations": turns})
    };
    let entries: Vec<Value> = (1..=PATIENTS).map(entry).collect();
    fs::write(file(root, "MeCoVQA/MeCoVQA-Grounding.json"), Value::from(entries).to_string()).unwrap();
}

/// The outline of a patient's mask.
fn outline(patient: usize) -> [[usize; 2]; 4] {
    let [left, top, right, bottom] = corners(patient);
    [[left, top], [right, top], [right, bottom], [left, bottom]]
}

fn coco(root: &Path) {
    for list in ["train", "val", "test"] {
        let image = |id: usize| json!({"id": id, "file_name": format!("a{id}.jpg"), "width": SIDE, "height": SIDE});
        let object = |id: usize| {
            let outline: Vec<usize> = outline(id).concat();
            json!({"id": id, "image_id": id, "category_id": 1, "segmentation": [outline], "iscrowd": 0})
        };
        let (images, annotations): (Vec<Value>, Vec<Value>) = of_split(list).map(|id| (image(id), object(id))).unzip();
        let text = json!({"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "nodule"}]});
        fs::write(file(root, &format!("{list}/_annotations.coco.json")), text.to_string()).unwrap();
    }
}

fn labelme(root: &Path) {
    for patient in 1..=PATIENTS {
        let shape = json!({"label": "nodule", "points": outline(patient), "shape_type": "polygon"});
        let text = json!({"shapes": [shape], "imagePath": "a.jpg", "imageWidth": SIDE, "imageHeight": SIDE});
        fs::write(file(root, &format!("P{patient:02}/a.json")), text.to_string()).unwrap();
    }
}

fn yolo(root: &Path) {
    fs::write(root.join("data.yaml"), "names: [nodule]\n").unwrap();
    for patient in 1..=PATIENTS {
        let values: Vec<String> =
            outline(patient).concat().iter().map(|value| (*value as f64 / SIDE as f64).to_string()).collect();
        let path = file(root, &format!("labels/{}/a{patient}.txt", split(patient)));
        fs::write(path, format!("0 {}\n", values.join(" "))).unwrap();
    }
}

fn written(tree: &Tree) -> PathBuf {
    let root = folder(&format!("layout-{}/tree", tree.layout));
    for patient in 1..=PATIENTS {
        if tree.image.contains('.') && !tree.image.contains(".npz") {
            write_file(&file(&root, &name(tree.image, patient)), false, patient);
        }
        for mask in tree.masks {
            write_file(&file(&root, &name(mask, patient)), true, patient);
        }
    }
    (tree.more)(&root);
    root
}

/// Goes from the files of a layout to scores.
fn scored(tree: &Tree) {
    let root = written(tree);
    let home = root.parent().unwrap();
    let scanned = done(prsmed().current_dir(home).args(["data", "scan", "tree", "--out", "scan"]));
    assert!(scanned.contains(&format!("layout      {} ({PATIENTS})", tree.layout)), "{}: {scanned}", tree.layout);
    let mut prepare = prsmed();
    prepare.current_dir(home).args(["--json", "data", "prepare", "tree", "--modality", "ct", "--out", "data"]);
    let report = objects(&done(&mut prepare)).pop().unwrap();
    assert_eq!(report["images"], PATIENTS, "{}: {report}", tree.layout);
    for split in ["train", "val", "test"] {
        assert!(report["images_by_split"][split].as_u64() > Some(0), "{}: {report}", tree.layout);
    }
    let run = home.join("run");
    done(&mut train(&home.join("data"), &run, &["train.max_steps=1"]));
    let first = name(tree.image, 1);
    let (is_volume, mut predict) = (first.contains(".n") || !first.contains('.'), prsmed());
    predict.current_dir(home).arg("predict").arg(&run).arg("--image").arg(root.join(&first));
    predict.args(["--question", "Where is the lesion?", "--max-new-tokens", "1"]);
    let out = if is_volume { ["--out", "mask.nii.gz"] } else { ["--mask-out", "mask.png"] };
    done(predict.args(out));
    assert!(home.join(out[1]).is_file(), "{}", tree.layout);
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--max-new-tokens", "1", "--data-root"]).arg(home.join("data")).arg(&run);
    let text = done(&mut eval);
    assert!(text.contains("dice"), "{}: {text}", tree.layout);
    fs::remove_dir_all(home).unwrap();
}

#[test]
fn each_layout_has_a_tree_and_is_in_the_help_and_the_guide() {
    let help = done(prsmed().args(["data", "scan", "--help"]));
    let guide = include_str!("../../docs/guides/your-data-as-it-is.md");
    for layout in layouts() {
        assert!(TREES.iter().any(|tree| tree.layout == layout.name), "no tree of {}", layout.name);
        assert!(help.contains(&format!("`{}`", layout.name)), "{}: {help}", layout.name);
        assert!(guide.contains(&format!("| `{}` |", layout.name)), "{}", layout.name);
    }
}

#[test]
fn an_image_and_a_volume_layout_go_from_folders_to_scores() {
    TREES.iter().filter(|tree| ["coco", "bids", "dicom"].contains(&tree.layout)).for_each(scored);
}

#[test]
#[ignore = "takes minutes"]
fn all_layouts_go_from_folders_to_scores() {
    TREES.iter().for_each(scored);
}
