//! Generates the models that are made from Rust sources.

use std::path::Path;
use std::{env, fs};

const STATUS_PAGE: &str = "../../src/liveness/status_page.rs";
const FLIGHT: &str = "../../src/liveness/flight.rs";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let status_page = source(STATUS_PAGE);
    // One loom word for each byte would take most of the time.
    let status_page = replace(&status_page, "TEXT_BYTES: usize = 1024", "TEXT_BYTES: usize = 4");
    write("status_page.rs", &status_page);
    // As many entries as the model has calls, less one.
    let flight = replace(&source(FLIGHT), "KEPT: usize = 256", "KEPT: usize = 3");
    write("flight.rs", &flight);
    // Planted bugs.
    write("status_page_store.rs", &replace(&status_page, "Ordering::Release", "Ordering::Relaxed"));
    write("status_page_load.rs", &replace(&status_page, "Ordering::Acquire", "Ordering::Relaxed"));
    write(
        "flight_store.rs",
        &replace(&flight, "store(number, Ordering::Release)", "store(number, Ordering::Relaxed)"),
    );
    write(
        "flight_load.rs",
        &replace(
            &flight,
            "written = self.count.load(Ordering::Acquire)",
            "written = self.count.load(Ordering::Relaxed)",
        ),
    );
    write("flight_fence_of_owner.rs", &replace(&flight, "fence(Ordering::Release);", ""));
    write("flight_fence_of_reader.rs", &replace(&flight, "fence(Ordering::Acquire);", ""));
    write("flight_overwritten.rs", &replace(&flight, "< KEPT as u64 - 1", "< KEPT as u64"));
}

/// Returns a source on loom's atomics, without its own tests.
fn source(path: &str) -> String {
    println!("cargo::rerun-if-changed={path}");
    let source = fs::read_to_string(path).expect("the source");
    let source = source.split("#[cfg(test)]").next().expect("the first part");
    // `include!` accepts no inner comments.
    let source = source.lines().filter(|line| !line.starts_with("//!")).collect::<Vec<_>>().join("\n");
    replace(&source, "std::sync::atomic", "loom::sync::atomic")
}

fn write(name: &str, source: &str) {
    let out = env::var_os("OUT_DIR").expect("set by Cargo");
    fs::write(Path::new(&out).join(name), source).expect("written");
}

fn replace(source: &str, from: &str, to: &str) -> String {
    assert_eq!(source.matches(from).count(), 1, "`{from}` in a source");
    source.replace(from, to)
}
