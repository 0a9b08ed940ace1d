use std::fs;
use std::path::Path;

use super::super::nrrd::tests::check_written;
use crate::fixture::checkout;
use crate::{labels, open};

const HEADER: &str = "ObjectType = Image\nNDims = 3\nBinaryData = True\nTransformMatrix = 1 0 0 0 1 0 0 0 1\nOffset = 0 0 0\n\
                      ElementSpacing = 1 1 2\nDimSize = 3 2 2\nElementType = MET_UCHAR\n";
const VOXELS: &[u8; 12] = b"\0\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b";

fn refused(folder: &Path, header: &str) -> String {
    let path = folder.join("image.mha");
    fs::write(&path, [header.as_bytes(), VOXELS].concat()).expect("written");
    let error = open(&path).expect_err(header);
    assert!(error.to_string().contains("image.mha"), "{error}");
    format!("{error}\n{}", error.hint())
}

#[test]
fn headers_that_cannot_be_used_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let local = format!("{HEADER}ElementDataFile = LOCAL\n");
    let path = folder.path().join("good.mha");
    fs::write(&path, [local.as_bytes(), VOXELS].concat()).expect("written");
    assert_eq!(labels::open(&path).expect("labels").values, (0..12).collect::<Vec<u16>>());
    for (from, to, part) in [
        ("= Image", "= Scene", "the type `Scene`"),
        ("NDims = 3", "NDims = 7", "NDims = 7; 2, 3 and 4"),
        ("NDims = 3", "NDims = 2", "does not have 2 numbers in `DimSize`"),
        ("DimSize = 3 2 2\n", "", "no field `DimSize`"),
        ("DimSize = 3 2 2", "DimSize = 3 2 0", "is empty"),
        ("DimSize = 3 2 2", "DimSize = 99999 99999 99999", "more than 1073741824"),
        ("DimSize = 3 2 2", "DimSize = 3 2 9", "truncated"),
        ("1 0 0 0 1 0 0 0 1", "1 0 0 1 0 0 0 0 1", "singular"),
        ("1 0 0 0 1 0 0 0 1", "1 0 0 0 1 0 0 0", "does not have 9 numbers in `TransformMatrix`"),
        ("= 1 1 2", "= 1 0 2", "singular"),
        ("MET_UCHAR", "MET_UCHAR_ARRAY", "the type `MET_UCHAR_ARRAY`"),
        ("ElementType", "ElementNumberOfChannels = 3\nElementType", "3 values at each of 3x2x2 voxels"),
        ("ElementType", "HeaderSize = -2\nElementType", "the wrong `HeaderSize` -2"),
        ("ElementType", "DistanceUnits = furlong\nElementType", "the unit `furlong`"),
        ("ElementType", "CompressedData = True\nElementType", "cannot be read"),
        ("= LOCAL", "= ../image.raw", "points to the file `../image.raw`, which is not in the folder"),
        ("= LOCAL", "= /etc/hostname", "points to the file `/etc/hostname`"),
        ("= LOCAL", "= none.raw", "which is missing"),
        ("ElementDataFile = LOCAL\n", "", "no field `ElementDataFile`"),
    ] {
        assert!(local.contains(from), "{from}");
        let found = refused(folder.path(), &local.replace(from, to));
        assert!(found.contains(part), "{found}");
    }
    let several = local.replace("3 2 2", "3 2 2 1").replace("NDims = 3", "NDims = 4");
    assert!(refused(folder.path(), &several).contains("4 numbers in `ElementSpacing`"));
    let endless = format!("ObjectType = Image\nComment = {}\n", "x".repeat(5 << 20));
    assert!(refused(folder.path(), &endless).contains("header has more than 4 MiB"));
}

#[test]
fn masks_are_written() {
    for name in ["int16.mha", "big.mhd", "flat.mha"] {
        let volume = open(&checkout().join("tests/fixtures/volumes/itk").join(name)).expect("a volume");
        check_written(&volume, "mask.mha");
    }
}
