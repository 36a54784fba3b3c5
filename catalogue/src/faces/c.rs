//! `capi/src/catalogue.rs`: the enums of the C header, and what their codes are in the library.

use super::GENERATED;
use crate::fused::{NORMS, SCALINGS};
use crate::ops::OPS;
use crate::types::TYPES;

/// The C library's file. cbindgen makes the header's enums of it.
pub fn enums() -> String {
    let mut text = format!("//! {GENERATED}\n\nuse fast_allreduce::{{DType, ReduceOp, Scaling}};\n\n");
    let types: Vec<_> =
        TYPES.iter().enumerate().map(|(code, one)| (code, one.variant.to_owned(), one.c_doc)).collect();
    let ops = OPS.iter().enumerate().filter(|(_, op)| op.parameter.is_none());
    let ops: Vec<_> = ops.map(|(code, op)| (code, capitalised(op.name), op.c_doc, op.variant)).collect();
    enumeration(&mut text, "Types of elements.", "dtype", types.iter().cloned());
    enumeration(
        &mut text,
        "How elements are combined, always in the order of the ranks.",
        "op",
        ops.iter().map(|(code, name, doc, _)| (*code, name.clone(), *doc)),
    );
    let none = |doc: &'static str| (0, "None".to_owned(), doc);
    let norms = NORMS.iter().zip(1..).map(|(one, code)| (code, one.variant.to_owned(), one.doc));
    let norms = [none("Nothing is normalised.")].into_iter().chain(norms);
    enumeration(&mut text, "How rows are normalised.", "norm", norms);
    let scalings = SCALINGS.iter().zip(1..).map(|(one, code)| (code, one.variant.to_owned(), one.doc));
    let scalings = [none("Rows are not quantised.")].into_iter().chain(scalings);
    enumeration(&mut text, "What rows are quantised to.", "scaling", scalings);
    lookup(&mut text, "dtype_of", "DType", types.iter().map(|(code, variant, _)| (*code, variant.as_str())));
    lookup(&mut text, "op_of", "ReduceOp", ops.iter().map(|(code, _, _, variant)| (*code, *variant)));
    let scalings = SCALINGS.iter().zip(1..).map(|(one, code)| (code, one.variant));
    lookup(&mut text, "scaling_of", "Scaling", scalings);
    text
}

fn enumeration<'a>(
    text: &mut String,
    doc: &str,
    name: &str,
    variants: impl Iterator<Item = (usize, String, &'a str)>,
) {
    *text += &format!("/// {doc}\n#[repr(u32)]\n#[derive(Clone, Copy)]\n#[expect(dead_code, reason = \"names for the header\")]\n");
    *text += &format!("pub enum fast_allreduce_{name} {{\n");
    for (code, variant, doc) in variants {
        *text += &format!("    /// {doc}\n    {variant} = {code},\n");
    }
    *text += "}\n\n";
}

fn lookup<'a>(text: &mut String, name: &str, kind: &str, variants: impl Iterator<Item = (usize, &'a str)>) {
    *text += &format!(
        "/// What a code stands for.\npub fn {name}(code: u32) -> Option<{kind}> {{\n    match code {{\n"
    );
    for (code, variant) in variants {
        *text += &format!("        {code} => Some({kind}::{variant}),\n");
    }
    *text += "        _ => None,\n    }\n}\n\n";
}

fn capitalised(name: &str) -> String {
    let (first, rest) = name.split_at(1);
    first.to_ascii_uppercase() + rest
}
