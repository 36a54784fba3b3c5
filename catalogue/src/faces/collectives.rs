//! `src/call/generated.rs`: the collectives with their arguments.

use super::GENERATED;
use crate::collectives::{Collective, Counts, COLLECTIVES};

const HEAD: &str = "\
use super::fused::RawFused;
use super::quantized::QuantizedTransport;
use crate::catalogue::{CallKind, ReduceOp};

/// A collective, for the calls that take any: [`Communicator::collective_raw`](crate::Communicator::collective_raw), tools and tests.
///
/// The `count` of a call is NCCL's: the elements of one rank's share where buffers hold a share for each rank, and is not looked
/// at where the collective has counts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective<'a> {
";

const OF: &str = "    /// The collective of a kind, with those of these arguments that it takes. `counts` are by rank, `by_peer` those that this rank
    /// sends to each rank, and receives from it. `None` of calls of messages, and of kinds that take others.
    pub fn of(
        kind: CallKind,
        op: ReduceOp,
        root: usize,
        counts: &'a [usize],
        [send, receive]: [&'a [usize]; 2],
    ) -> Option<Self> {
        Some(match kind {
";

/// An argument of a variant.
struct Argument {
    name: &'static str,
    /// Its type.
    of: &'static str,
    doc: &'static str,
}

const OP: Argument = Argument { name: "op", of: "ReduceOp", doc: "How." };
const ROOT: Argument = Argument { name: "root", of: "usize", doc: "Who." };
const COUNTS: Argument =
    Argument { name: "counts", of: "&'a [usize]", doc: "Elements of each rank's share." };
const SEND: Argument =
    Argument { name: "send", of: "&'a [usize]", doc: "Elements that this rank sends, by receiving rank." };
const RECEIVE: Argument = Argument {
    name: "receive",
    of: "&'a [usize]",
    doc: "Elements that this rank receives, by sending rank.",
};

impl Collective {
    fn arguments(&self) -> Vec<Argument> {
        if let Some(of) = self.holds {
            return vec![Argument { name: "what", of, doc: "" }];
        }
        let mut arguments = Vec::new();
        arguments.extend(self.reduces.then_some(OP));
        arguments.extend(self.has_root.then_some(ROOT));
        match self.counts {
            Counts::Equal => {}
            Counts::ByRank => arguments.push(COUNTS),
            Counts::ByPeer => arguments.extend([SEND, RECEIVE]),
        }
        arguments
    }

    /// Whether a variant's arguments have names there: unless its name says what they are.
    fn is_named(&self) -> bool {
        self.has_root || self.counts == Counts::ByPeer
    }

    /// The variant with what stands for each of its arguments.
    fn variant(&self, argument: impl Fn(&Argument) -> String) -> String {
        let arguments: Vec<_> = self.arguments().iter().map(argument).collect();
        match (arguments.join(", "), self.is_named()) {
            (arguments, _) if arguments.is_empty() => self.variant.to_owned(),
            (arguments, true) => format!("{} {{ {arguments} }}", self.variant),
            (arguments, false) => format!("{}({arguments})", self.variant),
        }
    }

    /// A pattern that binds none.
    fn any(&self) -> String {
        let arguments = match self.arguments().is_empty() {
            true => "",
            false if self.is_named() => " { .. }",
            false => "(..)",
        };
        format!("{}{arguments}", self.variant)
    }

    /// A pattern that binds one argument.
    fn binding(&self, name: &str) -> String {
        if self.is_named() {
            return format!("{} {{ {name}, .. }}", self.variant);
        }
        self.variant(|argument| if argument.name == name { name.to_owned() } else { "_".to_owned() })
    }
}

/// The file.
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
    text += "}\n\nimpl<'a> Collective<'a> {\n    /// Which one it is, without its arguments.\n    #[inline]\n    pub const fn kind(&self) -> CallKind {\n        match self {\n";
    for (one, _) in all() {
        text += &format!("            Self::{} => CallKind::{},\n", one.any(), one.variant);
    }
    text += "        }\n    }\n\n";
    let mut accessor = |doc: &str, signature: &str, name: &str| {
        text += &format!(
            "    /// {doc}\n    #[inline]\n    pub(crate) const fn {signature} {{\n        match *self {{\n"
        );
        let value_of = |one: &Collective| match one.arguments().iter().any(|argument| argument.name == name) {
            true => format!("Some({name})"),
            // What holds something else is a sum.
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
    };
    accessor("How elements are combined, if they are.", "reduction(&self) -> Option<ReduceOp>", "op");
    accessor("The rank that has another part than the others.", "root(&self) -> Option<usize>", "root");
    accessor("The counts that all ranks have to agree on.", "counts(&self) -> Option<&'a [usize]>", "counts");
    accessor(
        "The counts of this rank's shares by the rank that they are for.",
        "sends(&self) -> Option<&'a [usize]>",
        "send",
    );
    accessor(
        "The counts of this rank's shares by the rank that they are from.",
        "receives(&self) -> Option<&'a [usize]>",
        "receive",
    );
    text += OF;
    for (one, _) in all().filter(|(one, _)| one.holds.is_none()) {
        let value = one.variant(|argument| argument.name.to_owned());
        text += &format!("            CallKind::{} => Self::{value},\n", one.variant);
    }
    text += "            _ => return None,\n        })\n    }\n}\n";
    text
}
