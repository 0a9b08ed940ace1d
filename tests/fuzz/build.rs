//! Sets the path of libtorch in the fuzz binaries, and lets libtorch_cpu.so find its own libraries.

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if let Ok(libtorch) = std::env::var("LIBTORCH") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}/lib");
        println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
    }
}
