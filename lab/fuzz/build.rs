//! Lists the decoders: every use of `decoder!` in the library.

use std::path::{Path, PathBuf};

fn main() {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src");
    println!("cargo::rerun-if-changed={}", library.display());
    let mut names = Vec::new();
    find(&library, &mut names);
    names.sort();
    let declared: String = names.iter().map(|name| format!("    fn {name}(bytes: &[u8]);\n")).collect();
    let listed: String = names.iter().map(|name| format!("    (\"{name}\", {name}),\n")).collect();
    let code = format!(
        "extern \"Rust\" {{\n{declared}}}\n\
         /// Every decoder, by its name.\n\
         pub const DECODERS: &[(&str, unsafe fn(&[u8]))] = &[\n{listed}];\n"
    );
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap()).join("decoders.rs");
    std::fs::write(out, code).unwrap();
}

fn find(folder: &Path, names: &mut Vec<String>) {
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            find(&path, names);
        } else {
            let text = std::fs::read_to_string(&path).unwrap();
            let uses = text.split("testing::decoder!(").skip(1);
            names.extend(uses.map(|used| used.split(',').next().unwrap().to_owned()));
        }
    }
}
