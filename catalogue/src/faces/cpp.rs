//! `csrc/catalogue.h`: the tables as lists for the preprocessor; `csrc/algorithms/all.cuh`: lists of includes.

use std::fmt::Write as _;

use super::GENERATED;
use crate::fused::{NORMS, SCALINGS};
use crate::kernels::{Family, Kernel, KERNELS};
use crate::ops::{Takes, OPS};
use crate::types::{Class, HOT_WORLDS, KERNEL_TYPES, TYPES};

const INTRODUCTION: &str = "\
//
// FA_<LIST>(X, ...) expands to X(entry, ...) for each entry, so that lists can be nested. The fields of an
// entry (the code is the enumerator, the number its value):
//
//   FA_TYPES        code, number, name, element, bytes, class (floats or integers), kernel type
//   FA_SIGNED       codes of signed integers
//   FA_KERNEL_TYPES types that GPU kernels are compiled for: name, element
//   FA_OPS          code, number, name, classes of types (all, integers or floats)
//   FA_COMBINING    ways to combine values: code, classes of types, case labels of the operations that use it
//   FA_REDUCING     kernels that reduce: code, number, name
//   FA_HOT          kernels that reduce and have a hot set: code, number, name
//   FA_MOVING       kernels that move bytes: code, number, name
//   FA_OTHER        kernels with separate entry points: code, number, name
//   FA_NORMING      kernels of fused allreduces, for hot types: code, number, name, algorithm
//   FA_NORMING_NAMES each of their names once: some share one
//   FA_NVLS         in-switch reductions of hot types, on sm_90 and newer: code, number, name
//   FA_SHARDED      norms of rows that are divided among ranks, for hot types: code, number, name
//   FA_NORMS        norms of rows: code, number, functor
//   FA_SCALINGS     formats of quantised rows: code, number, bits of a number
//   FA_HOT_TYPES    types of the hot set: name, element
//   FA_HOT_WORLDS   world sizes of the hot set
";

/// Returns the header.
pub fn header() -> String {
    let mut text = format!("// {GENERATED}\n{INTRODUCTION}");
    text += "#ifndef FAST_ALLREDUCE_CATALOGUE_H\n#define FAST_ALLREDUCE_CATALOGUE_H\n\n// clang-format off\n";
    let types = TYPES.iter().enumerate().map(|(code, one)| {
        let class = match one.class {
            Class::Float => "floats",
            Class::Signed | Class::Unsigned => "integers",
        };
        let (name, element) = (one.name, one.element);
        format!("FA_{}, {code}, {name}, {element}, {}, {class}, {}", upper(name), one.bytes, one.kernels)
    });
    list(&mut text, "TYPES", types);
    let signed = TYPES.iter().filter(|one| one.class == Class::Signed);
    list(&mut text, "SIGNED", signed.map(|one| format!("FA_{}", upper(one.name))));
    list(&mut text, "KERNEL_TYPES", KERNEL_TYPES.iter().map(|one| format!("{}, {}", one.name, one.element)));
    let ops = OPS.iter().enumerate();
    list(
        &mut text,
        "OPS",
        ops.map(|(code, op)| format!("FA_{}, {code}, {}, {}", upper(op.name), op.name, class(op.takes))),
    );
    let combining = OPS.iter().filter(|op| op.combines_as.is_none());
    let combining = combining.map(|op| {
        let of = OPS.iter().filter(|other| other.name == op.name || other.combines_as == Some(op.name));
        let cases: String = of.map(|op| format!(" case FA_{}:", upper(op.name))).collect();
        format!("FA_{}, {},{cases}", upper(op.name), class(op.takes))
    });
    list(&mut text, "COMBINING", combining);
    kernels(&mut text, "REDUCING", |kernel| kernel.family == Family::Reducing);
    kernels(&mut text, "HOT", Kernel::is_hot);
    kernels(&mut text, "MOVING", |kernel| kernel.family == Family::Moving);
    kernels(&mut text, "OTHER", |kernel| kernel.family == Family::Other);
    let is_norming = |kernel: &&Kernel| matches!(kernel.family, Family::Norming(_));
    kernels(&mut text, "NORMING", |kernel| is_norming(&kernel));
    let mut names: Vec<_> =
        KERNELS.iter().filter(is_norming).map(|kernel| kernel.entry().to_owned()).collect();
    names.dedup();
    list(&mut text, "NORMING_NAMES", names.into_iter());
    kernels(&mut text, "NVLS", |kernel| kernel.family == Family::Nvls);
    kernels(&mut text, "SHARDED", |kernel| kernel.family == Family::Sharded);
    let norms = NORMS.iter().zip(1..);
    list(
        &mut text,
        "NORMS",
        norms.map(|(one, code)| format!("FA_NORM_{}, {code}, {}Norm", upper(one.name), one.variant)),
    );
    let scalings = SCALINGS.iter().zip(1..);
    list(
        &mut text,
        "SCALINGS",
        scalings.map(|(one, code)| format!("FA_SCALE_{}, {code}, {}", upper(one.name), one.bits)),
    );
    let hot = KERNEL_TYPES.iter().filter(|one| one.hot);
    list(&mut text, "HOT_TYPES", hot.map(|one| format!("{}, {}", one.name, one.element)));
    list(&mut text, "HOT_WORLDS", HOT_WORLDS.iter().map(u32::to_string));
    text += "// clang-format on\n\n#endif\n";
    text
}

/// Returns `csrc/algorithms/reducing.cuh` (kernels that reduce) or `csrc/algorithms/all.cuh` (all kernels).
pub fn includes(of_reducing: bool) -> String {
    let of_file = |kernel: &&Kernel| match kernel.family {
        Family::Reducing | Family::Norming(_) => of_reducing,
        Family::Moving | Family::Other | Family::Nvls | Family::Sharded => !of_reducing,
    };
    let mut files: Vec<_> =
        KERNELS.iter().filter(of_file).map(|kernel| format!("#include \"{}.cuh\"\n", kernel.file)).collect();
    if !of_reducing {
        files.push("#include \"reducing.cuh\"\n".to_owned());
    }
    files.sort();
    files.dedup();
    let subject = if of_reducing { "The algorithms that reduce" } else { "All algorithms" };
    format!("// {subject}.\n//\n// {GENERATED}\n#pragma once\n\n{}", files.concat())
}

fn class(takes: Takes) -> &'static str {
    match takes {
        Takes::All => "all",
        Takes::Integers => "integers",
        Takes::Floats => "floats",
    }
}

fn kernels(text: &mut String, name: &str, of: impl Fn(&Kernel) -> bool) {
    let entries = KERNELS.iter().enumerate().filter(|(_, kernel)| of(kernel)).map(|(code, kernel)| {
        let of = match kernel.family {
            Family::Norming(algorithm) => format!(", {algorithm}"),
            Family::Reducing | Family::Moving | Family::Other | Family::Nvls | Family::Sharded => {
                String::new()
            }
        };
        format!("FA_{}, {code}, {}{of}", upper(kernel.name), kernel.entry())
    });
    list(text, name, entries);
}

fn list(text: &mut String, name: &str, entries: impl Iterator<Item = String>) {
    let lines: Vec<_> = entries.map(|entry| format!("  X({entry}, __VA_ARGS__)")).collect();
    // Writing to a string does not fail.
    let _ = writeln!(text, "#define FA_{name}(X, ...) \\\n{}\n", lines.join(" \\\n"));
}

fn upper(name: &str) -> String {
    name.to_ascii_uppercase()
}
