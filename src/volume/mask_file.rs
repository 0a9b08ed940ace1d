//! Mask files: what their values, colours, palettes and transparency mean.
//!
//! A mask has one target; see [`labels`]. Every choice that is made here can be seen in the file. Where a file allows
//! two readings, it is refused.

use std::collections::HashSet;
use std::fmt;

use ::image::{DynamicImage, GenericImage, GrayImage, ImageBuffer, Luma, Rgb, RgbImage, Rgba};

use super::colours::{self, Colour, grey_of, hex, is_grey};
use super::decode::shared::Decoded;
use super::foreground::{self as labels, Labels, MAX_LABELS, NOISE, SMALL};
use super::photograph;
use super::plateau;
use super::transparency::{self, Transparency};

/// What to do about a mask with several labels.
const CHOOSE_LABELS: &str = "choose the labels of the target, for example the argument `labels=1,3`, or write one mask for \
                                 each label";
const SPLIT_COLOURS: &str = "save one mask for each colour, or a grey label map (0, 1, 2, ...), of which the argument `labels` \
                             chooses";
const NO_PHOTOGRAPH: &str =
    "give a mask: background 0 and one value for the target; were the images and the masks swapped?";
const THRESHOLD: &str = "save a mask with background 0 and one value for the target: threshold probabilities first, and of a \
                         label map write one mask for each label";

/// What to do about a refused mask where no labels can be chosen.
pub const ONE_TARGET: &str = "give a mask of one target, with background 0 and target 255; of probabilities, the target is \
                              where they are at least one half";

/// The colour of an index that is not transparent, where the colours are no labels.
const OPAQUE: [u8; 3] = [255; 3];

/// A mask with the values of its file. Colour is converted with the weights of Pillow's `convert("L")`; a palette file
/// has its indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredMask {
    values: Values,
    meaning: Meaning,
    /// The indexes of a palette file whose greys are one target with soft borders, for labels that are chosen.
    indexes: Option<GrayImage>,
    /// What was decided about its transparency.
    pub note: Option<&'static str>,
    /// Its EXIF orientation was applied, because it was not upright.
    pub is_turned: bool,
}

type Grey16 = ImageBuffer<Luma<u16>, Vec<u16>>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Values {
    Grey8(GrayImage),
    Grey16(Grey16),
}

/// How labels are found from the values.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Meaning {
    /// Grey levels, with noise of this many levels.
    Levels { noise: u8 },
    /// Indexes of a palette; these are not the background.
    Indexes(Vec<(u8, Colour)>),
    /// Grey values of colours; these colours are labels.
    Colours(Vec<Colour>),
}

/// Why a mask is not the mask of one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskRefusal {
    /// It has several labels, and none is chosen.
    SeveralLabels(String),
    /// It has several colours, or labels do not say which.
    Colours(String),
    /// It is no mask.
    Photograph(String),
    /// It has probabilities of at most one half, or labels so thin that none fills an area.
    Probabilities(String),
}

impl MaskRefusal {
    /// What to do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::SeveralLabels(_) => CHOOSE_LABELS,
            Self::Colours(_) => SPLIT_COLOURS,
            Self::Photograph(_) => NO_PHOTOGRAPH,
            Self::Probabilities(_) => THRESHOLD,
        }
    }
}

impl fmt::Display for MaskRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::SeveralLabels(reason)
        | Self::Colours(reason)
        | Self::Photograph(reason)
        | Self::Probabilities(reason)) = self;
        f.write_str(reason)
    }
}

impl From<GrayImage> for StoredMask {
    fn from(grey: GrayImage) -> Self {
        Self::levels(Values::Grey8(grey), 0)
    }
}

impl From<Grey16> for StoredMask {
    fn from(grey: Grey16) -> Self {
        Self::levels(Values::Grey16(grey), 0)
    }
}

impl StoredMask {
    /// # Errors
    /// A reason, for colours and transparency that contradict each other.
    pub(super) fn new(decoded: Decoded) -> Result<Self, String> {
        let Decoded { image, palette, noise, is_turned } = decoded;
        let mask = match (image, palette) {
            (image, Some(palette)) => Self::of_indexes(image.into_luma8(), &palette)?,
            (image, None) if image.color().has_alpha() => Self::of_transparent(image)?,
            (image, None) => Self::of_opaque(image, noise),
        };
        Ok(Self { is_turned, ..mask })
    }

    fn levels(values: Values, noise: u8) -> Self {
        Self { values, meaning: Meaning::Levels { noise }, indexes: None, note: None, is_turned: false }
    }

    fn of_opaque(image: DynamicImage, noise: u8) -> Self {
        match image {
            DynamicImage::ImageLuma8(grey) => Self::levels(Values::Grey8(grey), noise),
            DynamicImage::ImageLuma16(deep) => Self::levels(Values::Grey16(deep), noise),
            DynamicImage::ImageRgb16(rgb) if rgb.pixels().all(|Rgb(colour)| is_grey(*colour)) => {
                if rgb.iter().all(|value| value % 257 == 0) {
                    return Self::of_opaque(DynamicImage::ImageRgb16(rgb).into_luma8().into(), noise);
                }
                let (width, height) = rgb.dimensions();
                Grey16::from_fn(width, height, |x, y| Luma([rgb.get_pixel(x, y).0[0]])).into()
            }
            colour => Self::of_colours(&colour.into_rgb8(), noise),
        }
    }

    fn of_colours(rgb: &RgbImage, noise: u8) -> Self {
        let (width, height) = rgb.dimensions();
        let mut grey = GrayImage::from_fn(width, height, |x, y| Luma([grey_of(rgb.get_pixel(x, y).0)]));
        if rgb.pixels().all(|Rgb(colour)| is_grey(*colour)) {
            return Self::levels(Values::Grey8(grey), noise);
        }
        let labels = colours::label_colours(rgb, noise > 0);
        // a blue of 1 or 2 has the grey value 0
        if !labels.is_empty() && grey.iter().all(|value| *value == 0) {
            grey.iter_mut().zip(rgb.pixels()).for_each(|(grey, colour)| *grey = u8::from(colour.0 != [0; 3]) * 255);
        }
        Self { meaning: Meaning::Colours(labels), ..grey.into() }
    }

    fn of_transparent(image: DynamicImage) -> Result<Self, String> {
        let is_deep = image.color().bytes_per_pixel() > image.color().channel_count();
        let (width, height) = (image.width(), image.height());
        let rgb = image.to_rgb8();
        let alpha = Grey16::from_raw(width, height, image.to_rgba16().pixels().map(|pixel| pixel.0[3]).collect());
        let alpha = alpha.unwrap_or_default();
        let (found, note) = transparency::of(rgb.pixels().zip(alpha.iter()).map(|(rgb, alpha)| (rgb.0, *alpha, 1)))?;
        let mask = match found {
            Transparency::IsMask if is_deep => alpha.into(),
            Transparency::IsMask => DynamicImage::ImageLuma16(alpha).into_luma8().into(),
            Transparency::Opaque => Self::of_opaque(without_alpha(image), 0),
            Transparency::Hides => {
                // a soft border is cut at half, but labels may have different opacities
                let is_soft = labels::labels_of(alpha.as_raw(), width as usize, 0).len() < 2;
                let limit = if is_soft { alpha.iter().copied().max().unwrap_or(0) / 2 } else { 0 };
                let mut opaque = without_alpha(image);
                let hidden = alpha.enumerate_pixels().filter(|(.., alpha)| alpha.0[0] <= limit);
                hidden.for_each(|(x, y, _)| opaque.put_pixel(x, y, Rgba([0, 0, 0, 255])));
                Self::of_opaque(opaque, 0)
            }
        };
        Ok(Self { note, ..mask })
    }

    fn of_indexes(image: GrayImage, palette: &[[u8; 4]]) -> Result<Self, String> {
        let mut counts = [0_u64; 256];
        image.iter().for_each(|index| counts[usize::from(*index)] += 1);
        let entry = |index: u8| palette.get(usize::from(index)).copied().unwrap_or([0, 0, 0, 255]);
        let colour = |index: u8| {
            let [r, g, b, _] = entry(index);
            [r, g, b]
        };
        let count = |index: u8| counts[usize::from(index)];
        let used: Vec<u8> = (0..=255).filter(|index| count(*index) > 0).collect();
        let pixels = used.iter().map(|&index| (colour(index), entry(index)[3].into(), count(index)));
        let (found, note) = transparency::of(pixels)?;
        let mapped = |value: &dyn Fn(u8) -> u8| {
            let mut mask = image.clone();
            mask.iter_mut().for_each(|index| *index = value(*index));
            mask
        };
        // of a mask in the transparency, the opacity as a grey
        let is_alpha = found == Transparency::IsMask;
        let shade = |index: u8| if is_alpha { [entry(index)[3]; 3] } else { colour(index) };
        let is_hidden = |index: u8| found != Transparency::Opaque && entry(index)[3] == 0;
        let shown: Vec<u8> = used.iter().copied().filter(|index| !is_hidden(*index)).collect();
        // a ramp of greys: the indexes are the levels
        if !is_alpha && shown.iter().all(|&index| colour(index) == [index; 3]) {
            return Ok(Self { note, ..mapped(&|index| if is_hidden(index) { 0 } else { index }).into() });
        }
        let targets = if is_alpha { shown } else { target_indexes(&shown, shown.len() < used.len(), colour) };
        let is_target = |index: u8| targets.contains(&index);
        let num_shades = targets.iter().map(|&index| shade(index)).collect::<HashSet<_>>().len();
        // indexes of one colour are labels, except among the many colours of soft borders
        if targets.len() > 1 && (num_shades == targets.len() || num_shades >= NOISE) {
            let soft = if is_alpha {
                mapped(&|index| entry(index)[3]).into()
            } else {
                let shown = |index: u8| if is_target(index) { colour(index) } else { [0; 3] };
                let size = image.dimensions();
                Self::of_colours(&RgbImage::from_fn(size.0, size.1, |x, y| Rgb(shown(image.get_pixel(x, y).0[0]))), 0)
            };
            let is_clear = is_alpha || !targets.iter().any(|&index| colours::is_black(shade(index)));
            let are_grey = targets.iter().all(|&index| is_grey(shade(index)));
            // antialiasing, whose indexes are no labels
            if (are_grey && is_clear || targets.len() >= NOISE) && soft.labels().len() < 2 {
                let indexes = (!is_target(0)).then(|| mapped(&|index| if is_target(index) { index } else { 0 }));
                return Ok(Self { indexes, note, ..soft });
            }
        }
        let named = |index: u8| if is_alpha { OPAQUE } else { colour(index) };
        let targets = targets.into_iter().map(|index| (index, (named(index), count(index)))).collect();
        Ok(Self { meaning: Meaning::Indexes(targets), note, ..image.into() })
    }

    /// The label of a mask of one target; 255 for all light greys. `None` if it is empty or only known by about.
    pub fn only_label(&self) -> Option<u16> {
        let label = self.labels().first()?.0;
        match (&self.meaning, &self.values) {
            (Meaning::Levels { noise: 1.. }, _) => None,
            (Meaning::Levels { .. }, Values::Grey8(_)) if label >= 128 => Some(255),
            _ => Some(label),
        }
    }

    /// Width and height in pixels.
    pub fn dimensions(&self) -> (u32, u32) {
        match &self.values {
            Values::Grey8(grey) => grey.dimensions(),
            Values::Grey16(deep) => deep.dimensions(),
        }
    }

    /// Its labels and their numbers of pixels; see [`labels::labels_of`]. Those of colours are grey values.
    pub fn labels(&self) -> Vec<(u16, u64)> {
        let width = self.dimensions().0 as usize;
        match (&self.meaning, &self.values) {
            (Meaning::Indexes(targets), _) => {
                targets.iter().map(|&(index, (_, count))| (index.into(), count)).collect()
            }
            (Meaning::Colours(colours), _) => {
                let mut labels: Vec<_> = colours.iter().map(|&(rgb, count)| (grey_of(rgb).into(), count)).collect();
                labels.sort_unstable();
                labels
            }
            (&Meaning::Levels { noise }, Values::Grey8(grey)) => labels::labels_of(grey.as_raw(), width, noise),
            (&Meaning::Levels { noise }, Values::Grey16(deep)) => labels::labels_of(deep.as_raw(), width, noise),
        }
    }

    /// The mask of one target as 8-bit grey. With `labels`, exactly these labels are foreground (255) and everything
    /// else is background. Probabilities are foreground above half of the range.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn target(self, labels: Labels) -> Result<GrayImage, MaskRefusal> {
        self.check(labels)?;
        Ok(match labels.is_empty() {
            true if self.has_probabilities() => self.binary(),
            true => self.into_grey(),
            false => self.select(labels),
        })
    }

    /// Whether its levels are probabilities or thin labels: none is that of a target. Compression hides that.
    fn has_probabilities(&self) -> bool {
        match (&self.meaning, &self.values) {
            (Meaning::Levels { noise: 0 }, Values::Grey8(grey)) => plateau::has_none(grey.as_raw()),
            (Meaning::Levels { noise: 0 }, Values::Grey16(deep)) => plateau::has_none(deep.as_raw()),
            _ => false,
        }
    }

    /// Half of the range of the file's values, and the largest one.
    fn half_and_most(&self) -> (u16, u16) {
        match &self.values {
            Values::Grey8(grey) => (127, grey.iter().copied().max().map_or(0, u16::from)),
            Values::Grey16(deep) => (32_767, deep.iter().copied().max().unwrap_or(0)),
        }
    }

    /// Whether the mask has one target.
    ///
    /// # Errors
    /// [`MaskRefusal`] for several labels and for probabilities of at most one half if `labels` is empty, for labels that do
    /// not name one colour, and for photographs.
    pub fn check(&self, labels: Labels) -> Result<(), MaskRefusal> {
        let width = self.dimensions().0 as usize;
        let num_levels = match &self.values {
            Values::Grey8(_) if matches!(self.meaning, Meaning::Indexes(_)) => None,
            Values::Grey8(grey) => photograph::num_levels(grey.as_raw(), width),
            Values::Grey16(deep) => photograph::num_levels(deep.as_raw(), width),
        };
        if let Some(num_levels) = num_levels {
            let reason = format!("is no mask: it has {num_levels} grey levels that fill no area, like a photograph");
            return Err(MaskRefusal::Photograph(reason));
        }
        if let (Some((index, count)), Values::Grey8(grey), true) = (self.black_index(), &self.values, labels.is_empty())
        {
            let num_zeros: usize = grey.iter().map(|value| usize::from(*value == 0)).sum();
            let reason = format!(
                "index 0 ({num_zeros} pixels) and index {index} ({count} pixels) of the mask's palette are both black, so \
                 that it is not clear whether {index} is background"
            );
            return Err(MaskRefusal::SeveralLabels(reason));
        }
        let several = |colours: &[Colour]| {
            let reason = format!("the mask has several colours: {}", colours::describe(colours));
            if colours.len() > 1 { Err(MaskRefusal::Colours(reason)) } else { Ok(()) }
        };
        match &self.meaning {
            Meaning::Colours(colours) if labels.is_empty() => several(colours),
            Meaning::Colours(colours) => {
                let chosen = colours.iter().map(|(colour, _)| *colour);
                let mut chosen: Vec<_> = chosen.filter(|colour| labels.contains(grey_of(*colour).into())).collect();
                chosen.sort_by_key(|colour| grey_of(*colour));
                let same = chosen.windows(2).find(|pair| grey_of(pair[0]) == grey_of(pair[1]));
                same.map_or(Ok(()), |pair| {
                    let (first, second, grey) = (hex(pair[0]), hex(pair[1]), grey_of(pair[0]));
                    let reason =
                        format!("the colours {first} and {second} of the mask have the same grey value {grey}");
                    Err(MaskRefusal::Colours(reason))
                })
            }
            // label 0 cannot be chosen
            Meaning::Indexes(targets) if targets.first().is_some_and(|(index, _)| *index == 0) => {
                several(&targets.iter().map(|(_, colour)| *colour).collect::<Vec<_>>())?;
                let reason = "index 0 of the mask's palette is not the background, so that its labels are not clear";
                if labels.is_empty() { Ok(()) } else { Err(MaskRefusal::Colours(reason.into())) }
            }
            _ if labels.is_empty() => {
                let found = self.labels();
                let reason = format!("the mask has several labels: {}", labels::describe(&found));
                if found.len() > 1 { Err(MaskRefusal::SeveralLabels(reason)) } else { self.check_levels() }
            }
            _ => Ok(()),
        }
    }

    /// Refuses probabilities without one above half, whose target would be their peak, and thin labels.
    fn check_levels(&self) -> Result<(), MaskRefusal> {
        let (half, most) = self.half_and_most();
        if most > half || !self.has_probabilities() {
            return Ok(());
        }
        let range = 2 * u32::from(half) + 1;
        let reason = format!(
            "is no mask: its largest value is {most} of {range}, and none of its many values is that of a target, as in \
             probabilities below one half or in a map of thin labels"
        );
        Err(MaskRefusal::Probabilities(reason))
    }

    /// A black index of a palette beside index 0, and its number of pixels.
    fn black_index(&self) -> Option<(u8, u64)> {
        let Meaning::Indexes(targets) = &self.meaning else { return None };
        let black = targets.iter().find(|(_, (colour, _))| colours::is_black(*colour));
        black.map(|(index, (_, count))| (*index, *count))
    }

    /// 255 where the mask has any label, also one of several.
    ///
    /// # Errors
    /// As [`Self::check`], but for several labels.
    pub fn any_label(&self) -> Result<GrayImage, MaskRefusal> {
        match self.check(Labels::NONE) {
            Ok(()) => return Ok(self.binary()),
            Err(MaskRefusal::SeveralLabels(_)) if self.black_index().is_none() => {}
            Err(refusal) => return Err(refusal),
        }
        let (width, height) = self.dimensions();
        let mut all = GrayImage::new(width, height);
        let found: Vec<u16> = self.labels().into_iter().map(|(label, _)| label).collect();
        for some in found.chunks(MAX_LABELS) {
            let some = Labels::new(some).map_err(MaskRefusal::SeveralLabels)?;
            self.check(some)?;
            all.iter_mut().zip(self.select(some).iter()).for_each(|(value, own)| *value |= own);
        }
        Ok(all)
    }

    /// 255 where the value is one of `labels`, else 0. In a file with compression noise, pixels have the label that is
    /// nearest to their value. In a palette file with soft borders, labels are its indexes, or else its levels.
    pub fn select(&self, labels: Labels) -> GrayImage {
        let chosen =
            self.indexes.as_ref().filter(|indexes| indexes.iter().any(|index| labels.contains((*index).into())));
        if let Some(indexes) = chosen {
            let mut mask = indexes.clone();
            mask.iter_mut().for_each(|index| *index = u8::from(labels.contains((*index).into())) * 255);
            return mask;
        }
        let noise = if let Meaning::Levels { noise } = self.meaning { u16::from(noise) } else { 0 };
        let levels: Vec<u16> = if noise > 0 { self.labels().iter().map(|(label, _)| *label).collect() } else { vec![] };
        let nearest = |value: u16| levels.iter().copied().chain([0]).min_by_key(|level| level.abs_diff(value));
        let is_chosen = |value: u16| match nearest(value).filter(|_| noise > 0) {
            Some(0) => false,
            Some(level) => {
                (level.saturating_sub(noise)..=level.saturating_add(noise)).any(|near| labels.contains(near))
            }
            None => labels.contains(value),
        };
        self.mapped(|value| u8::from(is_chosen(value)) * 255)
    }

    /// The mask of one label as 0 and 255. The threshold is half of the range, or 0 if no value is above half (0/1
    /// masks, 16-bit labels).
    pub fn binary(&self) -> GrayImage {
        let (half, most) = self.half_and_most();
        // with noise or antialiased colours, half of the label: the largest value may be noise
        let is_exact = matches!(self.meaning, Meaning::Levels { noise: 0 });
        let level = if is_exact { most } else { self.labels().last().map_or(most, |(label, _)| *label) };
        let is_soft = !is_exact && usize::from(most) >= SMALL;
        let threshold = if level > half { half } else { level / 2 * u16::from(is_soft) };
        match &self.meaning {
            Meaning::Indexes(_) => self.clone().into_grey(),
            _ => self.mapped(|value| u8::from(value > threshold) * 255),
        }
    }

    /// 8-bit values. 16-bit values above 255 are scaled, so that the largest becomes 255. The target of a palette
    /// file is 255.
    pub fn into_grey(self) -> GrayImage {
        if let Meaning::Indexes(targets) = &self.meaning {
            let is_target = |value: u16| targets.iter().any(|(index, _)| u16::from(*index) == value);
            return self.mapped(|value| u8::from(is_target(value)) * 255);
        }
        match self.values {
            Values::Grey8(grey) => grey,
            Values::Grey16(ref deep) => {
                let most = deep.iter().copied().max().map_or(0, u32::from);
                let scaled = |value: u32| if most > 255 { (value * 255 + most / 2) / most } else { value };
                self.mapped(|value| u8::try_from(scaled(value.into())).unwrap_or(u8::MAX))
            }
        }
    }

    fn mapped(&self, new: impl Fn(u16) -> u8) -> GrayImage {
        let (width, height) = self.dimensions();
        GrayImage::from_fn(width, height, |x, y| {
            Luma([new(match &self.values {
                Values::Grey8(grey) => grey.get_pixel(x, y).0[0].into(),
                Values::Grey16(deep) => deep.get_pixel(x, y).0[0],
            })])
        })
    }
}

/// The indexes that are not the background.
///
/// Black and transparent indexes are the background. If there are none, index 0 is the background, unless another index is
/// white: then the background is unknown, and all indexes are kept. An index that repeats the black of index 0 is kept
/// too. If all indexes have one colour, index 0 is the background.
fn target_indexes(shown: &[u8], has_hidden: bool, colour: impl Fn(u8) -> [u8; 3]) -> Vec<u8> {
    let is_black = |index: u8| colours::is_black(colour(index));
    let is_one_colour = shown.len() > 1 && shown.iter().all(|&index| colour(index) == colour(shown[0]));
    let is_white = |index: u8| index > 0 && colour(index) == [255; 3] && !is_one_colour;
    let is_index_0 = !has_hidden && !shown.iter().any(|&index| is_black(index) || is_white(index));
    let is_second_black = |index: u8| index > 0 && shown.first() == Some(&0) && colour(index) == colour(0);
    let is_background = |index: u8| is_black(index) && !is_second_black(index) || is_index_0 && index == 0;
    shown.iter().copied().filter(|&index| !is_background(index)).collect()
}

fn without_alpha(image: DynamicImage) -> DynamicImage {
    match image {
        grey @ DynamicImage::ImageLumaA8(_) => grey.into_luma8().into(),
        deep @ DynamicImage::ImageLumaA16(_) => deep.into_luma16().into(),
        deep @ DynamicImage::ImageRgba16(_) => deep.into_rgb16().into(),
        colour => colour.into_rgb8().into(),
    }
}

#[cfg(test)]
#[path = "mask_file_tests.rs"]
mod tests;
