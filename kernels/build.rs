//! Tells the build script of fast-allreduce the folder of the kernels: that of this package, or another that
//! `FAST_ALLREDUCE_KERNELS` names. A clone has none until `scripts/kernels.sh` has run.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-env-changed=FAST_ALLREDUCE_KERNELS");
    let asked =
        std::env::var_os("FAST_ALLREDUCE_KERNELS").filter(|value| !value.is_empty()).map(PathBuf::from);
    let Some(package) = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from) else {
        panic!("cargo sets CARGO_MANIFEST_DIR")
    };
    let folder = asked.clone().unwrap_or_else(|| package.join("fatbin"));
    // The package, if it is not asked otherwise: a missing file would count as changed in every build.
    println!("cargo::rerun-if-changed={}", asked.as_ref().unwrap_or(&package).display());
    let there = folder.is_absolute() && folder.join("FACTS").is_file();
    assert!(
        there || asked.is_none(),
        "FAST_ALLREDUCE_KERNELS: {} is not the absolute path of a folder with kernels",
        folder.display()
    );
    if there {
        println!("cargo::metadata=folder={}", folder.display());
    }
}
