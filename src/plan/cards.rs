//! Graphics cards: what they really offer and how fast they are.
//!
//! The table is `cards.toml`; every row says where its numbers come from and which of them nobody verified.
//! [`find`] turns what a user writes (`24gb`, `rtx4090`, `NVIDIA A100-SXM4-80GB`) into a [`Budget`].

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// Bytes of one GiB. A "24 GB" card has 24 of them in its chips, so marketing sizes are counted in it too.
pub const GIB: u64 = 1 << 30;
/// Bytes of one MiB.
pub const MIB: u64 = 1 << 20;

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Name as it is printed.
    pub name: String,
    /// Other spellings, without vendor, series and size words, in lowercase.
    pub aliases: Vec<String>,
    /// Marketing size in GB.
    pub gb: u32,
    /// Total that `nvidia-smi` shows, in MiB.
    pub smi_mib: u64,
    /// Total that CUDA offers to a process, in MiB: the smallest value found on Linux. `None` when none was found.
    pub cuda_mib: Option<u64>,
    /// Where the two totals come from.
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
    /// Whether the tensor cores know bf16. Where not, `half` holds for fp16 only.
    pub bf16: bool,
    /// Memory in MiB that a process holds before its first tensor. `None` when no reading was found.
    pub context_mib: Option<u64>,
    /// Where `context_mib` comes from.
    pub context_source: Option<String>,
    /// Where the rates come from.
    pub source: String,
    /// Why this program cannot use the card; `None` when it can.
    pub unsupported: Option<String>,
}

impl Card {
    /// Bytes that CUDA offers to a process: the reading, else the nominal size less [`driver_loss`].
    pub fn total_bytes(&self) -> u64 {
        self.cuda_mib.map_or_else(|| after_driver(f64::from(self.gb)), |mib| mib * MIB)
    }

    /// Nominal size in bytes.
    pub fn marketing_bytes(&self) -> u64 {
        u64::from(self.gb) * GIB
    }

    /// Its rates.
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

    fn answers_to(&self, name: &str) -> bool {
        self.aliases.iter().any(|alias| {
            let (model, form) = alias.strip_suffix("pcie").map_or((alias.as_str(), ""), |model| (model, "pcie"));
            ["", "g", "gb", "gib"].iter().any(|unit| name == format!("{model}{}{unit}{form}", self.gb)) || name == alias
        })
    }

    /// The budget of this card, idle.
    pub(crate) fn budget(&'static self, note: String) -> Budget {
        Budget {
            card: Some(self),
            marketing_bytes: self.marketing_bytes(),
            total_bytes: self.total_bytes(),
            capability: self.capability,
            rates: self.rates(),
            note,
        }
    }
}

/// How fast a device is, in operations and bytes a second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rates {
    /// Dense bf16 (or fp16, see `bf16`) on tensor cores, FLOP/s.
    pub half: f64,
    /// fp32 outside the tensor cores, FLOP/s.
    pub fp32: f64,
    /// Dense TF32, FLOP/s; `None` where the format does not exist.
    pub tf32: Option<f64>,
    /// Memory bandwidth, bytes/s.
    pub bandwidth: f64,
    /// Whether `half` holds for bf16.
    pub bf16: bool,
    /// Whose rates these are.
    pub of: String,
}

/// What a plan may use.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// The card, when one was named or detected.
    pub card: Option<&'static Card>,
    /// The size as it is sold, bytes.
    pub marketing_bytes: u64,
    /// What CUDA offers to a process on an idle card, bytes.
    pub total_bytes: u64,
    /// Compute capability; of a bare size the highest one among the cards it stands for.
    pub capability: (u32, u32),
    /// Rates for time predictions.
    pub rates: Rates,
    /// How `total_bytes` was found, for the user.
    pub note: String,
}

/// What a card must be able to do to stand for a bare size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// bf16 on tensor cores.
    pub bf16: bool,
}

impl Default for Needs {
    fn default() -> Self {
        Self { bf16: true }
    }
}

/// Why a text is no budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// Neither a known card nor a size.
    #[error("`{text}` is neither a known card nor a size such as `24gb`")]
    Unknown {
        /// What was asked for.
        text: String,
        /// Names of the nearest supported cards, best first.
        nearest: Vec<&'static str>,
    },
    /// A known card that this program cannot use.
    #[error("`{card}` is not supported: {reason}")]
    Unsupported {
        /// The card's name.
        card: &'static str,
        /// Why.
        reason: &'static str,
    },
}

impl NotFound {
    /// The next thing to do, in one sentence.
    pub fn hint(&self) -> String {
        match self {
            Self::Unknown { nearest, .. } => {
                let names: Vec<String> = nearest.iter().map(|name| format!("`{name}`")).collect();
                format!("did you mean {}? a memory size such as `24gb` always works", names.join(", "))
            }
            Self::Unsupported { .. } => "name an NVIDIA card or a memory size such as `24gb`".into(),
        }
    }
}

static CARDS: LazyLock<Vec<Card>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct Table {
        card: Vec<Card>,
    }
    toml::from_str::<Table>(include_str!("cards.toml")).expect("the embedded table is parsed by a test").card
});

/// Every card of the table, unsupported ones included.
pub fn all() -> &'static [Card] {
    &CARDS
}

/// Memory that driver and firmware keep from a card of `gb` GB without ECC: 352 MiB and 10 MiB for each GB.
///
/// An upper line over the listed cards (the RTX 5090 comes closest to it). Cards with ECC in ordinary memory (A10, L4,
/// L40S, T4) lose another sixteenth; they are in the table by themselves.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are small and positive")]
pub fn driver_loss(gb: f64) -> u64 {
    ((352.0 + 10.0 * gb) * 1_048_576.0) as u64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "sizes are small and positive"
)]
fn after_driver(gb: f64) -> u64 {
    ((gb * GIB as f64) as u64).saturating_sub(driver_loss(gb))
}

/// The budget that `text` names, for programs that need bf16.
///
/// # Errors
/// As [`find_with`].
pub fn find(text: &str) -> Result<Budget, NotFound> {
    find_with(text, Needs::default())
}

/// The budget that `text` names: a card in any usual spelling (NVML's included), or a bare size (`24gb`, `11 GiB`).
///
/// * A name that exists in several sizes means the smallest one.
/// * `... MIG 1g.10gb` is that slice of the card: 95 % of its memory (what 1g.10gb of an A100-80 shows) and its share
///   of the card's rates.
/// * A bare size means the smallest total that a listed card of that size or a larger one offers, among cards that
///   `needs` allow; for a size without a listed card also no more than the size less [`driver_loss`]. So a larger size
///   never offers less.
/// * The rates of a bare size are, each by itself, the lowest among the listed cards of that size or a larger one that
///   `needs` allow, or those of the largest card for sizes beyond it. So a larger size is never slower.
///
/// # Errors
/// [`NotFound`] with the nearest known names, or with the reason why a known card cannot be used.
pub fn find_with(text: &str, needs: Needs) -> Result<Budget, NotFound> {
    if let Some(card) = by_name(text) {
        if let Some(reason) = &card.unsupported {
            return Err(NotFound::Unsupported { card: &card.name, reason });
        }
        let sizes: Vec<String> = all()
            .iter()
            .filter(|other| other.aliases == card.aliases)
            .map(|other| format!("{} GB", other.gb))
            .collect();
        let choice = if sizes.len() > 1 && !compact(text).contains(&card.gb.to_string()) {
            format!(" (it exists with {}; the smallest is taken)", sizes.join(" and "))
        } else {
            String::new()
        };
        let without = if card.bf16 { "" } else { "; it has no bf16" };
        return Ok(card.budget(format!("{}{choice}: {}{without}", card.name, card.memory_source)));
    }
    if let Some(slice) = slice(text) {
        return Ok(slice);
    }
    if let Some(gb) = size(text) {
        return Ok(bare(gb, needs));
    }
    Err(NotFound::Unknown { text: text.trim().into(), nearest: nearest(&compact(text)) })
}

/// The listed card of this name, the smallest one where a name stands for several; unsupported ones included.
pub fn by_name(text: &str) -> Option<&'static Card> {
    let name = compact(text);
    let of = |name: &str| all().iter().filter(|card| card.answers_to(name)).min_by_key(|card| card.gb);
    of(&name).or_else(|| of(name.strip_suffix("pcie")?))
}

/// Lowercase, without separators and the words that do not tell models apart; a `pcie` goes to the end.
fn compact(text: &str) -> String {
    const NOISE: [&str; 20] = [
        "nvidia",
        "geforce",
        "tesla",
        "amd",
        "instinct",
        "rtx",
        "gpu",
        "card",
        "graphics",
        "generation",
        "sxm",
        "sxm2",
        "sxm3",
        "sxm4",
        "sxm5",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "oam",
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

/// The cards that stand for a bare size of `bytes`: those of the smallest listed size not below it, else the largest.
pub fn standing_for(bytes: u64, needs: Needs) -> Vec<&'static Card> {
    let usable = || all().iter().filter(|card| card.unsupported.is_none() && (card.bf16 || !needs.bf16));
    let largest = usable().map(|card| card.gb).max();
    let gb = usable().filter(|card| card.marketing_bytes() >= bytes).map(|card| card.gb).min().or(largest);
    usable().filter(|card| Some(card.gb) == gb).collect()
}

fn bare(gb: f64, needs: Needs) -> Budget {
    let bytes = after_driver(gb) + driver_loss(gb);
    let usable = |card: &&Card| card.unsupported.is_none() && (card.bf16 || !needs.bf16);
    let not_below: Vec<&Card> = all().iter().filter(usable).filter(|card| card.marketing_bytes() >= bytes).collect();
    let stand_ins = standing_for(bytes, needs);
    let listed = stand_ins.iter().any(|card| card.marketing_bytes() == bytes);
    let smallest = not_below.iter().min_by_key(|card| card.total_bytes());
    let (total_bytes, note) = match smallest {
        Some(card) if listed || card.total_bytes() < after_driver(gb) => {
            (card.total_bytes(), format!("{gb} GB: what the {} offers, the least among cards of this size", card.name))
        }
        _ => {
            (after_driver(gb), format!("{gb} GB: no such card is listed; the size less {} MiB", driver_loss(gb) / MIB))
        }
    };
    Budget {
        card: None,
        marketing_bytes: bytes,
        total_bytes,
        capability: stand_ins.iter().map(|card| card.capability).max().unwrap_or_default(),
        rates: slowest(if not_below.is_empty() { &stand_ins } else { &not_below }),
        note,
    }
}

/// Each rate by itself the lowest of `cards`.
fn slowest(cards: &[&Card]) -> Rates {
    let least = |rate: fn(&Card) -> f64| cards.iter().map(|card| rate(card)).fold(f64::INFINITY, f64::min);
    let tf32 = cards.iter().all(|card| card.tf32.is_some()).then(|| least(|card| card.tf32.unwrap_or_default()) * 1e12);
    let of = cards.iter().min_by(|a, b| a.half.total_cmp(&b.half)).map_or("", |card| card.name.as_str());
    Rates {
        half: least(|card| card.half) * 1e12,
        fp32: least(|card| card.fp32) * 1e12,
        tf32,
        bandwidth: least(|card| card.bandwidth) * 1e9,
        bf16: cards.iter().all(|card| card.bf16),
        of: format!("the slowest cards of this size or larger ({of} in bf16)"),
    }
}

/// `NVIDIA A100 80GB PCIe MIG 1g.10gb`: a slice of a card.
fn slice(text: &str) -> Option<Budget> {
    let lower = text.to_lowercase();
    let (parent, profile) = lower.split_once("mig")?;
    let card = by_name(parent).filter(|card| card.unsupported.is_none())?;
    let (compute, memory) = profile.trim().rsplit_once('.')?;
    let sevenths: f64 = compute.rsplit('.').next()?.strip_suffix('g')?.parse().ok()?;
    let gb: u32 = memory.split('+').next()?.strip_suffix("gb")?.parse().ok()?;
    let share = (sevenths / 7.0).min(1.0);
    let rates = card.rates();
    Some(Budget {
        card: Some(card),
        marketing_bytes: u64::from(gb) * GIB,
        total_bytes: u64::from(gb) * GIB * 95 / 100,
        capability: card.capability,
        rates: Rates {
            half: rates.half * share,
            fp32: rates.fp32 * share,
            tf32: rates.tf32.map(|rate| rate * share),
            bandwidth: rates.bandwidth * (f64::from(gb) / f64::from(card.gb)).min(1.0),
            of: format!("{}, {sevenths} of its 7 slices", card.name),
            ..rates
        },
        note: format!("slice {} of {}: 95 % of {gb} GB", profile.trim(), card.name),
    })
}

/// Names of the three supported cards whose spellings are the fewest edits away from `name`.
fn nearest(name: &str) -> Vec<&'static str> {
    let distance = |card: &Card| {
        let spellings = card.aliases.iter().flat_map(|alias| [alias.clone(), format!("{alias}{}gb", card.gb)]);
        spellings.map(|spelling| strsim::damerau_levenshtein(name, &spelling)).min().unwrap_or(usize::MAX)
    };
    let mut cards: Vec<&Card> = all().iter().filter(|card| card.unsupported.is_none()).collect();
    cards.sort_by_key(|card| distance(card));
    cards.iter().take(3).map(|card| card.name.as_str()).collect()
}

#[cfg(test)]
#[path = "cards_tests.rs"]
mod tests;
