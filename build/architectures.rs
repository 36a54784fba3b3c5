//! Selects the GPU architectures to compile for, from the user's request, this machine's GPUs and the
//! toolkit.

/// The meaning of `FAST_ALLREDUCE_ARCHS=all`: one architecture per generation with NVLink peers or in common
/// use; binaries also run on later minor versions.
pub const ALL: [&str; 8] = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"];

/// The default if no GPU is found: the architectures of server GPUs, and of the workstation GPUs that servers with
/// PCIe have (RTX PRO 6000).
pub const USUAL: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// Returns the architectures to compile for, the newest last. `asked` is `FAST_ALLREDUCE_ARCHS`, `gpus` are
/// the compute capabilities of this machine's GPUs, and `known` is what the toolkit compiles for.
///
/// # Errors
///
/// Names the architecture that `asked` or the toolkit lacks.
pub fn select(asked: Option<&str>, gpus: &[Capability], known: &[String]) -> Result<Vec<String>, String> {
    match asked {
        Some("all") => among(&ALL, known),
        Some(list) => listed(list, known),
        None => {
            let own: Vec<_> = gpus.iter().filter_map(|&gpu| code_for(gpu, known)).collect();
            // If all GPUs are too old, the build is for the GPUs of another machine.
            if own.is_empty() {
                among(&USUAL, known).or_else(|_| among(&ALL, known))
            } else {
                Ok(newest_last(known.iter().filter(|k| own.contains(&k.as_str()))))
            }
        }
    }
}

/// Virtual architectures whose PTX differs: the sources use nothing that was added in between or after the
/// last. PTX is two thirds of nvcc's time, so architectures share it.
const VIRTUAL: [u32; 4] = [70, 75, 80, 90];

/// Returns virtual architectures, and what to compile from the PTX of each: code for `archs`, and for the
/// newest one also the PTX itself, which the driver compiles for future GPUs.
pub fn targets(archs: &[String]) -> Vec<(String, Vec<String>)> {
    let mut targets: Vec<(String, Vec<String>)> = Vec::new();
    for arch in archs {
        let ptx = ptx_of(arch);
        match targets.last_mut() {
            Some((last, codes)) if *last == ptx => codes.push(arch.clone()),
            _ => targets.push((ptx, vec![arch.clone()])),
        }
    }
    if let Some((ptx, codes)) = targets.last_mut() {
        codes.push(ptx.clone());
    }
    targets
}

/// Returns the targets of the probes if the GPUs that they check are not known: PTX that the driver compiles
/// for any of `archs`.
pub fn ptx_alone(archs: &[String]) -> Vec<(String, Vec<String>)> {
    archs.first().map(|oldest| (ptx_of(oldest), vec![ptx_of(oldest)])).into_iter().collect()
}

/// Returns the virtual architecture of the PTX. An architecture with a suffix, such as sm_90a, has its own.
fn ptx_of(arch: &str) -> String {
    let shared = number(arch).and_then(|own| VIRTUAL.into_iter().filter(|&shared| shared <= own).max());
    match shared {
        Some(shared) if !arch.ends_with(char::is_alphabetic) => format!("compute_{shared}"),
        _ => arch.replace("sm_", "compute_"),
    }
}

/// A GPU's compute capability, such as 9.0: major, minor.
pub type Capability = (u32, u32);

/// Parses lines such as `9.0`, and skips others.
pub fn parse_capabilities(text: &str) -> Vec<Capability> {
    let parse = |line: &str| {
        let (major, minor) = line.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

/// Returns the newest of `known` that is not newer than the GPU. Its code runs there if the major versions
/// are equal; otherwise the driver compiles its PTX.
fn code_for(gpu: Capability, known: &[String]) -> Option<&str> {
    let runs = |arch: &&String| number(arch).is_some_and(|code| (code / 10, code % 10) <= gpu);
    known.iter().filter(runs).max_by_key(|arch| number(arch)).map(String::as_str)
}

/// Parses a comma-separated list, whose members must be in `known`.
fn listed(list: &str, known: &[String]) -> Result<Vec<String>, String> {
    let asked = || list.split(',').map(str::trim).filter(|arch| !arch.is_empty());
    if let Some(arch) = asked().find(|arch| !known.iter().any(|k| k == arch)) {
        return Err(format!(
            "{arch:?} is neither `all` alone nor an architecture that nvcc knows; it knows {}",
            known.join(" ")
        ));
    }
    let archs = newest_last(known.iter().filter(|k| asked().any(|arch| arch == k.as_str())));
    (!archs.is_empty()).then_some(archs).ok_or_else(|| format!("{list:?} names no architecture"))
}

/// Returns those of `wanted` that are known.
fn among(wanted: &[&str], known: &[String]) -> Result<Vec<String>, String> {
    let archs = newest_last(known.iter().filter(|k| wanted.contains(&k.as_str())));
    let none = || format!("nvcc knows none of {}", wanted.join(" "));
    (!archs.is_empty()).then_some(archs).ok_or_else(none)
}

fn newest_last<'a>(archs: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut archs: Vec<String> = archs.cloned().collect();
    // Numerically: as text, sm_100 precedes sm_70.
    archs.sort_by_key(|arch| number(arch));
    archs
}

fn number(arch: &str) -> Option<u32> {
    arch.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic).parse().ok()
}
