//! Table of GPUs: usable memory and speed.
//!
//! The table is `data/gpus.toml`. Each row names the sources of its numbers and marks those that were not verified.
//! [`find`] turns user input (`24gb`, `rtx4090`, `NVIDIA A100-SXM4-80GB`) into a [`GpuBudget`].

use super::reading::DeviceReading;
use super::speed::{LARGE_PRODUCTS, PRODUCTS, Rates, Speed};
use super::unsupported::{OldGpu, other_vendor, refusal, too_old};
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
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Marketing size in GB.
    pub gb: u32,
    /// Total memory in `nvidia-smi`, in MiB; 0 in the file for the nominal size.
    #[serde(default)]
    pub smi_mib: u64,
    /// Total memory that CUDA offers to a process, in MiB: the smallest value found on Linux. `None` if none was found.
    pub cuda_mib: Option<u64>,
    /// Source of the two totals.
    #[serde(default = "nominal")]
    pub memory_source: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Memory bandwidth in GB/s (10^9 bytes). `None`, as the other rates, if none is published.
    pub bandwidth: Option<f64>,
    /// Dense bf16 or fp16 tensor-core rate with fp32 accumulation, in TFLOPS (10^12), without sparsity. fp16 only where
    /// there is no bf16.
    pub half: Option<f64>,
    /// Whether fp32 accumulation halves the tensor-core rate, as on GeForce cards.
    #[serde(default)]
    pub halved: bool,
    /// Measured rate of large half-precision products in TFLOPS, where it is far below `half`.
    pub products: Option<f64>,
    /// fp32 rate outside the tensor cores, in TFLOPS.
    pub fp32: Option<f64>,
    /// Dense TF32 tensor-core rate in TFLOPS; `None` where the format does not exist.
    pub tf32: Option<f64>,
    /// NVLink between the GPUs of a machine: bandwidth of NCCL's ring in GB/s (10^9 bytes) and direction. Of an A100, in its
    /// SXM form.
    pub nvlink: Option<f64>,
    /// Memory in MiB that a process uses before its first tensor. `None` if no published measurement was found.
    pub context_mib: Option<u64>,
    /// Source of `context_mib`.
    pub context_source: Option<String>,
    /// Source of the rates.
    #[serde(default = "data_sheet")]
    pub source: String,
    /// What a user should know about it.
    pub remark: Option<String>,
    /// Whether it is one of the GPUs that a bare size means.
    #[serde(skip)]
    pub stands_for_size: bool,
}

fn nominal() -> String {
    "the nominal size (with ECC, what `nvidia-smi` shows) minus what the driver keeps".to_owned()
}

fn data_sheet() -> String {
    "NVIDIA's data sheets and whitepapers, not read again".to_owned()
}

impl Gpu {
    /// Bytes that CUDA offers to a process: `cuda_mib`, else the nominal size (with ECC, which takes a sixteenth, the
    /// total in `nvidia-smi`) minus [`driver_loss`].
    pub fn total_bytes(&self) -> u64 {
        let ecc = if self.has_ecc() { self.marketing_bytes() - self.smi_mib * MIB } else { 0 };
        self.cuda_mib.map_or_else(|| after_driver(f64::from(self.gb)) - ecc, |mib| mib * MIB)
    }

    /// Whether ECC takes a part of its memory.
    fn has_ecc(&self) -> bool {
        self.smi_mib * 100 <= u64::from(self.gb) * 1024 * 97
    }

    /// Nominal size in bytes.
    pub fn marketing_bytes(&self) -> u64 {
        u64::from(self.gb) * GIB
    }

    /// Rates for time predictions; `None` if none are published.
    pub fn rates(&self) -> Option<Rates> {
        Some(Rates {
            half: self.half? * 1e12,
            products: self.products()? * 1e12,
            fp32: self.fp32? * 1e12,
            tf32: self.tf32.map(|tera| tera * 1e12),
            bandwidth: self.bandwidth? * 1e9,
            of: self.name.clone(),
        })
    }

    /// TFLOPS of the half-precision products of a training: [`LARGE_PRODUCTS`] of what large square ones reach.
    ///
    /// GeForce cards, whose rate fp32 accumulation halves, reach nearly all of it: published measurements in torch are
    /// 27 of 25.5 (RTX 3060), 76 of 71 (RTX 3090), 66 of 80 (RTX 3090 Ti), 45 of 54 (RTX 2080 Ti; the last two
    /// in bewantbe/busy-gemm-benchmark) and 168 of 165 (RTX 4090). A T4 has no power for its rate: 24 of 65. Of other GPUs,
    /// [`PRODUCTS`] of the rate is assumed; an A100 reaches 247 of 312 in large products.
    pub(super) fn products(&self) -> Option<f64> {
        let large = self.products.or(self.half.filter(|_| self.halved));
        Some(large.map_or(PRODUCTS * self.half?, |tera| LARGE_PRODUCTS * tera))
    }

    fn matches_name(&self, name: &str) -> bool {
        self.aliases.iter().any(|alias| {
            let (model, form) = alias.strip_suffix("pcie").map_or((alias.as_str(), ""), |model| (model, "pcie"));
            ["", "g", "gb", "gib"].iter().any(|unit| name == format!("{model}{}{unit}{form}", self.gb)) || name == alias
        })
    }

    /// The budget of this GPU when idle.
    pub(crate) fn budget(&'static self, note: String) -> GpuBudget {
        let rates = self.rates();
        GpuBudget {
            gpu: Some(self),
            name: Some(self.name.clone()),
            marketing_bytes: self.marketing_bytes(),
            total_bytes: self.total_bytes(),
            capability: self.capability,
            has_own_rates: rates.is_some(),
            rates: rates.unwrap_or_else(|| bare(f64::from(self.gb)).rates),
            note,
            nvlink: None,
            reading: None,
            host_free: None,
        }
    }
}

/// Memory and speed that a plan may use.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuBudget {
    /// The listed GPU, when one was named or detected.
    pub gpu: Option<&'static Gpu>,
    /// Name of the GPU, listed or not; `None` for a bare size.
    pub name: Option<String>,
    /// Marketing size, bytes.
    pub marketing_bytes: u64,
    /// Memory that CUDA offers to a process on the idle GPU, bytes.
    pub total_bytes: u64,
    /// Compute capability; for a bare size, the highest one among GPUs of that size.
    pub capability: (u32, u32),
    /// Rates for time predictions.
    pub rates: Rates,
    /// Whether they are those of this GPU (or of this size). If not, they serve to compare settings only.
    pub has_own_rates: bool,
    /// Origin of `total_bytes`, for the user.
    pub note: String,
    /// Bandwidth of NVLink to the other GPUs of its machine, bytes/s; `None` without it, or if that is not known.
    pub nvlink: Option<f64>,
    /// What `prsmed calibrate` measured on this GPU, if it did.
    pub reading: Option<Box<DeviceReading>>,
    /// Free memory of the host, if the GPU is one of this machine.
    pub host_free: Option<Bytes>,
}

impl GpuBudget {
    /// Speed for time predictions: measured, else shares of the rates.
    pub fn speed(&self) -> Speed {
        self.reading.as_ref().map_or_else(|| Speed::assumed(&self.rates), |reading| reading.speed.clone())
    }

    /// Whether the GPU computes in bf16. GPUs before Ampere only emulate it.
    pub fn has_bf16(&self) -> bool {
        has_bf16(self.capability)
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
    /// A GPU that this program cannot use.
    #[error("{gpu}: {reason}")]
    Unsupported {
        /// The GPU's name.
        gpu: String,
        /// The reason.
        reason: String,
    },
}

impl NotFound {
    /// What the user can do next, in one sentence.
    pub fn hint(&self) -> String {
        match self {
            Self::Unknown { text, .. } if counted(text).is_some() => {
                let (count, name) = counted(text).unwrap_or_default();
                format!(
                    "name one GPU and give their number, where the command has it: the arguments `gpu=\"{name}\" gpus={count}`"
                )
            }
            Self::Unknown { text, .. } if text.to_ascii_lowercase().starts_with("cuda") => {
                "leave it out to plan for the GPU of this machine, or name one, for example `RTX 3060` or `24gb`".into()
            }
            Self::Unknown { nearest, .. } => {
                let names: Vec<String> = nearest.iter().map(|name| format!("`{name}`")).collect();
                let names = names.join(", ");
                format!(
                    "did you mean {names}? a memory size such as `24gb` always works, also after a name: `NAME 24gb`"
                )
            }
            Self::Unsupported { .. } => {
                "name an NVIDIA GPU of the RTX 20 series or newer, a memory size such as `24gb`, or `cpu`; \
                 docs/guides/install.md says which build of libtorch drives which GPUs"
                    .into()
            }
        }
    }
}

fn has_bf16((major, _): (u32, u32)) -> bool {
    major >= 8
}

static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| {
    let complete = |gpu: Gpu, stands_for_size| Gpu {
        aliases: if gpu.aliases.is_empty() { vec![compact(&gpu.name)] } else { gpu.aliases },
        smi_mib: if gpu.smi_mib == 0 { u64::from(gpu.gb) * 1024 } else { gpu.smi_mib },
        stands_for_size,
        ..gpu
    };
    let GpuTable { gpu, by_name, .. } = TABLE.clone();
    let sized = gpu.into_iter().map(|gpu| complete(gpu, true));
    sized.chain(by_name.into_iter().map(|gpu| complete(gpu, false))).collect()
});

/// The content of `data/gpus.toml`.
#[derive(Clone, Deserialize)]
pub(super) struct GpuTable {
    gpu: Vec<Gpu>,
    by_name: Vec<Gpu>,
    pub(super) too_old: Vec<OldGpu>,
}

pub(super) static TABLE: LazyLock<GpuTable> = LazyLock::new(|| {
    toml::from_str(include_str!("../../data/gpus.toml")).expect("the embedded table is parsed by a test")
});

/// Every GPU of the table.
pub fn all() -> &'static [Gpu] {
    &GPUS
}

/// The GPUs that bare sizes mean.
pub fn sized() -> impl Iterator<Item = &'static Gpu> {
    all().iter().filter(|gpu| gpu.stands_for_size)
}

/// Those of them with bf16, for which predictions and searches of bare sizes are made.
fn typical() -> impl Iterator<Item = &'static Gpu> {
    sized().filter(|gpu| has_bf16(gpu.capability))
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
/// * A bare size offers the smallest total of the GPUs of [`sized`] with bf16 of that size or larger. A size without such
///   a GPU offers at most the size minus [`driver_loss`]. A larger size therefore never offers less.
/// * Each rate of a bare size is the lowest among these GPUs of that size or larger. Beyond the largest GPU it is that
///   GPU's rate. A larger size is therefore never slower.
/// * An unlisted name with a size (`RTX 3060 8GB`) offers the memory of that size; its times are not known.
///
/// # Errors
/// [`NotFound`] with the most similar known names, or with the reason why a GPU cannot be used.
pub fn find(text: &str) -> Result<GpuBudget, NotFound> {
    if let Some(gpu) = by_name(text) {
        return listed(gpu, text);
    }
    let unsupported = |gpu: &str, reason: String| Err(NotFound::Unsupported { gpu: gpu.to_owned(), reason });
    if let Some(reason) = other_vendor(text) {
        return unsupported(text.trim(), reason.to_owned());
    }
    if let Some(slice) = slice(text) {
        return refusal(slice.capability).map_or(Ok(slice), |reason| unsupported(text.trim(), reason));
    }
    if let Some(gb) = size(text) {
        return Ok(bare(gb));
    }
    let (name, gb) = sized_name(text).map_or((text.trim(), None), |(name, gb)| (name, Some(gb)));
    if let Some((gpu, reason)) = too_old(&TABLE.too_old, &compact(name)) {
        return unsupported(gpu, reason);
    }
    match gb {
        Some(gb) => named(name, gb),
        None => Err(NotFound::Unknown { text: text.trim().into(), nearest: nearest(&compact(text)) }),
    }
}

/// Number and name of `2x RTX 4090` or `8 x A100`.
fn counted(text: &str) -> Option<(&str, &str)> {
    let name = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let count = &text[..text.len() - name.len()];
    let name = name.trim_start().strip_prefix(['x', 'X', '×'])?.trim_start();
    (!count.is_empty() && find(name).is_ok()).then_some((count, name))
}

/// The budget of a listed GPU, named by `text`.
fn listed(gpu: &'static Gpu, text: &str) -> Result<GpuBudget, NotFound> {
    if let Some(reason) = refusal(gpu.capability) {
        return Err(NotFound::Unsupported { gpu: gpu.name.clone(), reason });
    }
    let shares_a_name = |other: &&Gpu| other.aliases.iter().any(|alias| gpu.aliases.contains(alias));
    let sizes: Vec<String> = all().iter().filter(shares_a_name).map(|other| format!("{} GB", other.gb)).collect();
    let choice = if sizes.len() > 1 && !compact(text).contains(&gpu.gb.to_string()) {
        format!(" (it exists with {}; the smallest is taken)", sizes.join(" and "))
    } else {
        String::new()
    };
    let remark = gpu.remark.as_ref().map_or_else(String::new, |remark| format!("; {remark}"));
    let without = if has_bf16(gpu.capability) { "" } else { "; it has no bf16" };
    let memory = match gpu.cuda_mib {
        Some(_) => "the least memory that CUDA was found to offer on it",
        None => "its nominal size less what the driver keeps",
    };
    let budget = gpu.budget(format!("{}{choice}: {memory}{remark}{without}", gpu.name));
    // A100s exist with and without it
    let has_nvlink = gpu.capability != (8, 0) || text.to_lowercase().contains("sxm");
    Ok(GpuBudget { nvlink: gpu.nvlink.filter(|_| has_nvlink).map(|rate| rate * 1e9), ..budget })
}

/// A GPU that is not listed, or not with this size: the memory of the size, and the compute capability of the listed GPU
/// of that name.
fn named(name: &str, gb: f64) -> Result<GpuBudget, NotFound> {
    let of_size = bare(gb);
    let capability = by_name(name).map_or(of_size.capability, |gpu| gpu.capability);
    if let Some(reason) = refusal(capability) {
        return Err(NotFound::Unsupported { gpu: name.to_owned(), reason });
    }
    let (major, minor) = capability;
    let known = if by_name(name).is_some() { "its compute capability is" } else { "assumed: compute capability" };
    let note = format!("`{name}` with {gb} GB is not in the table of GPUs; {known} {major}.{minor}; {}", of_size.note);
    Ok(GpuBudget { name: Some(format!("{name} {gb} GB")), capability, has_own_rates: false, note, ..of_size })
}

/// The listed GPU of this name, the smallest one if several have the name.
pub fn by_name(text: &str) -> Option<&'static Gpu> {
    let name = compact(text);
    let of = |name: &str| all().iter().filter(|gpu| gpu.matches_name(name)).min_by_key(|gpu| gpu.gb);
    of(&name).or_else(|| of(name.strip_suffix("pcie")?))
}

/// Normalises a name: lowercase, without separators and words that do not identify the model; `pcie` moves to the end.
fn compact(text: &str) -> String {
    const NOISE: [&str; 18] = [
        "nvidia", "geforce", "tesla", "rtx", "gtx", "gpu", "card", "graphics", "generation", "sxm", "sxm2", "sxm3",
        "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e",
    ];
    let lower = text.to_lowercase();
    let mut name = String::new();
    let mut form = "";
    for word in lower.split(|c: char| !c.is_alphanumeric() && c != '.').filter(|word| !NOISE.contains(word)) {
        match word {
            "pcie" => form = "pcie",
            "mobile" => name.push_str("laptop"),
            _ => name.push_str(word.strip_prefix("rtx").or_else(|| word.strip_prefix("gtx")).unwrap_or(word)),
        }
    }
    name + form
}

/// GB of a bare size: `24gb`, `24 GiB`, `22.5g`, `24`, `24576MiB`.
fn size(text: &str) -> Option<f64> {
    let lower = text.trim().to_lowercase();
    let of = |units: &[&str]| units.iter().find_map(|unit| lower.strip_suffix(unit)?.trim_end().parse::<f64>().ok());
    let gb = of(&["mib", "mb"]).map(|mib| mib / 1024.0).or_else(|| of(&["gib", "gb", "g", ""]));
    gb.filter(|gb| (1.0..=1024.0).contains(gb))
}

/// Name and GB of `NAME 24gb`.
fn sized_name(text: &str) -> Option<(&str, f64)> {
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    let number = ["gib", "gb", "g"].iter().find_map(|unit| lower.strip_suffix(unit))?.trim_end();
    let name = number.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let gb = number[name.len()..].parse().ok().filter(|gb: &f64| (1.0..=1024.0).contains(gb))?;
    let name = text[..name.len()].trim_end_matches(|c: char| !c.is_alphanumeric());
    // a slice whose profile is wrong
    let is_slice = lower.split(|c: char| !c.is_alphanumeric()).any(|word| word == "mig");
    (name.contains(char::is_alphanumeric) && !is_slice).then_some((name, gb))
}

/// The GPUs of [`sized`] with bf16 of size `bytes`; if there are none, those of the next larger size, else the largest.
pub fn gpus_of_size(bytes: u64) -> Vec<&'static Gpu> {
    let largest = typical().map(|gpu| gpu.gb).max();
    let gb = typical().filter(|gpu| gpu.marketing_bytes() >= bytes).map(|gpu| gpu.gb).min().or(largest);
    typical().filter(|gpu| Some(gpu.gb) == gb).collect()
}

fn bare(gb: f64) -> GpuBudget {
    let bytes = after_driver(gb) + driver_loss(gb);
    let not_below: Vec<&Gpu> = typical().filter(|gpu| gpu.marketing_bytes() >= bytes).collect();
    let stand_ins = gpus_of_size(bytes);
    let listed = stand_ins.iter().any(|gpu| gpu.marketing_bytes() == bytes);
    let smallest = not_below.iter().min_by_key(|gpu| gpu.total_bytes());
    let (total_bytes, note) = match smallest {
        Some(gpu) if listed || gpu.total_bytes() < after_driver(gb) => {
            (gpu.total_bytes(), format!("memory of the {}, the least of this size", gpu.name))
        }
        _ => (after_driver(gb), format!("no GPU of this size is listed; the size minus {} MiB", driver_loss(gb) / MIB)),
    };
    GpuBudget {
        gpu: None,
        name: None,
        marketing_bytes: bytes,
        total_bytes,
        capability: stand_ins.iter().map(|gpu| gpu.capability).max().unwrap_or_default(),
        rates: slowest(if not_below.is_empty() { &stand_ins } else { &not_below }),
        has_own_rates: true,
        note,
        nvlink: None,
        reading: None,
        host_free: None,
    }
}

/// The lowest of each rate among `gpus`, which all have rates.
fn slowest(gpus: &[&Gpu]) -> Rates {
    let all: Vec<Rates> = gpus.iter().filter_map(|gpu| gpu.rates()).collect();
    let least = |rate: fn(&Rates) -> f64| all.iter().map(rate).fold(f64::INFINITY, f64::min);
    let tf32 = all.iter().all(|rates| rates.tf32.is_some()).then(|| least(|rates| rates.tf32.unwrap_or_default()));
    let of = all.iter().min_by(|a, b| a.products.total_cmp(&b.products)).map_or("", |rates| rates.of.as_str());
    Rates {
        half: least(|rates| rates.half),
        products: least(|rates| rates.products),
        fp32: least(|rates| rates.fp32),
        tf32,
        bandwidth: least(|rates| rates.bandwidth),
        of: format!("the slowest GPUs of this size or larger ({of} in bf16)"),
    }
}

/// A MIG slice of a GPU, such as `NVIDIA A100 80GB PCIe MIG 1g.10gb`.
fn slice(text: &str) -> Option<GpuBudget> {
    let lower = text.to_lowercase();
    let (parent, profile) = lower.split_once("mig")?;
    let gpu = by_name(parent)?;
    let (compute, memory) = profile.trim().rsplit_once('.')?;
    let sevenths: f64 = compute.rsplit('.').next()?.strip_suffix('g')?.parse().ok()?;
    let gb: u32 = memory.split('+').next()?.strip_suffix("gb")?.parse().ok()?;
    let share = (sevenths / 7.0).min(1.0);
    let rates = gpu.rates()?;
    Some(GpuBudget {
        marketing_bytes: u64::from(gb) * GIB,
        total_bytes: u64::from(gb) * GIB * 95 / 100,
        rates: Rates {
            half: rates.half * share,
            products: rates.products * share,
            fp32: rates.fp32 * share,
            tf32: rates.tf32.map(|rate| rate * share),
            bandwidth: rates.bandwidth * (f64::from(gb) / f64::from(gpu.gb)).min(1.0),
            of: format!("{}, {sevenths} of its 7 slices", gpu.name),
        },
        ..gpu.budget(format!("slice {} of {}: 95 % of {gb} GB", profile.trim(), gpu.name))
    })
}

/// Names of the three GPUs with the smallest edit distance to `name`.
fn nearest(name: &str) -> Vec<&'static str> {
    let distance = |gpu: &Gpu| {
        let spellings = gpu.aliases.iter().flat_map(|alias| [alias.clone(), format!("{alias}{}gb", gpu.gb)]);
        spellings.map(|spelling| strsim::damerau_levenshtein(name, &spelling)).min().unwrap_or(usize::MAX)
    };
    let mut gpus: Vec<&Gpu> = all().iter().filter(|gpu| refusal(gpu.capability).is_none()).collect();
    gpus.sort_by_key(|gpu| distance(gpu));
    gpus.iter().take(3).map(|gpu| gpu.name.as_str()).collect()
}

#[cfg(test)]
#[path = "gpus_tests.rs"]
mod tests;
