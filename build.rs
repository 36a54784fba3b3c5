//! Compiles `csrc/` for the host, once for each instruction set, and for CUDA if there is an nvcc or prebuilt kernels.

use std::path::{Path, PathBuf};

#[path = "build/cuda.rs"]
mod cuda;
#[path = "build/fingerprint.rs"]
mod fingerprint;
#[path = "build/prebuilt.rs"]
mod prebuilt;

macro_rules! avx512 {
    () => {
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mbmi2 -mprefer-vector-width=512"
    };
}

/// The variant that is joined first.
const FIRST: &str = "baseline";

/// An instruction set: name, compiler flags, sources.
type Variant = (&'static str, &'static str, &'static [&'static str]);

const SOURCES: &[&str] = &["entry.cpp", "loops.cpp"];

/// The instruction sets of the host device, in ascending order. `src/device/host/isa.rs` lists the same names.
const X86_64: [Variant; 4] = [
    // For processors older than current servers: without the hot set.
    (FIRST, "-DFA_HOT_SET=0", SOURCES),
    ("avx2", "-mavx2 -mf16c -mbmi2", SOURCES),
    (
        "avx512",
        concat!(
            avx512!(),
            " -DFA_BF16_ENTRY=fast_allreduce_host_avx512_bf16 -DFA_BF16_NAMESPACE=fast_allreduce_avx512_bf16"
        ),
        SOURCES,
    ),
    // The other code would be the same.
    ("avx512_bf16", concat!(avx512!(), " -mavx512bf16 -DFA_ONLY_BF16"), &["loops.cpp"]),
];
const OTHER: [Variant; 1] = [(FIRST, "", SOURCES)];

fn main() {
    let csrc = Path::new(&variable("CARGO_MANIFEST_DIR")).join("csrc");
    println!("cargo:rerun-if-changed={}", csrc.display());
    println!("cargo:rerun-if-changed=build.rs");
    let sources = fingerprint::of(&csrc).unwrap_or_else(|error| panic!("{}: {error}", csrc.display()));
    println!("cargo:rustc-env=FAST_ALLREDUCE_SOURCES={sources:016x}");

    let x86_64 = variable("CARGO_CFG_TARGET_ARCH") == "x86_64";
    let variants: &[Variant] = if x86_64 { &X86_64 } else { &OTHER };
    // One archive for each, built in parallel: cc parallelises only within an archive.
    let out_dir = PathBuf::from(variable("OUT_DIR"));
    let compilers = variants.iter().map(|&(isa, flags, sources)| {
        let (csrc, folder) = (csrc.clone(), out_dir.join(isa));
        std::thread::spawn(move || compile_host(&csrc, folder, isa, flags, sources))
    });
    for (compiler, (isa, ..)) in compilers.collect::<Vec<_>>().into_iter().zip(variants) {
        if let Err(panic) = compiler.join() {
            std::panic::resume_unwind(panic);
        }
        // Not by the threads: the order decides the bytes of what is linked. The first has printed its own.
        if *isa != FIRST {
            println!("cargo:rustc-link-search=native={}", out_dir.join(isa).display());
            println!("cargo:rustc-link-lib=static=fast_allreduce_host_{isa}");
        }
    }

    cuda::build(&csrc, sources, &out_dir);
}

/// `out_dir` is a folder of this variant: the objects have the same names, and are written at the same time.
fn compile_host(csrc: &Path, out_dir: PathBuf, isa: &str, flags: &str, sources: &[&str]) {
    std::fs::create_dir_all(&out_dir).unwrap_or_else(|error| panic!("{}: {error}", out_dir.display()));
    let mut build = cc::Build::new();
    build
        .out_dir(out_dir)
        .cpp(true)
        .std("c++17")
        .files(sources.iter().map(|file| csrc.join("host").join(file)))
        .define("FA_NAMESPACE", format!("fast_allreduce_{isa}").as_str())
        .define("FA_HOST_ENTRY", format!("fast_allreduce_host_{isa}").as_str())
        // Independent of the profile: the kernels are the product. Their vectors are explicit, so -O3 would
        // only add size.
        .opt_level(2)
        .debug(false)
        .warnings(true)
        .extra_warnings(true)
        .flag("-ffp-contract=off") // a fused multiply-add would round differently from the other devices
        .flag("-fno-math-errno") // so that a square root is one instruction
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .cpp_link_stdlib(None)
        // The environment variables that the compilation depends on, and the library.
        .cargo_metadata(isa == FIRST);
    for flag in flags.split_whitespace() {
        build.flag(flag);
    }
    build.compile(&format!("fast_allreduce_host_{isa}"));
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|error| panic!("cargo sets {name}: {error}"))
}
