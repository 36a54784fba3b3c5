//! Tells the build script of fast-allreduce the folder of the kernels: that of this package, or another that
//! `FAST_ALLREDUCE_KERNELS` names. A clone has none until `scripts/kernels.sh` has run.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=FAST_ALLREDUCE_KERNELS");
    let asked =
        std::env::var_os("FAST_ALLREDUCE_KERNELS").filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = std::env::var_os("CARGO_MANIFEST_DIR").map(|package| Path::new(&package).join("fatbin"));
    let Some(folder) = asked.clone().or(own) else { panic!("cargo sets CARGO_MANIFEST_DIR") };
    println!("cargo::rerun-if-changed={}", folder.display());
    let there = folder.join("FACTS").is_file();
    assert!(there || asked.is_none(), "FAST_ALLREDUCE_KERNELS: {} has no kernels", folder.display());
    if there {
        println!("cargo::metadata=folder={}", folder.display());
    }
}
