"""Checks of medical files against pydicom, highdicom, nibabel and rt-utils, for the tests.

    medical_check.py samples OUT            values of the samples that pydicom and nibabel install: OUT/index.json
    medical_check.py nifti FILE             header and values of a mask, as JSON
    medical_check.py seg FILE FOLDER MASKS  compares a DICOM SEG with its series and with raw masks, one per segment
    medical_check.py draw OUT               for each of several orientations in OUT: a series, `mask.raw`, and an RTSTRUCT
                                            `drawn.dcm` with its mask `drawn.raw` by OpenCV
    medical_check.py contours OUT           compares `mask.rtstruct.dcm` and `mask.dcm` in these folders with `mask.raw`
    medical_check.py sequences OUT          writes invented volumes of three sequences of two patients
    medical_check.py slices FOLDER ROOT AXIS CONTEXT SEQUENCES
                                            compares prepared images in ROOT with the slices of these volumes by numpy

Run with `PYTHONPATH=.tools/medical .venv/bin/python`.
"""

import copy
import json
import sys
import warnings
from pathlib import Path

import highdicom
import nibabel
import numpy
import pydicom
from PIL import Image

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


# Rows and columns of a square slice (rt-utils mixes them up in others), slices, and directions of a row and a column.
SIDE, SLICES = 32, 6
ORIENTATIONS = {
    "supine": ([1, 0, 0], [0, 1, 0]),
    "prone": ([-1, 0, 0], [0, -1, 0]),
    "feet first": ([-1, 0, 0], [0, 1, 0]),
    "decubitus left": ([0, -1, 0], [1, 0, 0]),
    "decubitus right": ([0, 1, 0], [-1, 0, 0]),
    "sagittal": ([0, 1, 0], [0, 0, -1]),
    "coronal": ([1, 0, 0], [0, 0, -1]),
    "oblique": ([0.88, 0.384, 0.28], [-0.4, 0.9165151389911680, 0.0]),
}


def series(folder, row, column):
    """Writes a CT series from its last slice to its first one."""
    folder.mkdir(parents=True)
    row, column = numpy.array(row, dtype=float), numpy.array(column, dtype=float)
    column -= row * numpy.dot(row, column) / numpy.dot(row, row)
    row, column = row / numpy.linalg.norm(row), column / numpy.linalg.norm(column)
    study, series, frame = (pydicom.uid.generate_uid() for _ in range(3))
    for index in range(SLICES):
        dataset = pydicom.Dataset()
        dataset.file_meta = pydicom.dataset.FileMetaDataset()
        dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        dataset.SOPClassUID, dataset.SOPInstanceUID = pydicom.uid.CTImageStorage, pydicom.uid.generate_uid()
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.FrameOfReferenceUID = study, series, frame
        dataset.Modality, dataset.PatientName, dataset.PatientID = "CT", "SECRET^NAME", "SECRET"
        dataset.PatientBirthDate = dataset.StudyDate = dataset.StudyTime = dataset.PatientSex = ""
        dataset.StudyID = dataset.AccessionNumber = "SECRET"
        dataset.SeriesNumber, dataset.InstanceNumber = 1, SLICES - index
        position = numpy.array([-20.3, 30.7, 101.25]) + numpy.cross(row, column) * 2.5 * index
        dataset.ImagePositionPatient = [f"{value:.9f}"[:16] for value in position]
        dataset.ImageOrientationPatient = [f"{value:.12f}"[:16] for value in [*row, *column]]
        dataset.PixelSpacing, dataset.SliceThickness = [0.75, 0.75], 2.5
        dataset.Rows = dataset.Columns = SIDE
        dataset.BitsAllocated = dataset.BitsStored = 16
        dataset.HighBit, dataset.PixelRepresentation, dataset.SamplesPerPixel = 15, 0, 1
        dataset.PhotometricInterpretation, dataset.RescaleSlope, dataset.RescaleIntercept = "MONOCHROME2", 1, -1024
        dataset.PixelData = bytes(2 * SIDE * SIDE)
        dataset.save_as(folder / f"{index}.dcm", enforce_file_format=True)


def draw(out):
    import cv2
    import rt_utils

    z, y, x = numpy.mgrid[0:SLICES, 0:SIDE, 0:SIDE]
    distance = numpy.sqrt((x - 15.3) ** 2 + (y - 14.1) ** 2 + ((z - 2.6) * 3.3) ** 2)
    # a shell with a ball in it, pixels that touch at corners, and borders of the image
    mask = ((distance < 14) & (distance > 8)) | (distance < 4) | ((x + y + z) % 9 == 0) & (y < 6)
    for name, (row, column) in ORIENTATIONS.items():
        folder = out / name
        series(folder / "series", row, column)
        mask.astype("u1").tofile(folder / "mask.raw")
        builder = rt_utils.RTStructBuilder.create_new(str(folder / "series"))
        builder.add_roi(numpy.ones((SIDE, SIDE, SLICES), dtype=bool), name="rings")
        to_patient = rt_utils.image_helper.get_pixel_to_patient_transformation_matrix(builder.series_data)
        drawn, contours = numpy.zeros(mask.shape, dtype="u1"), []
        for index, original in enumerate(builder.ds.ROIContourSequence[0].ContourSequence):
            # nested ellipses, the first one partly outside
            for radius in [19.37, 9.71, 5.13, 2.29]:
                angle = numpy.linspace(0, 2 * numpy.pi, 41)[:-1] + 0.01
                points = numpy.stack([14.2 + radius * numpy.cos(angle), 16.9 + radius / 1.31 * numpy.sin(angle)], axis=1)
                points += 0.37 * index
                polygon = points.astype(numpy.float32).reshape(-1, 1, 2)
                centres = numpy.ndindex(SIDE, SIDE)
                inside = [cv2.pointPolygonTest(polygon, (float(j), float(i)), False) > 0 for i, j in centres]
                drawn[index] ^= numpy.array(inside, dtype="u1").reshape(SIDE, SIDE)
                contour = copy.deepcopy(original)
                planes = numpy.full((len(points), 1), index)
                places = rt_utils.image_helper.apply_transformation_to_3d_points(
                    numpy.concatenate([points, planes], axis=1), to_patient
                )
                contour.ContourData = [f"{value:.6f}" for value in places.ravel()]
                contour.NumberOfContourPoints = len(points)
                contours.append(contour)
        builder.ds.ROIContourSequence[0].ContourSequence = pydicom.Sequence(contours)
        builder.ds.save_as(folder / "drawn.dcm", enforce_file_format=True)
        drawn.tofile(folder / "drawn.raw")
    print(json.dumps(list(ORIENTATIONS)))


def contours(out):
    from rt_utils import RTStructBuilder, image_helper

    report = {}
    for name in ORIENTATIONS:
        folder = out / name
        mask = numpy.fromfile(folder / "mask.raw", dtype="u1").reshape(SLICES, SIDE, SIDE)
        builder = RTStructBuilder.create_from(str(folder / "series"), str(folder / "mask.rtstruct.dcm"))
        read = builder.get_roi_mask_by_name("liver")
        differing = int((numpy.moveaxis(read, 2, 0) != mask).sum())
        to_pixel = image_helper.get_patient_to_pixel_transformation_matrix(builder.series_data)
        area, border = 0.0, 0.0
        for contour in builder.ds.ROIContourSequence[0].ContourSequence:
            places = numpy.reshape(contour.ContourData, (-1, 3))
            x, y, _ = image_helper.apply_transformation_to_3d_points(places, to_pixel).T
            area += 0.5 * float(numpy.sum(x * numpy.roll(y, -1) - numpy.roll(x, -1) * y))
            border += float(numpy.sum(numpy.hypot(x - numpy.roll(x, -1), y - numpy.roll(y, -1))))
        segmentation = highdicom.seg.segread(folder / "mask.dcm")
        uids = [source.SOPInstanceUID for source in builder.series_data]
        frames = segmentation.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
        report[name] = {
            "names": builder.get_roi_names(),
            "differing": differing,
            "voxels": int(mask.sum()),
            "area": abs(area),
            "half_layer": border / 2,
            "seg_differs": bool((frames[..., 0] != mask).any()),
            "patient": [str(builder.ds.PatientName), builder.ds.PatientID, builder.ds.StudyID],
        }
    print(json.dumps(report))


def write_sequences(out):
    """Invented volumes of three sequences of two patients with permuted and flipped axes, with a label map that every slice
    of each direction has. The second patient has no T2."""
    random = numpy.random.default_rng(54)
    affine = numpy.array([[0, 0, -1.5, 20], [2.0, 0, 0, -7], [0, 2.5, 0, 3], [0, 0, 0, 1]])
    size = (6, 9, 7)
    for patient, names in {"P1": ("T1", "FLAIR", "T2"), "P2": ("T1", "FLAIR")}.items():
        (out / patient).mkdir(parents=True)
        for name in names:
            values = random.normal(300, 90, size)
            values = values.astype(numpy.float32) if name == "FLAIR" else values.astype(numpy.int16)
            nibabel.save(nibabel.Nifti1Image(values, affine), out / patient / f"{name}.nii.gz")
        mask = (numpy.add.outer(numpy.add.outer(numpy.arange(6), numpy.arange(9)), numpy.arange(7)) % 3 == 0).astype(numpy.uint8)
        nibabel.save(nibabel.Nifti1Image(mask, affine), out / patient / "mask.nii.gz")


def slices_of(path, axis):
    """The 8-bit slices of a volume as they are shown, with percentiles 0.5 to 99.5, and the distance of two slices."""
    image = nibabel.as_closest_canonical(nibabel.load(path))
    stored = numpy.asanyarray(image.dataobj)
    low, high = (numpy.float32(numpy.percentile(stored.astype(numpy.float64), share)) for share in (0.5, 99.5))
    grey = (stored.astype(numpy.float32) - low) / (high - low)
    grey = numpy.floor(numpy.clip(grey * numpy.float32(255), 0, 255) + numpy.float32(0.5)).astype(numpy.uint8)
    # rows from the front or from above, columns from the right
    along = {"axial": (2, grey.transpose(2, 1, 0)), "coronal": (1, grey.transpose(1, 2, 0))}[axis]
    return along[1][:, ::-1, ::-1], image.header.get_zooms()[along[0]]


def colours_of(patient, axis, context, sequences):
    """The prepared slices of a patient as arrays of RGB."""
    if sequences:
        found = [slices_of(path, axis)[0] if path.exists() else None
                 for path in (patient / f"{name}.nii.gz" for name in sequences)]
        empty = numpy.zeros_like(next(part for part in found if part is not None))
        found = [empty if part is None else part for part in found] + [empty]
        return numpy.stack(found[:3], axis=-1)
    grey, distance = slices_of(patient / "T1.nii.gz", axis)
    if context.endswith("mm"):
        steps = max(int(numpy.floor(float(context[:-2]) / distance + 0.5)), 1)
    else:
        steps = int(context)
    numbers = numpy.arange(len(grey))
    before, behind = numpy.maximum(numbers - steps, 0), numpy.minimum(numbers + steps, len(grey) - 1)
    return numpy.stack([grey[before], grey, grey[behind]], axis=-1)


def compare_slices(folder, root, axis, context, sequences):
    """Compares all images of a data root with the slices that numpy makes of the volumes."""
    num_equal, differing = 0, []
    for patient in sorted(path for path in folder.iterdir() if path.is_dir()):
        wanted = colours_of(patient, axis, context, sequences)
        for number, colours in enumerate(wanted):
            paths = list(root.glob(f"mr/*_images/{patient.name}*_{axis}_{number:04}.png"))
            found = [numpy.asarray(Image.open(path)) for path in paths]
            if len(found) == 1 and numpy.array_equal(found[0], colours):
                num_equal += 1
            else:
                differing.append(f"{patient.name} {number}: {len(found)} files")
    print(json.dumps({"equal": num_equal, "differing": differing}))


def main():
    command, arguments = sys.argv[1], [Path(argument) for argument in sys.argv[2:]]
    if command == "samples":
        samples(arguments[0])
    elif command == "nifti":
        nifti(arguments[0])
    elif command == "draw":
        draw(arguments[0])
    elif command == "contours":
        contours(arguments[0])
    elif command == "sequences":
        write_sequences(arguments[0])
    elif command == "slices":
        axis, context, sequences = map(str, arguments[2:])
        compare_slices(arguments[0], arguments[1], axis, context, [name for name in sequences.split(",") if name != "none"])
    elif command == "seg":
        seg(arguments[0], arguments[1], arguments[2:])
    else:
        sys.exit(f"unknown command {command}")


if __name__ == "__main__":
    main()
