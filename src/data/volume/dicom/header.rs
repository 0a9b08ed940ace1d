//! What the header of a DICOM image says about its pixels and their position. Identifiers of the patient are not read.

use dicom_core::Tag;
use dicom_core::header::Header as _;
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use std::path::Path;

use super::super::limits::check_size;
use super::super::modality::Modality;
use super::object::Object;
use super::syntax;
use crate::error::{Error, Result};

/// Most frames of a file. A header could promise many frames of one pixel.
const MAX_FRAMES: usize = 1 << 16;
const DAMAGED: &str = "export the series again from the archive";

/// Header of one DICOM file with an image.
#[derive(Clone)]
pub(super) struct Header {
    pub modality: Modality,
    pub study: String,
    pub series: String,
    pub series_number: Option<i64>,
    pub class: String,
    pub instance: String,
    pub frame_of_reference: Option<String>,
    pub pixels: PixelFormat,
    pub frames: Vec<Frame>,
    /// True if lines or text are stored apart from the pixels.
    pub has_overlay: bool,
}

/// How the pixels are stored.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PixelFormat {
    /// UID of the transfer syntax.
    pub syntax: String,
    /// Columns and rows.
    pub size: [usize; 2],
    pub samples: usize,
    pub photometric: Photometric,
    pub bits_allocated: u16,
    pub bits_stored: u16,
    pub high_bit: u16,
    pub is_signed: bool,
    /// True if the planes of a colour image follow each other.
    pub is_planar: bool,
}

/// Photometric interpretations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Photometric {
    Monochrome1,
    Monochrome2,
    Palette,
    Rgb,
    YbrFull,
    YbrFull422,
    /// `YBR_ICT` and `YBR_RCT`, which the decoder of JPEG 2000 converts.
    YbrJpeg2000,
}

impl Photometric {
    pub(super) fn is_grey(self) -> bool {
        matches!(self, Self::Monochrome1 | Self::Monochrome2)
    }
}

/// What is known of one frame.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// ImagePositionPatient in mm (LPS).
    pub position: Option<[f64; 3]>,
    /// ImageOrientationPatient: direction of a row, direction of a column.
    pub orientation: Option<[f64; 6]>,
    /// Distance in mm of neighbouring pixels along a row, along a column.
    pub spacing: Option<[f64; 2]>,
    /// SpacingBetweenSlices or SliceThickness in mm; used for a single slice only.
    pub thickness: Option<f64>,
    pub slope: f64,
    pub intercept: f64,
    /// Width and level.
    pub windows: Vec<[f32; 2]>,
}

fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::data(path, reason, DAMAGED)
}

pub(super) fn text(object: &InMemDicomObject, tag: Tag) -> Option<String> {
    let text = object.get(tag)?.to_str().ok()?;
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

fn numbers(object: &InMemDicomObject, tag: Tag) -> Option<Vec<f64>> {
    let numbers = object.get(tag)?.to_multi_float64().ok()?;
    (!numbers.is_empty() && numbers.iter().all(|number| number.is_finite())).then_some(numbers)
}

fn number(object: &InMemDicomObject, tag: Tag) -> Option<f64> {
    numbers(object, tag)?.first().copied()
}

fn integer(object: &InMemDicomObject, tag: Tag) -> Option<i64> {
    object.get(tag)?.to_int::<i64>().ok()
}

/// A number that the image is wrong without: an error if its value is not a number, `None` if there is no value.
fn required(path: &Path, object: &InMemDicomObject, tag: Tag, name: &str) -> Result<Option<f64>> {
    match number(object, tag) {
        None if text(object, tag).is_some() => Err(wrong(path, format!("its header has no valid {name}"))),
        found => Ok(found),
    }
}

fn array<const N: usize>(numbers: Option<Vec<f64>>) -> Option<[f64; N]> {
    numbers?.try_into().ok()
}

impl Header {
    /// Reads the header. `Ok(None)` for a DICOM object that is not an image (structured report, directory, ...).
    pub(super) fn read(path: &Path, object: &Object) -> Result<Option<Self>> {
        let modality = text(object, tags::MODALITY).unwrap_or_default();
        let is_image = object.get(tags::ROWS).is_some() && object.get(tags::COLUMNS).is_some();
        if !is_image || matches!(modality.as_str(), "SEG" | "RTDOSE" | "RTSTRUCT" | "RTPLAN" | "PR" | "KO" | "SR") {
            return Ok(None);
        }
        let pixels = PixelFormat::read(path, object)?;
        let num_frames = required(path, object, tags::NUMBER_OF_FRAMES, "NumberOfFrames")?.unwrap_or(1.0).max(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at least 1; more is refused below"
        )]
        let num_frames = num_frames as usize;
        check_size(path, [pixels.size[0], pixels.size[1], num_frames])?;
        if num_frames > MAX_FRAMES {
            return Err(wrong(path, format!("its header promises {num_frames} frames; {MAX_FRAMES} can be read")));
        }
        if object.get(tags::MODALITY_LUT_SEQUENCE).is_some() {
            let hint = "export the image with a rescale slope and intercept, or as NIfTI";
            return Err(Error::data(path, "it has a modality lookup table, which cannot be read", hint));
        }
        let groups = Groups::new(object);
        let frames = (0..num_frames).map(|frame| groups.frame(path, object, frame)).collect::<Result<_>>()?;
        Ok(Some(Self {
            modality: Modality::from_code(&modality),
            study: text(object, tags::STUDY_INSTANCE_UID).unwrap_or_default(),
            series: text(object, tags::SERIES_INSTANCE_UID).unwrap_or_default(),
            series_number: integer(object, tags::SERIES_NUMBER),
            class: text(object, tags::SOP_CLASS_UID).unwrap_or_default(),
            instance: text(object, tags::SOP_INSTANCE_UID).unwrap_or_default(),
            frame_of_reference: text(object, tags::FRAME_OF_REFERENCE_UID),
            pixels,
            frames,
            has_overlay: object.iter().any(|element| element.tag().group() & 0xffe0 == 0x6000),
        }))
    }
}

impl PixelFormat {
    fn read(path: &Path, object: &Object) -> Result<Self> {
        let syntax = object.meta().transfer_syntax().trim_matches(['\0', ' ']).to_owned();
        syntax::check(&syntax).map_err(|(reason, hint)| Error::data(path, reason, hint))?;
        let unsigned = |tag: Tag, name: &str| {
            let value = object.get(tag).and_then(|element| element.to_int::<u16>().ok());
            value.ok_or_else(|| wrong(path, format!("its header has no valid {name}")))
        };
        let bits_allocated = unsigned(tags::BITS_ALLOCATED, "BitsAllocated")?;
        let bits_stored = unsigned(tags::BITS_STORED, "BitsStored").unwrap_or(bits_allocated);
        let high_bit = unsigned(tags::HIGH_BIT, "HighBit").unwrap_or(bits_stored.saturating_sub(1));
        if !matches!(bits_allocated, 8 | 16 | 32)
            || bits_stored == 0
            || high_bit >= bits_allocated
            || bits_stored > high_bit + 1
        {
            let reason = format!(
                "its pixels have {bits_stored} bits of {bits_allocated}, up to bit {high_bit}, which cannot be read"
            );
            return Err(Error::data(
                path,
                reason,
                "images of 8, 16 and 32 bits can be read; convert it to one of these",
            ));
        }
        let samples = usize::from(unsigned(tags::SAMPLES_PER_PIXEL, "SamplesPerPixel").unwrap_or(1));
        let photometric = photometric(path, object, samples)?;
        Ok(Self {
            syntax,
            size: [unsigned(tags::COLUMNS, "Columns")?.into(), unsigned(tags::ROWS, "Rows")?.into()],
            samples,
            photometric,
            bits_allocated,
            bits_stored,
            high_bit,
            is_signed: unsigned(tags::PIXEL_REPRESENTATION, "PixelRepresentation").unwrap_or(0) == 1,
            is_planar: unsigned(tags::PLANAR_CONFIGURATION, "PlanarConfiguration").unwrap_or(0) == 1,
        })
    }
}

fn photometric(path: &Path, object: &InMemDicomObject, samples: usize) -> Result<Photometric> {
    let code = text(object, tags::PHOTOMETRIC_INTERPRETATION).unwrap_or_default();
    let found = match code.as_str() {
        "MONOCHROME1" => Photometric::Monochrome1,
        "MONOCHROME2" => Photometric::Monochrome2,
        "PALETTE COLOR" => Photometric::Palette,
        "RGB" => Photometric::Rgb,
        "YBR_FULL" => Photometric::YbrFull,
        "YBR_FULL_422" => Photometric::YbrFull422,
        "YBR_ICT" | "YBR_RCT" => Photometric::YbrJpeg2000,
        _ => {
            let reason = "its photometric interpretation cannot be read";
            let hint = "convert it to MONOCHROME2 or RGB, for example with DCMTK: `dcmj2pnm`, `img2dcm`";
            return Err(Error::data(path, reason, hint));
        }
    };
    let expected = if found.is_grey() || found == Photometric::Palette { 1 } else { 3 };
    if samples == expected {
        return Ok(found);
    }
    Err(wrong(path, format!("its header is inconsistent: {code} has {expected} samples per pixel, and not {samples}")))
}

/// Functional groups of an enhanced multi-frame image, or none.
pub(super) struct Groups<'a> {
    shared: Option<&'a InMemDicomObject>,
    per_frame: &'a [InMemDicomObject],
}

impl<'a> Groups<'a> {
    pub(super) fn new(object: &'a InMemDicomObject) -> Self {
        let items = |tag: Tag| object.get(tag).and_then(|element| element.items()).unwrap_or_default();
        Self {
            shared: items(tags::SHARED_FUNCTIONAL_GROUPS_SEQUENCE).first(),
            per_frame: items(tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE),
        }
    }

    /// The object that has `tag` for a frame: an item of `sequence` of the frame, of all frames, or the data set.
    fn holder(
        &self,
        object: &'a InMemDicomObject,
        frame: usize,
        sequence: Tag,
        tag: Tag,
    ) -> Option<&'a InMemDicomObject> {
        let item = |group: &'a InMemDicomObject| group.get(sequence)?.items()?.first();
        let candidates = [self.per_frame.get(frame).and_then(item), self.shared.and_then(item), Some(object)];
        candidates.into_iter().flatten().find(|candidate| candidate.get(tag).is_some())
    }

    /// A whole number of a frame.
    pub(super) fn number(&self, object: &'a InMemDicomObject, frame: usize, sequence: Tag, tag: Tag) -> Option<i64> {
        integer(self.holder(object, frame, sequence, tag)?, tag)
    }

    pub(super) fn frame(&self, path: &Path, object: &'a InMemDicomObject, frame: usize) -> Result<Frame> {
        let value = |sequence: Tag, tag: Tag| numbers(self.holder(object, frame, sequence, tag)?, tag);
        let first = |sequence: Tag, tag: Tag| value(sequence, tag).and_then(|values| values.first().copied());
        let measures = tags::PIXEL_MEASURES_SEQUENCE;
        let spacing: Option<[f64; 2]> = array(value(measures, tags::PIXEL_SPACING))
            .or_else(|| array(numbers(object, tags::IMAGER_PIXEL_SPACING)))
            .or_else(|| array(numbers(object, tags::NOMINAL_SCANNED_PIXEL_SPACING)))
            .or_else(|| ultrasound_spacing(object));
        let thickness =
            first(measures, tags::SPACING_BETWEEN_SLICES).or_else(|| first(measures, tags::SLICE_THICKNESS));
        let transformation = tags::PIXEL_VALUE_TRANSFORMATION_SEQUENCE;
        let stated = |tag: Tag, name: &str| match self.holder(object, frame, transformation, tag) {
            Some(holder) => required(path, holder, tag, name),
            None => Ok(None),
        };
        let slope = stated(tags::RESCALE_SLOPE, "RescaleSlope")?.unwrap_or(1.0);
        let intercept = stated(tags::RESCALE_INTERCEPT, "RescaleIntercept")?.unwrap_or(0.0);
        if slope == 0.0 {
            return Err(wrong(path, "its rescale slope is 0"));
        }
        let voi = tags::FRAME_VOILUT_SEQUENCE;
        let widths = value(voi, tags::WINDOW_WIDTH).unwrap_or_default();
        let levels = value(voi, tags::WINDOW_CENTER).unwrap_or_default();
        #[expect(clippy::cast_possible_truncation, reason = "a window")]
        let windows = widths.iter().zip(&levels).map(|(width, level)| [*width as f32, *level as f32]);
        Ok(Frame {
            position: array(value(tags::PLANE_POSITION_SEQUENCE, tags::IMAGE_POSITION_PATIENT)),
            orientation: array(value(tags::PLANE_ORIENTATION_SEQUENCE, tags::IMAGE_ORIENTATION_PATIENT)),
            // the first number of DICOM is the distance between rows
            spacing: spacing.map(|[between_rows, between_columns]| [between_columns, between_rows]),
            thickness: thickness.map(f64::abs),
            slope,
            intercept,
            windows: windows.filter(|[width, _]| *width > 0.0).collect(),
        })
    }
}

/// Distance in mm between rows and columns of an ultrasound image with one region whose unit is centimetres.
fn ultrasound_spacing(object: &InMemDicomObject) -> Option<[f64; 2]> {
    let [region] = object.get(tags::SEQUENCE_OF_ULTRASOUND_REGIONS)?.items()? else { return None };
    let is_cm = |tag: Tag| integer(region, tag) == Some(3);
    if !is_cm(tags::PHYSICAL_UNITS_X_DIRECTION) || !is_cm(tags::PHYSICAL_UNITS_Y_DIRECTION) {
        return None;
    }
    let mm = |tag: Tag| number(region, tag).map(|cm| cm.abs() * 10.0).filter(|mm| *mm > 0.0);
    Some([mm(tags::PHYSICAL_DELTA_Y)?, mm(tags::PHYSICAL_DELTA_X)?])
}
