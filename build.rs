//! Programs that are linked find libtorch at run time without `LD_LIBRARY_PATH`.

fn main() {
    // of no file: the default would be all files of the package
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    // absent in documentation without libtorch
    let Ok(folder) = std::env::var("DEP_PRSMED_NATIVE_LIBTORCH") else { return };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    // libtorch_cpu.so finds the CUDA libraries of its profiler itself
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
}
