//! Sets the shared library's soname. Its number is the ABI version, so that a program finds the version it was linked
//! with.

fn main() {
    println!("cargo:rerun-if-changed=src/lib.rs");
    let abi = include_str!("src/lib.rs").split_once("const FAST_ALLREDUCE_ABI_VERSION: u32 = ");
    let abi = abi.and_then(|(_, rest)| rest.split_once(';')).map(|(number, _)| number);
    let abi = abi.expect("src/lib.rs defines FAST_ALLREDUCE_ABI_VERSION");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfast_allreduce.so.{abi}");
}
