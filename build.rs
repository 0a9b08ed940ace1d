//! Compiles the native layer (`src/tensor/native/*.cpp`) against the libtorch that `torch-sys` found. It sets the link
//! options so that the binary finds this libtorch at run time without `LD_LIBRARY_PATH`.

use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=src/tensor/native");
    println!("cargo:rerun-if-changed=tests/native");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    let lib = PathBuf::from(
        env::var("DEP_TCH_LIBTORCH_LIB")
            .expect("`torch-sys` did not export the libtorch folder; run `scripts/setup` first"),
    );
    let include = lib.parent().expect("libtorch's lib folder has a parent").join("include");

    let mut sources: Vec<PathBuf> = fs::read_dir("src/tensor/native")
        .expect("src/tensor/native is part of the source tree")
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cpp"))
        .collect();
    sources.push(embed_kernels());
    // Kernels as C++ for the CPU; linked only where a test names them.
    sources.push("tests/native/kernels_emulated.cpp".into());
    sources.sort();
    let cuda = lib.join("libtorch_cuda.so").exists();
    let mut build = cc::Build::new();
    let headers = lib.join("../../nvidia/cu13/include");
    if cuda && headers.exists() {
        // the CUDA headers of the wheel, and one that the wheel lacks
        build.define("PRSMED_CUDA", None).include("src/tensor/native/cuda");
        build.flag("-isystem").flag(headers.to_str().expect("the libtorch path is UTF-8"));
        let nccl = lib.join("../../nvidia/nccl/include");
        build.flag("-isystem").flag(nccl.to_str().expect("the libtorch path is UTF-8"));
    }
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // libtorch was built with it; without it some of its classes have more members
        .define("NDEBUG", None)
        // libtorch's headers then include only the operators that they need
        .define("AT_PER_OPERATOR_HEADERS", None)
        .include(&include)
        .include("src/tensor/native")
        .include(include.join("torch/csrc/api/include"))
        .flag("-isystem")
        .flag(include.to_str().expect("the libtorch path is UTF-8"))
        .warnings(false)
        .files(sources)
        .compile("prsmed_native");

    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rustc-link-lib=dylib=torch");
    println!("cargo:rustc-link-lib=dylib=torch_cpu");
    println!("cargo:rustc-link-lib=dylib=c10");
    if cuda {
        // without this the linker drops the CUDA library, and libtorch reports no CUDA
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed,-ltorch_cuda,-lc10_cuda,--as-needed");
    }
}

/// Writes the CUDA sources as strings into a C++ file. The binary compiles them at run time.
fn embed_kernels() -> PathBuf {
    let mut names: Vec<String> = fs::read_dir("src/tensor/native/kernels")
        .expect("src/tensor/native/kernels is part of the source tree")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let written = "a string can be written to";
    let mut text = "#include <cstddef>\nstruct PrsmedKernelSource { const char *name, *text; };\n".to_owned();
    text += "extern const PrsmedKernelSource prsmed_kernel_sources[] = {\n";
    for name in &names {
        let source = fs::read_to_string(format!("src/tensor/native/kernels/{name}")).expect("a kernel's source");
        writeln!(text, "{{\"{name}\", R\"PRSMED({source})PRSMED\"}},").expect(written);
    }
    writeln!(text, "}};\nextern const size_t prsmed_kernel_source_count = {};", names.len()).expect(written);
    let path = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("kernel_sources.cpp");
    fs::write(&path, text).expect("OUT_DIR can be written");
    path
}
