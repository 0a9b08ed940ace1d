//! What the header of a DICOM image says about its pixels and their position. Of the patient only PatientID is read, to see which
//! series are of one patient; it is never shown or written.

use dicom_core::header::Header as _;
use dicom_core::{Tag, VR};
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use std::path::Path;
use std::sync::Arc;

use super::super::display::GreyTable;
use super::super::grid::{dot, length};
use super::super::limits::check_size;
use super::super::modality::Modality;
use super::super::source::Uid;
use super::numbers::{array, distances, integer, items, lookup_table, name, number, numbers, text, wrong};
use super::object::{Object, is_other_modality};
use super::syntax;
use prsmed_base::error::{Error, Result};

/// Most frames of a file. A header could promise many frames of one pixel.
const MAX_FRAMES: usize = 1 << 16;

/// Header of one DICOM file with an image.
#[derive(Clone)]
pub(super) struct DicomHeader {
    pub modality: Modality,
    pub study: String,
    /// PatientID.
    pub patient: Option<Uid>,
    pub series: String,
    pub series_number: Option<i64>,
    pub class: String,
    pub instance: String,
    pub frame_of_reference: Option<String>,
    pub pixels: PixelFormat,
    pub frames: Vec<FrameHeader>,
    /// Smallest and largest stored value of pixels that are not part of the image.
    pub padding: Option<[i64; 2]>,
    /// Lookup table for grey values, which may be used instead of a window.
    pub table: Option<Arc<GreyTable>>,
    /// The parts of ImageType.
    kinds: Vec<String>,
    /// SeriesDescription, to compare it with the text that a user gives. It is printed only in the hint about a series that is
    /// not found.
    pub description: String,
    /// `YYYY-MM-DD` and the digits of the time of the series, or else of its acquisition or study. They choose the newest series.
    pub date: Option<(String, String)>,
    /// Names and values of what tells images at one position apart.
    pub distinct: Vec<(&'static str, f64)>,
    /// True if PresentationLUTShape contradicts that large values are bright.
    pub has_inverse_shape: bool,
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

    /// True if the samples are luminance and colour differences, which no decoder has to convert.
    pub(super) fn is_ybr(self) -> bool {
        matches!(self, Self::YbrFull | Self::YbrFull422)
    }
}

/// What RescaleType says of the values of a CT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RescaleType {
    /// Hounsfield units, also without the attribute.
    Hounsfield,
    Unspecified,
    Other,
}

/// What is known of one frame.
#[derive(Debug, Clone)]
pub(super) struct FrameHeader {
    /// ImagePositionPatient in mm (LPS).
    pub position: Option<[f64; 3]>,
    /// ImageOrientationPatient: direction of a row, direction of a column.
    pub orientation: Option<[f64; 6]>,
    /// Distance in mm of neighbouring pixels along a row, along a column.
    pub spacing: Option<[f64; 2]>,
    /// What is to be known of this distance.
    pub spacing_note: Option<String>,
    /// SpacingBetweenSlices or SliceThickness in mm, or why it cannot be used; for a single slice only.
    pub thickness: Result<Option<f64>, String>,
    /// Slope and intercept, as far as they are stated.
    pub rescale: [Option<f64>; 2],
    pub rescale_type: RescaleType,
    /// Width and level.
    pub windows: Vec<[f32; 2]>,
    /// Why the windows cannot be used.
    pub window_fault: Option<String>,
    /// True if the windows are sigmoids.
    pub is_sigmoid: bool,
}

impl FrameHeader {
    pub(super) fn slope(&self) -> f64 {
        self.rescale[0].unwrap_or(1.0)
    }

    pub(super) fn intercept(&self) -> f64 {
        self.rescale[1].unwrap_or(0.0)
    }
}

impl DicomHeader {
    /// Reads the header. `Ok(None)` for a DICOM object that is not an image (structured report, directory, ...).
    pub(super) fn read(path: &Path, object: &Object) -> Result<Option<Self>> {
        let modality = text(object, tags::MODALITY).unwrap_or_default();
        let is_image = object.get(tags::ROWS).is_some() && object.get(tags::COLUMNS).is_some();
        if !is_image || is_other_modality(object) {
            return Ok(None);
        }
        let pixels = PixelFormat::read(path, object)?;
        let num_frames = number(path, object, tags::NUMBER_OF_FRAMES)?.unwrap_or(1.0).max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at least 1; more is refused")]
        let num_frames = num_frames as usize;
        check_size(path, [pixels.size[0], pixels.size[1], num_frames])?;
        if num_frames > MAX_FRAMES {
            return Err(wrong(path, format!("its header promises {num_frames} frames; {MAX_FRAMES} can be read")));
        }
        if object.get(tags::MODALITY_LUT_SEQUENCE).is_some() {
            let hint = "export the image with a rescale slope and intercept, or as NIfTI";
            return Err(Error::data(path, "it has a modality lookup table, which cannot be read", hint));
        }
        let groups = Groups::new(path, object);
        let mut frames = (0..num_frames).map(|frame| groups.frame(frame)).collect::<Result<Vec<_>>>()?;
        let table = groups.table(&pixels, frames[0].intercept() < 0.0).unwrap_or_else(|error| {
            frames.iter_mut().filter(|frame| frame.windows.is_empty()).for_each(|frame| {
                frame.window_fault.get_or_insert_with(|| error.to_string());
            });
            None
        });
        let kinds = text(object, tags::IMAGE_TYPE).unwrap_or_default();
        let distinct = DISTINCT.iter().filter_map(|tag| Some((name(*tag), number(path, object, *tag).ok()??)));
        Ok(Some(Self {
            padding: padding(path, object, &pixels)?,
            table,
            kinds: kinds.split('\\').map(|part| part.trim().to_uppercase()).collect(),
            description: text(object, tags::SERIES_DESCRIPTION).unwrap_or_default(),
            date: date(object),
            distinct: distinct.collect(),
            modality: Modality::from_code(&modality),
            study: text(object, tags::STUDY_INSTANCE_UID).unwrap_or_default(),
            patient: text(object, tags::PATIENT_ID).filter(|id| !id.is_empty()).map(Uid),
            series: text(object, tags::SERIES_INSTANCE_UID).unwrap_or_default(),
            series_number: integer(object, tags::SERIES_NUMBER),
            class: text(object, tags::SOP_CLASS_UID).unwrap_or_default(),
            instance: text(object, tags::SOP_INSTANCE_UID).unwrap_or_default(),
            frame_of_reference: text(object, tags::FRAME_OF_REFERENCE_UID),
            has_inverse_shape: pixels.photometric == Photometric::Monochrome2
                && text(object, tags::PRESENTATION_LUT_SHAPE).as_deref() == Some("INVERSE"),
            has_overlay: object.iter().any(|element| element.tag().group() & 0xffe0 == 0x6000),
            pixels,
            frames,
        }))
    }
}

/// Parts of ImageType of images that are projections of a volume, and of images of a screen.
const PROJECTIONS: [&str; 7] = ["PROJECTION IMAGE", "MIP", "MINIP", "MAX_IP", "MIN_IP", "MEAN_IP", "AVERAGE_IP"];
const SCREENS: [&str; 4] = ["SCREEN SAVE", "SCREENSHOT", "DOSE_INFO", "PATIENT PROTOCOL"];

impl DicomHeader {
    /// The number of its series in words.
    pub(super) fn series_text(&self) -> String {
        self.series_number.map_or("no number".to_owned(), |number| format!("number {number}"))
    }

    fn is_of(&self, kinds: &[&'static str]) -> Option<&'static str> {
        kinds.iter().copied().find(|kind| self.kinds.iter().any(|found| found == kind))
    }

    /// True for an overview image for planning.
    pub(super) fn is_localizer(&self) -> bool {
        self.is_of(&["LOCALIZER"]).is_some()
    }

    /// True if one image has all slices of a volume as tiles.
    pub(super) fn is_mosaic(&self) -> bool {
        self.is_of(&["MOSAIC"]).is_some()
    }

    /// What is to be known of images that are no slices of a patient.
    pub(super) fn kind_note(&self) -> Option<String> {
        let projection = self.is_of(&PROJECTIONS).map(|kind| {
            format!("the images are projections of a volume (ImageType has {kind}): areas and volumes are not those of tissue")
        });
        let screen = |kind: &str| {
            format!("the image is one of a screen or a report (ImageType has {kind}), and may not show the patient")
        };
        projection.or_else(|| self.is_of(&SCREENS).map(screen))
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
        let are_inside = high_bit < bits_allocated && (1..=high_bit + 1).contains(&bits_stored);
        if !are_inside || !matches!(bits_allocated, 8 | 16 | 32) {
            let reason = format!(
                "its pixels have {bits_stored} bits of {bits_allocated}, up to bit {high_bit}, which cannot be read"
            );
            let hint = "images of 8, 16 and 32 bits can be read; convert it to one of these";
            return Err(Error::data(path, reason, hint));
        }
        let samples = usize::from(unsigned(tags::SAMPLES_PER_PIXEL, "SamplesPerPixel").unwrap_or(1));
        let photometric = photometric(path, object, samples, &syntax)?;
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

/// What to do about colours that cannot be read.
pub(super) const CONVERT: &str = "convert it to MONOCHROME2 or RGB, for example with DCMTK: `dcmj2pnm`, `img2dcm`";
/// Colour spaces of the standard that cannot be read. The others may be texts of a user.
const OTHER_COLOURS: [&str; 7] = ["YBR_PARTIAL_422", "YBR_PARTIAL_420", "YBR_FULL_420", "HSV", "ARGB", "CMYK", "XYB"];

fn photometric(path: &Path, object: &InMemDicomObject, samples: usize, syntax: &str) -> Result<Photometric> {
    let code = text(object, tags::PHOTOMETRIC_INTERPRETATION).unwrap_or_default();
    let refuse = |reason: String| Err(Error::data(path, reason, CONVERT));
    let found = match code.as_str() {
        "MONOCHROME1" => Photometric::Monochrome1,
        "MONOCHROME2" => Photometric::Monochrome2,
        "PALETTE COLOR" => Photometric::Palette,
        "RGB" => Photometric::Rgb,
        "YBR_FULL" => Photometric::YbrFull,
        "YBR_FULL_422" => Photometric::YbrFull422,
        "YBR_ICT" | "YBR_RCT" if syntax::is_jpeg_2000(syntax) => Photometric::YbrJpeg2000,
        "YBR_ICT" | "YBR_RCT" => {
            return refuse(format!("its PhotometricInterpretation is {code}, and its pixels are not JPEG 2000"));
        }
        "" => return refuse("its header has no PhotometricInterpretation".to_owned()),
        other if OTHER_COLOURS.contains(&other) => {
            return refuse(format!("its PhotometricInterpretation is {code}, which cannot be read"));
        }
        _ => return refuse("its PhotometricInterpretation is none of the standard, and cannot be read".to_owned()),
    };
    let expected = if found.is_grey() || found == Photometric::Palette { 1 } else { 3 };
    if samples == expected {
        return Ok(found);
    }
    Err(wrong(path, format!("its header is inconsistent: {code} has {expected} samples per pixel, and not {samples}")))
}

/// The data set of an image, with the functional groups of an enhanced multi-frame image, or none.
pub(super) struct Groups<'a> {
    path: &'a Path,
    object: &'a InMemDicomObject,
    shared: Option<&'a InMemDicomObject>,
    per_frame: &'a [InMemDicomObject],
}

impl<'a> Groups<'a> {
    pub(super) fn new(path: &'a Path, object: &'a InMemDicomObject) -> Self {
        let shared = items(object, tags::SHARED_FUNCTIONAL_GROUPS_SEQUENCE).first();
        Self { path, object, shared, per_frame: items(object, tags::PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE) }
    }

    /// The object that has `tag` for a frame: an item of `sequence` of the frame or of all frames, else the data set.
    fn holder(&self, frame: usize, sequence: Tag, tag: Tag) -> &'a InMemDicomObject {
        let of_group = [self.per_frame.get(frame), self.shared].into_iter().flatten();
        let mut candidates = of_group.filter_map(|group| items(group, sequence).first());
        candidates.find(|candidate| candidate.get(tag).is_some()).unwrap_or(self.object)
    }

    /// A whole number of a frame.
    pub(super) fn number(&self, frame: usize, sequence: Tag, tag: Tag) -> Option<i64> {
        integer(self.holder(frame, sequence, tag), tag)
    }

    pub(super) fn frame(&self, frame: usize) -> Result<FrameHeader> {
        let Self { path, object, .. } = *self;
        let holder = |sequence: Tag, tag: Tag| self.holder(frame, sequence, tag);
        let measures = tags::PIXEL_MEASURES_SEQUENCE;
        let (spacing, spacing_note) = spacing(path, object, holder(measures, tags::PIXEL_SPACING))?;
        // most series do not need it
        let thickness = |tag: Tag| match number(path, holder(measures, tag), tag) {
            Ok(mm) => Ok(mm.map(f64::abs).filter(|mm| *mm > 0.0)),
            Err(error) => Err(error.to_string()),
        };
        let thickness = match thickness(tags::SPACING_BETWEEN_SLICES) {
            Ok(None) => thickness(tags::SLICE_THICKNESS),
            found => found,
        };
        let transformation = tags::PIXEL_VALUE_TRANSFORMATION_SEQUENCE;
        let rescale = |tag: Tag| number(path, holder(transformation, tag), tag);
        let rescale = [rescale(tags::RESCALE_SLOPE)?, rescale(tags::RESCALE_INTERCEPT)?];
        let is_ct = text(object, tags::MODALITY).as_deref() == Some("CT");
        check_rescale(path, rescale, is_ct)?;
        let unit = text(holder(transformation, tags::RESCALE_TYPE), tags::RESCALE_TYPE);
        let voi = tags::FRAME_VOILUT_SEQUENCE;
        // only some windows of the user need it
        let window = |tag: Tag| numbers(path, holder(voi, tag), tag).map(Option::unwrap_or_default);
        let function = text(holder(voi, tags::VOILUT_FUNCTION), tags::VOILUT_FUNCTION);
        let is_known = matches!(function.as_deref(), None | Some("LINEAR" | "LINEAR_EXACT" | "SIGMOID"));
        let (windows, window_fault) = match (window(tags::WINDOW_WIDTH), window(tags::WINDOW_CENTER)) {
            (Ok(widths), Ok(levels)) if is_known => (windows(&widths, &levels), None),
            (Ok(_), Ok(_)) => (Vec::new(), Some("its VOILUTFunction is unknown".to_owned())),
            (Err(error), _) | (_, Err(error)) => (Vec::new(), Some(error.to_string())),
        };
        let (position, orientation) = (tags::IMAGE_POSITION_PATIENT, tags::IMAGE_ORIENTATION_PATIENT);
        Ok(FrameHeader {
            position: array(path, holder(tags::PLANE_POSITION_SEQUENCE, position), position)?,
            orientation: directions(path, holder(tags::PLANE_ORIENTATION_SEQUENCE, orientation))?,
            // the first number of DICOM is the distance between rows
            spacing: spacing.map(|[between_rows, between_columns]| [between_columns, between_rows]),
            spacing_note,
            thickness,
            rescale,
            rescale_type: match unit.as_deref() {
                None | Some("HU" | "HU_MOD") => RescaleType::Hounsfield,
                Some("US") => RescaleType::Unspecified,
                Some(_) => RescaleType::Other,
            },
            windows,
            window_fault,
            is_sigmoid: function.as_deref() == Some("SIGMOID"),
        })
    }

    /// The lookup table for grey values of the first frame; a damaged one is an error.
    fn table(&self, format: &PixelFormat, has_negative: bool) -> Result<Option<Arc<GreyTable>>> {
        let tables = items(self.holder(0, tags::FRAME_VOILUT_SEQUENCE, tags::VOILUT_SEQUENCE), tags::VOILUT_SEQUENCE);
        let Some(item) = tables.first().filter(|_| format.photometric.is_grey()) else { return Ok(None) };
        let table = table(item, format.is_signed || has_negative);
        let damaged = || wrong(self.path, "its lookup table (VOI LUT) is damaged");
        table.map(|table| Some(Arc::new(table))).ok_or_else(damaged)
    }
}

/// Refuses a rescale whose values are no measurements, or cannot be kept as 32-bit floating-point numbers.
fn check_rescale(path: &Path, [slope, intercept]: [Option<f64>; 2], is_ct: bool) -> Result<()> {
    let (most_slope, most_intercept) = if is_ct { (1e3, 1e6) } else { (1e20, 1e20) };
    if slope == Some(0.0) {
        return Err(wrong(path, "RescaleSlope is 0"));
    }
    let (slope, intercept) = (slope.unwrap_or(1.0).abs(), intercept.unwrap_or(0.0).abs());
    if !(1e-20..=most_slope).contains(&slope) {
        return Err(wrong(path, format!("RescaleSlope is {slope:e}, which is out of range")));
    }
    if intercept > most_intercept || intercept > slope * f64::from(1 << 24) {
        let reason =
            format!("RescaleIntercept is {intercept:e}, which is out of range for a RescaleSlope of {slope:e}");
        return Err(wrong(path, reason));
    }
    Ok(())
}

/// ImageOrientationPatient. Zeros stand for no orientation.
fn directions(path: &Path, object: &InMemDicomObject) -> Result<Option<[f64; 6]>> {
    let found = array::<6>(path, object, tags::IMAGE_ORIENTATION_PATIENT)?;
    let Some(found @ [a, b, c, d, e, f]) = found.filter(|all| all.iter().any(|value| *value != 0.0)) else {
        return Ok(None);
    };
    let (row, column) = ([a, b, c], [d, e, f]);
    let is_unit = |vector| (length(vector) - 1.0).abs() < 0.01;
    if is_unit(row) && is_unit(column) && dot(row, column).abs() < 0.01 {
        return Ok(Some(found));
    }
    let reason = format!(
        "ImageOrientationPatient is `{a}\\{b}\\{c}\\{d}\\{e}\\{f}`, and must be two perpendicular directions of length 1"
    );
    Err(wrong(path, reason))
}

#[expect(clippy::cast_possible_truncation, reason = "a window")]
fn windows(widths: &[f64], levels: &[f64]) -> Vec<[f32; 2]> {
    let windows = widths.iter().zip(levels).map(|(width, level)| [*width as f32, *level as f32]);
    windows.filter(|[width, level]| *width > 0.0 && width.is_finite() && level.is_finite()).collect()
}

/// Descriptor and entries of a lookup table.
fn table(item: &InMemDicomObject, is_signed: bool) -> Option<GreyTable> {
    let (first, bits, entries) = lookup_table(item, tags::LUT_DESCRIPTOR, tags::LUT_DATA)?;
    let first = if first < 0 { i64::from(first) } else { padding_value(i64::from(first), 16, is_signed) };
    GreyTable::new(i32::try_from(first).ok()?, &entries, u32::try_from(bits).ok()?)
}

/// Smallest and largest stored value of padding (PS3.3, C.7.5.1.1.2): PixelPaddingValue, up to PixelPaddingRangeLimit.
fn padding(path: &Path, object: &InMemDicomObject, format: &PixelFormat) -> Result<Option<[i64; 2]>> {
    let value = |tag: Tag| -> Result<Option<i64>> {
        let Some(element) = object.get(tag).filter(|_| format.photometric.is_grey()) else { return Ok(None) };
        // numbers without a value representation are little-endian
        let value = match (element.vr(), element.to_bytes()) {
            (VR::UN | VR::OW | VR::OB, Ok(bytes)) if bytes.len() == 2 => {
                Some(f64::from(u16::from_le_bytes([bytes[0], bytes[1]])))
            }
            _ => number(path, object, tag)?,
        };
        #[expect(clippy::cast_possible_truncation, reason = "16 bits; any other number is outside of the pixels")]
        let value = value.map(|value| padding_value(value as i64, format.bits_allocated.min(16), format.is_signed));
        Ok(value)
    };
    let Some(first) = value(tags::PIXEL_PADDING_VALUE)? else { return Ok(None) };
    let last = value(tags::PIXEL_PADDING_RANGE_LIMIT)?.unwrap_or(first);
    Ok(Some([first.min(last), first.max(last)]))
}

/// A value that may be stored with the wrong sign, as one of `bits` bits.
fn padding_value(value: i64, bits: u16, is_signed: bool) -> i64 {
    let size = 1_i64 << bits;
    let value = value.rem_euclid(size);
    if is_signed && value >= size / 2 { value - size } else { value }
}

/// Date and time of a series, from the first date that is one.
fn date(object: &InMemDicomObject) -> Option<(String, String)> {
    let digits = |tag: Tag| text(object, tag).map(|text| text.chars().filter(char::is_ascii_digit).collect::<String>());
    let pairs = [
        (tags::SERIES_DATE, tags::SERIES_TIME),
        (tags::ACQUISITION_DATE, tags::ACQUISITION_TIME),
        (tags::STUDY_DATE, tags::STUDY_TIME),
    ];
    pairs.into_iter().find_map(|(date, time)| {
        let date = digits(date).filter(|date| date.len() == 8)?;
        Some((format!("{}-{}-{}", &date[..4], &date[4..6], &date[6..]), digits(time).unwrap_or_default()))
    })
}

/// Attributes that tell images at one position apart.
const DISTINCT: [Tag; 8] = [
    tags::SERIES_NUMBER,
    tags::ECHO_TIME,
    tags::ECHO_NUMBERS,
    tags::DIFFUSION_B_VALUE,
    tags::TRIGGER_TIME,
    tags::TEMPORAL_POSITION_IDENTIFIER,
    tags::INVERSION_TIME,
    tags::ACQUISITION_NUMBER,
];

/// Distance in mm between rows and columns, and what is to be known of it. That of a radiograph is stated at the detector,
/// where the patient is magnified (PS3.3, 10.7).
fn spacing(
    path: &Path,
    object: &InMemDicomObject,
    measures: &InMemDicomObject,
) -> Result<(Option<[f64; 2]>, Option<String>)> {
    let of_pixels = distances(path, measures, tags::PIXEL_SPACING)?;
    let at_detector = distances(path, object, tags::IMAGER_PIXEL_SPACING)?;
    let is_calibrated = object.get(tags::PIXEL_SPACING_CALIBRATION_TYPE).is_some();
    if of_pixels.is_some() {
        let is_of_detector = of_pixels == at_detector && !is_calibrated;
        let note = "PixelSpacing is the size of a pixel at the detector (ImagerPixelSpacing): the patient is smaller, by a \
                    factor that was not applied";
        return Ok((of_pixels, is_of_detector.then(|| note.to_owned())));
    }
    if let Some(mm) = at_detector {
        let factor = number(path, object, tags::ESTIMATED_RADIOGRAPHIC_MAGNIFICATION_FACTOR)?;
        let Some(factor) = factor else {
            let note = "the file has the size of a pixel at the detector (ImagerPixelSpacing), which is used; the patient is \
                        smaller, by a factor that the file does not say";
            return Ok((Some(mm), Some(note.to_owned())));
        };
        if !(0.1..=100.0).contains(&factor) {
            let reason = format!("EstimatedRadiographicMagnificationFactor is {factor}, which is out of range");
            return Err(wrong(path, reason));
        }
        let note = format!(
            "the file has the size of a pixel at the detector (ImagerPixelSpacing); it is divided by \
             EstimatedRadiographicMagnificationFactor ({factor})"
        );
        return Ok((Some(mm.map(|mm| mm / factor)), Some(note)));
    }
    if let Some(mm) = distances(path, object, tags::NOMINAL_SCANNED_PIXEL_SPACING)? {
        let note = "the file has the size of a pixel on the scanned film (NominalScannedPixelSpacing), which is used; the \
                    patient may be larger or smaller";
        return Ok((Some(mm), Some(note.to_owned())));
    }
    Ok((ultrasound_spacing(path, object)?, None))
}

/// Distance in mm between rows and columns of an ultrasound image with one region whose unit is centimetres.
fn ultrasound_spacing(path: &Path, object: &InMemDicomObject) -> Result<Option<[f64; 2]>> {
    let [region] = items(object, tags::SEQUENCE_OF_ULTRASOUND_REGIONS) else { return Ok(None) };
    let is_cm = |tag: Tag| integer(region, tag) == Some(3);
    if !is_cm(tags::PHYSICAL_UNITS_X_DIRECTION) || !is_cm(tags::PHYSICAL_UNITS_Y_DIRECTION) {
        return Ok(None);
    }
    // a delta is negative where the axis of the region runs the other way
    let mm = |tag: Tag| Ok(number(path, region, tag)?.map(|cm| cm.abs() * 10.0).filter(|mm| *mm > 0.0));
    let rows: Option<f64> = mm(tags::PHYSICAL_DELTA_Y)?;
    Ok(rows.zip(mm(tags::PHYSICAL_DELTA_X)?).map(|(rows, columns)| [rows, columns]))
}
