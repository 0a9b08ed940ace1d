"""Checks of medical files against pydicom, highdicom and nibabel, for the tests.

    medical_check.py samples OUT            values of the samples that pydicom and nibabel install: OUT/index.json
    medical_check.py nifti FILE             header and values of a mask, as JSON
    medical_check.py seg FILE FOLDER MASKS  compares a DICOM SEG with its series and with raw masks, one per segment

Run with `PYTHONPATH=.tools/medical .venv/bin/python`.
"""

import json
import sys
import warnings
from pathlib import Path

import highdicom
import nibabel
import numpy
import pydicom

warnings.simplefilter("ignore")


def dicom_values(path):
    """Values [frame, row, column(, colour)] with slope and intercept, colours as RGB; `None` if it is no image."""
    dataset = pydicom.dcmread(path)
    if "PixelData" not in dataset or dataset.get("Modality") in ("SEG", "RTDOSE"):
        return None
    array = dataset.pixel_array
    photometric = dataset.PhotometricInterpretation
    if photometric == "PALETTE COLOR":
        array = pydicom.pixels.apply_color_lut(array, dataset) >> 8
    if dataset.get("NumberOfFrames", 1) == 1:
        array = array[None]
    array = array.astype(numpy.float64)
    if dataset.SamplesPerPixel == 3 and dataset.BitsStored > 8:
        array = array // 2 ** (dataset.BitsStored - 8)
    return array * float(dataset.get("RescaleSlope", 1)) + float(dataset.get("RescaleIntercept", 0))


def samples(out):
    out.mkdir(parents=True, exist_ok=True)
    index = []

    def add(path, kind, read):
        entry = {"path": str(path), "kind": kind, "syntax": ""}
        try:
            if kind == "dicom":
                entry["syntax"] = pydicom.dcmread(path, stop_before_pixels=True).file_meta.TransferSyntaxUID.name
            values = read(path)
            if values is None:
                return
            entry["shape"] = list(values.shape)
            entry["file"] = f"{len(index)}.f64"
            numpy.ascontiguousarray(values, dtype="<f8").tofile(out / entry["file"])
        except Exception as error:
            entry["error"] = type(error).__name__
        index.append(entry)

    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    for path in sorted(folder.glob("*.dcm")):
        add(path, "dicom", dicom_values)
    folder = Path(nibabel.__file__).parent / "tests" / "data"
    for path in sorted(folder.glob("*.nii*")):
        add(path, "nifti", lambda path: numpy.asarray(nibabel.load(path).get_fdata()).T)
    (out / "index.json").write_text(json.dumps(index))
    print(f"{len(index)} samples")


def nifti(path):
    image = nibabel.load(path)
    data = numpy.asarray(image.dataobj)
    report = {
        "shape": image.shape,
        "dtype": str(data.dtype),
        "affine": image.affine[:3].tolist(),
        "qform": None if image.get_qform(coded=True)[0] is None else image.get_qform()[:3].tolist(),
        "sform_code": int(image.header["sform_code"]),
        "zooms": [float(zoom) for zoom in image.header.get_zooms()],
        "unit": image.header.get_xyzt_units()[0],
        "orientation": "".join(nibabel.aff2axcodes(image.affine)),
        "values": data.T.reshape(-1).tolist() if data.size <= 10000 else [],
        "sum": int(data.sum()),
    }
    print(json.dumps(report))


def seg(path, folder, masks):
    segmentation = highdicom.seg.segread(path)
    sources = [pydicom.dcmread(file, stop_before_pixels=True, force=True) for file in sorted(folder.rglob("*")) if file.is_file()]
    sources = [source for source in sources if "ImagePositionPatient" in source]
    row, column = numpy.split(numpy.array(sources[0].ImageOrientationPatient, dtype=float), 2)
    normal = numpy.cross(row, column)
    sources.sort(key=lambda source: float(numpy.dot(normal, source.ImagePositionPatient)))
    uids = [source.SOPInstanceUID for source in sources]
    pixels = segmentation.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
    expected = numpy.stack([numpy.fromfile(mask, dtype="u1").reshape(pixels.shape[:3]) for mask in masks], axis=-1)
    assert (pixels == expected).all(), "the pixels of the segments differ"
    for source in sources:
        assert segmentation.FrameOfReferenceUID == source.FrameOfReferenceUID
        assert segmentation.StudyInstanceUID == source.StudyInstanceUID
    # geometry of the frames against that of their source images
    for frame in segmentation.PerFrameFunctionalGroupsSequence:
        uid = frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        source = sources[uids.index(uid)]
        position = frame.PlanePositionSequence[0].ImagePositionPatient
        assert numpy.allclose(position, source.ImagePositionPatient, atol=1e-3), (position, source.ImagePositionPatient)
    shared = segmentation.SharedFunctionalGroupsSequence[0]
    orientation = shared.PlaneOrientationSequence[0].ImageOrientationPatient
    assert numpy.allclose(orientation, sources[0].ImageOrientationPatient, atol=1e-5)
    assert numpy.allclose(shared.PixelMeasuresSequence[0].PixelSpacing, sources[0].PixelSpacing, atol=1e-6)
    try:
        shape = list(segmentation.get_volume(allow_missing_positions=True).spatial_shape)
    except RuntimeError:  # a sheared stack is no volume for highdicom
        shape = None
    report = {
        "labels": [segmentation.get_segment_description(number).segment_label for number in segmentation.segment_numbers],
        "frames": int(segmentation.NumberOfFrames),
        "volume_shape": shape,
        "patient": [str(segmentation.PatientName), segmentation.PatientID, segmentation.PatientBirthDate],
        "identity_removed": segmentation.PatientIdentityRemoved,
    }
    print(json.dumps(report))


def main():
    command, arguments = sys.argv[1], [Path(argument) for argument in sys.argv[2:]]
    if command == "samples":
        samples(arguments[0])
    elif command == "nifti":
        nifti(arguments[0])
    elif command == "seg":
        seg(arguments[0], arguments[1], arguments[2:])
    else:
        sys.exit(f"unknown command {command}")


if __name__ == "__main__":
    main()
