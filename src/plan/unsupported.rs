//! GPUs that this program cannot use, and why: other vendors, and NVIDIA GPUs without kernels in libtorch.

use crate::tensor::{self, GpuCode};
use serde::Deserialize;

/// Oldest GPUs of libtorch's build for CUDA 13, the wheel on PyPI (NVIDIA's release notes: CUDA 13 has no Volta and older).
const OLDEST: (u32, u32) = (7, 5);

/// GPUs that are known by name only to say why they cannot be used.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OldGpu {
    name: String,
    aliases: Vec<String>,
    capability: (u32, u32),
}

/// Why GPUs of compute capability `capability` cannot be used; `None` if they can. Asks the loaded libtorch for which GPUs
/// it has code; without a CUDA build, that of CUDA 13 is assumed.
pub fn refusal(capability: (u32, u32)) -> Option<String> {
    refusal_by(capability, &tensor::gpu_code(), tensor::cuda_version())
}

fn refusal_by((major, minor): (u32, u32), code: &[GpuCode], cuda: Option<(i64, i64)>) -> Option<String> {
    if code.is_empty() {
        let reason = format!(
            "compute capability {major}.{minor}; libtorch with CUDA 13 needs {}.{} (Turing) or newer",
            OLDEST.0, OLDEST.1
        );
        return ((major, minor) < OLDEST).then_some(reason);
    }
    if code.iter().any(|code| code.runs_on((major, minor))) {
        return None;
    }
    let mut built: Vec<(u32, u32)> = code.iter().map(|code| code.capability).collect();
    built.sort_unstable();
    built.dedup();
    let built: Vec<String> = built.iter().map(|(major, minor)| format!("{major}.{minor}")).collect();
    let cuda = cuda.map_or_else(String::new, |(major, minor)| format!(" for CUDA {major}.{minor}"));
    let needs = "its GPUs need one of these, or a newer one of the same major version";
    Some(format!("compute capability {major}.{minor}; this libtorch{cuda} has code for {}: {needs}", built.join(", ")))
}

/// Name of one of the GPUs that are too old, and why, by its compact name.
pub(super) fn too_old<'a>(known: &'a [OldGpu], compact: &str) -> Option<(&'a str, String)> {
    let name = compact.strip_suffix("pcie").unwrap_or(compact);
    let gpu = known.iter().find(|gpu| gpu.aliases.iter().any(|alias| alias == name))?;
    Some((&gpu.name, refusal(gpu.capability)?))
}

const APPLE: &str = "Apple GPUs are not supported: prsmed needs an NVIDIA GPU, or a CPU, and Linux on x86-64";
const AMD: &str =
    "AMD GPUs are not supported: they need libtorch's ROCm build, which this program is not built or tested with";
const INTEL: &str =
    "Intel GPUs are not supported: they need libtorch's XPU build, which this program is not built or tested with";
const OTHER: &str = "this accelerator is not supported: prsmed needs an NVIDIA GPU, or a CPU";
const SHARED: &str = "boards that share the host's memory with the GPU are not supported: their CPU is an ARM (aarch64), prsmed runs on x86-64";

/// Words that name a GPU or accelerator that is none of NVIDIA's cards, and the reason of the refusal. A `#` stands for a
/// digit, after which the word may go on.
const VENDORS: [(&[&str], &str); 5] = [
    (&["apple", "mac", "macos", "macbook", "macmini", "macstudio", "imac", "mps", "metal"], APPLE),
    (
        &[
            "amd", "ati", "rocm", "hip", "radeon", "instinct", "firepro", "vega", "navi", "rdna", "cdna", "rx", "rx#",
            "mi#", "vega#", "w6#", "w7#", "gfx#",
        ],
        AMD,
    ),
    (
        &[
            "intel", "arc", "xpu", "iris", "uhd", "gaudi", "gaudi#", "habana", "a310", "a380", "a580", "a750", "a770",
            "b570", "b580",
        ],
        INTEL,
    ),
    (&["jetson", "orin", "xavier", "tegra", "thor", "gb10", "spark"], SHARED),
    (&["tpu", "tpu#", "npu", "ipu", "trainium", "inferentia", "adreno", "mali", "snapdragon", "ascend"], OTHER),
];

/// Why the GPU named by `text` is not supported, if it is none of NVIDIA's cards.
pub(super) fn other_vendor(text: &str) -> Option<&'static str> {
    let lower = text.to_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let is_one = |pattern: &&str| {
        words.iter().any(|word| match pattern.strip_suffix('#') {
            Some(start) => word.strip_prefix(start).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())),
            None => word == pattern,
        })
    };
    // "M4" is a Mac, "Tesla M4" is not
    let is_nvidia = words.iter().any(|word| ["tesla", "nvidia", "geforce", "quadro"].contains(word));
    let is_chip = |word: &str| {
        let number = word.strip_prefix('m').and_then(|rest| rest.chars().next());
        let suffix = word.get(2..).unwrap_or_default();
        number.is_some_and(|c| ('1'..='9').contains(&c)) && ["", "pro", "max", "ultra"].contains(&suffix)
    };
    if !is_nvidia && words.first().is_some_and(|word| is_chip(word)) {
        return Some(APPLE);
    }
    let (_, reason) = VENDORS.iter().find(|(patterns, _)| patterns.iter().any(is_one))?;
    Some(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpus::{NotFound, find};

    fn refused(text: &str) -> String {
        match find(text) {
            Err(error @ NotFound::Unsupported { .. }) => error.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn gpus_without_kernels_in_libtorch_are_refused_with_their_compute_capability() {
        if !tensor::gpu_code().is_empty() {
            return;
        }
        let needs = "libtorch with CUDA 13 needs 7.5 (Turing) or newer";
        for (text, capability) in [
            ("V100", "7.0"),
            ("Tesla V100-SXM2-32GB", "7.0"),
            ("TITAN V", "7.0"),
            ("NVIDIA Tesla P100-PCIE-16GB", "6.0"),
            ("GTX 1080 Ti", "6.1"),
            ("gtx1070", "6.1"),
            ("GeForce GTX 1060 6GB", "6.1"),
            ("Tesla P40 24GB", "6.1"),
            ("K80", "3.7"),
            ("Tesla K80 12gb", "3.7"),
            ("Tesla M60", "5.2"),
            ("V100 MIG 1g.5gb", "7.0"),
        ] {
            let error = refused(text);
            assert!(error.ends_with(&format!(": compute capability {capability}; {needs}")), "{text}: {error}");
        }
        assert_eq!(refused("V100 16gb"), format!("V100 16GB: compute capability 7.0; {needs}"));
    }

    #[test]
    fn gpus_of_other_vendors_are_refused_with_the_reason() {
        for (text, reason) in [
            ("MacBook", APPLE),
            ("MacBook Pro M3 Max", APPLE),
            ("M2", APPLE),
            ("m4 pro", APPLE),
            ("mps", APPLE),
            ("RX 7900", AMD),
            ("RX7900XTX 24GB", AMD),
            ("Radeon Pro W7900", AMD),
            ("MI250", AMD),
            ("AMD Instinct MI300X", AMD),
            ("Intel Arc A770 16GB", INTEL),
            ("arc", INTEL),
            ("Jetson AGX Orin 64GB", SHARED),
            ("TPU v4", OTHER),
        ] {
            assert_eq!(refused(text), format!("{text}: {reason}"));
        }
        for text in ["Tesla M4", "A2", "RTX A4000", "RTX 4060 Ti", "TITAN RTX"] {
            assert_eq!(other_vendor(text), None, "{text}");
        }
    }

    #[test]
    fn the_gpus_of_a_libtorch_are_those_that_it_has_code_for() {
        let code = tensor::gpu_code_of(
            "- NVCC architecture flags: -gencode;arch=compute_50,code=sm_50;-gencode;arch=compute_70,code=sm_70;-gencode;\
             arch=compute_86,code=sm_86;-gencode;arch=compute_90a,code=sm_90a;-gencode;arch=compute_90,code=compute_90\n",
        );
        let with = |code: &[GpuCode]| {
            let all = [(6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)];
            all.into_iter()
                .filter(|capability| refusal_by(*capability, code, Some((12, 6))).is_none())
                .collect::<Vec<_>>()
        };
        assert_eq!(with(&code), [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]);
        assert_eq!(with(&code[..3]), [(7, 0), (7, 5), (8, 6), (8, 9)], "no PTX for newer GPUs");
        assert_eq!(with(&[]), [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], "libtorch for CUDA 13 is assumed");
        let reason = refusal_by((6, 1), &code, Some((12, 6))).expect("no code");
        assert!(
            reason.starts_with("compute capability 6.1; this libtorch for CUDA 12.6 has code for 5.0, 7.0, 8.6, 9.0")
        );
    }
}
