//! Generates the models that are made from Rust sources.

use std::path::Path;
use std::{env, fs};

const STATUS_PAGE: &str = "../../src/liveness/status_page.rs";

fn main() {
    println!("cargo::rerun-if-changed={STATUS_PAGE}");
    println!("cargo::rerun-if-changed=build.rs");
    let source = fs::read_to_string(STATUS_PAGE).expect("the status page's source");
    // Without the source's own tests.
    let source = source.split("#[cfg(test)]").next().expect("the first part");
    // `include!` accepts no inner comments.
    let source = source.lines().filter(|line| !line.starts_with("//!")).collect::<Vec<_>>().join("\n");
    let source = replace(&source, "std::sync::atomic", "loom::sync::atomic");
    // One loom word for each byte would take most of the time.
    let source = replace(&source, "TEXT_BYTES: usize = 1024", "TEXT_BYTES: usize = 4");
    let out = env::var_os("OUT_DIR").expect("set by Cargo");
    let write = |name, source: &str| fs::write(Path::new(&out).join(name), source).expect("written");
    write("status_page.rs", &source);
    // Planted bugs.
    write("status_page_store.rs", &replace(&source, "Ordering::Release", "Ordering::Relaxed"));
    write("status_page_load.rs", &replace(&source, "Ordering::Acquire", "Ordering::Relaxed"));
}

fn replace(source: &str, from: &str, to: &str) -> String {
    assert_eq!(source.matches(from).count(), 1, "`{from}` in {STATUS_PAGE}");
    source.replace(from, to)
}
