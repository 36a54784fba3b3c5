//! `python/lib/fast_allreduce/_catalogue.py`: the operations, torch's names of the types, formats of quantised rows, and settings.

use super::GENERATED;
use crate::fused::{Group, SCALINGS};
use crate::kernels::KERNELS;
use crate::ops::{Takes, OPS};
use crate::settings::{Kind, SETTINGS};
use crate::types::TYPES;

/// The Python package's file.
pub fn tables() -> String {
    let mut text = format!("# {GENERATED}\n\nfrom __future__ import annotations\n\nfrom enum import Enum\nfrom os import PathLike\nfrom typing import Literal, TypedDict\n\n\nclass ReduceOp(str, Enum):\n");
    text += "    \"\"\"How elements are combined, always in the order of the ranks. Its name, such as \"sum\", does as well.\n\n    \
             The bitwise ones are of integers. `premul_sum(scale)` makes another one, of floats.\n    \"\"\"\n\n";
    for op in OPS.iter().filter(|op| op.parameter.is_none()) {
        text += &format!("    {} = \"{}\"\n", op.name.to_ascii_uppercase(), op.name);
    }
    text += "\n\n# Types that can be reduced, by torch's names.\nTORCH_TYPES = (\n";
    for one in &TYPES {
        text += &format!("    \"{}\",\n", one.torch);
    }
    text += ")\n\n# Operations by the attribute of torch.distributed.ReduceOp.\nTORCH_OPS = {\n";
    for op in OPS.iter().filter(|op| op.parameter.is_none()) {
        let Some(torch) = op.torch else { continue };
        text += &format!("    \"{torch}\": ReduceOp.{},\n", op.name.to_ascii_uppercase());
    }
    text += "}\n\n# Operations that floating-point types do not have.\nINTEGER_OPS = (\n";
    for op in OPS.iter().filter(|op| op.takes == Takes::Integers) {
        text += &format!("    ReduceOp.{},\n", op.name.to_ascii_uppercase());
    }
    text += ")\n\n# Formats of quantised rows whose scale is given.\nGIVEN_SCALINGS = (\n";
    for one in SCALINGS.iter().filter(|one| one.group == Group::Given) {
        for name in [&one.name].into_iter().chain(one.aliases) {
            text += &format!("    \"{name}\",\n");
        }
    }
    text += ")\n";
    settings(&mut text);
    text
}

/// The keywords of `Communicator.init` and `from_env`, which take the device by itself.
fn settings(text: &mut String) {
    *text += "\n\nclass Settings(TypedDict, total=False):\n    \"\"\"Settings of a communicator. None is the default.\"\"\"\n\n";
    for one in SETTINGS {
        let takes = match one.kind {
            Kind::Switch => "bool".into(),
            Kind::Seconds => "float".into(),
            Kind::Bytes => "int | str".into(),
            Kind::Count(_) => "int".into(),
            Kind::Choice(words) => literal(words.all.iter().map(|word| word.name)),
            Kind::Algorithm => literal(KERNELS.iter().filter_map(|kernel| Some(kernel.algorithm?.name))),
            Kind::Tuning => "str | PathLike[str]".into(),
            Kind::Device => continue,
        };
        *text += &format!(
            "    # {}\n    # Default: {}.\n    {}: {takes} | None\n",
            super::without_links(one.doc),
            one.default,
            one.name
        );
    }
}

fn literal<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.map(|word| format!("\"{word}\"")).collect();
    format!("Literal[{}]", words.join(", "))
}
