//! `python/lib/fast_allreduce/_catalogue.py`: the operations, torch's names of the types, formats of quantised rows,
//! and settings.

use super::GENERATED;
use crate::fused::{Group, SCALINGS};
use crate::kernels::KERNELS;
use crate::ops::{Takes, OPS};
use crate::settings::{Kind, SETTINGS};
use crate::types::TYPES;

const HEAD: &str = r#"
from __future__ import annotations

from enum import Enum
from os import PathLike
from typing import Literal, TypedDict


class ReduceOp(str, Enum):
    """Reduction operation. Elements are combined in rank order. Functions also accept the name, such as "sum".

    Bitwise operations support integers only. `premul_sum(scale)` returns another operation, which supports floats only.
    """

"#;

/// Returns the Python package's file.
pub fn tables() -> String {
    let mut text = format!("# {GENERATED}\n{HEAD}");
    let ops = || OPS.iter().filter(|op| op.parameter.is_none());
    let upper = |name: &str| name.to_ascii_uppercase();
    text.extend(ops().map(|op| format!("    {} = \"{}\"\n", upper(op.name), op.name)));
    text += "\n";
    let mut tuple = |doc: &str, name: &str, entries: &mut dyn Iterator<Item = String>| {
        let entries: String = entries.map(|entry| format!("    {entry},\n")).collect();
        let (open, close) = if name == "TORCH_OPS" { ('{', '}') } else { ('(', ')') };
        text += &format!("\n# {doc}\n{name} = {open}\n{entries}{close}\n");
    };
    let quoted = |name: &str| format!("\"{name}\"");
    tuple(
        "Types that can be reduced, by torch's names.",
        "TORCH_TYPES",
        &mut TYPES.iter().map(|one| quoted(one.torch)),
    );
    tuple(
        "Operations by the attribute of torch.distributed.ReduceOp.",
        "TORCH_OPS",
        &mut ops().filter_map(|op| Some(format!("{}: ReduceOp.{}", quoted(op.torch?), upper(op.name)))),
    );
    tuple(
        "Operations that support integers only.",
        "INTEGER_OPS",
        &mut ops().filter(|op| op.takes == Takes::Integers).map(|op| format!("ReduceOp.{}", upper(op.name))),
    );
    let given = SCALINGS.iter().filter(|one| one.group == Group::Given);
    tuple(
        "Formats of quantised rows whose scale is given.",
        "GIVEN_SCALINGS",
        &mut given.flat_map(|one| [&one.name].into_iter().chain(one.aliases)).map(|name| quoted(name)),
    );
    settings(&mut text);
    text
}

/// Adds the keywords of `Communicator.init` and `from_env`. These functions have a separate argument for the device.
fn settings(text: &mut String) {
    *text += "\n\nclass Settings(TypedDict, total=False):\n";
    *text += "    \"\"\"Settings of a communicator. None means the default.\"\"\"\n\n";
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
