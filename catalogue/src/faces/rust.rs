//! `src/catalogue/generated.rs`: the library's enums, and the kernels that it loads.

use super::items::{
    begin_impl, columns, end_impl, enumeration, list, names, one_of, option, Column, COPY, NON_EXHAUSTIVE,
    SAVED,
};
use super::GENERATED;
use crate::collectives::{Collective, Counts, COLLECTIVES};
use crate::fused::{Group, Parameter, Scaling, NORMS, SCALINGS};
use crate::kernels::{Algorithm, Family, Kernel, KERNELS};
use crate::ops::{Op, Takes, OPS};
use crate::types::{Class, Type, HOT_WORLDS, KERNEL_TYPES, TYPES};

const HEAD: &str = "\
use serde::{Deserialize, Serialize};

use super::facts::{NormFacts, ScalingFacts, TypeFacts};
use crate::abi;
#[cfg(feature = \"cuda\")]
use super::facts::{KernelFacts, KernelFamily};
use crate::scale::Scale;

";

/// Returns the library's file.
pub fn library() -> String {
    let mut text = format!("//! {GENERATED}\n\n{HEAD}");
    facts_enums(&mut text);
    types(&mut text);
    ops(&mut text);
    algorithms(&mut text);
    call_kinds(&mut text);
    planned_calls(&mut text);
    norms(&mut text);
    scalings(&mut text);
    kernels(&mut text);
    text
}

/// Copies the enums of the tables.
fn facts_enums(text: &mut String) {
    let file = include_str!("../facts.rs");
    let (_, enums) = file.split_once("\n\n").unwrap_or_default();
    *text += &enums.replace("pub enum", "pub(crate) enum");
    *text += "\n";
}

fn types(text: &mut String) {
    let variants =
        TYPES.iter().zip(0..).map(|(one, code)| (one.doc.to_owned(), format!("{} = {code}", one.variant)));
    let doc = "Element type of a message.";
    enumeration(text, doc, &[SAVED, "repr(u32)", NON_EXHAUSTIVE], "DType", variants);
    begin_impl(text, "DType");
    let all = TYPES.iter().map(|one| one.variant);
    list(text, "All types, in the order of their codes.", "pub const ALL", all);
    let facts: Column<&Type> = (
        "Returns the facts about the type.",
        "pub(super) const fn facts(self) -> &'static TypeFacts",
        &type_facts,
    );
    columns(text, &[facts], || TYPES.iter().map(|one| (one.variant, one)));
    end_impl(text);
    names(text, "DTYPES", TYPES.iter().map(|one| one.name));
    let mut elements = |doc, name, which: &dyn Fn(&Type) -> bool| {
        let types = TYPES.iter().filter(|one| which(one));
        let types = types.filter_map(|one| Some(format!("{} => {}", one.rust?, one.variant)));
        let types = types.collect::<Vec<_>>().join(", ");
        *text += &format!("/// {doc}\nmacro_rules! {name} {{\n    ($then:ident) => {{\n");
        *text += &format!("        $then! {{ {types} }}\n    }};\n}}\npub(crate) use {name};\n\n");
    };
    elements("Passes the Rust types and their variants to a macro.", "with_elements", &|_| true);
    elements("Passes the Rust integers and their variants to a macro.", "with_integers", &|one| {
        one.class != Class::Float
    });
}

fn type_facts(one: &Type) -> String {
    let Type { name, bytes, nccl_tests, numpy, torch, dlpack, nccl, kernels, .. } = one;
    let is_float = one.class == Class::Float;
    let is_hot = KERNEL_TYPES.iter().any(|kernel| kernel.name == *kernels && kernel.hot);
    format!(
        "&TypeFacts {{ name: \"{name}\", size: {bytes}, is_float: {is_float}, nccl_tests: \"{nccl_tests}\", \
         numpy: \"{numpy}\", torch: \"{torch}\", dlpack: {dlpack}, nccl: {nccl:?}, kernels: \"{kernels}\", \
         is_hot: {is_hot} }}"
    )
}

fn ops(text: &mut String) {
    let with = |op: &Op, of: &dyn Fn(&str) -> String| {
        let parameter = op.parameter.map_or(String::new(), |parameter| format!("({})", of(parameter)));
        format!("{}{parameter}", op.variant)
    };
    let variants = OPS.iter().map(|op| (op.doc.to_owned(), with(op, &str::to_owned)));
    enumeration(text, include_str!("reduce_op.txt"), &[SAVED, NON_EXHAUSTIVE], "ReduceOp", variants);
    begin_impl(text, "ReduceOp");
    let of = |takes| {
        let of = OPS.iter().filter(move |op| op.takes == takes && op.parameter.is_none());
        of.map(|op| op.variant)
    };
    let doc = "Operations that support all element types, in the order of their codes.";
    list(text, doc, "pub const ARITHMETIC", of(Takes::All));
    let doc = "Operations that support integers only, in the order of their codes.";
    list(text, doc, "pub const INTEGER_ONLY", of(Takes::Integers));
    let all: Vec<_> = OPS.iter().map(|op| with(op, &|parameter| format!("{parameter}::ONE"))).collect();
    let doc = "All operations, in the order of their codes; a premultiplied sum with the scale 1.";
    list(text, doc, "pub(crate) const ALL", all.iter().map(String::as_str));
    #[rustfmt::skip]
    let methods: [Column<&Op>; 4] = [
        ("Returns the name, for example `\"sum\"`.",
         "pub const fn name(self) -> &'static str", &|op| quoted(op.name)),
        ("Returns the kernels' code. Ranks compare it; scales may differ among ranks.",
         "pub(crate) const fn code(self) -> u32", &|op| position(&OPS, |other| other.name == op.name)),
        (
            "Returns whether the operation is defined for a type.",
            "pub const fn is_of(self, dtype: DType) -> bool",
            &|op| match op.takes {
                Takes::All => "true".to_owned(),
                Takes::Integers => "!dtype.is_float()".to_owned(),
                Takes::Floats => "dtype.is_float()".to_owned(),
            },
        ),
        ("Returns the value of `ncclRedOp_t`, if NCCL has the operation as a constant.",
         "pub const fn nccl(self) -> Option<i32>", &|op| option(op.nccl)),
    ];
    let patterns: Vec<_> = OPS.iter().map(|op| with(op, &|_| "_".to_owned())).collect();
    columns(text, &methods, || patterns.iter().map(String::as_str).zip(&OPS));
    end_impl(text);
    let of = |class: Takes| OPS.iter().filter(move |op| [Takes::All, class].contains(&op.takes));
    let all = OPS.iter().map(|op| match op.parameter {
        Some(parameter) => format!("{}:{}", op.name, parameter.to_ascii_uppercase()),
        None => op.name.to_owned(),
    });
    names(text, "OPS", all.collect::<Vec<_>>().iter().map(String::as_str));
    let floats = one_of(of(Takes::Floats).map(|op| op.name));
    let integers = one_of(of(Takes::Integers).map(|op| op.name));
    *text += &format!("pub(super) const OPS_OF_FLOATS: &str = \"{floats} for floats\";\n\n");
    *text += &format!("pub(super) const OPS_OF_INTEGERS: &str = \"{integers} for integers\";\n\n");
}

/// Documentation of `Algorithm`.
const ALGORITHM: &str = "\
Algorithm of an allreduce. All direct algorithms give the same bits.

```
use fast_allreduce::Algorithm;

assert_eq!(\"two-shot-push\".parse(), Ok(Algorithm::TwoShotPush));
assert!(Algorithm::TwoShotPush.is_direct() && !Algorithm::Ring.is_direct());
```";

fn algorithms(text: &mut String) {
    let all: Vec<(&Kernel, Algorithm)> =
        KERNELS.iter().filter_map(|kernel| Some((kernel, kernel.algorithm?))).collect();
    let variants = all.iter().map(|(kernel, algorithm)| {
        (algorithm.doc.join("\n\n"), format!("{} = {}", algorithm.variant, code_of(kernel.name)))
    });
    enumeration(text, ALGORITHM, &[COPY, "repr(u32)", NON_EXHAUSTIVE], "Algorithm", variants);
    begin_impl(text, "Algorithm");
    let is_nvls = |kernel: &Kernel| kernel.family == Family::Nvls;
    let mut variants = |doc, constant, of: &dyn Fn(&Kernel, Algorithm) -> bool| {
        let of = all.iter().filter(|(kernel, algorithm)| of(kernel, *algorithm));
        list(text, doc, constant, of.map(|(_, algorithm)| algorithm.variant));
    };
    variants(
        "Algorithms of all devices, in the order of their codes. [`Self::NVLS`] has the others.",
        "pub const ALL",
        &|kernel, _| !is_nvls(kernel),
    );
    variants("In-switch reductions, for GPUs with NVSwitch.", "pub const NVLS", &|kernel, _| is_nvls(kernel));
    let doc = "Direct algorithms, which all give the same bits.";
    variants(doc, "pub const DIRECT", &|_, algorithm| algorithm.direct);
    #[rustfmt::skip]
    let methods: [Column<(&Kernel, Algorithm)>; 8] = [
        ("Returns the name in settings and on command lines, for example `\"one-shot-pull\"`.",
         "pub const fn name(self) -> &'static str", &|(_, algorithm)| quoted(algorithm.name)),
        ("Returns whether the algorithm is direct. All direct algorithms give the same bits.",
         "pub const fn is_direct(self) -> bool", &|(_, algorithm)| algorithm.direct.to_string()),
        ("Returns whether the algorithm is an in-switch reduction.",
         "pub const fn is_nvls(self) -> bool", &|(kernel, _)| is_nvls(kernel).to_string()),
        ("Returns the code of the kernel that sums by the algorithm and applies a norm, if there is one.",
         "pub(crate) const fn norm_kernel(self) -> Option<u32>", &|(kernel, _)| norm_kernel(kernel.name)),
        ("Returns the memory of a region that a launch uses.",
         "pub(crate) const fn capacity_rule(self) -> CapacityRule",
         &|(_, algorithm)| format!("CapacityRule::{:?}", algorithm.capacity)),
        ("Returns the work that is divided among the blocks of a grid.",
         "pub(crate) const fn work(self) -> Work", &|(_, algorithm)| format!("Work::{:?}", algorithm.work)),
        ("Returns when registered inputs are read directly.",
         "pub(crate) const fn reads_inputs(self) -> ReadsInputs",
         &|(_, algorithm)| format!("ReadsInputs::{:?}", algorithm.reads_inputs)),
        ("Returns whether each of two ranks reads only what the other has staged.",
         "pub(crate) const fn swaps_staging(self) -> bool", &|(_, algorithm)| algorithm.swaps_staging.to_string()),
    ];
    columns(text, &methods, || all.iter().map(|one| (one.1.variant, *one)));
    end_impl(text);
    names(text, "ALGORITHMS", all.iter().map(|(_, algorithm)| algorithm.name));
}

/// Documentation of `CallKind`.
const CALL_KIND: &str = "\
Kind of a call: a collective without its arguments, or a call of messages. Ranks compare the codes.

```
use fast_allreduce::CallKind;

assert_eq!(CallKind::AllGather.name(), \"all_gather\");
assert!(CallKind::Broadcast.has_root() && CallKind::ReduceScatter.reduces());
```";

fn call_kinds(text: &mut String) {
    let variants = COLLECTIVES.iter().zip(1..);
    let variants =
        variants.map(|(one, code)| (format!("`{}`", one.name), format!("{} = {code}", one.variant)));
    const KIND: &str =
        "derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)";
    let attributes = [KIND, NON_EXHAUSTIVE, "repr(u8)"];
    enumeration(text, CALL_KIND, &attributes, "CallKind", variants);
    begin_impl(text, "CallKind");
    let all: Vec<_> = COLLECTIVES.iter().map(|one| format!("Self::{}", one.variant)).collect();
    *text += &format!("    /// All kinds.\n    pub const ALL: &'static [Self] = &[{}];\n\n", all.join(", "));
    let measured = COLLECTIVES.iter().filter(|one| one.is_measured).map(|one| one.variant);
    list(text, "Calls that `bench` measures, as nccl-tests does.", "pub const MEASURED", measured);
    let code = |kernel: Option<&str>| option(kernel.map(code_of));
    #[rustfmt::skip]
    let methods: [Column<&Collective>; 14] = [
        ("Returns the name of the method, for example `\"all_gather\"`.",
         "pub const fn name(self) -> &'static str", &|one| quoted(one.name)),
        ("Returns the name as a C string.",
         "#[cfg(feature = \"nvtx\")]\n    pub(crate) const fn c_name(self) -> &'static std::ffi::CStr",
         &|one| format!("c{}", quoted(one.name))),
        ("Returns the elements that a rank reads.",
         "pub(crate) const fn reads(self) -> Extent", &|one| format!("Extent::{:?}", one.reads)),
        ("Returns the elements that a rank writes.",
         "pub(crate) const fn writes(self) -> Extent", &|one| format!("Extent::{:?}", one.writes)),
        ("Returns the overlap of input and output that makes the call in place.",
         "pub(crate) const fn in_place(self) -> InPlace", &|one| format!("InPlace::{:?}", one.in_place)),
        ("Returns the division of the call among launches.",
         "pub(crate) const fn division(self) -> Division", &|one| format!("Division::{:?}", one.division)),
        ("Returns the kernel's code, if all calls of the kind have the same kernel.",
         "pub(crate) const fn kernel(self) -> Option<u32>", &|one| code(one.kernel)),
        ("Returns the code of another kernel for large messages between more than two GPUs.",
         "pub(crate) const fn kernel_of_large(self) -> Option<u32>", &|one| code(one.kernel_of_large)),
        ("Returns whether two ranks may swap their staging.",
         "pub(crate) const fn swaps_staging(self) -> SwapsStaging",
         &|one| format!("SwapsStaging::{:?}", one.swaps_staging)),
        ("Returns whether elements are reduced.",
         "pub const fn reduces(self) -> bool", &|one| one.reduces.to_string()),
        ("Returns whether the call has a root.",
         "pub const fn has_root(self) -> bool", &|one| one.has_root.to_string()),
        ("Returns whether shares have counts by rank.",
         "pub const fn has_counts(self) -> bool", &|one| (one.counts != Counts::Equal).to_string()),
        ("Returns the rows of a plan's table that are for the call.",
         "pub(crate) const fn planned_as(self) -> PlannedCall", &|one| format!("PlannedCall::{}", one.planned_as)),
        ("Returns the ratio of bus bandwidth to algorithm bandwidth.",
         "pub(super) const fn bus(self) -> BusFactor", &|one| format!("BusFactor::{:?}", one.bus)),
    ];
    columns(text, &methods, || COLLECTIVES.iter().map(|one| (one.variant, one)));
    end_impl(text);
}

fn planned_calls(text: &mut String) {
    let mut planned: Vec<&'static str> = Vec::new();
    for one in &COLLECTIVES {
        if !planned.contains(&one.planned_as) {
            planned.push(one.planned_as);
        }
    }
    let variants = planned.iter().map(|variant| {
        let of = COLLECTIVES.iter().filter(|one| one.planned_as == *variant);
        let of: Vec<_> = of.map(|one| format!("`{}`", one.name)).collect();
        (of.join(", "), (*variant).to_owned())
    });
    let doc = "Calls that a row of a plan's [`Table`](crate::plan::Table) is for.";
    enumeration(text, doc, &[COPY, "repr(usize)", NON_EXHAUSTIVE], "PlannedCall", variants);
    begin_impl(text, "PlannedCall");
    list(text, "All of them.", "pub const ALL", planned.iter().copied());
    let name: Column<&str> = (
        "Returns the name in tuning files: `\"all_reduce\"`, ..., `\"messages\"`.",
        "pub const fn name(self) -> &'static str",
        &|variant| quoted(&snake(variant)),
    );
    columns(text, &[name], || planned.iter().map(|variant| (*variant, *variant)));
    end_impl(text);
}

/// Returns the name, type, default and documentation of a parameter.
fn parameter(parameter: Parameter) -> (&'static str, &'static str, &'static str, &'static str) {
    match parameter {
        Parameter::Epsilon => ("epsilon", "f32", "0.0", "Number that is added before the square root."),
        Parameter::UnitOffset => ("unit_offset", "bool", "false", "Whether 1 is added to each weight."),
    }
}

/// Documentation of `Norm`.
const NORM: &str = "\
Norm of the rows of a sum. `docs/fused.md` defines the arithmetic, to the bit.

```
use fast_allreduce::Norm;

let norm = Norm::Rms { epsilon: 1e-5, unit_offset: false };
assert_eq!((norm.name(), norm.takes_bias()), (\"rms\", false));
```";

/// Adds the enum of norms, whose variants hold parameters, and the table of their facts.
fn norms(text: &mut String) {
    let none = ("No norm.".to_owned(), "#[default]\n    None".to_owned());
    let variants = NORMS.iter().map(|norm| {
        let fields = norm.parameters.iter().map(|&one| {
            let (name, kind, _, doc) = parameter(one);
            format!("        /// {doc}\n        {name}: {kind},\n")
        });
        (norm.doc.to_owned(), format!("{} {{\n{}    }}", norm.variant, fields.collect::<String>()))
    });
    let attributes =
        ["derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)", NON_EXHAUSTIVE];
    enumeration(text, NORM, &attributes, "Norm", [none].into_iter().chain(variants));
    begin_impl(text, "Norm");
    *text += "    /// Returns the code; 0 for no norm.\n    pub const fn code(self) -> u32 {\n        match self {\n";
    *text += "            Self::None => 0,\n";
    for (norm, code) in NORMS.iter().zip(1..) {
        *text += &format!("            Self::{} {{ .. }} => {code},\n", norm.variant);
    }
    *text += "        }\n    }\n\n    /// Returns the norm of a code, with the parameters that it takes.\n";
    *text += "    pub(super) const fn known(code: u32, epsilon: f32, unit_offset: bool) -> Option<Self> {\n";
    *text += "        match code {\n            0 => Some(Self::None),\n";
    for (norm, code) in NORMS.iter().zip(1..) {
        let names: Vec<_> = norm.parameters.iter().map(|&one| parameter(one).0).collect();
        *text += &format!("            {code} => Some(Self::{} {{ {} }}),\n", norm.variant, names.join(", "));
    }
    *text += "            _ => None,\n        }\n    }\n\n";
    for one in [Parameter::Epsilon, Parameter::UnitOffset] {
        let (name, kind, default, _) = parameter(one);
        let of = NORMS.iter().filter(|norm| norm.parameters.contains(&one));
        let of: Vec<_> = of.map(|norm| format!("Self::{} {{ {name}, .. }}", norm.variant)).collect();
        *text += &format!("    /// Returns the parameter, or {default} for norms without it.\n");
        *text += &format!("    pub(crate) const fn {name}(self) -> {kind} {{\n        match self {{\n");
        *text += &format!("            {} => {name},\n", of.join(" | "));
        *text += &format!("            _ => {default},\n        }}\n    }}\n\n");
    }
    end_impl(text);
    *text += "/// Facts about the norms, and about the absence of one.\n";
    *text += &format!("pub(super) const NORMS: [NormFacts; {}] = [\n", NORMS.len() + 1);
    let facts = NORMS
        .iter()
        .map(|norm| (norm.name, norm.parameters.contains(&Parameter::UnitOffset), norm.takes_bias));
    for ((name, unit_offset, bias), code) in [("none", false, false)].into_iter().chain(facts).zip(0..) {
        *text += &format!(
            "    NormFacts {{ code: {code}, name: \"{name}\", takes_unit_offset: {unit_offset}, \
             takes_bias: {bias} }},\n"
        );
    }
    *text += "];\n\n";
    names(text, "NORM_NAMES", ["none"].into_iter().chain(NORMS.iter().map(|norm| norm.name)));
}

/// Documentation of `Scaling`.
const SCALING: &str = "\
Format of quantised rows: bits of a number, and elements that share a scale. `docs/quantized-rows.md` has the formulas.

```
use fast_allreduce::{DType, Scaling};

let scaling: Scaling = \"per_token\".parse()?;
assert_eq!((scaling, scaling.bits(), scaling.scale_type()), (Scaling::PerRow, 8, DType::F32));
assert_eq!(Scaling::Nvfp4.number_bytes(4096), 2048);
# Ok::<(), fast_allreduce::Error>(())
```";

fn scalings(text: &mut String) {
    let variants = SCALINGS.iter().zip(1..);
    let variants = variants.map(|(one, code)| (one.doc.to_owned(), format!("{} = {code}", one.variant)));
    enumeration(text, SCALING, &[SAVED, "repr(u32)", NON_EXHAUSTIVE], "Scaling", variants);
    begin_impl(text, "Scaling");
    let all = SCALINGS.iter().map(|one| one.variant);
    list(text, "All formats, in the order of their codes.", "pub const ALL", all);
    let facts: Column<&Scaling> = (
        "Returns the facts about the format.",
        "pub(super) const fn facts(self) -> &'static ScalingFacts",
        &|one| {
            let Scaling { name, aliases, bits, .. } = one;
            let is_given = one.group == Group::Given;
            let group = match one.group {
                Group::Given | Group::Row => None,
                Group::Elements(elements) => Some(elements),
            };
            let (rule, layout) = (one.rule.constant(), one.layout.constant());
            format!(
                "&ScalingFacts {{ name: \"{name}\", aliases: &{aliases:?}, bits: {bits}, is_given: {is_given}, \
                 group: {group:?}, rule: abi::{rule}, layout: abi::{layout} }}"
            )
        },
    );
    columns(text, &[facts], || SCALINGS.iter().map(|one| (one.variant, one)));
    end_impl(text);
    names(text, "SCALINGS", SCALINGS.iter().map(|one| one.name));
}

fn kernels(text: &mut String) {
    *text += "/// Kernels, by code.\n#[cfg(feature = \"cuda\")]\n";
    *text += &format!("pub(crate) const KERNELS: [KernelFacts; {}] = [\n", KERNELS.len());
    for kernel in &KERNELS {
        let family = match kernel.family {
            Family::Reducing => "Reducing",
            Family::Moving => "Moving",
            Family::Other => "Other",
            Family::Norming(_) | Family::Sharded => "Norming",
            Family::Nvls => "Nvls",
        };
        let (name, is_hot) = (kernel.entry(), kernel.is_hot());
        *text += &format!(
            "    KernelFacts {{ name: \"{name}\", family: KernelFamily::{family}, is_hot: {is_hot} }},\n"
        );
    }
    *text += "];\n\n/// World sizes that the hot set has kernels for.\n#[cfg(feature = \"cuda\")]\n";
    *text += &format!("pub(crate) const HOT_WORLDS: [usize; {}] = {HOT_WORLDS:?};\n", HOT_WORLDS.len());
}

/// Returns the code of the kernel that sums by an algorithm and applies a norm, if there is one.
fn norm_kernel(algorithm: &'static str) -> String {
    let kernel = KERNELS.iter().find(|norm| norm.family == Family::Norming(algorithm));
    option(kernel.map(|norm| code_of(norm.name)))
}

/// Returns a kernel's code.
fn code_of(kernel: &str) -> String {
    position(&KERNELS, |other| other.name == kernel)
}

/// Returns a row's position in its table, which is its code.
fn position<T>(table: &[T], is_row: impl Fn(&T) -> bool) -> String {
    table.iter().position(is_row).map_or_else(String::new, |code| code.to_string())
}

fn quoted(name: &str) -> String {
    format!("\"{name}\"")
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
