//! Compiles the native layer (`src/tensor/native/*.cpp`) against the libtorch that `torch-sys` found, and links so that
//! the binary finds that libtorch at run time without `LD_LIBRARY_PATH`.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=src/tensor/native");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
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
    sources.sort();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // as libtorch was built: some of its classes have more members without it
        .define("NDEBUG", None)
        .include(&include)
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
    if lib.join("libtorch_cuda.so").exists() {
        // Without this the linker drops the CUDA library (nothing names a symbol of it) and CUDA is reported absent.
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed,-ltorch_cuda,--as-needed");
    }
}
