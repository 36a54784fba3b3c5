//! `capi/src/catalogue.rs`: the enums of the C header, and lookups of their codes.

use super::items::enumeration;
use super::GENERATED;
use crate::fused::{NORMS, SCALINGS};
use crate::ops::OPS;
use crate::types::TYPES;

/// Returns the C library's file. cbindgen generates the header's enums from it.
pub fn enums() -> String {
    let mut text = format!("//! {GENERATED}\n\nuse fast_allreduce::{{DType, ReduceOp, Scaling}};\n\n");
    let types = || TYPES.iter().enumerate().map(|(code, one)| (code, one.variant));
    let ops = || OPS.iter().enumerate().filter(|(_, op)| op.parameter.is_none());
    let scalings = || SCALINGS.iter().zip(1..).map(|(one, code)| (code, one.variant));
    let none = |doc: &'static str| [(0, "None".to_owned(), doc)].into_iter();
    c_enum(
        &mut text,
        "Element types.",
        "dtype",
        TYPES.iter().zip(0..).map(|(one, code)| (code, one.variant.to_owned(), one.c_doc)),
    );
    c_enum(
        &mut text,
        "Reduction operations. Elements are combined in rank order.",
        "op",
        ops().map(|(code, op)| (code, capitalised(op.name), op.c_doc)),
    );
    let norms = NORMS.iter().zip(1..).map(|(one, code)| (code, one.variant.to_owned(), one.doc));
    c_enum(&mut text, "Norms of rows.", "norm", none("No norm.").chain(norms));
    let formats = SCALINGS.iter().zip(1..).map(|(one, code)| (code, one.variant.to_owned(), one.doc));
    c_enum(
        &mut text,
        "Formats of quantised rows.",
        "scaling",
        none("Rows are not quantised.").chain(formats),
    );
    lookup(&mut text, "dtype_of", "DType", types());
    lookup(&mut text, "op_of", "ReduceOp", ops().map(|(code, op)| (code, op.variant)));
    lookup(&mut text, "scaling_of", "Scaling", scalings());
    text.truncate(text.len() - 1);
    text
}

fn c_enum<'a>(
    text: &mut String,
    doc: &str,
    name: &str,
    variants: impl Iterator<Item = (usize, String, &'a str)>,
) {
    const ATTRIBUTES: [&str; 3] =
        ["repr(u32)", "derive(Clone, Copy)", "expect(dead_code, reason = \"names for the header\")"];
    let variants = variants.map(|(code, variant, doc)| (doc.to_owned(), format!("{variant} = {code}")));
    enumeration(text, doc, &ATTRIBUTES, &format!("fast_allreduce_{name}"), variants);
}

fn lookup<'a>(text: &mut String, name: &str, kind: &str, variants: impl Iterator<Item = (usize, &'a str)>) {
    *text += &format!("/// Returns the [`{kind}`] of a code.\n");
    *text += &format!("pub fn {name}(code: u32) -> Option<{kind}> {{\n    match code {{\n");
    for (code, variant) in variants {
        *text += &format!("        {code} => Some({kind}::{variant}),\n");
    }
    *text += "        _ => None,\n    }\n}\n\n";
}

fn capitalised(name: &str) -> String {
    let (first, rest) = name.split_at(1);
    first.to_ascii_uppercase() + rest
}
