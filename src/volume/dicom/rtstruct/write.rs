//! Writing of RTSTRUCT: the contours of each target on the slices of a DICOM series.

use std::path::Path;

use dicom_core::VR;
use dicom_dictionary_std::{tags, uids};
use dicom_object::InMemDicomObject;

use super::super::super::grid::{Grid, corners, length, swap_lps_ras};
use super::super::super::source::{References, Uid};
use super::super::super::voxels::Volume;
use super::super::derived::{Kind, SegmentMask, group, image_of_slice, images, item, now, sequence, text};
use super::trace::trace;
use prsmed_base::error::{Error, Result};

/// Explicit value representations would limit a contour to 64 KiB.
pub(in super::super) const RTSTRUCT: Kind =
    Kind { modality: "RTSTRUCT", class: uids::RT_STRUCTURE_SET_STORAGE, syntax: uids::IMPLICIT_VR_LITTLE_ENDIAN };

/// Detached Study Management, the class that the standard asks for although it is retired.
const STUDY: &str = "1.2.840.10008.3.1.2.3.1";

/// Colours of targets in their order, which also people with colour blindness can tell apart (Okabe and Ito, 2008).
const COLOURS: [&str; 7] =
    ["230\\159\\0", "86\\180\\233", "0\\158\\115", "240\\228\\66", "0\\114\\178", "213\\94\\0", "204\\121\\167"];

/// The bytes of segments as an RTSTRUCT with one ROI for each, on the slices of `volume`, which must come from a DICOM
/// series with positions. Contours are 1/16 of a pixel within the borders of their pixels.
///
/// # Errors
/// [`Error::Shape`] for a mask of another size; [`Error::Data`] as [`check`].
pub(in super::super) fn encoded(path: &Path, segments: &[SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    segments.iter().try_for_each(|segment| volume.grid.check(segment.mask.len()))?;
    let (references, frame_of_reference, digits) = check(path, volume)?;
    let mut object = RTSTRUCT.object(references, frame_of_reference);
    let [date, clock] = now();
    let numbered = || segments.iter().zip(1_usize..).map(|(segment, number)| (segment, number.to_string()));
    object.extend([
        text(tags::OPERATORS_NAME, VR::PN, ""),
        text(tags::STRUCTURE_SET_LABEL, VR::SH, "prsmed"),
        text(tags::STRUCTURE_SET_DESCRIPTION, VR::ST, "research use only"),
        text(tags::STRUCTURE_SET_DATE, VR::DA, &date),
        text(tags::STRUCTURE_SET_TIME, VR::TM, &clock),
        text(tags::APPROVAL_STATUS, VR::CS, "UNAPPROVED"),
        sequence(tags::REFERENCED_FRAME_OF_REFERENCE_SEQUENCE, [series(references, frame_of_reference)]),
        sequence(
            tags::STRUCTURE_SET_ROI_SEQUENCE,
            numbered().map(|(segment, number)| {
                item([
                    text(tags::ROI_NUMBER, VR::IS, &number),
                    text(tags::REFERENCED_FRAME_OF_REFERENCE_UID, VR::UI, &frame_of_reference.0),
                    text(tags::ROI_NAME, VR::LO, &segment.label()),
                    text(tags::ROI_GENERATION_ALGORITHM, VR::CS, "AUTOMATIC"),
                ])
            }),
        ),
        sequence(
            tags::ROI_CONTOUR_SEQUENCE,
            numbered().zip(COLOURS.iter().cycle()).map(|((segment, number), colour)| {
                let mut roi = item([
                    text(tags::ROI_DISPLAY_COLOR, VR::IS, colour),
                    text(tags::REFERENCED_ROI_NUMBER, VR::IS, &number),
                ]);
                let contours = contours(segment.mask, volume, references, digits);
                // an empty sequence would say that contours are unknown
                roi.extend((!contours.is_empty()).then(|| sequence(tags::CONTOUR_SEQUENCE, contours)));
                roi
            }),
        ),
        sequence(
            tags::RTROI_OBSERVATIONS_SEQUENCE,
            numbered().map(|(_, number)| {
                item([
                    text(tags::OBSERVATION_NUMBER, VR::IS, &number),
                    text(tags::REFERENCED_ROI_NUMBER, VR::IS, &number),
                    text(tags::RTROI_INTERPRETED_TYPE, VR::CS, ""),
                    text(tags::ROI_INTERPRETER, VR::PN, ""),
                ])
            }),
        ),
    ]);
    RTSTRUCT.bytes(object)
}

/// The series with all of its images.
fn series(references: &References, frame_of_reference: &Uid) -> InMemDicomObject {
    let series = [
        text(tags::SERIES_INSTANCE_UID, VR::UI, &references.series),
        sequence(tags::CONTOUR_IMAGE_SEQUENCE, images(references)),
    ];
    let study = [
        text(tags::REFERENCED_SOP_CLASS_UID, VR::UI, STUDY),
        text(tags::REFERENCED_SOP_INSTANCE_UID, VR::UI, &references.study),
        group(tags::RT_REFERENCED_SERIES_SEQUENCE, series),
    ];
    item([
        text(tags::FRAME_OF_REFERENCE_UID, VR::UI, &frame_of_reference.0),
        group(tags::RT_REFERENCED_STUDY_SEQUENCE, study),
    ])
}

/// The contours of a mask on all slices, with so many decimal digits.
fn contours(mask: &[u8], volume: &Volume, references: &References, digits: usize) -> Vec<InMemDicomObject> {
    let [width, height, _] = volume.grid.size;
    let slices = mask.chunks_exact(width * height).enumerate();
    let contours = slices.flat_map(|(slice, mask)| {
        trace(mask, [width, height]).into_iter().map(move |points| {
            let place = |[x, y]: [f64; 2]| swap_lps_ras(volume.grid.affine.apply([x, y, slice as f64]));
            let numbers = points.iter().flat_map(|point| place(*point)).map(|mm| format!("{mm:.digits$}"));
            let mut contour = item([
                text(tags::CONTOUR_GEOMETRIC_TYPE, VR::CS, "CLOSED_PLANAR"),
                text(tags::NUMBER_OF_CONTOUR_POINTS, VR::IS, &points.len().to_string()),
                text(tags::CONTOUR_DATA, VR::DS, &numbers.collect::<Vec<_>>().join("\\")),
            ]);
            let image = references.instances.get(slice).map(image_of_slice);
            contour.extend(image.map(|image| sequence(tags::CONTOUR_IMAGE_SEQUENCE, [image])));
            contour
        })
    });
    contours.collect()
}

/// Characters of a decimal string.
const MAX_DECIMAL: usize = 16;

/// Fails for a volume that is no DICOM series with positions, or whose positions need more digits than RTSTRUCT has.
pub(in super::super) fn check<'a>(path: &Path, volume: &'a Volume) -> Result<(&'a References, &'a Uid, usize)> {
    let (references, frame_of_reference) = RTSTRUCT.check(path, volume)?;
    let digits = digits(&volume.grid).ok_or_else(|| {
        let reason =
            format!("the positions of the volume have more digits than RTSTRUCT can hold ({MAX_DECIMAL} characters)");
        Error::data(path, reason, "write NIfTI instead: use a name that ends with `.nii.gz`")
    })?;
    Ok((references, frame_of_reference, digits))
}

/// Decimal digits of coordinates in mm that are exact to a thousandth of the distance of pixels and slices; `None` if
/// they do not fit into a decimal string.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 16")]
fn digits(grid: &Grid) -> Option<usize> {
    let [x, y, z] = grid.affine.inverse()?.0.map(|row| length([row[0], row[1], row[2]]));
    let digits = (3.0 + x.max(y).max(z).log10()).ceil().clamp(0.0, MAX_DECIMAL as f64) as usize;
    let fits = |mm: f64| format!("{mm:.digits$}").len() <= MAX_DECIMAL;
    // the borders of the outer pixels are beyond their centres
    corners(grid.size).all(|corner| grid.affine.apply(corner).iter().all(|mm| fits(-10.0 * mm.abs()))).then_some(digits)
}

#[cfg(test)]
mod tests {
    use super::super::super::super::grid::Affine;
    use super::*;

    #[test]
    fn coordinates_are_exact_to_a_thousandth_of_a_voxel() {
        let of = |[x, y, z]: [f64; 3], origin: f64| {
            let steps = [[x, 0.0, 0.0], [0.0, y, 0.0], [0.0, 0.0, z]];
            digits(&Grid { size: [9; 3], affine: Affine::from_columns(steps, [origin; 3]) })
        };
        assert_eq!(of([0.7, 0.7, 3.0], 500.0), Some(4));
        assert_eq!(of([1.0, 1.0, 1.0], 1e8), Some(3));
        assert_eq!(of([0.01, 0.5, 0.5], 0.0), Some(5));
        assert_eq!([of([1e-14, 1.0, 1.0], 0.0), of([0.01, 0.01, 0.01], 1e10)], [None; 2]);
    }
}
