//! Compiles the families of kernels in `csrc/cuda`, each to a fatbin, for the architectures of this machine's
//! GPUs or the requested ones, or copies the kernels of the crate `fast-allreduce-kernels`.
//!
//! A missing toolkit is not an error: the fatbins are then empty, and the crate reports at run time that it
//! was built without CUDA, and why. A toolkit that was requested explicitly but is unusable, or that fails to
//! compile, is an error.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[path = "architectures.rs"]
mod architectures;

use architectures::Capability;

use crate::fingerprint;
use crate::prebuilt::{self, Facts};

/// The outcome of building the CUDA kernels.
#[derive(Debug)]
pub enum Outcome {
    /// The fatbins in `out_dir` are those of the crate `fast-allreduce-kernels`.
    Prebuilt { facts: Facts, fatbin_bytes: u64 },
    /// nvcc has compiled the fatbins in `out_dir`.
    Built { nvcc: PathBuf, version: String, archs: Vec<String>, fatbin_bytes: u64 },
    /// The fatbins are empty.
    Absent { reason: String },
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Built { nvcc, version, archs, fatbin_bytes } => {
                write!(f, "nvcc {version} ({}) for {}, {fatbin_bytes} bytes", nvcc.display(), archs.join(" "))
            }
            Self::Prebuilt { facts: Facts { nvcc, archs, .. }, fatbin_bytes } => {
                write!(f, "prebuilt by nvcc {nvcc} for {}, {fatbin_bytes} bytes", archs.join(" "))
            }
            Self::Absent { reason } => write!(f, "none: {reason}"),
        }
    }
}

/// The families of kernels, slowest to compile first; the library loads each as a module.
const KERNELS: [&str; 4] = ["cuda/norms", "cuda/any_world", "cuda/hot_set", "cuda/others"];
/// Modules that only the feature `probes` embeds. They take more than a quarter of nvcc's time, so if the
/// GPUs that they check are not known, only their PTX is built.
const PROBES: [&str; 2] = ["probes/worlds", "probes/costs"];

/// Writes a fatbin for each family of kernels to `out_dir`, and sets `FAST_ALLREDUCE_CUDA_BUILD` for the crate that is
/// being built: one line that describes the build. `sources` is the fingerprint of `csrc`.
///
/// # Panics
///
/// If nvcc rejects a source, prebuilt kernels are not those of the sources, or an environment variable requests
/// something impossible. A panic is how a build script reports an error to cargo.
pub fn build(csrc: &Path, sources: u64, out_dir: &Path) -> Outcome {
    // Cargo walks a folder; the flags are compiled into this build script, so cargo watches them.
    println!("cargo:rerun-if-changed={}", csrc.display());
    let probes = env_var("CARGO_FEATURE_PROBES").map_or(&[][..], |_| &PROBES);
    let units: Vec<_> = KERNELS.iter().chain(probes).map(|name| Unit::new(csrc, out_dir, name)).collect();
    let (kernels, probes) = units.split_at(KERNELS.len());
    let outcome = match Source::find() {
        Source::Nvcc(toolkit) => toolkit.compile(csrc, sources, out_dir, &units),
        Source::Prebuilt(folder) => {
            println!("cargo:rerun-if-changed={}", folder.display());
            let names: Vec<_> = kernels.iter().map(Unit::name).collect();
            let (facts, fatbin_bytes) = Facts::copy(&folder, (sources, hash_of_flags()), &names, out_dir)
                .unwrap_or_else(|reason| panic!("{reason}"));
            assert!(
                env_var("FAST_ALLREDUCE_ARCHS").is_none(),
                "FAST_ALLREDUCE_ARCHS: the prebuilt kernels are for {}; FAST_ALLREDUCE_NVCC=PATH compiles others",
                facts.archs.join(" ")
            );
            write_empty(probes);
            Outcome::Prebuilt { facts, fatbin_bytes }
        }
        Source::Absent(reason) => {
            write_empty(&units);
            Outcome::Absent { reason }
        }
    };
    println!("cargo:rustc-env=FAST_ALLREDUCE_CUDA_BUILD={}", one_line(&outcome.to_string()));
    outcome
}

/// `include_bytes!` needs the files in any case.
fn write_empty(units: &[Unit]) {
    for Unit { fatbin, .. } in units {
        fs::write(fatbin, []).unwrap_or_else(|e| panic!("{}: {e}", fatbin.display()));
    }
}

/// A source that one nvcc process compiles.
struct Unit {
    source: PathBuf,
    fatbin: PathBuf,
}

impl Unit {
    fn new(csrc: &Path, out_dir: &Path, name: &str) -> Self {
        let file = name.rsplit('/').next().unwrap_or(name);
        Self { source: csrc.join(format!("{name}.cu")), fatbin: out_dir.join(format!("{file}.fatbin")) }
    }

    /// Returns the fatbin's name.
    fn name(&self) -> String {
        self.fatbin.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn read(&self) -> Vec<u8> {
        fs::read(&self.fatbin).unwrap_or_else(|e| panic!("{}: {e}", self.fatbin.display()))
    }
}

/// Where the kernels come from.
enum Source {
    Nvcc(Toolkit),
    /// A folder of kernels.
    Prebuilt(PathBuf),
    /// Nowhere, for this reason.
    Absent(String),
}

impl Source {
    fn find() -> Self {
        if env_var("CARGO_FEATURE_CUDA").is_none() {
            return Self::Absent("the feature `cuda` is off".into());
        }
        if env_var("DOCS_RS").is_some() {
            return Self::Absent("DOCS_RS is set".into());
        }
        // An explicit request is used or is an error; falling back would hide a mistake.
        if let Some(asked) = env_var("FAST_ALLREDUCE_NVCC") {
            if asked == "none" {
                return Self::Absent("FAST_ALLREDUCE_NVCC=none".into());
            }
            let toolkit = Toolkit::at(Path::new(&asked));
            return Self::Nvcc(toolkit.unwrap_or_else(|reason| panic!("FAST_ALLREDUCE_NVCC: {reason}")));
        }
        // From the build script of the crate with the kernels, unless that is a clone, which has none.
        if let Some(folder) = env_var("DEP_FAST_ALLREDUCE_KERNELS_FOLDER") {
            return Self::Prebuilt(folder.into());
        }
        let mut unusable = Vec::new();
        let places = PLACES.iter().flat_map(|place| place());
        for nvcc in places.map(|folder| folder.join("nvcc")).filter(|nvcc| nvcc.is_file()) {
            match Toolkit::at(&nvcc) {
                Ok(toolkit) => return Self::Nvcc(toolkit),
                Err(reason) => unusable.push(reason),
            }
        }
        if !unusable.is_empty() {
            return Self::Absent(unusable.join("; "));
        }
        let mut reason =
            "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda, nor from scripts/cuda-toolchain.sh"
                .to_owned();
        if env_var("CARGO_FEATURE_PREBUILT").is_some() {
            reason +=
                ", and no kernels in fast-allreduce-kernels (in a clone, scripts/kernels.sh compiles them)";
        }
        Self::Absent(reason)
    }
}

/// A working nvcc.
struct Toolkit {
    nvcc: PathBuf,
    /// Such as `13.0.88`.
    version: String,
    /// Every `sm_` that it compiles for.
    archs: Vec<String>,
}

impl Toolkit {
    fn at(nvcc: &Path) -> Result<Self, String> {
        if !nvcc.is_file() {
            return Err(format!("{} is not a file", nvcc.display()));
        }
        // Recompile when a toolkit is replaced in place, or becomes usable.
        println!("cargo:rerun-if-changed={}", nvcc.display());
        let answer = |option| {
            let output = run(Command::new(nvcc).arg(option));
            let output = output.map_err(|e| format!("{} did not start: {e}", nvcc.display()))?;
            if output.status.success() {
                Ok(String::from_utf8_lossy(&output.stdout).into_owned())
            } else {
                Err(format!("{} {option} failed ({})", nvcc.display(), output.status))
            }
        };
        let version = parse_version(&answer("--version")?)
            .ok_or_else(|| format!("{} --version names no version", nvcc.display()))?;
        let archs = parse_archs(&answer("--list-gpu-code")?);
        // It must know at least one architecture, whatever the GPUs and settings are.
        architectures::select(Some("all"), &[], &archs)
            .map_err(|reason| format!("{} {version}: {reason}", nvcc.display()))?;
        Ok(Self { nvcc: nvcc.into(), version, archs })
    }

    /// Compiles the units, as many in parallel as cargo's `-j` allows.
    fn compile(self, csrc: &Path, sources: u64, out_dir: &Path, units: &[Unit]) -> Outcome {
        let asked = env_var("FAST_ALLREDUCE_ARCHS").map(|asked| asked.to_string_lossy().into_owned());
        let gpus = if asked.is_none() { gpus() } else { Vec::new() };
        let archs = architectures::select(asked.as_deref(), &gpus, &self.archs)
            .unwrap_or_else(|reason| panic!("FAST_ALLREDUCE_ARCHS: {reason}"));
        let targets = architectures::targets(&archs);
        let targets_of_probes = match asked.is_some() || !gpus.is_empty() {
            true => targets.clone(),
            false => architectures::ptx_alone(&archs),
        };
        // nvcc itself reads these.
        for name in ["NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"] {
            env_var(name);
        }
        let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1).max(1);
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..jobs.min(units.len()) {
                scope.spawn(|| loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(unit) = units.get(index) else { break };
                    let targets = if index < KERNELS.len() { &targets } else { &targets_of_probes };
                    self.compile_one(csrc, targets, unit, jobs.div_ceil(units.len()));
                });
            }
        });
        let kernels: Vec<_> = units[..KERNELS.len()].iter().map(|unit| (unit.name(), unit.read())).collect();
        let fatbin_bytes = kernels.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        // For the crate that packs the kernels.
        let facts = Facts {
            sources,
            flags: hash_of_flags(),
            nvcc: self.version.clone(),
            archs: archs.clone(),
            fatbins: kernels
                .iter()
                .map(|(name, bytes)| (name.clone(), fingerprint::of_bytes(bytes)))
                .collect(),
        };
        let file = out_dir.join(prebuilt::FILE);
        fs::write(&file, facts.to_string()).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        Outcome::Built { nvcc: self.nvcc, version: self.version, archs, fatbin_bytes }
    }

    fn compile_one(&self, csrc: &Path, targets: &[(String, Vec<String>)], unit: &Unit, threads: usize) {
        let mut command = Command::new(&self.nvcc);
        command.arg("-fatbin").args(flags()).arg(self.compression()).arg("-I").arg(csrc);
        command.args(
            targets.iter().map(|(ptx, codes)| format!("-gencode=arch={ptx},code=[{}]", codes.join(","))),
        );
        command.arg("--threads").arg(threads.to_string());
        command.arg("-o").arg(&unit.fatbin).arg(&unit.source);

        let output = run(&mut command).unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "nvcc failed ({}); FAST_ALLREDUCE_NVCC=none builds without CUDA\n{command:?}\n{}{stderr}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
        );
        for line in stderr.lines().filter(|line| !line.trim().is_empty()) {
            println!("cargo:warning={line}");
        }
    }

    /// Returns the option for the smallest format that loads on every driver on which the toolkit's code runs. Under
    /// CUDA 12, `--compress-mode` would need driver 550, while the older format needs 525; the drivers of CUDA 13
    /// (580 and later) read both.
    fn compression(&self) -> &'static str {
        let major = self.version.split('.').next().and_then(|n| n.parse::<u32>().ok());
        if major >= Some(13) {
            "--compress-mode=size"
        } else {
            "-Xfatbin=-compress-all"
        }
    }
}

/// Folders that may have nvcc, the most deliberately chosen first. They are evaluated lazily, so that only
/// variables that matter are watched: a change of PATH does not rebuild if CUDA_HOME decided.
const PLACES: [fn() -> Vec<PathBuf>; 4] = [in_variables, in_path, in_usual_place, in_cache];

fn in_variables() -> Vec<PathBuf> {
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env_var);
    roots.map(|root| Path::new(&root).join("bin")).collect()
}

fn in_path() -> Vec<PathBuf> {
    let path = env_var("PATH").unwrap_or_default();
    env::split_paths(&path).filter(|folder| folder.is_absolute()).collect()
}

fn in_usual_place() -> Vec<PathBuf> {
    vec!["/usr/local/cuda/bin".into()]
}

/// Returns the folder in which `scripts/cuda-toolchain.sh` installs.
fn in_cache() -> Vec<PathBuf> {
    let in_home = || env_var("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = env_var("XDG_CACHE_HOME").map(PathBuf::from).or_else(in_home);
    cache.map(|cache| cache.join("fast-allreduce/cuda-13.0/bin")).into_iter().collect()
}

const FLAGS: &str = include_str!("nvcc.flags");

fn flags() -> impl Iterator<Item = &'static str> {
    FLAGS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn hash_of_flags() -> u64 {
    fingerprint::of_bytes(FLAGS.as_bytes())
}

/// Parses `release 13.0, V13.0.88` to `13.0.88`.
fn parse_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("release "))?;
    Some(line.rsplit_once(", V")?.1.trim().into())
}

fn parse_archs(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|line| line.starts_with("sm_")).map(Into::into).collect()
}

/// Returns the compute capabilities of this machine's GPUs from nvidia-smi, whatever CUDA_VISIBLE_DEVICES
/// says; none if it is not installed or fails.
fn gpus() -> Vec<Capability> {
    let mut driver = Command::new("nvidia-smi");
    driver.args(["--query-gpu=compute_cap", "--format=csv,noheader"]);
    let text = within(Duration::from_secs(20), &mut driver).unwrap_or_default();
    architectures::parse_capabilities(&text)
}

/// Returns the output of a program that succeeds within a limit. A program that waits for a broken driver may
/// never end. The output must fit in a pipe's buffer.
fn within(limit: Duration, command: &mut Command) -> Option<String> {
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    while child.try_wait().ok()?.is_none() {
        if started.elapsed() > limit {
            // Not waited for: a process that is stuck in the driver does not end.
            let _ = child.kill();
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads a variable that affects the result: cargo runs the build script again when it changes. An empty
/// variable counts as not set.
fn env_var(name: &str) -> Option<OsString> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var_os(name).filter(|value| !value.is_empty())
}

fn run(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).output()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
