//! Table of GPUs: usable memory and speed.
//!
//! The table is `data/gpus.toml`. Each row names the sources of its numbers and marks those that were not verified.
//! [`find`] turns user input (`24gb`, `rtx4090`, `NVIDIA A100-SXM4-80GB`) into a [`Budget`].

use super::reading::Reading;
use super::speed::{Rates, Speed};
use crate::units::Bytes;
use serde::Deserialize;
use std::sync::LazyLock;

/// Bytes of one GiB. A "24 GB" GPU has 24 GiB of memory chips, so marketing sizes are counted in GiB too.
pub const GIB: u64 = 1 << 30;
/// Bytes of one MiB.
pub const MIB: u64 = 1 << 20;

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name as it is printed.
    pub name: String,
    /// Names for look-up, without vendor, series and size words, in lowercase.
    pub aliases: Vec<String>,
    /// Marketing size in GB.
    pub gb: u32,
    /// Total memory in `nvidia-smi`, in MiB.
    pub smi_mib: u64,
    /// Total memory that CUDA offers to a process, in MiB: the smallest value found on Linux. `None` if none was found.
    pub cuda_mib: Option<u64>,
    /// Source of the two totals.
    pub memory_source: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Memory bandwidth in GB/s (10^9 bytes).
    pub bandwidth: f64,
    /// Dense bf16 or fp16 tensor-core rate with fp32 accumulation, in TFLOPS (10^12), without sparsity.
    pub half: f64,
    /// fp32 rate outside the tensor cores, in TFLOPS.
    pub fp32: f64,
    /// Dense TF32 tensor-core rate in TFLOPS; `None` where the format does not exist.
    pub tf32: Option<f64>,
    /// Whether the tensor cores support bf16. If not, `half` holds for fp16 only.
    pub bf16: bool,
    /// Memory in MiB that a process uses before its first tensor. `None` if no published measurement was found.
    pub context_mib: Option<u64>,
    /// Source of `context_mib`.
    pub context_source: Option<String>,
    /// Source of the rates.
    pub source: String,
    /// Why this program cannot use the GPU; `None` when it can.
    pub unsupported: Option<String>,
}

impl Gpu {
    /// Bytes that CUDA offers to a process: `cuda_mib`, else the nominal size minus [`driver_loss`].
    pub fn total_bytes(&self) -> u64 {
        self.cuda_mib.map_or_else(|| after_driver(f64::from(self.gb)), |mib| mib * MIB)
    }

    /// Nominal size in bytes.
    pub fn marketing_bytes(&self) -> u64 {
        u64::from(self.gb) * GIB
    }

    /// Rates for time predictions.
    pub fn rates(&self) -> Rates {
        Rates {
            half: self.half * 1e12,
            fp32: self.fp32 * 1e12,
            tf32: self.tf32.map(|tera| tera * 1e12),
            bandwidth: self.bandwidth * 1e9,
            bf16: self.bf16,
            of: self.name.clone(),
        }
    }

    fn matches_name(&self, name: &str) -> bool {
        self.aliases.iter().any(|alias| {
            let (model, form) = alias.strip_suffix("pcie").map_or((alias.as_str(), ""), |model| (model, "pcie"));
            ["", "g", "gb", "gib"].iter().any(|unit| name == format!("{model}{}{unit}{form}", self.gb)) || name == alias
        })
    }

    /// The budget of this GPU when idle.
    pub(crate) fn budget(&'static self, note: String) -> Budget {
        Budget {
            gpu: Some(self),
            marketing_bytes: self.marketing_bytes(),
            total_bytes: self.total_bytes(),
            capability: self.capability,
            rates: self.rates(),
            note,
            reading: None,
            host_free: None,
        }
    }
}

/// Memory and speed that a plan may use.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// The GPU, when one was named or detected.
    pub gpu: Option<&'static Gpu>,
    /// Marketing size, bytes.
    pub marketing_bytes: u64,
    /// Memory that CUDA offers to a process on the idle GPU, bytes.
    pub total_bytes: u64,
    /// Compute capability; for a bare size, the highest one among GPUs of that size.
    pub capability: (u32, u32),
    /// Rates for time predictions.
    pub rates: Rates,
    /// Origin of `total_bytes`, for the user.
    pub note: String,
    /// What `prsmed calibrate` measured on this GPU, if it did.
    pub reading: Option<Box<Reading>>,
    /// Free memory of the host, if the GPU is one of this machine.
    pub host_free: Option<Bytes>,
}

impl Budget {
    /// Speed for time predictions: measured, else shares of the rates.
    pub fn speed(&self) -> Speed {
        self.reading.as_ref().map_or_else(|| Speed::assumed(&self.rates), |reading| reading.speed.clone())
    }
}

/// Why a text names no budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// Neither a known GPU nor a size.
    #[error("`{text}` is neither a known GPU nor a size such as `24gb`")]
    Unknown {
        /// The given text.
        text: String,
        /// Names of the nearest supported GPUs, best first.
        nearest: Vec<&'static str>,
    },
    /// A known GPU that this program cannot use.
    #[error("`{gpu}` is not supported: {reason}")]
    Unsupported {
        /// The GPU's name.
        gpu: &'static str,
        /// The reason.
        reason: &'static str,
    },
}

impl NotFound {
    /// What the user can do next, in one sentence.
    pub fn hint(&self) -> String {
        match self {
            Self::Unknown { nearest, .. } => {
                let names: Vec<String> = nearest.iter().map(|name| format!("`{name}`")).collect();
                format!("did you mean {}? a memory size such as `24gb` always works", names.join(", "))
            }
            Self::Unsupported { .. } => "name an NVIDIA GPU or a memory size such as `24gb`".into(),
        }
    }
}

static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct Table {
        gpu: Vec<Gpu>,
    }
    toml::from_str::<Table>(include_str!("../../data/gpus.toml")).expect("the embedded table is parsed by a test").gpu
});

/// Every GPU of the table, unsupported ones included.
pub fn all() -> &'static [Gpu] {
    &GPUS
}

/// Memory that driver and firmware reserve on a GPU of `gb` GB without ECC: 352 MiB and 10 MiB for each GB.
///
/// This is an upper bound over the listed GPUs (the RTX 5090 is closest to it). GPUs with ECC in ordinary memory (A10,
/// L4, L40S, T4) lose another sixteenth; the table has their own values.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are small and positive")]
pub fn driver_loss(gb: f64) -> u64 {
    ((352.0 + 10.0 * gb) * 1_048_576.0) as u64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are small and positive")]
fn after_driver(gb: f64) -> u64 {
    ((gb * GIB as f64) as u64).saturating_sub(driver_loss(gb))
}

/// The budget named by `text`: a GPU in any usual spelling (NVML's included), or a bare size (`24gb`, `11 GiB`).
///
/// * A name that exists in several sizes means the smallest one.
/// * `... MIG 1g.10gb` is that slice of the GPU: 95 % of its memory (as published for 1g.10gb of an A100-80) and its
///   share of the GPU's rates.
/// * A bare size offers the smallest total of all listed GPUs with bf16 of that size or larger. A size without a listed
///   GPU offers at most the size minus [`driver_loss`]. A larger size therefore never offers less.
/// * Each rate of a bare size is the lowest among the listed GPUs with bf16 of that size or larger. Beyond the largest
///   GPU it is that GPU's rate. A larger size is therefore never slower.
///
/// # Errors
/// [`NotFound`] with the most similar known names, or with the reason why a known GPU cannot be used.
pub fn find(text: &str) -> Result<Budget, NotFound> {
    if let Some(gpu) = by_name(text) {
        if let Some(reason) = &gpu.unsupported {
            return Err(NotFound::Unsupported { gpu: &gpu.name, reason });
        }
        let sizes: Vec<String> =
            all().iter().filter(|other| other.aliases == gpu.aliases).map(|other| format!("{} GB", other.gb)).collect();
        let choice = if sizes.len() > 1 && !compact(text).contains(&gpu.gb.to_string()) {
            format!(" (it exists with {}; the smallest is taken)", sizes.join(" and "))
        } else {
            String::new()
        };
        let without = if gpu.bf16 { "" } else { "; it has no bf16" };
        return Ok(gpu.budget(format!("{}{choice}: {}{without}", gpu.name, gpu.memory_source)));
    }
    if let Some(slice) = slice(text) {
        return Ok(slice);
    }
    if let Some(gb) = size(text) {
        return Ok(bare(gb));
    }
    Err(NotFound::Unknown { text: text.trim().into(), nearest: nearest(&compact(text)) })
}

/// The listed GPU of this name, the smallest one if several have the name; unsupported ones included.
pub fn by_name(text: &str) -> Option<&'static Gpu> {
    let name = compact(text);
    let of = |name: &str| all().iter().filter(|gpu| gpu.matches_name(name)).min_by_key(|gpu| gpu.gb);
    of(&name).or_else(|| of(name.strip_suffix("pcie")?))
}

/// Normalises a name: lowercase, without separators and words that do not identify the model; `pcie` moves to the end.
fn compact(text: &str) -> String {
    const NOISE: [&str; 20] = [
        "nvidia", "geforce", "tesla", "amd", "instinct", "rtx", "gpu", "card", "graphics", "generation", "sxm", "sxm2",
        "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e", "oam",
    ];
    let lower = text.to_lowercase();
    let mut name = String::new();
    let mut form = "";
    for word in lower.split(|c: char| !c.is_alphanumeric() && c != '.').filter(|word| !NOISE.contains(word)) {
        match word {
            "pcie" => form = "pcie",
            _ => name.push_str(word.strip_prefix("rtx").unwrap_or(word)),
        }
    }
    name + form
}

/// GB of a bare size: `24gb`, `24 GiB`, `22.5g`, `24`.
fn size(text: &str) -> Option<f64> {
    let lower = text.trim().to_lowercase();
    let number = ["gib", "gb", "g"].iter().find_map(|unit| lower.strip_suffix(unit)).unwrap_or(&lower);
    number.trim().parse().ok().filter(|gb: &f64| (1.0..=1024.0).contains(gb))
}

/// The listed GPUs with bf16 of size `bytes`; if there are none, those of the next larger listed size, else the
/// largest.
pub fn gpus_of_size(bytes: u64) -> Vec<&'static Gpu> {
    let usable = || all().iter().filter(|gpu| gpu.unsupported.is_none() && gpu.bf16);
    let largest = usable().map(|gpu| gpu.gb).max();
    let gb = usable().filter(|gpu| gpu.marketing_bytes() >= bytes).map(|gpu| gpu.gb).min().or(largest);
    usable().filter(|gpu| Some(gpu.gb) == gb).collect()
}

fn bare(gb: f64) -> Budget {
    let bytes = after_driver(gb) + driver_loss(gb);
    let usable = |gpu: &&Gpu| gpu.unsupported.is_none() && gpu.bf16;
    let not_below: Vec<&Gpu> = all().iter().filter(usable).filter(|gpu| gpu.marketing_bytes() >= bytes).collect();
    let stand_ins = gpus_of_size(bytes);
    let listed = stand_ins.iter().any(|gpu| gpu.marketing_bytes() == bytes);
    let smallest = not_below.iter().min_by_key(|gpu| gpu.total_bytes());
    let (total_bytes, note) = match smallest {
        Some(gpu) if listed || gpu.total_bytes() < after_driver(gb) => {
            (gpu.total_bytes(), format!("memory of the {}, the least of this size", gpu.name))
        }
        _ => (after_driver(gb), format!("no GPU of this size is listed; the size minus {} MiB", driver_loss(gb) / MIB)),
    };
    Budget {
        gpu: None,
        marketing_bytes: bytes,
        total_bytes,
        capability: stand_ins.iter().map(|gpu| gpu.capability).max().unwrap_or_default(),
        rates: slowest(if not_below.is_empty() { &stand_ins } else { &not_below }),
        note,
        reading: None,
        host_free: None,
    }
}

/// The lowest of each rate among `gpus`.
fn slowest(gpus: &[&Gpu]) -> Rates {
    let least = |rate: fn(&Gpu) -> f64| gpus.iter().map(|gpu| rate(gpu)).fold(f64::INFINITY, f64::min);
    let tf32 = gpus.iter().all(|gpu| gpu.tf32.is_some()).then(|| least(|gpu| gpu.tf32.unwrap_or_default()) * 1e12);
    let of = gpus.iter().min_by(|a, b| a.half.total_cmp(&b.half)).map_or("", |gpu| gpu.name.as_str());
    Rates {
        half: least(|gpu| gpu.half) * 1e12,
        fp32: least(|gpu| gpu.fp32) * 1e12,
        tf32,
        bandwidth: least(|gpu| gpu.bandwidth) * 1e9,
        bf16: gpus.iter().all(|gpu| gpu.bf16),
        of: format!("the slowest GPUs of this size or larger ({of} in bf16)"),
    }
}

/// A MIG slice of a GPU, such as `NVIDIA A100 80GB PCIe MIG 1g.10gb`.
fn slice(text: &str) -> Option<Budget> {
    let lower = text.to_lowercase();
    let (parent, profile) = lower.split_once("mig")?;
    let gpu = by_name(parent).filter(|gpu| gpu.unsupported.is_none())?;
    let (compute, memory) = profile.trim().rsplit_once('.')?;
    let sevenths: f64 = compute.rsplit('.').next()?.strip_suffix('g')?.parse().ok()?;
    let gb: u32 = memory.split('+').next()?.strip_suffix("gb")?.parse().ok()?;
    let share = (sevenths / 7.0).min(1.0);
    let rates = gpu.rates();
    Some(Budget {
        gpu: Some(gpu),
        marketing_bytes: u64::from(gb) * GIB,
        total_bytes: u64::from(gb) * GIB * 95 / 100,
        capability: gpu.capability,
        rates: Rates {
            half: rates.half * share,
            fp32: rates.fp32 * share,
            tf32: rates.tf32.map(|rate| rate * share),
            bandwidth: rates.bandwidth * (f64::from(gb) / f64::from(gpu.gb)).min(1.0),
            of: format!("{}, {sevenths} of its 7 slices", gpu.name),
            ..rates
        },
        note: format!("slice {} of {}: 95 % of {gb} GB", profile.trim(), gpu.name),
        reading: None,
        host_free: None,
    })
}

/// Names of the three supported GPUs with the smallest edit distance to `name`.
fn nearest(name: &str) -> Vec<&'static str> {
    let distance = |gpu: &Gpu| {
        let spellings = gpu.aliases.iter().flat_map(|alias| [alias.clone(), format!("{alias}{}gb", gpu.gb)]);
        spellings.map(|spelling| strsim::damerau_levenshtein(name, &spelling)).min().unwrap_or(usize::MAX)
    };
    let mut gpus: Vec<&Gpu> = all().iter().filter(|gpu| gpu.unsupported.is_none()).collect();
    gpus.sort_by_key(|gpu| distance(gpu));
    gpus.iter().take(3).map(|gpu| gpu.name.as_str()).collect()
}

#[cfg(test)]
#[path = "gpus_tests.rs"]
mod tests;
