//! Numbers that answers name about a mask: the share of the image, and the count of regions.

use std::sync::LazyLock;

use ::image::GrayImage;
use regex::Regex;
use serde::Serialize;

use crate::position::{self, Region};

/// What a text says wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WordKind {
    /// Another location than that of the mask.
    Location,
    /// Another area than that of the mask.
    Area,
    /// Another number of regions than that of the mask.
    Count,
    /// Another target than the question.
    Target,
}

/// Numbers of a mask that texts name.
#[derive(Debug)]
pub(crate) struct MaskNumbers {
    area_percent: f64,
    /// Count of regions without and with specks.
    counts: [usize; 2],
}

/// Whether a text has a number.
pub(crate) fn has_any(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit())
}

impl MaskNumbers {
    /// Of a mask and its foreground as a whole.
    pub(crate) fn of(whole: &Region, mask: &GrayImage) -> Self {
        let regions = position::components(mask);
        let large = regions.iter().filter(|region| region.area_px * 100 >= whole.area_px).count();
        let area_percent = 100.0 * whole.area_px as f64 / mask.len() as f64;
        Self { area_percent, counts: [large, regions.len()] }
    }

    /// What is wrong with the numbers of a text: `about 14% of the image`, `2 separate areas`.
    pub(crate) fn wrong<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (WordKind, String)> + 'a {
        static PERCENT: LazyLock<Regex> = LazyLock::new(|| {
            let noun = "image|picture|scan|slice|photograph|radiograph|frame";
            Regex::new(&format!(
                r"(?i)(less than|more than|over|under)?\s*(\d+(?:\.\d+)?)\s?% of (?:the|this) (?:{noun})\b"
            ))
            .expect("a valid pattern")
        });
        static COUNT: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"(?i)\b(\d+) separate (?:areas|regions|parts)\b").expect("a valid pattern"));
        let areas = PERCENT.captures_iter(text).filter_map(|found| {
            let value: f64 = found[2].parse().ok()?;
            let area = self.area_percent;
            let is_right = match found.get(1).map(|word| word.as_str().to_lowercase()).as_deref() {
                Some("less than" | "under") => area < value * 1.25 + 0.5,
                Some("more than" | "over") => area > value * 0.8 - 0.5,
                _ => (area - value).abs() <= f64::max(1.0, 0.25 * value),
            };
            let says = found[0].trim();
            (!is_right).then(|| (WordKind::Area, format!("the answer says `{says}`, the mask covers {area:.1}%")))
        });
        let counts = COUNT.captures_iter(text).filter_map(|found| {
            let count: usize = found[1].parse().ok()?;
            let [large, all] = self.counts;
            let is_right = (large..=all).contains(&count);
            let reason = format!("the answer says `{}`, the mask has {all}", &found[0]);
            (!is_right).then_some((WordKind::Count, reason))
        });
        areas.chain(counts)
    }
}
