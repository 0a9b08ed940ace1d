//! Layouts of data sets that are known by the names of their files.
//!
//! They say nothing about the labels in the files: a folder with the names of a data set may have other labels.

use super::dataset_json;
use super::patterns::{Layout, NO_LAYOUT};

const SECOND_READER: &str = "the mask of a second reader; the first one is used";
const INSTANCES: &str = "single instances of objects, whose masks are used without them";

/// The first of several that explain equally many files counts.
pub(super) const NAMED: &[Layout] = &[
    Layout {
        name: "prsmed",
        about: "PRS-Med: `lung_CT/train_images/2.png`, `lung_CT/train_masks/2.png`, questions and answers of `annotations/lung_CT.csv`",
        masks: &[
            r"^(?<base>(.*/)?[^/]+/)(?<split>train|val|test)_masks/(?<id>[^/]+?)(_Segmentation)?\.(png|jpg|jpeg)$",
        ],
        images: &[r"^(?<base>(.*/)?(?<class>[^/]+)/)(?<split>train|val|test)_images/(?<id>[^/]+)\.(png|jpg|jpeg)$"],
        describe: Some(super::prsmed_tables::describe),
        ..NO_LAYOUT
    },
    Layout {
        name: "busi",
        about: "`benign/benign (1).png`, `benign (1)_mask.png`, `benign (1)_mask_1.png`",
        masks: &[r"^(?<base>.*?)(?<id>(benign|malignant|normal) \(\d+\))_mask(?<number>_\d+)?\.png$"],
        images: &[r"^(?<base>.*?)(?<id>(benign|malignant|normal) \(\d+\))\.png$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "isic",
        about: "`ISIC_0000000.jpg`, `ISIC_0000000_segmentation.png`, `ISIC_0000000_attribute_globules.png`",
        masks: &[
            r"(?i)^(.*?(?<split>training|validation|test)[^/]*/)?(.*/)?(?<id>ISIC_\d+)_segmentation\.png$",
            r"(?i)^(.*?(?<split>training|validation|test)[^/]*/)?(.*/)?(?<id>ISIC_\d+)_attribute_(?<target>[a-z_]+)\.png$",
        ],
        others: &[(r"(?i)ISIC_\d+_superpixels\.png$", "regions of similar colour, which are no target")],
        images: &[r"(?i)^(.*?(?<split>training|validation|test)[^/]*/)?(.*/)?(?<id>ISIC_\d+)\.(jpg|jpeg|png)$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "lgg",
        about: "`TCGA_CS_4941_19960909/TCGA_CS_4941_19960909_1.tif`, `.._1_mask.tif`",
        masks: &[r"(^|/)(?<id>TCGA_\w\w_\w{4}_\d{8}_\d+)_mask\.(tif|png)$"],
        images: &[r"(^|/)(?<id>(?<patient>TCGA_\w\w_\w{4})_\d{8}_\d+)\.(tif|png)$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "kits",
        about: "`case_00000/imaging.nii.gz`, `case_00000/segmentation.nii.gz`",
        masks: &[r"^(?<base>.*?)(?<id>case_\d+)/(aggregated_MAJ_seg|segmentation)\.nii(\.gz)?$"],
        others: &[
            (r"(^|/)case_\d+/(instances|segmentation_samples|segmentations)/", INSTANCES),
            (
                r"(^|/)case_\d+/aggregated_(AND|OR)_seg\.nii(\.gz)?$",
                "another agreement of the readers than the majority",
            ),
        ],
        images: &[r"^(?<base>.*?)(?<id>(?<patient>case_\d+))/imaging\.nii(\.gz)?$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "lits",
        about: "`volume-0.nii`, `segmentation-0.nii`, also in different folders",
        masks: &[r"(^|/)segmentation-(?<id>\d+)\.nii(\.gz)?$"],
        images: &[r"(^|/)volume-(?<id>(?<patient>\d+))\.nii(\.gz)?$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "brats",
        about: "`BraTS20_Training_001/BraTS20_Training_001_flair.nii.gz`, `.._seg.nii.gz`; `BraTS-GLI-00000-000-t1c.nii.gz`",
        masks: &[r"(?i)^(?<base>.*?)(?<id>BraTS[^/]*)/[^/]+[_-]seg\.nii(\.gz)?$"],
        images: &[
            r"(?i)^(?<base>.*?)(?<id>(?<patient>BraTS-[a-z]+-\d+)-\d+)/[^/]+-(?<channel>t1n|t1c|t2w|t2f)\.nii(\.gz)?$",
            r"(?i)^(?<base>.*?)(?<id>(?<patient>BraTS[^/]*))/[^/]+_(?<channel>t1|t1ce|t1gd|t2|flair)\.nii(\.gz)?$",
        ],
        ..NO_LAYOUT
    },
    Layout {
        name: "acdc",
        about: "`training/patient001/patient001_frame01.nii.gz`, `patient001_frame01_gt.nii.gz`",
        masks: &[r"^(?<base>.*?)((?<split>training|testing)/)?patient\d+/(?<id>patient\d+_frame\d+)_gt\.nii(\.gz)?$"],
        others: &[(r"patient\d+_4d\.nii(\.gz)?$", "the whole heart cycle, of which the frames with masks are used")],
        images: &[
            r"^(?<base>.*?)((?<split>training|testing)/)?patient\d+/(?<id>(?<patient>patient\d+)_frame\d+)\.nii(\.gz)?$",
        ],
        ..NO_LAYOUT
    },
    Layout {
        name: "totalsegmentator",
        about: "`s0001/ct.nii.gz`, `s0001/segmentations/liver.nii.gz`: a file for each structure",
        masks: &[r"^(?<base>.*?)(?<id>[^/]+)/segmentations/(?<target>[^/]+?)\.nii(\.gz)?$"],
        images: &[r"^(?<base>.*?)(?<id>(?<patient>[^/]+))/(ct|mri|mr)\.nii(\.gz)?$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "drive",
        about: "`training/images/21_training.tif`, `training/1st_manual/21_manual1.gif`",
        masks: &[r"^(?<base>.*?)((?<split>training|test)/)?1st_manual/(?<id>\d+)_manual1\.\w+$"],
        others: &[
            (r"(^|/)2nd_manual/\d+_manual2\.\w+$", SECOND_READER),
            (r"(^|/)mask/\d+_(training|test)_mask\.\w+$", "the field of view, which is no target"),
        ],
        images: &[r"^(?<base>.*?)((?<split>training|test)/)?images/(?<id>\d+)_(training|test)\.\w+$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "chase",
        about: "`Image_01L.jpg`, `Image_01L_1stHO.png`; both eyes are one patient",
        masks: &[r"(^|/)(?<id>Image_\d+[LR])_1stHO\.\w+$"],
        others: &[(r"(^|/)Image_\d+[LR]_2ndHO\.\w+$", SECOND_READER)],
        images: &[r"(^|/)(?<id>(?<patient>Image_\d+)[LR])\.\w+$"],
        ..NO_LAYOUT
    },
    Layout {
        name: "voc",
        about: "`JPEGImages/0001.jpg`, `SegmentationClass/0001.png`; splits of `ImageSets/Segmentation`",
        masks: &[r"^(?<base>.*?)SegmentationClass/(?<id>[^/]+)\.png$"],
        others: &[(r"(^|/)SegmentationObject/[^/]+\.png$", INSTANCES)],
        images: &[r"(?i)^(?<base>.*?)JPEGImages/(?<id>[^/]+)\.(jpg|jpeg|png)$"],
        describe: Some(super::voc_sets::describe),
        ..NO_LAYOUT
    },
    Layout {
        name: "nnunet",
        about: "`imagesTr/case_0000.nii.gz`, `labelsTr/case.nii.gz`; channels and labels of `dataset.json`",
        masks: &[r"^(?<base>.*?)labels(?<split>Tr|Ts)/(?<id>[^/]+?)\.(nii\.gz|nii|nrrd|mha|png|tif|tiff)$"],
        images: &[
            r"^(?<base>.*?)images(?<split>Tr|Ts)/(?<id>[^/]+)_(?<channel>\d{4})\.(nii\.gz|nii|nrrd|mha|png|tif|tiff)$",
        ],
        describe: Some(dataset_json::describe),
        ..NO_LAYOUT
    },
    Layout {
        name: "decathlon",
        about: "Medical Segmentation Decathlon: `imagesTr/liver_0.nii.gz`, `labelsTr/liver_0.nii.gz`, lists of `dataset.json`",
        masks: &[r"^(?<base>.*?)labels(?<split>Tr|Ts)/(?<id>[^/]+?)\.nii(\.gz)?$"],
        images: &[r"^(?<base>.*?)images(?<split>Tr|Ts)/(?<id>(?<patient>[^/]+?))\.nii(\.gz)?$"],
        describe: Some(dataset_json::describe),
        ..NO_LAYOUT
    },
    Layout {
        name: "kvasir",
        about: "`images/cju0.jpg`, `masks/cju0.jpg`; also in `train/`, `val/` and `test/`",
        masks: &[
            r"(?i)^(?<base>.*?)((?<split>train\w*|val\w*|test\w*)/)?(masks?|ground[ _]?truth)/(?<id>[^/]+)\.(jpg|jpeg|png|tif|tiff|bmp)$",
        ],
        images: &[
            r"(?i)^(?<base>.*?)((?<split>train\w*|val\w*|test\w*)/)?(images?|original)/(?<id>[^/]+)\.(jpg|jpeg|png|tif|tiff|bmp)$",
        ],
        ..NO_LAYOUT
    },
    Layout {
        name: "bids",
        about: "BIDS: `sub-01/anat/sub-01_T1w.nii.gz`, `derivatives/NAME/sub-01/anat/sub-01_label-lesion_mask.nii.gz`, `sub-01_dseg.nii.gz`",
        masks: &[
            r"^(?<base>.*?)(derivatives/[^/]+/)?sub-[^/]+/(ses-[^/]+/)?[^/]+/(?<id>sub-[^_]+(_ses-[^_]+)?)(_[a-z]+-[^_]+)*?_label-(?<target>[^_]+)(_[a-z]+-[^_]+)*_mask\.nii(\.gz)?$",
            r"^(?<base>.*?)(derivatives/[^/]+/)?sub-[^/]+/(ses-[^/]+/)?[^/]+/(?<id>sub-[^_]+(_ses-[^_]+)?)(_[a-z]+-[^_]+)*?_desc-(?<target>[^_]+)(_[a-z]+-[^_]+)*_mask\.nii(\.gz)?$",
            r"^(?<base>.*?)(derivatives/[^/]+/)?sub-[^/]+/(ses-[^/]+/)?[^/]+/(?<id>sub-[^_]+(_ses-[^_]+)?)(_[a-z]+-[^_]+)*_(mask|dseg)\.nii(\.gz)?$",
        ],
        images: &[
            r"^(?<base>.*?)sub-[^/]+/(ses-[^/]+/)?[^/]+/(?<id>(?<patient>sub-[^_]+)(_ses-[^_]+)?)_(?<channel>([a-z]+-[^_]+_)*[A-Za-z0-9]+)\.nii(\.gz)?$",
        ],
        describe: Some(super::bids_labels::describe),
        ..NO_LAYOUT
    },
    Layout {
        name: "biomedparse",
        about: "BiomedParse: `train/covid_1585_X-Ray_chest.png`, `train_mask/covid_1585_X-Ray_chest_COVID-19+infection.png`",
        masks: &[r"^(?<base>.*?)(?<split>train|val|test)_mask/(?<id>[^/]+_[^/_]+_[^/_]+)_(?<target>[^/_]+)\.png$"],
        others: &[(r"(^|/)(train|val|test)\.json$", "it repeats what the names of the masks say")],
        images: &[r"^(?<base>.*?)(?<split>train|val|test)/(?<id>[^/]+_(?<class>[^/_]+)_[^/_]+)\.png$"],
        ..NO_LAYOUT
    },
];
