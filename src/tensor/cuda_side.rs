//! The CUDA side: the part of the native layer that uses libtorch's CUDA library (`native/cuda`).
//!
//! The program links only libtorch's CPU libraries. It contains the CUDA side as a shared library and opens it when the
//! process starts, if there is an NVIDIA driver (`libcuda.so.1`) and the installed torch has CUDA. So one program works
//! with torch for the CPU, for CUDA 12 and for CUDA 13, and loads no CUDA library where there is no GPU.

use super::native;
use std::ffi::{CStr, c_char};
use std::path::PathBuf;

/// Whether the CUDA side is open, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaSide {
    /// It is open: GPUs can be used.
    Open,
    /// `libcuda.so.1` cannot be opened; the dynamic linker's words.
    NoDriver(String),
    /// The installed torch has no `libtorch_cuda.so`.
    TorchWithoutCuda,
    /// This program was built without it, because torch's CUDA headers were missing.
    NotBuilt,
    /// `libtorch_cuda.so` cannot be opened; the dynamic linker's words.
    CudaFails(String),
    /// It does not fit the installed torch; the dynamic linker's words.
    SideFails(String),
    /// It could not be written to memory or to a temporary file; what was refused, in the system's words.
    NoFile(String),
}

/// How torch's CUDA build is installed.
const REPAIR: &str =
    "`scripts/setup --cuda`, or `pip install --force-reinstall 'torch==2.11.*'` for an installed wheel";

impl CudaSide {
    /// The state of this process; it never changes.
    pub fn current() -> Self {
        let (status, [detail, _]) = state();
        match status {
            0 => Self::Open,
            1 => Self::NoDriver(detail),
            2 => Self::TorchWithoutCuda,
            3 => Self::NotBuilt,
            4 => Self::CudaFails(detail),
            5 => Self::SideFails(detail),
            _ => Self::NoFile(detail),
        }
    }

    /// Whether GPUs can be used.
    pub fn is_open(&self) -> bool {
        *self == Self::Open
    }

    /// Why it is not open, and the remedy where there is one; `None` if it is open.
    pub fn reason(&self) -> Option<String> {
        let folder = libtorch_folder();
        let torch = folder.display();
        Some(match self {
            Self::Open => return None,
            Self::NoDriver(words) => format!("there is no NVIDIA driver ({words})"),
            Self::TorchWithoutCuda => {
                format!("torch in {torch} is built without CUDA; install its CUDA build: {REPAIR}")
            }
            Self::NotBuilt => {
                "this prsmed was built without its CUDA side, because torch's CUDA headers were missing; \
                 run `scripts/setup --cuda` and `cargo clean -p prsmed`, then build again"
                    .to_owned()
            }
            Self::CudaFails(words) => {
                format!("torch's CUDA library does not load ({words}); install it again: {REPAIR}")
            }
            Self::SideFails(words) => format!(
                "the CUDA side of this prsmed does not fit the torch in {torch} ({words}); build prsmed again for this torch"
            ),
            Self::NoFile(words) => format!(
                "this system lets prsmed store its CUDA side neither in memory nor in a temporary file ({words}); name \
                 a folder that can be written in TMPDIR"
            ),
        })
    }
}

/// The folder of the libtorch that this process has loaded.
pub fn libtorch_folder() -> PathBuf {
    let (_, [_, folder]) = state();
    PathBuf::from(folder)
}

/// Number of the state, its detail, and the folder of libtorch.
fn state() -> (i32, [String; 2]) {
    let [mut detail, mut folder]: [*const c_char; 2] = [c"".as_ptr(); 2];
    // SAFETY: the callee writes two pointers to texts that live as long as the process.
    unsafe {
        let status = native::prsmed_cuda_side(&raw mut detail, &raw mut folder);
        (status, [detail, folder].map(|text| CStr::from_ptr(text).to_string_lossy().into_owned()))
    }
}

/// The version of torch that this program was compiled for.
pub fn built_for_torch() -> String {
    // SAFETY: a constant string of the native layer.
    unsafe { CStr::from_ptr(native::prsmed_torch_version()) }.to_string_lossy().into_owned()
}

/// The version of the loaded libtorch.
pub fn libtorch_version() -> String {
    build_setting("TORCH_VERSION").unwrap_or_else(built_for_torch)
}

/// Major and minor version of the CUDA that the loaded libtorch was built for; `None` without CUDA.
pub fn cuda_version() -> Option<(i64, i64)> {
    let version = build_setting("CUDA_VERSION")?;
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Code for GPUs in a build of libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuCode {
    /// Compute capability that it was compiled for: major, minor.
    pub capability: (u32, u32),
    /// Which other GPUs run it.
    kind: CodeKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CodeKind {
    /// Machine code (`sm_80`): GPUs of the same major version and no smaller minor one.
    Machine,
    /// Machine code with features of one GPU (`sm_90a`): that GPU only.
    Specific,
    /// PTX (`compute_90`): all newer GPUs.
    Ptx,
}

impl GpuCode {
    /// Whether a GPU of this compute capability runs it.
    pub fn runs_on(&self, capability: (u32, u32)) -> bool {
        match self.kind {
            CodeKind::Machine => capability.0 == self.capability.0 && capability.1 >= self.capability.1,
            CodeKind::Specific => capability == self.capability,
            CodeKind::Ptx => capability >= self.capability,
        }
    }
}

/// The GPUs that the loaded libtorch has code for; empty without its CUDA library.
pub fn gpu_code() -> Vec<GpuCode> {
    build_text().map_or_else(Vec::new, |text| gpu_code_of(&text))
}

/// The GPUs of libtorch's description of its build (`...,code=sm_75;...`).
pub fn gpu_code_of(text: &str) -> Vec<GpuCode> {
    let code = |target: &str| {
        let (kind, number) = match target.strip_prefix("sm_") {
            Some(number) => (CodeKind::Machine, number),
            None => (CodeKind::Ptx, target.strip_prefix("compute_")?),
        };
        let digits = number.trim_end_matches(|c: char| !c.is_ascii_digit());
        let kind = if digits.len() < number.len() { CodeKind::Specific } else { kind };
        let number: u32 = digits.parse().ok()?;
        Some(GpuCode { capability: (number / 10, number % 10), kind })
    };
    let targets = text.split("code=").skip(1);
    targets.filter_map(|rest| code(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?)).collect()
}

/// A setting of libtorch's own build, for example `CUDA_VERSION`.
fn build_setting(name: &str) -> Option<String> {
    setting_of(&build_text()?, name)
}

/// libtorch's description of its build.
fn build_text() -> Option<String> {
    // SAFETY: the callee writes a message.
    unsafe { native::made_text(|out| native::prsmed_torch_build(out)) }.ok()
}

/// The value of `NAME=VALUE, ` in libtorch's description of its build.
fn setting_of(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!(" {name}="))?;
    rest.split([',', '\n']).next().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaded_libtorch_is_the_one_that_this_program_was_compiled_for() {
        assert_eq!(libtorch_version(), built_for_torch());
        assert!(libtorch_folder().join("libtorch_cpu.so").exists());
    }

    #[test]
    fn settings_of_a_build_are_read() {
        let text =
            "PyTorch built with:\n  - Build settings: BLAS_INFO=mkl, CUDA_VERSION=12.8, TORCH_VERSION=2.11.0, \n";
        assert_eq!(setting_of(text, "CUDA_VERSION").as_deref(), Some("12.8"));
        assert_eq!(setting_of(text, "TORCH_VERSION").as_deref(), Some("2.11.0"));
        assert_eq!(setting_of(text, "USE_NCCL"), None);
    }

    #[test]
    fn a_machine_without_a_driver_opens_nothing() {
        let side = CudaSide::current();
        if matches!(side, CudaSide::NoDriver(_)) {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            for library in ["libtorch_cuda", "libc10_cuda", "libcublas", "libcudnn", "libnccl"] {
                assert!(!maps.contains(library), "{library} is loaded");
            }
            assert!(side.reason().unwrap().contains("libcuda.so.1"));
        } else {
            assert_eq!(side, CudaSide::Open, "{:?}", side.reason());
        }
    }

    #[test]
    fn every_reason_names_its_remedy() {
        for (side, part) in [
            (CudaSide::TorchWithoutCuda, "scripts/setup --cuda"),
            (CudaSide::NotBuilt, "then build again"),
            (
                CudaSide::CudaFails("libcudnn.so.9: no such file".into()),
                "(libcudnn.so.9: no such file); install it again",
            ),
            (CudaSide::SideFails("undefined symbol".into()), "build prsmed again for this torch"),
            (CudaSide::NoFile("/x: Permission denied".into()), "(/x: Permission denied); name a folder"),
        ] {
            let reason = side.reason().unwrap();
            assert!(reason.contains(part), "{reason}");
        }
        assert_eq!(CudaSide::Open.reason(), None);
    }
}
