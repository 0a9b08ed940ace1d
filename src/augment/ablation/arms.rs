//! Arms of an ablation, and the trainings that they need.

use crate::data::mixing_sampler::Ratio;
use std::fmt;

/// Training data of one arm of the ablation.
///
/// Every training has the same number of steps and the same batch size, so no arm gains from longer training. The
/// arms `Duplicates` and `Synthetic` of one ratio have equal batches, row by row, up to one difference: in place of a
/// synthetic row, `Duplicates` has the real row that the pair was made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arm {
    /// Real images without changes.
    Real,
    /// Real images with classical augmentation: flips, rotations, elastic deformation, intensity changes.
    Classical,
    /// Real images, and for each synthetic row of the arm `Synthetic` the unchanged real row of its source.
    Duplicates(Ratio),
    /// Real and synthetic images.
    Synthetic(Ratio),
}

impl Arm {
    /// The arms for these ratios, the baseline first.
    pub fn all(ratios: &[Ratio]) -> Vec<Self> {
        let of_ratio = ratios.iter().flat_map(|&ratio| [Self::Duplicates(ratio), Self::Synthetic(ratio)]);
        [Self::Real, Self::Classical].into_iter().chain(of_ratio).collect()
    }

    /// Name of the kind of arm.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Classical => "classical",
            Self::Duplicates(_) => "duplicates",
            Self::Synthetic(_) => "synthetic",
        }
    }

    /// Extra rows per real row, for arms with extra rows.
    pub fn ratio(self) -> Option<Ratio> {
        match self {
            Self::Real | Self::Classical => None,
            Self::Duplicates(ratio) | Self::Synthetic(ratio) => Some(ratio),
        }
    }
}

/// `real`, or for example `synthetic-0.5`: the name in folder names, tables and the report.
impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        self.ratio().map_or(Ok(()), |ratio| write!(f, "-{ratio}"))
    }
}

impl serde::Serialize for Arm {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// One training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunKey {
    /// Number of real training images; 0 = all.
    pub limit_real: usize,
    /// Training data.
    pub arm: Arm,
    /// Seed of all its random numbers.
    pub seed: u64,
}

/// The name of the run's folder.
impl fmt::Display for RunKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit_real, arm, seed } = self;
        match limit_real {
            0 => write!(f, "prsmed-all-{arm}-{seed}"),
            images => write!(f, "prsmed-{images}-{arm}-{seed}"),
        }
    }
}
