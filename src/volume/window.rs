//! Intensity windows: how the values of a volume become 8-bit grey.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::display::Curve;
use super::hounsfield::{LEAST_WATER, TissueShares};
use super::modality::Modality;
use super::voxel_set::VoxelSet;
use super::voxels::{FEW_VALUES, Volume, Voxels, extremes, has_more_than};
use prsmed_base::error::{Error, Result};

/// Named windows for CT in Hounsfield units: name, width, level, source.
///
/// Sources: `BiomedParse`, microsoft/BiomedParse, issue 104 (the values of its training data); `radiology`, the values in
/// common use, as on radiopaedia.org, "Windowing (CT)", with the middle of a range. Radiologists often read the lung at
/// `1500/-600`; write the numbers to get it.
pub const NAMED: [(&str, f32, f32, &str); 10] = [
    ("soft-tissue", 400.0, 40.0, "BiomedParse"),
    ("lung", 1500.0, -160.0, "BiomedParse"),
    ("brain", 80.0, 40.0, "BiomedParse"),
    ("bone", 1800.0, 400.0, "BiomedParse"),
    ("abdomen", 400.0, 50.0, "radiology"),
    ("liver", 150.0, 30.0, "radiology"),
    ("mediastinum", 350.0, 50.0, "radiology"),
    ("stroke", 40.0, 40.0, "radiology"),
    ("subdural", 215.0, 75.0, "radiology"),
    ("angiography", 600.0, 300.0, "radiology"),
];

/// How values become grey. As text: `auto`, a name of [`NAMED`], `WIDTH/LEVEL`, `LOW..HIGH`, `file` or `pLOW-pHIGH`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Window {
    /// By modality. CT: `soft-tissue`. Radiographs: the window or lookup table of the file, if it has one. 8-bit images
    /// that are not CT, MR, PET or nuclear medicine: all 256 values. Others: percentiles 0.5 to 99.5.
    #[default]
    Auto,
    /// An entry of [`NAMED`], by its index.
    Named(usize),
    /// Width and level (centre), as radiologists write them.
    Level {
        /// From black to white.
        width: f32,
        /// The middle grey.
        level: f32,
    },
    /// The values of black and white.
    Range {
        /// Black.
        low: f32,
        /// White.
        high: f32,
    },
    /// The first window of the DICOM file, with its sigmoid if it has one; without a window its lookup table (VOI LUT).
    File,
    /// Percentiles of all voxels that are not padding, 0..=100, with linear interpolation as in numpy.
    Percentiles {
        /// Black.
        low: f32,
        /// White.
        high: f32,
    },
}

/// A window that leaves so few grey levels of more values does not fit them.
const FEW_GREYS: usize = 4;

/// Percentiles for volumes without a better rule.
const PERCENTILES: Window = Window::Percentiles { low: 0.5, high: 99.5 };

impl Window {
    /// A named window.
    pub fn named(name: &str) -> Option<Self> {
        NAMED.iter().position(|entry| entry.0 == name).map(Self::Named)
    }

    /// The window that `Auto` means for a volume; other windows stay as they are.
    #[must_use]
    pub fn chosen_for(self, volume: &Volume) -> Self {
        if self != Self::Auto {
            return self;
        }
        match &volume.modality {
            Modality::Ct => Self::named("soft-tissue").unwrap_or(PERCENTILES),
            modality if modality.is_radiograph() && volume.has_window() => Self::File,
            modality if volume.is_8_bit && !modality.is_measured() => Self::Range { low: 0.0, high: 255.0 },
            _ => PERCENTILES,
        }
    }

    /// The values of black and white for a volume. Percentiles are computed from all its voxels that are not padding.
    ///
    /// # Errors
    /// [`Error::Config`] for `file` if the file has no window that can be used, and for a window in Hounsfield units if the
    /// values are not in them.
    pub fn levels(self, volume: &Volume) -> Result<Levels> {
        if let Self::Named(_) = self {
            check_hounsfield(self, volume)?;
        }
        let [low, high] = match (self, self.bounds()) {
            (_, Some(bounds)) => bounds,
            (Self::File, _) => return file_levels(volume),
            (Self::Percentiles { low, high }, _) => percentiles(&volume.voxels, &volume.display.padding, [low, high]),
            _ => return self.chosen_for(volume).levels(volume),
        };
        // a volume with one value
        let high = if high > low { high } else { low + 1.0 };
        Ok(Levels { inverted: volume.inverted, ..Levels::new(low, high) })
    }

    /// The values of black and white of a window that has the same for every volume.
    fn bounds(self) -> Option<[f32; 2]> {
        match self {
            Self::Named(index) => Some(around(NAMED[index].1, NAMED[index].2)),
            Self::Level { width, level } => Some(around(width, level)),
            Self::Range { low, high } => Some([low, high]),
            Self::Auto | Self::File | Self::Percentiles { .. } => None,
        }
    }

    /// True if both show every volume alike, such as `soft-tissue` and `400/40`.
    pub fn is_same(self, other: Self) -> bool {
        self == other || self.bounds().is_some_and(|bounds| Some(bounds) == other.bounds())
    }

    /// A note about a window by name or in numbers that may not fit the values of a volume: it leaves few grey levels, or it
    /// is in Hounsfield units and the values are unlike them. For a CT, the notes of the volume say the latter.
    pub fn mismatch(self, volume: &Volume, levels: &Levels) -> Option<String> {
        let is_hounsfield = match self {
            Self::Named(_) => true,
            Self::Level { .. } | Self::Range { .. } => {
                levels.low <= LEAST_WATER && volume.modality == Modality::Unknown
            }
            _ => return None,
        };
        let values = || volume.voxels.values(&volume.display.padding, 0..volume.voxels.len());
        let [low, high] = extremes(values());
        let grey = |value: f32| f32::from(levels.apply(value));
        let is_light = || TissueShares::of(values()).has_light();
        let what = if !has_more_than(FEW_GREYS, values().map(grey)) && has_more_than(FEW_VALUES, values()) {
            format!("leaves at most {FEW_GREYS} of 256 grey levels of the values ({low:?} to {high:?})")
        } else if is_hounsfield && volume.modality != Modality::Ct && low < high && !is_light() {
            format!(
                "is like one in Hounsfield units, and less than 1 % of the values ({low:?} to {high:?}) are those of air, lung \
                 and fat (-1100 to -20)"
            )
        } else {
            return None;
        };
        Some(format!(
            "the window `{self}` {what}: if the values are normalised or in another unit, choose percentiles such as \
             `p0.5-p99.5`, or numbers that fit"
        ))
    }
}

/// Refuses a window in Hounsfield units for a CT that has other values.
fn check_hounsfield(window: Window, volume: &Volume) -> Result<()> {
    let Some(reason) = &volume.display.not_hounsfield else { return Ok(()) };
    let reason = format!("{reason}, and `{window}` is a window in Hounsfield units");
    let hint = "export the series with RescaleSlope and RescaleIntercept, or give a window of the stored values: percentiles \
                such as `p0.5-p99.5`, or numbers such as `0..4095`";
    Err(Error::config("window", reason, hint))
}

/// The levels of the file's own window or lookup table.
fn file_levels(volume: &Volume) -> Result<Levels> {
    let hint = "choose a window by name, for example the argument `window=soft-tissue`, or percentiles: the argument `window=p0.5-p99.5`";
    if let Some(fault) = &volume.display.window_fault {
        return Err(Error::config("window", format!("the window of the file cannot be used: {fault}"), hint));
    }
    let [low, high] = match (volume.windows.first(), &volume.display.curve) {
        (Some([width, level]), _) => around(*width, *level),
        (None, Curve::Table(table)) => table.range(),
        (None, _) => {
            return Err(Error::config("window", "`file` asks for the window of the file, and the file has none", hint));
        }
    };
    Ok(Levels { low, high, inverted: volume.inverted, curve: volume.display.curve.clone() })
}

fn around(width: f32, level: f32) -> [f32; 2] {
    [level - width / 2.0, level + width / 2.0]
}

/// The values of black and white, and whether the grey is inverted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Levels {
    /// Value of black (255 if inverted).
    pub low: f32,
    /// Value of white (0 if inverted); larger than `low`.
    pub high: f32,
    /// True for MONOCHROME1: small values are bright.
    pub inverted: bool,
    /// The way from black to white.
    #[serde(skip_serializing_if = "Curve::is_linear")]
    pub curve: Curve,
}

impl Levels {
    /// A straight line from black to white.
    pub fn new(low: f32, high: f32) -> Self {
        Self { low, high, inverted: false, curve: Curve::Linear }
    }

    /// The grey of a value, rounded; values outside are clipped.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clipped to 0..=255")]
    pub fn apply(&self, value: f32) -> u8 {
        let share = (value - self.low) / (self.high - self.low);
        let grey = match &self.curve {
            Curve::Linear => (share * 255.0).clamp(0.0, 255.0).round() as u8,
            Curve::Sigmoid => (255.0 / (1.0 + (-4.0 * (share - 0.5)).exp())).round() as u8,
            Curve::Table(table) => table.grey(value),
        };
        if self.inverted { 255 - grey } else { grey }
    }
}

/// Percentiles with linear interpolation, as `numpy.percentile`, without padding.
fn percentiles(voxels: &Voxels, padding: &VoxelSet, wanted: [f32; 2]) -> [f32; 2] {
    let used = padding.others(0..voxels.len());
    match voxels {
        Voxels::I16(values) => percentiles_i16(used.flat_map(|run| &values[run]), wanted),
        Voxels::F32(values) => {
            let mut sorted = Vec::with_capacity(values.len() - padding.len());
            used.for_each(|run| sorted.extend_from_slice(&values[run]));
            percentiles_f32(sorted, wanted)
        }
        Voxels::Rgb(_) => [0.0, 255.0],
    }
}

/// Ranks below and above a percentile among `count` sorted values, and the share of the upper one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and count - 1")]
fn ranks(percentile: f32, count: usize) -> (usize, usize, f64) {
    let rank = f64::from(percentile) / 100.0 * count.saturating_sub(1) as f64;
    let below = (rank as usize).min(count.saturating_sub(1));
    (below, (below + 1).min(count.saturating_sub(1)), rank - below as f64)
}

#[expect(clippy::cast_possible_truncation, reason = "a grey value")]
fn interpolate(below: f64, above: f64, share: f64) -> f32 {
    (below + (above - below) * share) as f32
}

fn percentiles_i16<'a>(values: impl Iterator<Item = &'a i16>, wanted: [f32; 2]) -> [f32; 2] {
    let mut counts = vec![0_usize; 1 << 16];
    values.for_each(|value| counts[usize::from(value.abs_diff(i16::MIN))] += 1);
    let total = counts.iter().sum();
    let at = |rank: usize| {
        let mut seen = 0;
        for (value, count) in (i32::from(i16::MIN)..).zip(&counts) {
            seen += count;
            if seen > rank {
                return f64::from(value);
            }
        }
        0.0
    };
    wanted.map(|percentile| {
        let (below, above, share) = ranks(percentile, total);
        interpolate(at(below), at(above), share)
    })
}

fn percentiles_f32(mut sorted: Vec<f32>, wanted: [f32; 2]) -> [f32; 2] {
    if sorted.is_empty() {
        return [0.0, 1.0];
    }
    wanted.map(|percentile| {
        let (below, above, share) = ranks(percentile, sorted.len());
        let (_, middle, rest) = sorted.select_nth_unstable_by(below, f32::total_cmp);
        let middle = f64::from(*middle);
        let next = rest.iter().copied().min_by(f32::total_cmp).filter(|_| above > below).map_or(middle, f64::from);
        interpolate(middle, next, share)
    })
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(index) => f.write_str(NAMED[*index].0),
            Self::Level { width, level } => write!(f, "{width}/{level}"),
            Self::Range { low, high } => write!(f, "{low}..{high}"),
            Self::File => f.write_str("file"),
            Self::Percentiles { low, high } => write!(f, "p{low}-p{high}"),
        }
    }
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let named = match text {
            "auto" => Some(Self::Auto),
            "file" => Some(Self::File),
            _ => Self::named(text),
        };
        if let Some(window) = named {
            return Ok(window);
        }
        let numbers = |parts: Option<(&str, &str)>| -> Result<Option<(f32, f32)>, String> {
            parts.map(|(a, b)| Ok((number(a)?, number(b)?))).transpose()
        };
        if let Some((low, high)) = numbers(text.strip_prefix('p').and_then(|rest| rest.split_once("-p")))? {
            let is_valid = 0.0 <= low && low < high && high <= 100.0;
            let reason = format!("`{text}` has no two increasing percentiles from 0 to 100, as in `p0.5-p99.5`");
            return if is_valid { Ok(Self::Percentiles { low, high }) } else { Err(reason) };
        }
        if let Some((low, high)) = numbers(text.split_once(".."))? {
            let reason = format!("`{text}`: the value of white must be larger than that of black");
            return if low < high { Ok(Self::Range { low, high }) } else { Err(reason) };
        }
        if let Some((width, level)) = numbers(text.split_once('/'))? {
            let reason = format!("`{text}`: the width of a window must be larger than 0");
            return if width > 0.0 { Ok(Self::Level { width, level }) } else { Err(reason) };
        }
        let names: Vec<&str> = NAMED.iter().map(|entry| entry.0).collect();
        Err(format!(
            "`{text}` is not a window; use `auto`, `file`, WIDTH/LEVEL as in `400/40`, LOW..HIGH as in `-160..240`, \
             percentiles as in `p0.5-p99.5`, or one of {}",
            prsmed_base::error::quoted(&names)
        ))
    }
}

fn number(text: &str) -> Result<f32, String> {
    let value: Option<f32> = text.trim().parse().ok();
    value.filter(|value| value.is_finite()).ok_or_else(|| format!("`{}` is not a number", text.trim()))
}

impl Serialize for Window {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_read_and_written() {
        for text in ["auto", "file", "soft-tissue", "lung", "400/40", "1500/-160", "-160..240", "p0.5-p99.5", "p0-p100"]
        {
            let window: Window = text.parse().unwrap();
            assert_eq!(window.to_string(), text);
            let json = serde_json::to_string(&window).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<Window>(&json).unwrap(), window);
        }
        for (name, ..) in NAMED {
            assert!(name.parse::<Window>().is_ok(), "{name}");
        }
        for (text, part) in [
            ("0/40", "larger than 0"),
            ("-5/40", "larger than 0"),
            ("40..40", "white must be larger"),
            ("p99-p1", "two increasing percentiles"),
            ("p0-p101", "from 0 to 100"),
            ("nan/40", "not a number"),
            ("belly", "soft-tissue"),
        ] {
            let error = text.parse::<Window>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn values_are_rounded_and_clipped() {
        let levels = Levels::new(-160.0, 240.0);
        assert_eq!([-2000.0, -160.0, 40.0, 240.0, 3000.0].map(|value| levels.apply(value)), [0, 0, 128, 255, 255]);
        let inverted = Levels { inverted: true, ..levels.clone() };
        assert_eq!([-160.0, 240.0].map(|value| inverted.apply(value)), [255, 0]);
        // DICOM PS3.3, C.11.2.1.3.1: 255 / (1 + exp(-4 (value - level) / width))
        let sigmoid = Levels { curve: Curve::Sigmoid, ..Levels::new(-160.0, 240.0) };
        assert_eq!([-2000.0, -160.0, 40.0, 240.0, 3000.0].map(|value| sigmoid.apply(value)), [0, 30, 128, 225, 255]);
        assert_eq!(serde_json::to_value(&sigmoid).unwrap()["curve"], "sigmoid");
        assert!(serde_json::to_value(Levels::new(0.0, 1.0)).unwrap().get("curve").is_none());
    }

    /// Numbers of numpy.percentile.
    #[test]
    fn percentiles_equal_those_of_numpy() {
        let values: [i16; 10] = [3, 1, -4, 1, 5, 900, 2, 6, 5, -300];
        let near = |found: [f32; 2], wanted: [f32; 2]| {
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-3), "{found:?}, not {wanted:?}");
        };
        near(percentiles_i16(values.iter(), [0.5, 99.5]), [-286.68, 859.77]);
        near(percentiles_i16(values.iter(), [0.0, 30.0]), [-300.0, 1.0]);
        let sevenths = values.map(|value| f32::from(value) / 7.0);
        near(percentiles_f32(sevenths.to_vec(), [0.5, 99.5]), [-40.954_285, 122.824_3]);
        near(percentiles_f32(sevenths.to_vec(), [30.0, 100.0]), [0.142_857, 128.571_43]);
    }
}
