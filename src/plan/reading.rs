//! Readings: what `prsmed calibrate` measured on a machine. Plans prefer them to assumptions.
//!
//! A reading of this machine, in the cache folder, comes first; then a reading of the same GPU that is shipped with the
//! program (`data/gpu-readings.json`); then the table of GPUs and its assumptions.

use super::speed::Speed;
use crate::{Error, Result, files};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Version of the file format.
const FORMAT: u32 = 1;
/// Most bytes of a file with a reading.
const MAX_BYTES: u64 = 1 << 20;

/// Device and software on which a reading was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceIdentity {
    /// NVML's name of the GPU, or `CPU` and its model.
    pub name: String,
    /// Memory of the GPU that CUDA offers, bytes; 0 for the CPU.
    pub bytes: u64,
    /// Compute capability of the GPU, if the driver reports it.
    pub capability: Option<(u32, u32)>,
    /// Version of the driver; `None` for the CPU, or without NVML.
    pub driver: Option<String>,
    /// Version of libtorch.
    pub libtorch: String,
    /// Version of cuDNN as a number (90100 for 9.1.0); `None` for the CPU.
    pub cudnn: Option<i64>,
    /// Compute threads of the process.
    pub num_threads: u64,
}

impl DeviceIdentity {
    /// True if a reading taken on `self` applies to `other`: the same device, libtorch and, on the CPU, number of threads.
    fn holds_for(&self, other: &Self) -> bool {
        let is_cpu = self.bytes == 0;
        self.name == other.name
            // a driver may reserve a little more or less
            && self.bytes.abs_diff(other.bytes) <= other.bytes / 50
            && self.libtorch == other.libtorch
            && (!is_cpu || self.num_threads == other.num_threads)
    }
}

/// Memory after one step of a calibration, when its tensors are freed. Each step adds to those before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// What was used for the first time.
    pub step: String,
    /// Memory of this process, bytes: on a GPU as the driver reports it, on the CPU resident memory. `None` if the
    /// driver does not report it, or without NVML.
    pub used: Option<u64>,
    /// Bytes that libtorch's allocator reserves.
    pub reserved: u64,
    /// Bytes of live tensors and workspaces.
    pub allocated: u64,
    /// Highest bytes during the step beyond its own tensors: the workspace of its largest operator. `None` where it is
    /// not separated from them.
    pub workspace: Option<u64>,
}

/// A reading of one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceReading {
    /// Version of this format.
    pub format: u32,
    /// Where it was made.
    #[serde(rename = "device")]
    pub identity: DeviceIdentity,
    /// Day, as 2026-11-22.
    pub date: String,
    /// Memory after each step.
    pub memory: Vec<Level>,
    /// Speed of operators.
    pub speed: Speed,
}

impl DeviceReading {
    /// A reading made on `date`.
    pub fn new(identity: DeviceIdentity, date: String, memory: Vec<Level>, speed: Speed) -> Self {
        Self { format: FORMAT, identity, date, memory, speed }
    }

    /// Where the numbers come from, for the user.
    pub fn source(&self) -> String {
        format!("measured on {} on {} (`prsmed calibrate`)", self.identity.name, self.date)
    }

    fn level(&self, step: &str) -> Option<&Level> {
        self.memory.iter().find(|level| level.step == step)
    }

    /// Memory of the process before its first tensor, and what libraries add to it later, bytes.
    pub(super) fn outside(&self) -> Option<(u64, u64)> {
        let outside = |level: &Level| Some(level.used?.saturating_sub(level.reserved));
        let context = self.level(CONTEXT).and_then(outside)?;
        let most = self.memory.iter().filter_map(outside).max()?;
        Some((context, most - context))
    }

    /// Workspaces of matrix products that stay allocated, bytes.
    pub(super) fn product_workspaces(&self) -> Option<u64> {
        self.level(PRODUCTS).map(|level| level.allocated)
    }

    /// The largest workspace of a convolution, bytes.
    pub(super) fn convolution_workspace(&self) -> Option<u64> {
        self.level(CONVOLUTIONS)?.workspace
    }
}

/// The first tensor on the GPU.
pub(super) const CONTEXT: &str = "CUDA context and first tensor";
/// Matrix products on the thread of the forward pass and on autograd's.
pub(super) const PRODUCTS: &str = "matrix products, forward and backward";
/// Convolutions of the image encoders' sizes.
pub(super) const CONVOLUTIONS: &str = "convolutions, forward and backward";

static SHIPPED: LazyLock<Vec<DeviceReading>> = LazyLock::new(|| {
    let text = include_str!("../../data/gpu-readings.json");
    serde_json::from_str(text).expect("the embedded readings are parsed by a test")
});

/// The file of readings of `identity` below the cache folder `cache`.
pub fn file(cache: &Path, identity: &DeviceIdentity) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = identity.name.chars().take(80).map(plain).collect();
    let threads = if identity.bytes == 0 { format!("-{}-threads", identity.num_threads) } else { String::new() };
    cache.join("readings").join(format!("{name}{threads}.json"))
}

/// Saves `reading` below the cache folder `cache`, in place of an earlier one. Returns the file.
///
/// # Errors
/// [`Error::Io`].
pub fn save(cache: &Path, reading: &DeviceReading) -> Result<PathBuf> {
    let path = file(cache, &reading.identity);
    let text = serde_json::to_string_pretty(reading).map_err(|error| Error::Internal { reason: error.to_string() })?;
    if let Some(folder) = path.parent() {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
    }
    files::write(&path, text.as_bytes()).map_err(Error::io(&path, "write"))?;
    Ok(path)
}

/// The reading for `identity`: this machine's from the cache folder, else a shipped one. A file that cannot be used is
/// described in the second value.
pub fn find(cache: Option<&Path>, identity: &DeviceIdentity) -> (Option<DeviceReading>, Option<String>) {
    let shipped = || SHIPPED.iter().find(|reading| reading.identity.holds_for(identity)).cloned();
    let Some(path) = cache.map(|cache| file(cache, identity)).filter(|path| path.exists()) else {
        return (shipped(), None);
    };
    let reason = match load(&path) {
        Ok(reading) if reading.identity.holds_for(identity) => return (Some(reading), None),
        Ok(DeviceReading { identity: DeviceIdentity { libtorch, name, .. }, .. }) => {
            format!("made with libtorch {libtorch} on {name}, which is not this machine's")
        }
        Err(reason) => reason,
    };
    (shipped(), Some(format!("{}: {reason}; run `prsmed calibrate` again", path.display())))
}

fn load(path: &Path) -> std::result::Result<DeviceReading, String> {
    let text = files::read_to_string(path, MAX_BYTES).map_err(|error| error.to_string())?;
    let reading: DeviceReading = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if reading.format != FORMAT {
        return Err(format!("format {}, and this program reads {FORMAT}", reading.format));
    }
    if !reading.speed.is_valid() {
        return Err("a rate is not a positive number".into());
    }
    Ok(reading)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::plan::speed::tests::measured;

    const MIB: u64 = 1 << 20;

    pub(in crate::plan) fn gpu() -> DeviceReading {
        let level = |step: &str, used: u64, reserved: u64, allocated: u64, workspace: u64| Level {
            step: step.into(),
            used: Some(used * MIB),
            reserved: reserved * MIB,
            allocated: allocated * MIB,
            workspace: Some(workspace * MIB),
        };
        let memory = vec![
            level(CONTEXT, 502, 2, 0, 0),
            level(PRODUCTS, 720, 80, 65, 64),
            level(CONVOLUTIONS, 1010, 110, 65, 30),
        ];
        let identity = DeviceIdentity {
            name: "NVIDIA H200".into(),
            bytes: 140_000 * MIB,
            capability: Some((9, 0)),
            driver: Some("580.65".into()),
            libtorch: "2.11.0".into(),
            cudnn: Some(90_100),
            num_threads: 8,
        };
        DeviceReading::new(identity, "2026-11-22".into(), memory, measured())
    }

    #[test]
    fn a_reading_is_found_again_for_the_same_device_and_libtorch_only() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, reading) = (folder.path(), gpu());
        assert_eq!(find(Some(cache), &reading.identity), (None, None));
        let path = save(cache, &reading).unwrap();
        assert_eq!(path, cache.join("readings/nvidia-h200.json"));
        assert_eq!(find(Some(cache), &reading.identity), (Some(reading.clone()), None));
        let other = |change: fn(&mut DeviceIdentity)| {
            let mut identity = reading.identity.clone();
            change(&mut identity);
            find(Some(cache), &identity)
        };
        assert!(other(|identity| identity.driver = Some("590.1".into())).0.is_some(), "another driver");
        assert!(other(|identity| identity.bytes += 100 * MIB).0.is_some(), "the driver reserves less");
        let (found, problem) = other(|identity| identity.libtorch = "2.12.0".into());
        let problem = problem.unwrap();
        assert!(found.is_none() && problem.contains("made with libtorch 2.11.0"), "{problem}");
        assert!(problem.ends_with("run `prsmed calibrate` again"), "{problem}");
        assert!(other(|identity| identity.bytes /= 2).0.is_none(), "a slice of the GPU");
    }

    #[test]
    fn a_damaged_reading_is_named_and_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, reading) = (folder.path(), gpu());
        let path = save(cache, &reading).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = [
            text[..text.len() / 2].to_owned(),
            text.replace("\"format\": 1", "\"format\": 2"),
            text.replace("\"bandwidth\": 10000000000.0", "\"bandwidth\": -1.0"),
            text.replace("\"date\"", "\"day\""),
        ];
        for text in changed {
            std::fs::write(&path, &text).unwrap();
            let (found, problem) = find(Some(cache), &reading.identity);
            assert!(found.is_none() && problem.is_some_and(|text| text.contains("nvidia-h200.json")), "{text}");
        }
    }

    #[test]
    fn readings_of_cpus_belong_to_a_number_of_threads() {
        let cpu = |num_threads| DeviceIdentity { name: "CPU".into(), bytes: 0, num_threads, ..gpu().identity };
        assert!(cpu(2).holds_for(&cpu(2)));
        assert!(!cpu(2).holds_for(&cpu(4)));
        assert_ne!(file(Path::new("c"), &cpu(2)), file(Path::new("c"), &cpu(4)));
    }

    #[test]
    fn the_shipped_readings_are_valid() {
        assert!(SHIPPED.iter().all(|reading| reading.format == FORMAT && reading.speed.is_valid()));
    }
}
