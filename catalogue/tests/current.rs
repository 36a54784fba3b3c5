//! Checks that the tables are consistent, and that the committed files are equal to the generated ones.

use std::collections::BTreeSet;
use std::path::Path;

use catalogue::faces::{self, Part};
use catalogue::kernels::{Family, KERNELS};
use catalogue::ops::OPS;
use catalogue::settings::{Kind, OTHER_VARIABLES, SETTINGS};
use catalogue::types::{HOT_WORLDS, KERNEL_TYPES, TYPES};

#[test]
fn committed_files_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for file in faces::all() {
        let committed = std::fs::read_to_string(root.join(file.path)).unwrap_or_default();
        let generated = file.rendered(&root).unwrap_or_else(|error| panic!("{}: {error}", file.path));
        let differs = committed.lines().zip(generated.lines()).position(|(old, new)| old != new);
        assert!(
            committed == generated,
            "{} differs from the catalogue (first at line {differs:?}): \
             run cargo run -p fast-allreduce-catalogue --example generate",
            file.path
        );
    }
}

/// The sentences of these documents name the world sizes of the hot set.
#[test]
fn documents_name_the_hot_worlds() {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for world in HOT_WORLDS {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == world => *last = world,
            _ => ranges.push((world, world)),
        }
    }
    let named = ranges.iter().map(|&(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first} to {last}"),
    });
    let phrase = format!("{} ranks", named.collect::<Vec<_>>().join(" and "));
    for document in ["docs/architecture.md", "docs/glossary.md", "docs/gpu.md"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(document);
        let text = std::fs::read_to_string(path).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(&phrase), "{document} does not say that the hot set is of {phrase}");
    }
}

#[test]
fn a_region_without_markers_is_refused() {
    let part = Part::Region { name: "types", text: "new\n".into() };
    let replaced = part.applied("a\n<!-- catalogue: types -->\nold\n<!-- catalogue: end -->\nb\n").unwrap();
    assert_eq!(replaced, "a\n<!-- catalogue: types -->\nnew\n<!-- catalogue: end -->\nb\n");
    for text in ["", "<!-- catalogue: types -->\n", "<!-- catalogue: ops -->\n<!-- catalogue: end -->\n"] {
        assert!(part.applied(text).is_err(), "{text:?}");
    }
}

#[test]
fn names_are_unique_and_refer_to_rows() {
    fn unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) {
        let mut seen = BTreeSet::new();
        for name in names {
            assert!(seen.insert(name), "{what} {name} is listed twice");
        }
    }
    unique("type", TYPES.iter().map(|one| one.name));
    unique("type's variant", TYPES.iter().map(|one| one.variant));
    unique("operation", OPS.iter().map(|one| one.name));
    unique("kernel", KERNELS.iter().map(|one| one.name));
    unique("algorithm", KERNELS.iter().filter_map(|one| one.algorithm).map(|one| one.name));
    unique("kernel type", KERNEL_TYPES.iter().map(|one| one.name));
    unique("setting", SETTINGS.iter().map(|one| one.name));
    let variables = SETTINGS.iter().filter_map(|one| one.environment.name());
    let others = OTHER_VARIABLES.iter().flat_map(|(names, _)| names.split(", "));
    unique("variable", variables.chain(others));
    for one in &TYPES {
        assert!(one.bytes.is_power_of_two(), "{}: alignment is checked with a mask", one.name);
        assert!(
            KERNEL_TYPES.iter().any(|kernels| kernels.name == one.kernels),
            "{}: no kernels {}",
            one.name,
            one.kernels
        );
        // Parsing would be ambiguous if a name in another library were the name of another type.
        for name in [one.nccl_tests, one.numpy, one.torch] {
            let other = TYPES.iter().find(|other| {
                other.variant != one.variant
                    && [other.name, other.nccl_tests, other.numpy, other.torch].contains(&name)
            });
            assert!(other.is_none(), "{name} is {} and {}", one.name, other.unwrap().name);
        }
    }
    for one in &KERNELS {
        if let Family::Norming(of) = one.family {
            assert!(
                KERNELS.iter().any(|kernel| kernel.name == of && kernel.family == Family::Reducing),
                "{}: no kernel {of}",
                one.name
            );
        }
    }
    // Every algorithm of the hot set has a kernel with a norm, so that its plans can always be fused.
    for hot in KERNELS.iter().filter(|kernel| kernel.is_hot()) {
        assert!(
            KERNELS.iter().any(|kernel| kernel.family == Family::Norming(hot.name)),
            "{} has no norm",
            hot.name
        );
    }
}

#[test]
fn defaults_are_values_or_descriptions() {
    for one in SETTINGS {
        let is_value = match one.kind {
            Kind::Switch => ["0", "1"].contains(&one.default),
            Kind::Count(most) => one.default.parse().is_ok_and(|number| (1..=most).contains(&number)),
            Kind::Choice(words) => words.all.iter().any(|word| word.name == one.default),
            Kind::Device => one.default == "cpu",
            Kind::Seconds | Kind::Bytes | Kind::Algorithm | Kind::Tuning => false,
        };
        assert!(is_value || one.default.contains(' '), "{}: {}", one.name, one.default);
        assert!(one.doc.ends_with('.'), "{}: {}", one.name, one.doc);
    }
}
