//! Registers that an instruction reads and writes.

use crate::ir::{Addr, Base, Instr, Op, Reg, Val};

fn val(a: &Val, f: &mut dyn FnMut(Reg)) {
    if let Val::Reg(reg) = *a {
        f(reg);
    }
}

fn addr(a: &Addr, f: &mut dyn FnMut(Reg)) {
    if let Base::Reg(reg) = a.base {
        f(reg);
    }
}

impl Instr {
    pub fn reads(&self, f: &mut dyn FnMut(Reg)) {
        if let Some((guard, _)) = self.guard {
            f(guard);
        }
        match &self.op {
            Op::Mov { a, .. }
            | Op::Un { a, .. }
            | Op::Testp { a, .. }
            | Op::Cvt { a, .. }
            | Op::Isspacep { a, .. } => val(a, f),
            Op::Split { a, .. } => val(a, f),
            Op::MovAddress { a, .. } | Op::Cvta { a, .. } => addr(a, f),
            Op::Mapa { a, rank, .. } => {
                addr(a, f);
                rank.iter().for_each(|v| val(v, f));
            }
            Op::Ld { addr: a, .. } | Op::MultimemLd { addr: a, .. } => addr(a, f),
            Op::Join { parts, .. } => parts.iter().for_each(|part| val(part, f)),
            Op::Bin { a, b, .. } | Op::Set { a, b, .. } | Op::CvtPack { a, b, .. } => {
                [a, b].into_iter().for_each(|v| val(v, f))
            }
            Op::Tern { a, b, c, .. } | Op::Selp { a, b, p: c, .. } => {
                [a, b, c].into_iter().for_each(|v| val(v, f))
            }
            Op::Bfi { args, .. } => args.iter().for_each(|v| val(v, f)),
            Op::Float { args, .. } => args.iter().for_each(|v| val(v, f)),
            Op::Setp { a, b, combine, .. } => {
                [a, b].into_iter().for_each(|v| val(v, f));
                if let Some((_, c, _)) = combine {
                    val(c, f);
                }
            }
            Op::St { a, addr: to, .. } | Op::MultimemSt { a, addr: to, .. } => {
                a.iter().for_each(|v| val(v, f));
                addr(to, f);
            }
            Op::Atom { addr: at, b, c, .. } => {
                addr(at, f);
                [b, c].into_iter().for_each(|v| val(v, f));
            }
            Op::Bar { id, count, p, .. } => {
                val(id, f);
                count.iter().for_each(|v| val(v, f));
                p.iter().for_each(|(v, _)| val(v, f));
            }
            Op::Warp { mask, a, b, c, .. } => [mask, a, b, c].into_iter().for_each(|v| val(v, f)),
            Op::BrxIdx { index, .. } => val(index, f),
            Op::MovSpecial { .. }
            | Op::Fence { .. }
            | Op::AliasFence
            | Op::ClusterBar { .. }
            | Op::Activemask { .. }
            | Op::Nanosleep
            | Op::Dependents { .. }
            | Op::Bra { .. }
            | Op::Call { .. }
            | Op::Ret
            | Op::Exit
            | Op::Trap => {}
        }
    }

    pub fn writes(&self, f: &mut dyn FnMut(Reg)) {
        match &self.op {
            Op::Mov { d, .. }
            | Op::MovSpecial { d, .. }
            | Op::MovAddress { d, .. }
            | Op::Join { d, .. }
            | Op::Un { d, .. }
            | Op::Bin { d, .. }
            | Op::Tern { d, .. }
            | Op::Bfi { d, .. }
            | Op::Float { d, .. }
            | Op::Set { d, .. }
            | Op::Selp { d, .. }
            | Op::Testp { d, .. }
            | Op::Cvt { d, .. }
            | Op::CvtPack { d, .. }
            | Op::Cvta { d, .. }
            | Op::Mapa { d, .. }
            | Op::Isspacep { d, .. }
            | Op::Activemask { d } => f(*d),
            Op::Split { d, .. } | Op::Ld { d, .. } | Op::MultimemLd { d, .. } => {
                d.iter().flatten().for_each(|&d| f(d))
            }
            Op::Setp { d, q, .. } => [d, q].into_iter().flatten().for_each(|&d| f(d)),
            Op::Atom { d, .. } | Op::Bar { d, .. } => d.iter().for_each(|&d| f(d)),
            Op::Warp { d, p, .. } => [d, p].into_iter().flatten().for_each(|&d| f(d)),
            Op::St { .. }
            | Op::MultimemSt { .. }
            | Op::Fence { .. }
            | Op::AliasFence
            | Op::ClusterBar { .. }
            | Op::Nanosleep
            | Op::Dependents { .. }
            | Op::Bra { .. }
            | Op::BrxIdx { .. }
            | Op::Call { .. }
            | Op::Ret
            | Op::Exit
            | Op::Trap => {}
        }
    }

    /// Returns whether execution may continue somewhere other than at the next instruction.
    pub fn ends_block(&self) -> bool {
        matches!(self.op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret | Op::Exit | Op::Trap)
    }

    /// Returns whether the instruction looks at other threads' stores, as a poll does.
    pub fn looks(&self) -> bool {
        match &self.op {
            Op::Ld { access, .. } => access.order.is_strong(),
            Op::Atom { .. } => true,
            _ => false,
        }
    }
}
