//! `src/catalogue/generated.rs`: the library's enums, and the kernels that it loads.

use super::GENERATED;
use crate::collectives::{Collective, Counts, COLLECTIVES};
use crate::fused::{Group, Parameter, NORMS, SCALINGS};
use crate::kernels::{Algorithm, Family, Kernel, KERNELS};
use crate::ops::{Takes, OPS};
use crate::types::{Class, Type, HOT_WORLDS, KERNEL_TYPES, TYPES};

/// The library's file.
pub fn library() -> String {
    let mut text = format!(
        "//! {GENERATED}\n\nuse super::facts::{{NormFacts, ScalingFacts, TypeFacts}};\n#[cfg(feature = \"cuda\")]\nuse super::facts::{{KernelFacts, KernelFamily}};\nuse crate::scale::Scale;\n\n"
    );
    facts_enums(&mut text);
    types(&mut text);
    ops(&mut text);
    algorithms(&mut text);
    collectives(&mut text);
    norms(&mut text);
    scalings(&mut text);
    kernels(&mut text);
    text
}

/// The words of the tables, as the library's own enums.
fn facts_enums(text: &mut String) {
    let file = include_str!("../facts.rs");
    let (_, enums) = file.split_once("\n\n").unwrap_or_default();
    *text += &enums.replace("pub enum", "pub(crate) enum");
    *text += "\n";
}

fn types(text: &mut String) {
    *text += "/// The type of the elements of a message.\n#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[repr(u32)]\n\
              #[non_exhaustive]\npub enum DType {\n";
    for (code, one) in TYPES.iter().enumerate() {
        *text += &format!("    /// {}\n    {} = {code},\n", one.doc, one.variant);
    }
    *text += "}\n\nimpl DType {\n    /// All types, in the order of their codes.\n";
    *text += &format!("    pub const ALL: [Self; {}] = [\n", TYPES.len());
    for one in &TYPES {
        *text += &format!("        Self::{},\n", one.variant);
    }
    *text += "    ];\n\n    #[inline]\n    pub(super) const fn facts(self) -> &'static TypeFacts {\n        match self {\n";
    for one in &TYPES {
        *text += &format!("            Self::{} => &{},\n", one.variant, facts(one));
    }
    *text += "        }\n    }\n}\n\n";
    let names: Vec<_> = TYPES.iter().map(|one| one.name).collect();
    *text += &format!("pub(super) const DTYPES: &str = \"one of {}\";\n\n", names.join(", "));
    let with = |doc, cfg, name, which: &dyn Fn(&Type) -> bool| {
        let types: Vec<_> = TYPES
            .iter()
            .filter(|one| which(one))
            .filter_map(|one| Some(format!("{} => {}", one.rust?, one.variant)))
            .collect();
        let types = types.join(", ");
        format!(
            "/// {doc}\n{cfg}macro_rules! {name} {{\n    ($then:ident) => {{ $then! {{ {types} }} }};\n}}\n\
             {cfg}pub(crate) use {name};\n\n"
        )
    };
    *text += &with("Hands a macro the Rust types and their variants.", "", "with_elements", &|_| true);
    *text += &with(
        "Hands a macro the Rust integers and their variants.",
        "#[cfg(feature = \"mpi\")]\n",
        "with_integers",
        &|one| one.class != Class::Float,
    );
}

fn facts(one: &Type) -> String {
    let Type { name, bytes, nccl_tests, numpy, torch, dlpack, nccl, kernels, .. } = one;
    let is_float = one.class == Class::Float;
    let is_hot = KERNEL_TYPES.iter().any(|kernel| kernel.name == *kernels && kernel.hot);
    format!(
        "TypeFacts {{ name: \"{name}\", size: {bytes}, is_float: {is_float}, nccl_tests: \"{nccl_tests}\", numpy: \"{numpy}\", \
         torch: \"{torch}\", dlpack: {dlpack}, nccl: {nccl:?}, kernels: \"{kernels}\", is_hot: {is_hot} }}"
    )
}

fn ops(text: &mut String) {
    *text += include_str!("reduce_op.txt");
    *text += "#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[non_exhaustive]\npub enum ReduceOp {\n";
    for op in &OPS {
        let parameter = op.parameter.map_or(String::new(), |parameter| format!("({parameter})"));
        *text += &format!("    /// {}\n    {}{parameter},\n", op.doc, op.variant);
    }
    *text += "}\n\nimpl ReduceOp {\n";
    let list = |text: &mut String, doc: &str, name: &str, takes: Takes| {
        let of: Vec<_> = OPS.iter().filter(|op| op.takes == takes && op.parameter.is_none()).collect();
        let variants: Vec<_> = of.iter().map(|op| format!("Self::{}", op.variant)).collect();
        *text += &format!(
            "    /// {doc}\n    pub const {name}: [Self; {}] = [{}];\n\n",
            of.len(),
            variants.join(", ")
        );
    };
    list(text, "Operations of every element type, in the order of their codes.", "ARITHMETIC", Takes::All);
    list(text, "Operations of integers alone, in the order of their codes.", "INTEGER_ONLY", Takes::Integers);
    *text += "    /// Every operation, in the order of the codes, with a scale of 1 where there is one.\n";
    let all = OPS.iter().map(|op| match op.parameter {
        Some(parameter) => format!("Self::{}({parameter}::ONE)", op.variant),
        None => format!("Self::{}", op.variant),
    });
    let all: Vec<_> = all.collect();
    *text += &format!("    pub(crate) const ALL: [Self; {}] = [{}];\n\n", OPS.len(), all.join(", "));
    let by_op = |text: &mut String, head: &str, value: &dyn Fn(&crate::ops::Op) -> String| {
        *text += head;
        *text += "        match self {\n";
        for op in &OPS {
            let pattern = op.parameter.map_or("", |_| "(_)");
            *text += &format!("            Self::{}{pattern} => {},\n", op.variant, value(op));
        }
        *text += "        }\n    }\n\n";
    };
    by_op(
        text,
        "    /// The name that the field uses: `\"sum\"`, `\"prod\"`, ...\n    pub const fn name(self) -> &'static str {\n",
        &|op| format!("\"{}\"", op.name),
    );
    by_op(
        text,
        "    /// The kernels' code. Ranks compare it; a scale is each rank's own.\n    #[inline]\n    pub(crate) const fn code(self) -> u32 {\n",
        &|op| position(&OPS, |other| other.name == op.name),
    );
    by_op(
        text,
        "    /// Whether it is defined for elements of a type.\n    pub const fn is_of(self, dtype: DType) -> bool {\n",
        &|op| match op.takes {
            Takes::All => "true".to_owned(),
            Takes::Integers => "!dtype.is_float()".to_owned(),
            Takes::Floats => "dtype.is_float()".to_owned(),
        },
    );
    by_op(
        text,
        "    /// `ncclRedOp_t`, where NCCL has the operation without making it first.\n    pub const fn nccl(self) -> Option<i32> {\n",
        &|op| op.nccl.map_or("None".to_owned(), |code| format!("Some({code})")),
    );
    text.truncate(text.len() - 1);
    *text += "}\n\n";
    let of = |class: Takes| {
        let names: Vec<_> =
            OPS.iter().filter(|op| [Takes::All, class].contains(&op.takes)).map(|op| op.name).collect();
        names.join(", ")
    };
    let (floats, integers) = (of(Takes::Floats), of(Takes::Integers));
    let all: Vec<_> = OPS
        .iter()
        .map(|op| {
            op.parameter.map_or(op.name.to_owned(), |parameter| format!("{}:{}", op.name, upper(parameter)))
        })
        .collect();
    *text += &format!("pub(super) const OPS: &str = \"one of {}\";\n", all.join(", "));
    *text += &format!("pub(super) const OPS_OF_FLOATS: &str = \"one of {floats} for floats\";\n");
    *text += &format!("pub(super) const OPS_OF_INTEGERS: &str = \"one of {integers} for integers\";\n\n");
}

fn algorithms(text: &mut String) {
    let all: Vec<(&Kernel, Algorithm)> =
        KERNELS.iter().filter_map(|kernel| Some((kernel, kernel.algorithm?))).collect();
    *text += "/// How an allreduce is done. The direct ones agree bit for bit.\n#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n\
              #[repr(u32)]\n#[non_exhaustive]\npub enum Algorithm {\n";
    for (kernel, algorithm) in &all {
        let doc: Vec<_> = algorithm.doc.iter().map(|paragraph| format!("    /// {paragraph}\n")).collect();
        *text += &format!("{}    {} = {},\n", doc.join("    ///\n"), algorithm.variant, code_of(kernel.name));
    }
    *text += "}\n\nimpl Algorithm {\n";
    let list = |text: &mut String, doc: &str, name: &str, of: &dyn Fn(&Kernel, Algorithm) -> bool| {
        let of: Vec<_> = all.iter().filter(|(kernel, algorithm)| of(kernel, *algorithm)).collect();
        let variants: Vec<_> =
            of.iter().map(|(_, algorithm)| format!("Self::{}", algorithm.variant)).collect();
        *text += &format!(
            "    /// {doc}\n    pub const {name}: [Self; {}] = [{}];\n\n",
            of.len(),
            variants.join(", ")
        );
    };
    let is_nvls = |kernel: &Kernel| kernel.family == Family::Nvls;
    list(
        text,
        "Algorithms of every device, in the order of their codes. [`Self::NVLS`] has the others.",
        "ALL",
        &|kernel, _| !is_nvls(kernel),
    );
    list(text, "In-switch reductions, of GPUs with NVSwitch.", "NVLS", &|kernel, _| is_nvls(kernel));
    list(text, "Direct algorithms, which agree bit for bit.", "DIRECT", &|_, algorithm| algorithm.direct);
    let rows = || all.iter().map(|(kernel, algorithm)| (algorithm.variant, (*kernel, *algorithm)));
    let columns: [Column<(&Kernel, Algorithm)>; 9] = [
        (
            "Its name on command lines: `\"one-shot-pull\"`, ...",
            "pub const fn name",
            "&'static str",
            &|(_, algorithm)| format!("\"{}\"", algorithm.name),
        ),
        (
            "Whether results have the bits that all direct algorithms give.",
            "pub const fn is_direct",
            "bool",
            &|(_, algorithm)| algorithm.direct.to_string(),
        ),
        ("Whether it is an in-switch reduction.", "pub const fn is_nvls", "bool", &|(kernel, _)| {
            is_nvls(kernel).to_string()
        }),
        (
            "The code of the kernel that sums by it and then normalises by RMS, where there is one.",
            "pub(crate) const fn norm_kernel",
            "Option<u32>",
            &|(kernel, _)| norm_kernel(Family::Norming(kernel.name)),
        ),
        (
            "The code of the kernel that sums by it and then applies another norm, where there is one.",
            "pub(crate) const fn other_norm_kernel",
            "Option<u32>",
            &|(kernel, _)| norm_kernel(Family::OtherNorming(kernel.name)),
        ),
        (
            "What a launch takes of a region.",
            "pub(crate) const fn capacity_rule",
            "CapacityRule",
            &|(_, algorithm)| format!("CapacityRule::{:?}", algorithm.capacity),
        ),
        ("What the blocks of a grid share.", "pub(crate) const fn work", "Work", &|(_, algorithm)| {
            format!("Work::{:?}", algorithm.work)
        }),
        (
            "When it reads registered inputs where they are.",
            "pub(crate) const fn reads_inputs",
            "ReadsInputs",
            &|(_, algorithm)| format!("ReadsInputs::{:?}", algorithm.reads_inputs),
        ),
        (
            "Whether each of two ranks reads what the other has staged and nobody its own.",
            "pub(crate) const fn swaps_staging",
            "bool",
            &|(_, algorithm)| algorithm.swaps_staging.to_string(),
        ),
    ];
    columns_of(text, &columns, rows);
    *text += "}\n\n";
    let names: Vec<_> = all.iter().map(|(_, algorithm)| algorithm.name).collect();
    *text += &format!("pub(super) const ALGORITHMS: &str = \"one of {}\";\n\n", names.join(", "));
}

fn collectives(text: &mut String) {
    *text += "/// A collective or a call of messages, without its arguments. The codes are those that ranks compare.\n\
              #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]\n#[non_exhaustive]\n#[repr(u8)]\n\
              pub enum CallKind {\n";
    for (one, code) in COLLECTIVES.iter().zip(1..) {
        *text += &format!("    /// `{}`\n    {} = {code},\n", one.name, one.variant);
    }
    let variants = |of: &dyn Fn(&Collective) -> bool| {
        let of = COLLECTIVES.iter().filter(|one| of(one)).map(|one| format!("Self::{}", one.variant));
        of.collect::<Vec<_>>()
    };
    *text += "}\n\nimpl CallKind {\n";
    let all = variants(&|_| true);
    *text +=
        &format!("    /// All of them.\n    pub const ALL: &'static [Self] = &[{}];\n\n", all.join(", "));
    let measured = variants(&|one| one.is_measured);
    *text += "    /// Calls that nccl-tests measures.\n";
    *text += &format!("    pub const MEASURED: [Self; {}] = [{}];\n\n", measured.len(), measured.join(", "));
    let columns: [Column<&Collective>; 14] = [
        ("The name of its method: `\"all_gather\"`, ...", "pub const fn name", "&'static str", &|one| {
            format!("\"{}\"", one.name)
        }),
        (
            "The name as C strings are.",
            "#[cfg(feature = \"nvtx\")]\n    pub(crate) const fn c_name",
            "&'static std::ffi::CStr",
            &|one| format!("c\"{}\"", one.name),
        ),
        ("What a rank reads.", "pub(crate) const fn reads", "Extent", &|one| {
            format!("Extent::{:?}", one.reads)
        }),
        ("What a rank writes.", "pub(crate) const fn writes", "Extent", &|one| {
            format!("Extent::{:?}", one.writes)
        }),
        ("When it is in place.", "pub(crate) const fn in_place", "InPlace", &|one| {
            format!("InPlace::{:?}", one.in_place)
        }),
        ("How it is divided among launches.", "pub(crate) const fn division", "Division", &|one| {
            format!("Division::{:?}", one.division)
        }),
        (
            "Its kernel's code, where every call has the same.",
            "pub(crate) const fn kernel",
            "Option<u32>",
            &|one| one.kernel.map_or("None".to_owned(), |kernel| format!("Some({})", code_of(kernel))),
        ),
        (
            "The code of another kernel, for large messages between more than two GPUs.",
            "pub(crate) const fn kernel_of_large",
            "Option<u32>",
            &|one| {
                one.kernel_of_large.map_or("None".to_owned(), |kernel| format!("Some({})", code_of(kernel)))
            },
        ),
        (
            "Whether two ranks may swap their staging.",
            "pub(crate) const fn swaps_staging",
            "SwapsStaging",
            &|one| format!("SwapsStaging::{:?}", one.swaps_staging),
        ),
        ("Whether elements are combined.", "pub const fn reduces", "bool", &|one| one.reduces.to_string()),
        ("Whether one rank has another part than the others.", "pub const fn has_root", "bool", &|one| {
            one.has_root.to_string()
        }),
        ("Whether shares have counts by rank.", "pub const fn has_counts", "bool", &|one| {
            (one.counts != Counts::Equal).to_string()
        }),
        (
            "The rows of a plan's table that are for it.",
            "pub(crate) const fn planned_as",
            "PlannedCall",
            &|one| format!("PlannedCall::{}", one.planned_as),
        ),
        ("Its bus bandwidth.", "pub(super) const fn bus", "BusFactor", &|one| {
            format!("BusFactor::{:?}", one.bus)
        }),
    ];
    columns_of(text, &columns, || COLLECTIVES.iter().map(|one| (one.variant, one)));
    *text += "}\n\n";
    let mut planned: Vec<&str> = Vec::new();
    for one in &COLLECTIVES {
        if !planned.contains(&one.planned_as) {
            planned.push(one.planned_as);
        }
    }
    *text += "/// The calls that a row of a plan's [`Table`](crate::plan::Table) is for.\n\
              #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[repr(usize)]\n#[non_exhaustive]\npub enum PlannedCall {\n";
    for variant in &planned {
        let of: Vec<_> = COLLECTIVES
            .iter()
            .filter(|one| one.planned_as == *variant)
            .map(|one| format!("`{}`", one.name))
            .collect();
        *text += &format!("    /// {}\n    {variant},\n", of.join(", "));
    }
    let all: Vec<_> = planned.iter().map(|variant| format!("Self::{variant}")).collect();
    *text += &format!(
        "}}\n\nimpl PlannedCall {{\n    /// All of them.\n    pub const ALL: [Self; {}] = [{}];\n\n",
        planned.len(),
        all.join(", ")
    );
    *text += "    /// Its name in files: `\"all_reduce\"`, ..., `\"messages\"`.\n    pub const fn name(self) -> &'static str {\n        match self {\n";
    for variant in &planned {
        *text += &format!("            Self::{variant} => \"{}\",\n", snake(variant));
    }
    *text += "        }\n    }\n}\n\n";
}

/// A method that tells a column of a table: its documentation, signature, result, and value for a row.
type Column<'a, Row> = (&'a str, &'a str, &'a str, &'a dyn Fn(Row) -> String);

/// The methods of an enum whose variants are the rows of a table.
///
/// A match for each column, whose values the compiler folds: with rows behind a pointer, calls of 1 KiB took 20 ns more on the
/// host.
fn columns_of<Row, Rows>(text: &mut String, columns: &[Column<Row>], rows: impl Fn() -> Rows)
where
    Rows: Iterator<Item = (&'static str, Row)>,
{
    for (doc, signature, result, value) in columns {
        let mut by_value: Vec<(String, Vec<String>)> = Vec::new();
        for (variant, row) in rows() {
            let (value, variant) = (value(row), format!("Self::{variant}"));
            match by_value.iter_mut().find(|(other, _)| *other == value) {
                Some((_, variants)) => variants.push(variant),
                None => by_value.push((value, vec![variant])),
            }
        }
        *text += &format!(
            "    /// {doc}\n    #[inline]\n    {signature}(self) -> {result} {{\n        match self {{\n"
        );
        for (value, variants) in by_value {
            *text += &format!("            {} => {value},\n", variants.join(" | "));
        }
        *text += "        }\n    }\n\n";
    }
}

fn kernels(text: &mut String) {
    *text += "/// The kernels, by code.\n#[cfg(feature = \"cuda\")]\n";
    *text += &format!("pub(crate) const KERNELS: [KernelFacts; {}] = [\n", KERNELS.len());
    for kernel in &KERNELS {
        let family = match kernel.family {
            Family::Reducing => "Reducing",
            Family::Moving => "Moving",
            Family::Other => "Other",
            Family::Norming(_) | Family::OtherNorming(_) => "Norming",
            Family::Nvls => "Nvls",
        };
        *text += &format!(
            "    KernelFacts {{ name: \"{}\", family: KernelFamily::{family}, is_hot: {} }},\n",
            kernel.name,
            kernel.is_hot()
        );
    }
    *text += "];\n\n/// Numbers of ranks that the hot set has kernels for.\n#[cfg(feature = \"cuda\")]\n";
    *text += &format!("pub(crate) const HOT_WORLDS: [usize; {}] = {HOT_WORLDS:?};\n", HOT_WORLDS.len());
}

/// The enum of norms, whose variants hold parameters, and the table of their facts.
fn norms(text: &mut String) {
    let of_type = |parameter: &Parameter| match parameter {
        Parameter::Epsilon => ("epsilon", "f32", "Is added before the square root."),
        Parameter::UnitOffset => ("unit_offset", "bool", "The weight is 1 more than what stands in memory."),
    };
    *text += "/// How the rows of a sum are normalised. `docs/fused.md` has the arithmetic, to the bit.\n\
              #[derive(Debug, Clone, Copy, PartialEq, Default)]\n#[non_exhaustive]\npub enum Norm {\n    \
              /// Not at all.\n    #[default]\n    None,\n";
    for norm in &NORMS {
        *text += &format!("    /// {}\n    {} {{\n", norm.doc, norm.variant);
        for (name, kind, doc) in norm.parameters.iter().map(of_type) {
            *text += &format!("        /// {doc}\n        {name}: {kind},\n");
        }
        *text += "    },\n";
    }
    *text += "}\n\nimpl Norm {\n    /// Its code; 0 for none.\n    pub const fn code(self) -> u32 {\n        match self {\n            Self::None => 0,\n";
    for (norm, code) in NORMS.iter().zip(1..) {
        *text += &format!("            Self::{} {{ .. }} => {code},\n", norm.variant);
    }
    *text += "        }\n    }\n\n    /// The norm of a code, with the parameters that it takes.\n    \
              pub(super) const fn known(code: u32, epsilon: f32, unit_offset: bool) -> Option<Self> {\n        \
              match code {\n            0 => Some(Self::None),\n";
    for (norm, code) in NORMS.iter().zip(1..) {
        let names: Vec<_> = norm.parameters.iter().map(|one| of_type(one).0).collect();
        *text += &format!("            {code} => Some(Self::{} {{ {} }}),\n", norm.variant, names.join(", "));
    }
    *text += "            _ => None,\n        }\n    }\n\n";
    for (parameter, default) in [(Parameter::Epsilon, "0.0"), (Parameter::UnitOffset, "false")] {
        let (name, kind, _) = of_type(&parameter);
        let of = NORMS.iter().filter(|norm| norm.parameters.contains(&parameter));
        let of: Vec<_> = of.map(|norm| format!("Self::{} {{ {name}, .. }}", norm.variant)).collect();
        *text += &format!(
            "    /// What it has of that, if anything.\n    pub(crate) const fn {name}(self) -> {kind} {{\n        match self {{\n            {} => {name},\n            _ => {default},\n        }}\n    }}\n\n",
            of.join(" | ")
        );
    }
    *text += "}\n\n/// All norms, and the absence of one.\n";
    *text += &format!("pub(super) const NORMS: [NormFacts; {}] = [\n", NORMS.len() + 1);
    *text += "    NormFacts { code: 0, name: \"none\", takes_unit_offset: false, takes_bias: false },\n";
    for (norm, code) in NORMS.iter().zip(1..) {
        *text += &format!(
            "    NormFacts {{ code: {code}, name: \"{}\", takes_unit_offset: {}, takes_bias: {} }},\n",
            norm.name,
            norm.parameters.contains(&Parameter::UnitOffset),
            norm.takes_bias
        );
    }
    let names: Vec<_> = NORMS.iter().map(|norm| norm.name).collect();
    *text += &format!("];\n\npub(super) const NORM_NAMES: &str = \"one of none, {}\";\n\n", names.join(", "));
}

fn scalings(text: &mut String) {
    *text += "/// A format of quantised rows: bits of a number, and which elements have a scale in common. `docs/fused.md` has the formulas.\n\
              #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[repr(u32)]\n#[non_exhaustive]\npub enum Scaling {\n";
    for (one, code) in SCALINGS.iter().zip(1..) {
        *text += &format!("    /// {}\n    {} = {code},\n", one.doc, one.variant);
    }
    let all: Vec<_> = SCALINGS.iter().map(|one| format!("Self::{}", one.variant)).collect();
    *text += &format!(
        "}}\n\nimpl Scaling {{\n    /// All formats, in the order of their codes.\n    pub const ALL: [Self; {}] = [{}];\n\n    \
         pub(super) const fn facts(self) -> &'static ScalingFacts {{\n        match self {{\n",
        all.len(),
        all.join(", ")
    );
    for one in &SCALINGS {
        let group = match one.group {
            Group::Given | Group::Row => None,
            Group::Elements(elements) => Some(elements),
        };
        *text += &format!(
            "            Self::{} => &ScalingFacts {{ name: \"{}\", aliases: &{:?}, bits: {}, is_given: {}, group: {group:?}, is_tiled: {} }},\n",
            one.variant,
            one.name,
            one.aliases,
            one.bits,
            one.group == Group::Given,
            one.is_tiled
        );
    }
    let names: Vec<_> = SCALINGS.iter().map(|one| one.name).collect();
    *text += &format!(
        "        }}\n    }}\n}}\n\npub(super) const SCALINGS: &str = \"one of {}\";\n\n",
        names.join(", ")
    );
}

/// The code of the kernel of a family, if there is one.
fn norm_kernel(family: Family) -> String {
    let norm = KERNELS.iter().find(|norm| norm.family == family);
    norm.map_or("None".to_owned(), |norm| format!("Some({})", code_of(norm.name)))
}

/// A kernel's code.
fn code_of(kernel: &str) -> String {
    position(&KERNELS, |other| other.name == kernel)
}

/// A row's position in its table, which is its code.
fn position<T>(table: &[T], is_row: impl Fn(&T) -> bool) -> String {
    table.iter().position(is_row).map_or_else(String::new, |code| code.to_string())
}

fn snake(variant: &str) -> String {
    let mut name = String::new();
    for character in variant.chars() {
        if character.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(character.to_ascii_lowercase());
    }
    name
}

fn upper(name: &str) -> String {
    name.to_ascii_uppercase()
}
