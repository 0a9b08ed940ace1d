//! Tests of scans, on trees with the names of real data sets and invented pixels.

use std::fs;
use std::io::{Cursor, Write as _};

use image::{GrayImage, ImageFormat, Luma, Rgb, RgbImage};
use serde_json::json;

use super::super::table::Pair;
use super::*;
use crate::fixture::Root;
use crate::manifest::{Manifest, Split};
use crate::prepare::{PairText, PrepareOptions, prepare, prepare_classes, read_pairs};
use crate::volume::write::{nifti_i16, nifti_labels};
use crate::volume::{Affine, Grid};
use prsmed_base::event::Silent;

/// A tree. Images are PNG files whatever their ending is; names of masks begin with `=`. Behind `<` is what a file has.
fn tree(names: &[&str]) -> Root {
    let root = Root::new();
    for (number, name) in names.iter().enumerate() {
        let (name, is_mask) = name.strip_prefix('=').map_or((*name, false), |name| (name, true));
        if let Some((name, content)) = name.split_once('<') {
            fs::write(root.file(name), text_of(content)).unwrap();
            continue;
        }
        let path = root.file(name);
        let tint = u8::try_from(number % 250).unwrap() + 1;
        let grid = Grid {
            size: [6, 5, 3],
            affine: Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]], [0.0; 3]),
        };
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        let labels = || (0..90_u8).map(|at| u8::from(at > 35 && at < 50)).collect::<Vec<_>>();
        match (["json", "txt"].contains(&ending), name.contains(".nii"), is_mask) {
            (true, ..) => fs::write(&path, "{}").unwrap(),
            (_, true, true) => nifti_labels(&path, &labels(), &grid).unwrap(),
            (_, true, false) => {
                let values: Vec<i16> = (0..90).map(|at| (at * (2 + i16::from(tint))) % 89).collect();
                nifti_i16(&path, &values, &grid).unwrap();
            }
            (_, _, is_mask) => fs::write(&path, png(is_mask, tint, 12)).unwrap(),
        }
    }
    root
}

/// A file of outlines of images of 12 x 8 pixels, two arrays, or a text.
fn text_of(content: &str) -> Vec<u8> {
    let (kind, rest) = content.split_once(' ').unwrap_or((content, ""));
    let labels = ["polyp", "large_cyst"];
    let number = |label: &str| labels.iter().position(|known| *known == label).unwrap();
    let of = |text: &str| text.split('+').filter(|label| !label.is_empty()).map(number).collect::<Vec<_>>();
    let outline = |label: usize| vec![1 + label, 1, 6 + label, 1, 6 + label, 5, 1 + label, 5];
    match kind {
        // `a.jpg=polyp+large_cyst,b.jpg=`
        "coco" => {
            let (mut images, mut annotations) = (Vec::new(), Vec::new());
            for (id, (name, own)) in rest.split(',').map(|image| image.split_once('=').unwrap()).enumerate() {
                images.push(json!({"id": id, "file_name": name, "width": 12, "height": 8}));
                annotations.extend(of(own).into_iter().map(|label| {
                    json!({"id": id * 10 + label, "image_id": id, "category_id": label, "segmentation": [outline(label)]})
                }));
            }
            let categories: Vec<_> = labels.iter().zip(0..).map(|(name, id)| json!({"id": id, "name": name})).collect();
            json!({"images": images, "annotations": annotations, "categories": categories}).to_string().into_bytes()
        }
        "labelme" => {
            let (name, own) = rest.split_once('=').unwrap();
            let shape = |label: usize| {
                let points: Vec<_> = outline(label).chunks(2).map(<[usize]>::to_vec).collect();
                json!({"label": labels[label], "points": points, "shape_type": "polygon"})
            };
            let shapes: Vec<_> = of(own).into_iter().map(shape).collect();
            json!({"shapes": shapes, "imagePath": name, "imageWidth": 12, "imageHeight": 8}).to_string().into_bytes()
        }
        "yolo" => {
            let part = |(at, value): (usize, usize)| value as f64 / [12.0, 8.0][at % 2];
            let line = |label: usize| {
                let values = outline(label).into_iter().enumerate().map(|value| part(value).to_string());
                format!("{label} {}\n", values.collect::<Vec<_>>().join(" "))
            };
            of(rest).into_iter().map(line).collect::<String>().into_bytes()
        }
        "npz" => npz(rest.parse().unwrap()),
        _ => content.as_bytes().to_vec(),
    }
}

/// The arrays `imgs`, `gts` and `spacing`, as MedSAM stores them.
fn npz(tint: u32) -> Vec<u8> {
    let array = |kind: &str, shape: &str, bytes: &[u8]| {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}");
        let header = format!("{header:<117}\n");
        [&b"\x93NUMPY\x01\0"[..], &u16::try_from(header.len()).unwrap().to_le_bytes()[..], header.as_bytes(), bytes]
            .concat()
    };
    let image: Vec<u8> = (0..90_u32).map(|at| u8::try_from(at * (6 + tint) % 89).unwrap()).collect();
    let labels: Vec<u8> = (0..90).map(|at| u8::from(at > 35 && at < 50)).collect();
    let spacing: Vec<u8> = [0.5_f64, 0.5, 2.0].iter().flat_map(|mm| mm.to_le_bytes()).collect();
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in [
        ("imgs.npy", array("|u1", "3, 5, 6", &image)),
        ("gts.npy", array("|u1", "3, 5, 6", &labels)),
        ("spacing.npy", array("<f8", "3,", &spacing)),
    ] {
        zip.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(&bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn png(is_mask: bool, tint: u8, width: u32) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    if is_mask {
        let mask = GrayImage::from_fn(width, 8, |x, y| Luma([if x < 5 && y < 3 { 255 } else { 0 }]));
        mask.write_to(&mut bytes, ImageFormat::Png).unwrap();
    } else {
        let image =
            RgbImage::from_fn(width, 8, |x, y| Rgb([u8::try_from(x * 9).unwrap(), u8::try_from(y * 7).unwrap(), tint]));
        image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    }
    bytes.into_inner()
}

fn scanned(root: &Root) -> ScanReport {
    scan(root.path(), &ScanOptions::default(), &Silent).unwrap()
}

/// `name: image + masks` of all pairs, below the root.
fn pairs(report: &ScanReport) -> Vec<String> {
    let below = |path: &Path| path.strip_prefix(&report.root).unwrap().display().to_string();
    let mask = |(target, path): &(Option<String>, PathBuf)| match target {
        Some(target) => format!("{target}={}", below(path)),
        None => below(path),
    };
    let text = |pair: &Pair| {
        let masks: Vec<String> = pair.masks.iter().map(mask).collect();
        format!("{}: {} + {}", pair.name, below(&pair.image), masks.join(" + "))
    };
    report.table.rows.iter().map(text).collect()
}

/// Layout, files, the pairs that they make, and the number of patients.
type Case = (&'static str, &'static [&'static str], &'static [&'static str], Option<usize>);

const CASES: &[Case] = &[
    (
        "busi",
        &[
            "benign/benign (1).png",
            "=benign/benign (1)_mask.png",
            "=benign/benign (1)_mask_1.png",
            "malignant/malignant (1).png",
            "=malignant/malignant (1)_mask.png",
        ],
        &[
            "benign (1): benign/benign (1).png + benign/benign (1)_mask.png + benign/benign (1)_mask_1.png",
            "malignant (1): malignant/malignant (1).png + malignant/malignant (1)_mask.png",
        ],
        None,
    ),
    (
        "isic",
        &[
            "ISIC2018_Task1-2_Training_Input/ISIC_0000000.jpg",
            "ISIC2018_Task1-2_Training_Input/ISIC_0000001.jpg",
            "=ISIC2018_Task1_Training_GroundTruth/ISIC_0000000_segmentation.png",
            "=ISIC2018_Task1_Training_GroundTruth/ISIC_0000001_segmentation.png",
            "=ISIC2018_Task2_Training_GroundTruth_v3/ISIC_0000001_attribute_globules.png",
        ],
        &[
            "ISIC_0000000: ISIC2018_Task1-2_Training_Input/ISIC_0000000.jpg + ISIC2018_Task1_Training_GroundTruth/ISIC_0000000_segmentation.png",
            "ISIC_0000001: ISIC2018_Task1-2_Training_Input/ISIC_0000001.jpg + ISIC2018_Task1_Training_GroundTruth/ISIC_0000001_segmentation.png + globules=ISIC2018_Task2_Training_GroundTruth_v3/ISIC_0000001_attribute_globules.png",
        ],
        None,
    ),
    (
        "kvasir",
        &["images/cju0.jpg", "=masks/cju0.jpg", "images/cju1.jpg", "=masks/cju1.jpg"],
        &["cju0: images/cju0.jpg + masks/cju0.jpg", "cju1: images/cju1.jpg + masks/cju1.jpg"],
        None,
    ),
    (
        "lgg",
        &[
            "kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_1.tif",
            "=kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_1_mask.tif",
            "kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_2.tif",
            "=kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_2_mask.tif",
        ],
        &[
            "TCGA_CS_4941_19960909_1: kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_1.tif + kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_1_mask.tif",
            "TCGA_CS_4941_19960909_2: kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_2.tif + kaggle_3m/TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_2_mask.tif",
        ],
        Some(1),
    ),
    (
        "kits",
        &[
            "case_00000/imaging.nii.gz",
            "=case_00000/segmentation.nii.gz",
            "=case_00000/instances/tumor_instance-1_annotation-1.nii.gz",
            "=case_00000/segmentations/kidney_instance-1_annotation-2.nii.gz",
            "=case_00000/aggregated_AND_seg.nii.gz",
            "case_00001/imaging.nii.gz",
            "=case_00001/segmentation.nii.gz",
        ],
        &[
            "case_00000: case_00000/imaging.nii.gz + case_00000/segmentation.nii.gz",
            "case_00001: case_00001/imaging.nii.gz + case_00001/segmentation.nii.gz",
        ],
        Some(2),
    ),
    (
        "lits",
        &[
            "volumes/volume-0.nii",
            "=segmentations/segmentation-0.nii",
            "volumes/volume-10.nii",
            "=segmentations/segmentation-10.nii",
        ],
        &[
            "0: volumes/volume-0.nii + segmentations/segmentation-0.nii",
            "10: volumes/volume-10.nii + segmentations/segmentation-10.nii",
        ],
        Some(2),
    ),
    (
        "acdc",
        &[
            "training/patient001/patient001_frame01.nii.gz",
            "=training/patient001/patient001_frame01_gt.nii.gz",
            "training/patient001/patient001_4d.nii.gz",
            "testing/patient101/patient101_frame01.nii.gz",
            "=testing/patient101/patient101_frame01_gt.nii.gz",
        ],
        &[
            "patient101_frame01: testing/patient101/patient101_frame01.nii.gz + testing/patient101/patient101_frame01_gt.nii.gz",
            "patient001_frame01: training/patient001/patient001_frame01.nii.gz + training/patient001/patient001_frame01_gt.nii.gz",
        ],
        Some(2),
    ),
    (
        "totalsegmentator",
        &[
            "s0000/ct.nii.gz",
            "=s0000/segmentations/liver.nii.gz",
            "=s0000/segmentations/kidney_left.nii.gz",
            "s0001/ct.nii.gz",
            "=s0001/segmentations/liver.nii.gz",
        ],
        &[
            "s0000: s0000/ct.nii.gz + left kidney=s0000/segmentations/kidney_left.nii.gz + liver=s0000/segmentations/liver.nii.gz",
            "s0001: s0001/ct.nii.gz + liver=s0001/segmentations/liver.nii.gz",
        ],
        Some(2),
    ),
    (
        "drive",
        &[
            "training/images/21_training.tif",
            "=training/1st_manual/21_manual1.gif",
            "=training/mask/21_training_mask.gif",
            "test/images/01_test.tif",
            "=test/1st_manual/01_manual1.gif",
            "=test/2nd_manual/01_manual2.gif",
            "=test/mask/01_test_mask.gif",
        ],
        &[
            "01: test/images/01_test.tif + test/1st_manual/01_manual1.gif",
            "21: training/images/21_training.tif + training/1st_manual/21_manual1.gif",
        ],
        None,
    ),
    (
        "chase",
        &["Image_01L.jpg", "=Image_01L_1stHO.png", "=Image_01L_2ndHO.png", "Image_01R.jpg", "=Image_01R_1stHO.png"],
        &["Image_01L: Image_01L.jpg + Image_01L_1stHO.png", "Image_01R: Image_01R.jpg + Image_01R_1stHO.png"],
        Some(1),
    ),
    (
        "voc",
        &[
            "VOC2012/JPEGImages/2007_000032.jpg",
            "=VOC2012/SegmentationClass/2007_000032.png",
            "=VOC2012/SegmentationObject/2007_000032.png",
        ],
        &["2007_000032: VOC2012/JPEGImages/2007_000032.jpg + VOC2012/SegmentationClass/2007_000032.png"],
        None,
    ),
    (
        "nnunet",
        &[
            "imagesTr/la_003_0000.nii.gz",
            "=labelsTr/la_003.nii.gz",
            "imagesTr/la_004_0000.nii.gz",
            "=labelsTr/la_004.nii.gz",
            "dataset.json",
        ],
        &[
            "la_003: imagesTr/la_003_0000.nii.gz + labelsTr/la_003.nii.gz",
            "la_004: imagesTr/la_004_0000.nii.gz + labelsTr/la_004.nii.gz",
        ],
        None,
    ),
    (
        "decathlon",
        &[
            "Task03_Liver/imagesTr/liver_0.nii.gz",
            "=Task03_Liver/labelsTr/liver_0.nii.gz",
            "Task03_Liver/imagesTs/liver_132.nii.gz",
            "Task03_Liver/dataset.json",
        ],
        &["liver_0: Task03_Liver/imagesTr/liver_0.nii.gz + Task03_Liver/labelsTr/liver_0.nii.gz"],
        Some(1),
    ),
    (
        "names",
        &["P1/image.png", "=P1/mask.png", "P2/image.png", "=P2/mask.png"],
        &["P1: P1/image.png + P1/mask.png", "P2: P2/image.png + P2/mask.png"],
        Some(2),
    ),
    (
        "names",
        &[
            "scans/A 1/imaging.nii.gz",
            "=labels/A 1/imaging.nii.gz",
            "scans/B2/imaging.nii.gz",
            "=labels/B2/imaging.nii.gz",
        ],
        &[
            "A 1: scans/A 1/imaging.nii.gz + labels/A 1/imaging.nii.gz",
            "B2: scans/B2/imaging.nii.gz + labels/B2/imaging.nii.gz",
        ],
        Some(2),
    ),
    (
        "names",
        &[
            "P1/a.png",
            "=P1/a_mask.png",
            "P1/b.png",
            "=P1/b_mask (2).png",
            "=P1/b_mask (1).png",
            "P2/a.png",
            "=P2/A Segmentation.png",
        ],
        &[
            "P1_a: P1/a.png + P1/a_mask.png",
            "P1_b: P1/b.png + P1/b_mask (1).png + P1/b_mask (2).png",
            "P2_a: P2/a.png + P2/A Segmentation.png",
        ],
        Some(2),
    ),
    (
        "names",
        &["ct.nii.gz", "=ct_labels.nii.gz", "mr.nii.gz", "=mr_labels.nii.gz"],
        &["ct: ct.nii.gz + ct_labels.nii.gz", "mr: mr.nii.gz + mr_labels.nii.gz"],
        None,
    ),
    (
        "names",
        &[
            "P1/t2.nii.gz",
            "=P1/masks/tumour.nii.gz",
            "=P1/masks/gland.nii.gz",
            "P2/t2.nii.gz",
            "=P2/masks/gland.nii.gz",
        ],
        &[
            "P1_t2: P1/t2.nii.gz + gland=P1/masks/gland.nii.gz + tumour=P1/masks/tumour.nii.gz",
            "P2_t2: P2/t2.nii.gz + gland=P2/masks/gland.nii.gz",
        ],
        Some(2),
    ),
    (
        "names",
        &["images/kept_seg.png", "=masks/kept_seg.png", "images/b.png", "=masks/b_seg.png"],
        &["b: images/b.png + masks/b_seg.png", "kept_seg: images/kept_seg.png + masks/kept_seg.png"],
        None,
    ),
    (
        "bids",
        &[
            "sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz",
            "=derivatives/manual/sub-01/ses-1/anat/sub-01_ses-1_space-orig_label-lesion_mask.nii.gz",
            "sub-02/anat/sub-02_acq-fast_T1w.nii.gz",
            "=derivatives/manual/sub-02/anat/sub-02_dseg.nii.gz",
            "derivatives/manual/dseg.tsv<index\tname\n0\tbackground\n1\tLeft_Thalamus\n",
            "dataset_description.json",
        ],
        &[
            "sub-01_ses-1: sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz + lesion=derivatives/manual/sub-01/ses-1/anat/sub-01_ses-1_space-orig_label-lesion_mask.nii.gz",
            "sub-02: sub-02/anat/sub-02_acq-fast_T1w.nii.gz + derivatives/manual/sub-02/anat/sub-02_dseg.nii.gz",
        ],
        Some(2),
    ),
    (
        "biomedparse",
        &[
            "train/covid_1585_X-Ray_chest.png",
            "=train_mask/covid_1585_X-Ray_chest_COVID-19+infection.png",
            "=train_mask/covid_1585_X-Ray_chest_lung.png",
            "test/T0340_fundus_retinal.png",
            "=test_mask/T0340_fundus_retinal_optic+disc.png",
            "train.json",
        ],
        &[
            "T0340_fundus_retinal: test/T0340_fundus_retinal.png + optic disc=test_mask/T0340_fundus_retinal_optic+disc.png",
            "covid_1585_X-Ray_chest: train/covid_1585_X-Ray_chest.png + COVID-19 infection=train_mask/covid_1585_X-Ray_chest_COVID-19+infection.png + lung=train_mask/covid_1585_X-Ray_chest_lung.png",
        ],
        None,
    ),
    (
        "prsmed",
        &[
            "lung_CT/train_images/2.png",
            "=lung_CT/train_masks/2.png",
            "skin_rgbimage/test_images/ISIC_0000001.jpg",
            "=skin_rgbimage/test_masks/ISIC_0000001_Segmentation.png",
            "annotations/lung_CT.csv<image_path,question,answer,split\nlung_CT\\train_masks\\2.png,Where?,\"Top, left.\",train\n",
        ],
        &[
            "2: lung_CT/train_images/2.png + lung_CT/train_masks/2.png",
            "ISIC_0000001: skin_rgbimage/test_images/ISIC_0000001.jpg + skin_rgbimage/test_masks/ISIC_0000001_Segmentation.png",
        ],
        None,
    ),
    (
        "medsam",
        &[
            "MedSAM_train/CT_Abd/CT_Abd_FLARE22_Tr_0001.npz<npz 1",
            "MedSAM_test/CT_Abd/CT_Abd_FLARE22_Tr_0050.npz<npz 2",
        ],
        &[
            "CT_Abd_FLARE22_Tr_0050: MedSAM_test/CT_Abd/CT_Abd_FLARE22_Tr_0050.npz + MedSAM_test/CT_Abd/CT_Abd_FLARE22_Tr_0050.npz#gts",
            "CT_Abd_FLARE22_Tr_0001: MedSAM_train/CT_Abd/CT_Abd_FLARE22_Tr_0001.npz + MedSAM_train/CT_Abd/CT_Abd_FLARE22_Tr_0001.npz#gts",
        ],
        None,
    ),
    (
        "mecovqa",
        &[
            "SAMed2Dv1/images/ct_00--AbdomenCT1K--Case_00220--x_0359.png",
            "=SAMed2Dv1/masks/ct_00--AbdomenCT1K--Case_00220--x_0359--0001_000.png",
            r#"MeCoVQA/train/MeCoVQA-Grounding.json<[{"image": "images/ct_00--AbdomenCT1K--Case_00220--x_0359.png", "conversations": [{"from": "human", "value": "<image>\nWhere is the liver?"}, {"from": "gpt", "value": "It is <SEG>.<mask>masks/ct_00--AbdomenCT1K--Case_00220--x_0359--0001_000.png</mask>"}]}]"#,
        ],
        &[
            "ct_00--AbdomenCT1K--Case_00220--x_0359: SAMed2Dv1/images/ct_00--AbdomenCT1K--Case_00220--x_0359.png + target 1=SAMed2Dv1/masks/ct_00--AbdomenCT1K--Case_00220--x_0359--0001_000.png",
        ],
        Some(1),
    ),
    (
        "coco",
        &[
            "train/a.jpg",
            "train/_annotations.coco.json<coco a.jpg=polyp+large_cyst",
            "valid/a.jpg",
            "valid/_annotations.coco.json<coco a.jpg=polyp",
        ],
        &[
            "train_a: train/a.jpg + large cyst=train/_annotations.coco.json#a.jpg#large_cyst + polyp=train/_annotations.coco.json#a.jpg#polyp",
            "val_a: valid/a.jpg + large cyst=valid/_annotations.coco.json#a.jpg#!large_cyst + polyp=valid/_annotations.coco.json#a.jpg#polyp",
        ],
        None,
    ),
    (
        "coco",
        &[
            "annotations/instances_train2017.json<coco 1.jpg=polyp",
            "annotations/instances_val2017.json<coco 1.jpg=polyp",
            "train2017/1.jpg",
            "val2017/1.jpg",
        ],
        &[
            "train_1: train2017/1.jpg + annotations/instances_train2017.json#1.jpg",
            "val_1: val2017/1.jpg + annotations/instances_val2017.json#1.jpg",
        ],
        None,
    ),
    (
        "labelme",
        &["P1/a.jpg", "P1/a.json<labelme a.jpg=polyp", "P2/a.jpg", "P2/a.json<labelme a.jpg=large_cyst"],
        &[
            "P1_a: P1/a.jpg + large cyst=P1/a.json#!large_cyst + polyp=P1/a.json#polyp",
            "P2_a: P2/a.jpg + large cyst=P2/a.json#large_cyst + polyp=P2/a.json#!polyp",
        ],
        Some(2),
    ),
    (
        "yolo",
        &[
            "data.yaml<names: [polyp, large_cyst]",
            "images/train/a.png",
            "images/val/b.png",
            "labels/train/a.txt<yolo polyp+large_cyst",
            "labels/val/b.txt<yolo polyp",
        ],
        &[
            "a: images/train/a.png + large cyst=labels/train/a.txt#large_cyst + polyp=labels/train/a.txt#polyp",
            "b: images/val/b.png + large cyst=labels/val/b.txt#!large_cyst + polyp=labels/val/b.txt#polyp",
        ],
        None,
    ),
    (
        "toy",
        &["P1/train/a.scan.png", "=P1/train/a.spot.png"],
        &["a: P1/train/a.scan.png + spot=P1/train/a.spot.png"],
        Some(1),
    ),
];

#[test]
fn the_layouts_of_data_sets_are_recognised() {
    for (layout, files, expected, patients) in CASES {
        let root = tree(files);
        let report = scanned(&root);
        let names: Vec<&str> = report.layouts.iter().map(|row| row.name).collect();
        assert_eq!(names, [*layout], "{files:?}");
        assert_eq!(pairs(&report), *expected, "{layout}");
        assert_eq!(report.patients, *patients, "{layout}: {:?}", report.notes);
        assert!(report.ambiguous.is_empty() && report.problems.is_empty(), "{layout}: {report:?}");
        let named = ScanOptions { layout: Some(layout.to_uppercase()), ..ScanOptions::default() };
        assert_eq!(pairs(&scan(root.path(), &named, &Silent).unwrap()), *expected);
        // what a scan writes is read as it was, and can be prepared
        let out = root.path().join("out");
        write_scan(&report, &out).unwrap();
        let table = read_pairs(&out.join("pairs.csv")).unwrap();
        let rows = report.table.rows.clone();
        let name = |pair: &Pair| (pair.name.clone(), pair.masks.len(), pair.patient.clone(), pair.split);
        assert_eq!(table.rows.iter().map(name).collect::<Vec<_>>(), rows.iter().map(name).collect::<Vec<_>>());
        let options = PrepareOptions {
            val_frac: 0.0,
            test_frac: 0.0,
            ..PrepareOptions::new(root.path(), root.path(), "x", root.path().join("data"))
        };
        let prepared = prepare_classes(table, &options, &Silent).unwrap();
        let num_rows: usize = prepared.iter().map(|(_, report)| report.rows).sum();
        assert!(num_rows >= expected.len(), "{layout}: {prepared:?}");
        let page = fs::read_to_string(out.join("scan.html")).unwrap();
        assert_eq!(page.matches("data:image/png;base64,iVBOR").count(), expected.len(), "{layout}");
    }
}

#[test]
fn splits_are_those_of_folders_only_if_there_are_several() {
    let split = |report: &ScanReport| -> Vec<Option<&str>> {
        report.table.rows.iter().map(|pair| pair.split.map(Split::name)).collect()
    };
    let report = scanned(&tree(CASES[6].1));
    assert_eq!(split(&report), [Some("test"), Some("train")]);
    let report = scanned(&tree(CASES[1].1));
    assert_eq!(split(&report), [None, None]);
    assert!(report.notes[0].contains("all masks are in folders of `train`"), "{:?}", report.notes);
    let root = tree(&["JPEGImages/a.jpg", "=SegmentationClass/a.png", "JPEGImages/b.jpg", "=SegmentationClass/b.png"]);
    for (name, text) in [("train", "a\n"), ("val", "b\n")] {
        fs::write(root.file(&format!("ImageSets/Segmentation/{name}.txt")), text).unwrap();
    }
    assert_eq!(split(&scanned(&root)), [Some("train"), Some("val")]);
}

#[test]
fn a_patient_in_two_splits_is_ambiguous_and_copies_are_noted() {
    let files = ["train/P01/scan.png", "=train/P01/mask.png", "test/P01/scan.png", "=test/P01/mask.png"];
    let others = ["train/P02/scan.png", "=train/P02/mask.png", "test/P03/scan.png", "=test/P03/mask.png"];
    let root = tree(&[files, others].concat());
    let reasons = |root: &Root| scanned(root).ambiguous.into_iter().map(|found| found.reason).collect::<Vec<_>>();
    let [reason] = reasons(&root).try_into().unwrap();
    assert!(reason.starts_with("the patient's images are in `train` and `test`; give them one split"), "{reason}");
    let root = tree(&others);
    assert_eq!(reasons(&root), <[String; 0]>::default());
    fs::copy(root.path().join(others[0]), root.path().join(others[2])).unwrap();
    assert_eq!(reasons(&root), <[String; 0]>::default());
    let notes = scanned(&root).notes.join("; ");
    assert!(notes.contains("1 of the groups of copies are in two splits"), "{notes}");
}

#[test]
fn labels_channels_and_lists_are_those_of_the_data_set() {
    let files = ["imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz", "=labelsTr/a.nii.gz"];
    let root = tree(&files);
    let json = r#"{"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "gland, inner": 1, "whole": [1, 2], "ignore": 3},
                   "training": [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}, {"image": "./imagesTr/b.nii.gz"}]}"#;
    fs::write(root.file("dataset.json"), json).unwrap();
    let report = scanned(&root);
    assert_eq!(report.sequences.keys().collect::<Vec<_>>(), ["ADC", "T2"]);
    assert!(
        report.ambiguous[0].reason.contains("2 images fit its masks: `ADC`, `T2`; one of them can be used"),
        "{report:?}"
    );
    assert!(
        report.unmatched[0].reason.contains("`./imagesTr/b.nii.gz` is listed, and missing"),
        "{:?}",
        report.unmatched
    );
    let error = report.clone().into_table().unwrap_err().to_string();
    assert!(error.contains("is ambiguous: `a`: 2 images fit its masks"), "{error}");
    let out = root.path().join("out");
    write_scan(&report, &out).unwrap();
    let error = read_pairs(&out.join("pairs.csv")).unwrap_err().to_string();
    assert!(error.contains("pairs.csv:2: the line is ambiguous: 2 images fit"), "{error}");
    fs::remove_dir_all(&out).unwrap();
    for channel in ["ADC", "adc"] {
        let options = ScanOptions { channel: Some(channel.into()), ..ScanOptions::default() };
        let report = scan(root.path(), &options, &Silent).unwrap();
        assert_eq!(pairs(&report), ["a: imagesTr/a_0001.nii.gz + labelsTr/a.nii.gz"]);
        assert_eq!(report.table.rows[0].labels.to_string(), "1=gland  inner,1+2=whole,3=background");
    }
    let options = ScanOptions { channel: Some("T1".into()), ..ScanOptions::default() };
    let report = scan(root.path(), &options, &Silent).unwrap();
    assert!(report.ambiguous[0].reason.contains("it has no channel `T1`, but `ADC`, `T2`"), "{report:?}");
    fs::write(root.file("dataset.json"), "{\"labels\": {\"x\": null}}").unwrap();
    let error = scan(root.path(), &options, &Silent).unwrap_err();
    assert!(error.to_string().contains("dataset.json: the label `x` has no number"), "{error}");
}

#[test]
fn several_channels_masks_and_layouts_are_ambiguous() {
    let brats = [
        "BraTS20_Training_001/BraTS20_Training_001_flair.nii.gz",
        "BraTS20_Training_001/BraTS20_Training_001_t1.nii.gz",
        "=BraTS20_Training_001/BraTS20_Training_001_seg.nii.gz",
    ];
    let root = tree(&brats);
    let report = scanned(&root);
    assert!(report.ambiguous[0].reason.contains("2 images fit its masks: `flair`, `t1`"), "{report:?}");
    let options = ScanOptions { channel: Some("FLAIR".into()), ..ScanOptions::default() };
    let report = scan(root.path(), &options, &Silent).unwrap();
    assert_eq!((report.layouts[0].name, report.volumes, report.ambiguous.len()), ("brats", 1, 0));
    for (files, reason) in [
        (&["a.png", "=a_mask.png", "=a_seg.png"][..], "2 masks fit the image: `a_mask.png`, `a_seg.png`; keep one"),
        (&["a.png", "a.jpg", "=a_mask.png"], "2 images fit its masks: `a.jpg`, `a.png`; keep one"),
        (&["P1/t1.nii.gz", "P1/t2.nii.gz", "=P1/seg.nii.gz"], "2 images fit its masks: `t1`, `t2`; one of them"),
        (
            &[
                "x/images/a.png",
                "=x/masks/a.png",
                "y/case_1/imaging.nii.gz",
                "=y/case_1/segmentation.nii.gz",
                "=y/case_1/b.nii.gz",
            ],
            "",
        ),
    ] {
        let report = scanned(&tree(files));
        assert!(reason.is_empty() || report.ambiguous[0].reason.contains(reason), "{files:?}: {report:?}");
    }
    let mixed =
        ["images/a.png", "=masks/a.png", "vessels/images/21_training.tif", "=vessels/1st_manual/21_manual1.gif"];
    let report = scanned(&tree(&mixed));
    assert!(report.ambiguous[0].reason.contains("files of the layouts"), "{report:?}");
    let error =
        scan(Path::new("/nowhere"), &ScanOptions { layout: Some("x".into()), ..ScanOptions::default() }, &Silent)
            .unwrap_err();
    assert!(error.hint().contains("`busi`, `isic`") && error.to_string().contains("there is no layout `x`"), "{error}");
}

#[test]
fn what_a_data_set_says_twice_is_ambiguous() {
    for (files, reason) in [
        (
            &["a.jpg", "=a_mask.png", "a.json<labelme a.jpg=polyp"][..],
            "it has masks in `a_mask.png`, and in `a.json` by the layout `labelme`",
        ),
        (
            &["scans/a.jpg", "labelme/a.json<labelme a.jpg=polyp", "yolo/a.txt<yolo polyp", "yolo/classes.txt<polyp"],
            "it has masks in `labelme/a.json`, and in `yolo/a.txt` by the layout `yolo`",
        ),
        (
            &["a.jpg", "x.json<coco a.jpg=polyp", "y.json<coco a.jpg=polyp"],
            "several annotation files have the image: keep one of their masks",
        ),
        (&["b/a.jpg", "c/a.jpg", "x.json<coco a.jpg=polyp"], "`a.jpg` of `x.json` may be each of 2 images"),
        (&["a.jpg", "b.jpg", "a.json<labelme b.jpg=polyp"], "`a.json` says that it is of `b.jpg`"),
        (&["train2017/a.jpg", "annotations/val.json<coco a.jpg=polyp"], "its files say both `train` and `val`"),
        (
            &[
                "JPEGImages/a.jpg",
                "=SegmentationClass/a.png",
                "ImageSets/Segmentation/val.txt<a",
                "ImageSets/Segmentation/test.txt<a\nb",
            ],
            "its files say both `",
        ),
        (
            &[
                "sub-1/anat/sub-1_T1w.nii.gz",
                "=derivatives/one/sub-1/anat/sub-1_label-lesion_mask.nii.gz",
                "=derivatives/two/sub-1/anat/sub-1_label-lesion_mask.nii.gz",
            ],
            "2 masks fit the image as `lesion`",
        ),
    ] {
        let root = tree(files);
        let report = scanned(&root);
        let first = report.ambiguous.first().map_or("", |found| found.reason.as_str());
        assert!(first.contains(reason), "{files:?}: {report:?}");
        write_scan(&report, &root.path().join("out")).unwrap();
        assert!(read_pairs(&root.path().join("out/pairs.csv")).unwrap_err().to_string().contains("is ambiguous"));
        assert!(report.into_table().is_err());
    }
    let root = tree(&["scans/a.jpg", "coco/instances.json<{\"images\": [], \"annotations\": [], \"categories\": []}"]);
    let error = scan(root.path(), &ScanOptions::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("coco/instances.json: names no images"), "{error}");
    assert!(error.hint().contains("export the annotations again"), "{}", error.hint());
    let root = tree(&["a.jpg", "a.txt<yolo polyp+large_cyst"]);
    let error = scan(root.path(), &ScanOptions::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("`0` is a number without a name"), "{error}");
}

#[test]
fn outlines_of_a_scan_have_the_pixels_of_folders() {
    for (name, labels) in [("a.json<labelme a.png=polyp", "labels"), ("x.json<coco a.png=polyp", "labels/x.json")] {
        let label = format!("labels/{name}");
        let root = tree(&["images/a.png", "images/b.png", &label]);
        let outs = Root::new();
        let file = |name: &str| root.path().join(name);
        let options = |images: &str, masks: &str, out: &str| PrepareOptions {
            val_frac: 0.0,
            test_frac: 0.0,
            skip_bad_pairs: true,
            ..PrepareOptions::new(file(images), file(masks), "x", outs.path().join(out))
        };
        prepare(&options("images", labels, "by-folders"), &Silent).unwrap();
        let table = scanned(&root).into_table().unwrap();
        prepare_classes(table, &options("", "", "by-scan"), &Silent).unwrap();
        let [a, b] =
            ["by-folders", "by-scan"].map(|out| fs::read(outs.path().join(out).join("x/train_masks/a.png")).unwrap());
        assert_eq!(a, b);
        let mask = image::open(outs.path().join("by-scan/x/train_masks/a.png")).unwrap().into_luma8();
        assert_eq!(mask.iter().filter(|value| **value > 0).count(), 20);
    }
}

#[test]
fn questions_and_names_of_labels_are_those_of_the_data_set() {
    let of = |layout: &str| {
        let (_, files, ..) = CASES.iter().find(|(name, ..)| *name == layout).unwrap();
        scanned(&tree(files)).into_table().unwrap().rows
    };
    let rows = of("prsmed");
    assert_eq!(rows[0].class.as_deref(), Some("lung_CT"));
    assert_eq!(rows[0].texts, [PairText { target: None, question: "Where?".into(), answer: "Top, left.".into() }]);
    let rows = of("mecovqa");
    let text = |target: &str| PairText {
        target: Some(target.into()),
        question: "Where is the liver?".into(),
        answer: "It is.".into(),
    };
    assert_eq!((rows[0].class.as_deref(), &rows[0].texts), (Some("ct"), &vec![text("target 1")]));
    assert_eq!(rows[0].patient.as_deref(), Some("AbdomenCT1K--Case_00220"));
    assert_eq!(of("bids")[1].labels.to_string(), "1=Left Thalamus");
    assert_eq!(of("biomedparse")[1].class.as_deref(), Some("X-Ray"));
}

/// One name that a table cannot hold must not cost the whole scan.
#[test]
fn files_that_a_table_cannot_name_and_empty_files_are_listed_with_their_reasons() {
    let root =
        tree(&["images/a.png", "=masks/a.png", "images/b|c.png", "=masks/b|c.png", "images/d*.png", "images/e.dcm<"]);
    let report = scanned(&root);
    assert_eq!(pairs(&report).len(), 1, "{:?}", pairs(&report));
    let reason = |name: &str| {
        let found = report.unmatched.iter().find(|skip| skip.path.ends_with(name));
        found.map_or("paired", |skip| skip.reason.as_str())
    };
    for name in ["images/b|c.png", "masks/b|c.png", "images/d*.png"] {
        assert!(reason(name).starts_with("a table cannot name it"), "{name}: {}", reason(name));
    }
    assert_eq!(reason("images/e.dcm"), "the file is empty");
    let out = root.path().join("scan");
    write_scan(&report, &out).unwrap();
}

/// Thirty patients as a hospital names them.
fn messy() -> Root {
    let mut names = Vec::new();
    for number in 1..=30 {
        let folder = if number % 3 == 0 { format!("PAT {number:02}") } else { format!("pat_{number:02}") };
        let (image, mask) =
            if number % 2 == 0 { ("SCAN.PNG", "Scan Mask.PNG") } else { ("scan.png", "scan_Segmentation.png") };
        names.push(format!("{folder}/{image}"));
        if number != 7 {
            names.push(format!("={folder}/{mask}"));
        }
    }
    let root = tree(&names.iter().map(String::as_str).collect::<Vec<_>>());
    fs::write(root.path().join("pat_11/scan_Segmentation.png"), png(true, 0, 14)).unwrap();
    fs::copy(root.path().join("pat_01/scan.png"), root.path().join("pat_02/SCAN.PNG")).unwrap();
    root
}

#[test]
fn a_messy_folder_is_listed_and_prepared_without_renaming() {
    let root = messy();
    let report = scanned(&root);
    assert_eq!((report.layouts.len(), report.images, report.patients), (1, 29, Some(29)), "{:?}", report.unmatched);
    let unmatched: Vec<_> = report.unmatched.iter().map(|skip| (skip.path.clone(), skip.reason.as_str())).collect();
    assert_eq!(unmatched, [(root.path().join("pat_07/scan.png"), "no mask with this stem")]);
    let [problem] = report.problems.as_slice() else { panic!("{:?}", report.problems) };
    assert!(
        problem.path.ends_with("pat_11/scan_Segmentation.png")
            && problem.reason == "is 14 x 8 pixels, its image 12 x 8"
    );
    assert_eq!(report.copies, [["pat_01/scan.png", "pat_02/SCAN.PNG"].map(|name| root.path().join(name))]);
    assert!(
        report.notes[0].contains("29 folders `PAT 03`, `PAT 06`, `PAT 09`, .. are taken for patients"),
        "{:?}",
        report.notes
    );
    let out = root.path().join("data");
    let options = PrepareOptions::new(root.path(), root.path(), "xray", &out);
    let prepared = prepare_classes(report.into_table().unwrap(), &options, &Silent).unwrap();
    let [(class, prepared)] = prepared.as_slice() else { panic!("one class") };
    assert_eq!((class.as_str(), prepared.images, prepared.patients, prepared.skipped.len()), ("xray", 28, Some(28), 2));
    let manifest = Manifest::open(&out, None).unwrap();
    assert_eq!(manifest.rows.len(), 56);
    let split = |patient: &str| manifest.rows.iter().find(|row| row.patient.as_deref() == Some(patient)).unwrap().split;
    assert_eq!(split("pat_01"), split("pat_02"), "copies are in one split");
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_volumes_and_cases_are_scanned_without_renaming() {
    let shared = |name: &str| crate::fixture::shared(name);
    let of = |name: &str| scan(&shared(name), &ScanOptions::default(), &Silent).unwrap();
    let names = |report: &ScanReport| report.table.rows.iter().map(|pair| pair.name.clone()).collect::<Vec<_>>();
    let volumes = of("data/volumes");
    assert_eq!(names(&volumes), ["ct", "ct_dicom", "mr"], "{volumes:?}");
    assert_eq!(names(&of("cases/per-patient-nifti")), ["A", "B"]);
    let busi = of("cases/busi-second-mask");
    assert_eq!((busi.images, busi.masks), (3, 4), "{busi:?}");
    assert_eq!(names(&of("cases/mask-palette-voc")), ["P0", "P1", "P2"]);
    assert_eq!(names(&of("cases/several-series-no-number")), ["P1"]);
    let outlines = "cases/annotation-files-as-masks";
    let report = of(outlines);
    assert_eq!(report.ambiguous.len(), 8, "{report:?}");
    for layout in ["labelme", "yolo"] {
        let options = ScanOptions { layout: Some(layout.into()), ..ScanOptions::default() };
        let report = scan(&shared(outlines), &options, &Silent).unwrap();
        assert_eq!((report.images, report.ambiguous.len(), report.problems.len()), (8, 0, 0), "{report:?}");
        let out = tempfile::tempdir().unwrap();
        let options = PrepareOptions::new("", "", "us", out.path().join("data"));
        let prepared = prepare_classes(report.into_table().unwrap(), &options, &Silent).unwrap();
        assert_eq!(prepared[0].1.images, 8);
    }
    let options = ScanOptions { layout: Some("coco".into()), ..ScanOptions::default() };
    let error = scan(&shared(outlines), &options, &Silent).unwrap_err();
    assert!(error.to_string().contains("coco/instances.json: names no images"), "{error}");
}
