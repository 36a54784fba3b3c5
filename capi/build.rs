//! Gives the shared library its name: the number is that of the ABI, so that a program finds the one it was linked with.

fn main() {
    println!("cargo:rerun-if-changed=src/lib.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfast_allreduce.so.1");
}
