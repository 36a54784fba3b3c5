//! Sets the shared library's soname. Its number is the ABI version, so that a program finds the version it was linked
//! with.

fn main() {
    println!("cargo:rerun-if-changed=src/lib.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfast_allreduce.so.1");
}
