//! Compiles the native layer (`native/*.cpp`) against the libtorch that `torch-sys` found, and its CUDA side
//! (`native/cuda`) as a shared library, which the program contains. It sets the link options so that the
//! binary finds this libtorch at run time without `LD_LIBRARY_PATH`.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::{env, fs};

const NATIVE: &str = "native";

/// The files of the native layer, in the groups that are compiled together: three quarters of the time of a file alone
/// are libtorch's headers. Two files of a group cannot have equal names in their anonymous namespaces.
const GROUPS: [&[&str]; 3] = [
    &["kernels", "kernels_operations", "kernels_runtime", "memory", "mirror", "optim", "packed_attention"],
    &[
        "async_copy", "attention", "autograd", "collective", "cross_entropy", "cuda_side", "functions", "graph",
        "hooks", "kernel_times", "ledger", "nf4",
    ],
    &["meta", "meta_cpu", "meta_cuda", "optim8", "seeds", "trace"],
];

fn main() {
    println!("cargo:rerun-if-changed={NATIVE}");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    let lib = PathBuf::from(
        env::var("DEP_TCH_LIBTORCH_LIB")
            .expect("`torch-sys` did not export the libtorch folder; run `scripts/setup` first"),
    );
    let torch = lib.parent().expect("libtorch's lib folder has a parent");
    // another torch: of a wheel, or of a zip file
    for file in ["version.py", "build-version"].map(|name| torch.join(name)).iter().filter(|file| file.exists()) {
        println!("cargo:rerun-if-changed={}", file.display());
    }

    let side = CudaSide::start(torch);
    let mut sources = native_sources();
    sources.push(embed_kernels());
    sources.push(side.embed());
    let mut build = compiler(torch);
    build.files(&sources).compile("prsmed_native");
    side.finish();

    // for the build scripts of other packages
    println!("cargo:libtorch={}", lib.display());
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    // libtorch_cpu.so finds the CUDA libraries of its profiler itself
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
    // before the libraries that torch-sys names: of those, the linker then needs no more, and none of CUDA
    println!("cargo:rustc-link-lib=dylib=torch_cpu");
    println!("cargo:rustc-link-lib=dylib=c10");
}

/// One source for each group, which includes its files.
fn native_sources() -> Vec<PathBuf> {
    let entries = fs::read_dir(NATIVE).expect("the native layer is part of the source tree");
    for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
        let is_grouped =
            GROUPS.iter().any(|group| group.iter().any(|name| path.file_stem().is_some_and(|s| s == *name)));
        assert!(is_grouped || path.extension().is_none_or(|end| end != "cpp"), "{}: add it to GROUPS", path.display());
    }
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let include = |name: &&str| format!("#include \"{root}/{NATIVE}/{name}.cpp\"\n");
    let source = |(number, group): (usize, &&[&str])| {
        write_source(&format!("native_{number}.cpp"), &group.iter().map(include).collect::<String>())
    };
    GROUPS.iter().enumerate().map(source).collect()
}

/// The C++ compiler with the headers of libtorch.
fn compiler(torch: &Path) -> cc::Build {
    let include = torch.join("include");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .pic(true)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // libtorch was built with it; without it some of its classes have more members
        .define("NDEBUG", None)
        // libtorch's headers then include only the operators that they need
        .define("AT_PER_OPERATOR_HEADERS", None)
        .include(NATIVE)
        .include(include.join("torch/csrc/api/include"))
        .flag("-isystem")
        .flag(text(&include))
        .warnings(false);
    build
}

/// The shared library of the CUDA side, which a process of the C++ compiler builds meanwhile. Without the headers of
/// CUDA's runtime, whose library a torch with CUDA needs even on the CPU, it is an empty file.
struct CudaSide {
    compiler: Option<Child>,
    library: PathBuf,
}

impl CudaSide {
    fn start(torch: &Path) -> Self {
        let library = out_dir().join("libprsmed_cuda.so");
        fs::write(&library, []).expect("OUT_DIR can be written");
        // of the wheels for CUDA 13 and for CUDA 12
        let wheels = ["cu13", "cuda_runtime", "nccl"].map(|name| torch.join("../nvidia").join(name).join("include"));
        if !wheels.iter().any(|folder| folder.join("cuda_runtime_api.h").exists()) {
            return Self { compiler: None, library };
        }
        let mut build = compiler(torch);
        // headers that the wheels lack, and after theirs those of wheels that only a machine with a GPU has
        build.include(format!("{NATIVE}/cuda/headers"));
        for folder in wheels.into_iter().chain([PathBuf::from(format!("{NATIVE}/cuda/fallback"))]) {
            build.flag("-isystem").flag(text(&folder));
        }
        let mut command = build.get_compiler().to_command();
        // It names no library: when it is opened, those of torch are loaded already.
        command.args(["-shared", "-s", "-Wl,-z,now", "-o"]).arg(&library);
        command.args(["graph.cpp", "side.cpp"].map(|name| format!("{NATIVE}/cuda/{name}")));
        let compiler = Some(command.spawn().expect("the C++ compiler can be started"));
        Self { compiler, library }
    }

    /// C++ that puts the finished library into the program.
    fn embed(&self) -> PathBuf {
        let assembly = |line: &str| format!("  \"{line}\\n\"\n");
        let mut body = String::new();
        for line in [
            ".section .rodata",
            ".global prsmed_cuda_side_begin, prsmed_cuda_side_end",
            ".balign 16",
            "prsmed_cuda_side_begin:",
            &format!(".incbin \\\"{}\\\"", text(&self.library)),
            "prsmed_cuda_side_end:",
            ".byte 0",
            ".previous",
        ] {
            body += &assembly(line);
        }
        write_source("cuda_side_bytes.cpp", &format!("__asm__(\n{body});\n"))
    }

    fn finish(mut self) {
        if let Some(compiler) = &mut self.compiler {
            let status = compiler.wait().expect("the C++ compiler ends");
            assert!(status.success(), "the CUDA side does not compile: {status}");
        }
    }
}

/// Writes the CUDA sources as strings into a C++ file. The binary compiles them at run time.
fn embed_kernels() -> PathBuf {
    let folder = format!("{NATIVE}/kernels");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("the kernels are part of the source tree")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let written = "a string can be written to";
    let mut text = "#include <cstddef>\nstruct PrsmedKernelSource { const char *name, *text; };\n".to_owned();
    text += "extern const PrsmedKernelSource prsmed_kernel_sources[] = {\n";
    for name in &names {
        let source = fs::read_to_string(format!("{folder}/{name}")).expect("a kernel's source");
        writeln!(text, "{{\"{name}\", R\"PRSMED({source})PRSMED\"}},").expect(written);
    }
    writeln!(text, "}};\nextern const size_t prsmed_kernel_source_count = {};", names.len()).expect(written);
    write_source("kernel_sources.cpp", &text)
}

fn write_source(name: &str, source: &str) -> PathBuf {
    let path = out_dir().join(name);
    fs::write(&path, source).expect("OUT_DIR can be written");
    path
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of the build are UTF-8")
}
