//! Finds unreachable blocks: an earlier branch has already decided the condition of the branch that leads
//! to them.
//!
//! The compiler keeps such code if it does not see that two conditions are equal, for example conditions on
//! parameters that are loaded twice. A value computed only from parameters, thread indices and constants is
//! the same throughout a kernel. Two such values with equal expressions are equal.

use std::collections::{BTreeMap, HashMap};

use crate::flow::analysis::Flow;
use crate::ir::{Addr, Base, BinOp, Cmp, Function, Instr, Op, Reg, Special, Val};

/// Known conditions, by expression.
type Facts = BTreeMap<String, bool>;

/// Expressions of values, by register; None if a register is written in several places or under a guard.
struct Values<'a> {
    by_register: HashMap<Reg, Option<&'a Instr>>,
    known: HashMap<Reg, Option<String>>,
}

/// Returns for each block whether it is dead.
pub(crate) fn dead_blocks(function: &Function, flow: &Flow) -> Vec<bool> {
    let mut by_register = HashMap::new();
    for instr in &function.code {
        instr.writes(&mut |reg| {
            let made = by_register.entry(reg).or_insert(Some(instr));
            if !made.is_some_and(|made| std::ptr::eq(made, instr)) || instr.guard.is_some() {
                *made = None;
            }
        });
    }
    let mut values = Values { by_register, known: HashMap::new() };
    let mut at: Vec<Option<Facts>> = vec![None; flow.blocks.len()];
    at[0] = Some(Facts::new());
    let mut open = vec![0];
    while let Some(block) = open.pop() {
        let Some(facts) = at[block].clone() else { continue };
        let own = &flow.blocks[block];
        let last = &function.code[own.last - 1];
        let condition = match (&last.op, last.guard) {
            (Op::Bra { .. }, Some((p, negated))) => {
                values.condition(p).map(|(key, inverse)| (key, inverse != negated))
            }
            _ => None,
        };
        for (number, &next) in own.next.iter().enumerate() {
            let mut facts = facts.clone();
            if let Some((key, inverse)) = &condition {
                // The second edge is taken if the guard holds.
                let holds = (number == 1) != *inverse;
                if facts.insert(key.clone(), holds).is_some_and(|before| before != holds) {
                    continue;
                }
            }
            let merged = match &at[next] {
                None => facts,
                Some(known) => known
                    .iter()
                    .filter(|(key, value)| facts.get(*key) == Some(value))
                    .map(|(k, v)| (k.clone(), *v))
                    .collect(),
            };
            if at[next].as_ref() != Some(&merged) {
                at[next] = Some(merged);
                open.push(next);
            }
        }
    }
    at.iter().map(Option::is_none).collect()
}

impl Values<'_> {
    /// Returns the expression of a predicate, and whether the predicate is its inverse.
    fn condition(&mut self, p: Reg) -> Option<(String, bool)> {
        let Op::Setp { cmp, ty, a, b, combine: None, .. } = &(*self.by_register.get(&p)?)?.op else {
            return None;
        };
        let (a, b) = (self.val(*a)?, self.val(*b)?);
        let (cmp, inverse) = match cmp {
            Cmp::Ne if !ty.is_float() => (Cmp::Eq, true),
            other => (*other, false),
        };
        let (a, b) = if cmp == Cmp::Eq && b < a { (b, a) } else { (a, b) };
        // Equality of integers compares bits, so signedness does not matter.
        let ty = if cmp == Cmp::Eq && !ty.is_float() { format!("{}", ty.bytes()) } else { format!("{ty:?}") };
        Some((format!("{cmp:?} {ty} {a} {b}"), inverse))
    }

    fn val(&mut self, val: Val) -> Option<String> {
        match val {
            Val::Reg(reg) => self.register(reg),
            Val::Imm(bits) => Some(format!("{bits}")),
            Val::F32(bits) => Some(format!("f{bits}")),
            Val::F64(bits) => Some(format!("d{bits}")),
        }
    }

    fn register(&mut self, reg: Reg) -> Option<String> {
        if let Some(known) = self.known.get(&reg) {
            return known.clone();
        }
        // The expression of a cyclic definition is unknown.
        self.known.insert(reg, None);
        let made = self.by_register.get(&reg).copied().flatten();
        let key = made.and_then(|made| self.made(made, reg)).filter(|key| key.len() < 500);
        self.known.insert(reg, key.clone());
        key
    }

    fn made(&mut self, instr: &Instr, reg: Reg) -> Option<String> {
        match &instr.op {
            Op::Mov { a, .. } => self.val(*a),
            Op::MovSpecial {
                a: a @ (Special::Tid(_) | Special::Ntid(_) | Special::Ctaid(_) | Special::Nctaid(_)),
                ..
            } => Some(format!("{a:?}")),
            Op::MovAddress { a, .. } => self.address(a),
            Op::Bin { op: BinOp::Add, a, b: Val::Imm(offset), .. } => {
                let base = self.val(*a)?;
                Some(add(&base, *offset as i64))
            }
            Op::Bin { op, ty, a, b, .. } => {
                Some(format!("({op:?} {ty:?} {} {})", self.val(*a)?, self.val(*b)?))
            }
            Op::Cvt { how, a, .. } => Some(format!("({how:?} {})", self.val(*a)?)),
            Op::Ld { access, d, addr }
                if access.space == crate::types::Space::Param && !matches!(addr.base, Base::Slot(_)) =>
            {
                let place = d.iter().position(|&d| d == Some(reg))?;
                let bytes = access.ty.bytes();
                let base = self.address(addr)?;
                Some(format!("[{} {bytes}]", add(&base, place as i64 * i64::from(bytes))))
            }
            _ => None,
        }
    }

    fn address(&mut self, addr: &Addr) -> Option<String> {
        match addr.base {
            Base::Param => Some(add("P+0", addr.offset)),
            Base::Reg(reg) => self.register(reg).map(|base| add(&base, addr.offset)),
            _ => None,
        }
    }
}

/// Adds an offset to a base of the form `x+n`.
fn add(base: &str, offset: i64) -> String {
    match base.rsplit_once('+').and_then(|(stem, n)| Some((stem, n.parse::<i64>().ok()?))) {
        Some((stem, n)) => format!("{stem}+{}", n.wrapping_add(offset)),
        None => format!("{base}+{offset}"),
    }
}
