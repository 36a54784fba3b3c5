//! `src/call/generated.rs`: the collectives with their arguments.

use super::items::end_impl;
use super::GENERATED;
use crate::collectives::{Collective, Counts, COLLECTIVES};

const HEAD: &str = "\
use super::fused::RawFused;
use super::gathered::RawGatheredRows;
use super::quantized::QuantizedTransport;
use super::sharded::RawShardedRows;
use crate::catalogue::{CallKind, ReduceOp};

/// Collective with its arguments, for functions that take any collective, such as
/// [`Communicator::collective_raw`](crate::Communicator::collective_raw).
///
/// The `count` of a call is NCCL's. If buffers hold a share for each rank, it is the number of elements of one share.
/// It is ignored if the collective itself has counts.
///
/// ```
/// use fast_allreduce::{CallKind, Collective, ReduceOp};
///
/// let collective = Collective::Reduce { op: ReduceOp::Max, root: 0 };
/// assert_eq!(collective.kind(), CallKind::Reduce);
/// assert_eq!(Collective::of(CallKind::Reduce, ReduceOp::Max, 0, &[], [&[], &[]]), Some(collective));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective<'a> {
";

const KIND: &str = "\
impl<'a> Collective<'a> {
    /// Returns the kind of the collective.
    #[inline]
    pub const fn kind(&self) -> CallKind {
        match self {
";

const OF: &str = "\
    /// Creates the collective of a kind from the arguments that it takes; others are ignored. `counts` are indexed by
    /// rank. `send` and `receive` are the counts that this rank sends to and receives from each rank. Returns `None`
    /// for calls of messages, of rows, and with quantised transport.
    pub fn of(
        kind: CallKind,
        op: ReduceOp,
        root: usize,
        counts: &'a [usize],
        [send, receive]: [&'a [usize]; 2],
    ) -> Option<Self> {
        Some(match kind {
";

/// Methods that return an argument: documentation, name, type, and name of the argument.
const ACCESSORS: [(&str, &str, &str, &str); 5] = [
    ("Returns the operation of a collective that reduces.", "reduction", "ReduceOp", "op"),
    ("Returns the root.", "root", "usize", "root"),
    ("Returns the counts by rank, which are equal on all ranks.", "counts", "&'a [usize]", "counts"),
    ("Returns the counts of this rank's shares by receiving rank.", "sends", "&'a [usize]", "send"),
    ("Returns the counts of this rank's shares by sending rank.", "receives", "&'a [usize]", "receive"),
];

/// An argument of a variant.
struct Argument {
    name: &'static str,
    /// Its type.
    of: &'static str,
    doc: &'static str,
}

const OP: Argument = Argument { name: "op", of: "ReduceOp", doc: "Operation." };
const ROOT: Argument = Argument { name: "root", of: "usize", doc: "Root rank." };
const COUNTS: Argument =
    Argument { name: "counts", of: "&'a [usize]", doc: "Number of elements of each rank's share." };
const SEND: Argument = Argument {
    name: "send",
    of: "&'a [usize]",
    doc: "Number of elements that this rank sends, by receiving rank.",
};
const RECEIVE: Argument = Argument {
    name: "receive",
    of: "&'a [usize]",
    doc: "Number of elements that this rank receives, by sending rank.",
};

impl Collective {
    fn arguments(&self) -> Vec<Argument> {
        let mut arguments = Vec::new();
        match self.holds {
            Some(of) => arguments.push(Argument { name: "what", of, doc: "" }),
            None => arguments.extend(self.reduces.then_some(OP)),
        }
        arguments.extend(self.has_root.then_some(ROOT));
        match self.counts {
            Counts::Equal => {}
            Counts::ByRank => arguments.push(COUNTS),
            Counts::ByPeer => arguments.extend([SEND, RECEIVE]),
        }
        arguments
    }

    /// Returns whether the variant's arguments have names.
    fn is_named(&self) -> bool {
        self.has_root || self.counts == Counts::ByPeer
    }

    /// Returns the variant with a text for each of its arguments.
    fn variant(&self, argument: impl Fn(&Argument) -> String) -> String {
        let arguments: Vec<_> = self.arguments().iter().map(argument).collect();
        match (arguments.join(", "), self.is_named()) {
            (arguments, _) if arguments.is_empty() => self.variant.to_owned(),
            (arguments, true) => format!("{} {{ {arguments} }}", self.variant),
            (arguments, false) => format!("{}({arguments})", self.variant),
        }
    }

    /// Returns a pattern that binds no argument.
    fn any(&self) -> String {
        let arguments = match self.arguments().is_empty() {
            true => "",
            false if self.is_named() => " { .. }",
            false => "(..)",
        };
        format!("{}{arguments}", self.variant)
    }

    /// Returns a pattern that binds one argument.
    fn binding(&self, name: &str) -> String {
        if self.is_named() {
            return format!("{} {{ {name}, .. }}", self.variant);
        }
        self.variant(|argument| if argument.name == name { name.to_owned() } else { "_".to_owned() })
    }
}

/// Returns the file.
pub fn arguments() -> String {
    let all = || COLLECTIVES.iter().filter_map(|one| Some((one, one.doc?)));
    let mut text = format!("//! {GENERATED}\n\n{HEAD}");
    for (one, doc) in all() {
        let named = one.is_named();
        let fields = one.variant(|Argument { name, of, doc }| match named {
            true => format!("\n        /// {doc}\n        {name}: {of}"),
            false => (*of).to_owned(),
        });
        text += &format!("    /// {doc}\n    {},\n", fields.replace(" }", ",\n    }").replace(" \n", "\n"));
    }
    text += "}\n\n";
    text += KIND;
    for (one, _) in all() {
        text += &format!("            Self::{} => CallKind::{},\n", one.any(), one.variant);
    }
    text += "        }\n    }\n\n";
    for (doc, method, of, name) in ACCESSORS {
        text += &format!(
            "    /// {doc}\n    #[inline]\n    pub(crate) const fn {method}(&self) -> Option<{of}> {{\n"
        );
        text += "        match *self {\n";
        let value_of = |one: &Collective| match one.arguments().iter().any(|argument| argument.name == name) {
            true => format!("Some({name})"),
            // Fused calls and those with quantised transport are sums.
            false if name == "op" && one.reduces => "Some(ReduceOp::Sum)".to_owned(),
            false => "None".to_owned(),
        };
        let mut values: Vec<_> = all().map(|(one, _)| value_of(one)).collect();
        values.sort_by_key(|value| value == "None");
        values.dedup();
        for value in values {
            let patterns = all().filter(|(one, _)| value_of(one) == value).map(|(one, _)| match &*value {
                "None" | "Some(ReduceOp::Sum)" => format!("Self::{}", one.any()),
                _ => format!("Self::{}", one.binding(name)),
            });
            text += &format!("            {} => {value},\n", patterns.collect::<Vec<_>>().join(" | "));
        }
        text += "        }\n    }\n\n";
    }
    text += OF;
    for (one, _) in all().filter(|(one, _)| one.holds.is_none()) {
        let value = one.variant(|argument| argument.name.to_owned());
        text += &format!("            CallKind::{} => Self::{value},\n", one.variant);
    }
    text += "            _ => return None,\n        })\n    }\n";
    end_impl(&mut text);
    text.truncate(text.len() - 1);
    text
}
