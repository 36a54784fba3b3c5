//! Moves, memory accesses, fences and addresses.

use super::{is_one_of, Decoder};
use crate::errors::LoadResult;
use crate::ir::{Access, Addr, AtomOp, Base, Mask, Op, Reg, Special, Val};
use crate::parser::Raw;
use crate::types::{Order, Scope, Space, Type};

impl Decoder<'_, '_> {
    pub(super) fn memory(&mut self) -> LoadResult<Op> {
        match self.name {
            "mov" => self.mov(),
            "ld" => self.load(),
            "st" => self.store(),
            "atom" | "red" => self.atomic(),
            "fence" => {
                if self.take("proxy") {
                    self.want("alias", |m| (m == "alias").then_some(()))?;
                    self.count(0..=0)?;
                    return Ok(Op::AliasFence);
                }
                let order = self.want("sc, acq_rel, acquire or release", |m| {
                    Some(match m {
                        "sc" => Order::SeqCst,
                        "acq_rel" => Order::AcqRel,
                        "acquire" => Order::Acquire,
                        "release" => Order::Release,
                        _ => return None,
                    })
                })?;
                let scope = self.want("a scope", Scope::parse)?;
                self.count(0..=0)?;
                Ok(Op::Fence { order, scope })
            }
            "membar" => {
                let scope = self.want("cta, gl or sys", |m| match m {
                    "gl" => Some(Scope::Gpu),
                    _ => Scope::parse(m),
                })?;
                self.count(0..=0)?;
                Ok(Op::Fence { order: Order::SeqCst, scope })
            }
            "cvta" => self.convert_address(),
            "mapa" | "getctarank" => self.map_address(),
            "isspacep" => {
                let space =
                    self.want("a space", |m| parse_space(m).filter(|&space| space != Space::Generic))?;
                self.count(2..=2)?;
                Ok(Op::Isspacep { space, d: self.pred(0)?, a: self.val(1, Type::U64)? })
            }
            _ => self.error("unknown instruction"),
        }
    }

    fn mov(&mut self) -> LoadResult<Op> {
        self.count(2..=2)?;
        let ty =
            self.ty_of(|ty| ty != Type::B8 && ty.bytes() <= 8 && !(ty.is_integer() && ty.bytes() == 1))?;
        match (&self.operands[0], &self.operands[1]) {
            (Raw::List(parts), raw) => {
                let d: LoadResult<Vec<Option<Reg>>> = parts
                    .iter()
                    .map(|part| match part {
                        Raw::Sink => Ok(None),
                        Raw::Reg(reg) => Ok(Some(*reg)),
                        other => self.error(format!("{other:?} is not a register")),
                    })
                    .collect();
                let d = d?;
                self.check_parts(ty, d.len(), d.iter().flatten().copied())?;
                Ok(Op::Split { d, a: self.val_of(raw, ty, false)? })
            }
            (_, Raw::List(parts)) => {
                let part_ty = match ty.bits() / (parts.len().max(1) as u32) {
                    16 => Type::B16,
                    32 => Type::B32,
                    _ => return self.error("parts of this size are not supported"),
                };
                let vals: LoadResult<Vec<Val>> =
                    parts.iter().map(|part| self.val_of(part, part_ty, false)).collect();
                self.check_parts(ty, parts.len(), [].into_iter())?;
                Ok(Op::Join { d: self.reg(0, ty)?, parts: vals? })
            }
            (_, &Raw::Name(name, offset)) => self.mov_name(ty, name, offset),
            _ => Ok(Op::Mov { ty, d: self.reg(0, ty)?, a: self.val(1, ty)? }),
        }
    }

    fn check_parts(&self, ty: Type, count: usize, regs: impl Iterator<Item = Reg>) -> LoadResult<()> {
        let part = ty.bytes() / count.max(1) as u32;
        if !ty.is_untyped() || !matches!(count, 2 | 4) || part < 2 {
            return self.error("parts of this size are not supported");
        }
        for reg in regs {
            if self.of_reg(reg).bytes() != part || self.of_reg(reg) == Type::Pred {
                return self.error("a part has another size");
            }
        }
        Ok(())
    }

    fn mov_name(&self, ty: Type, name: &str, offset: i64) -> LoadResult<Op> {
        if let Some((special, bytes)) = parse_special(name) {
            // The sizes of blocks and grids may also be read as 16 bits, which nvcc does not use.
            if ty.bytes() != bytes || offset != 0 {
                return self.error(format!("{name} does not have this type"));
            }
            return Ok(Op::MovSpecial { d: self.reg(0, ty)?, a: special });
        }
        let Some((space, base, at)) = (self.context.variable)(name) else {
            return self.error(format!("{name:?} is not known"));
        };
        let narrow = ty.bytes() == 4 && matches!(space, Space::Shared | Space::Local);
        if !(ty.bytes() == 8 || narrow) {
            return self.error("an address has 64 bits");
        }
        if matches!(base, Base::Return) {
            return self.error("a return value has no address");
        }
        Ok(Op::MovAddress { d: self.reg(0, ty)?, a: Addr { base, offset: offset.wrapping_add(at as i64) } })
    }

    /// Parses space, order and scope, up to the vector and the type.
    fn access(&mut self, load: bool) -> LoadResult<(Space, Order, Scope)> {
        // ptxas also accepts the space before the order.
        let early = self.take_if(parse_space);
        let mut order = Order::Weak;
        let mut scope = Scope::Sys;
        if self.take("volatile") {
            order = Order::Volatile;
        } else if let Some(strong) = self.take_if(|m| match m {
            "relaxed" => Some(Order::Relaxed),
            "acquire" if load => Some(Order::Acquire),
            "release" if !load => Some(Order::Release),
            _ => None,
        }) {
            order = strong;
            scope = self.want("a scope", Scope::parse)?;
        } else {
            self.take("weak");
        }
        let space = early.or_else(|| self.take_if(parse_space)).unwrap_or(Space::Generic);
        // Cache hints.
        let hints = [
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::evict_first",
            "L1::evict_last",
            "L1::no_allocate",
            "L2::evict_last",
            "L2::evict_normal",
            "L2::evict_first",
            "L2::64B",
            "L2::128B",
            "L2::256B",
        ];
        let ways: &[&str] =
            if load { &["ca", "cg", "cs", "lu", "cv", "nc"] } else { &["wb", "cg", "cs", "wt"] };
        if order == Order::Weak
            && self.take_if(|m| is_one_of(m, ways)).is_some()
            && matches!(space, Space::Shared | Space::SharedCluster)
        {
            return self.error("shared memory is not cached");
        }
        while self.take_if(|m| is_one_of(m, &hints)).is_some() {}
        Ok((space, order, scope))
    }

    /// Parses `.v2` and so on, and the type.
    fn vector(&mut self) -> LoadResult<(usize, Type)> {
        let count = self.take_if(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        let ty = self.ty_of(|ty| ty != Type::Pred && ty.bytes() <= 8 && !ty.is_packed())?;
        let bytes = count.unwrap_or(1) * ty.bytes() as usize;
        if bytes > 32 || (count == Some(8) && ty.bytes() != 4) || bytes == 32 && ty.bytes() < 4 {
            return self.error("a vector has at most 32 bytes");
        }
        Ok((count.unwrap_or(1), ty))
    }

    pub(super) fn elements(&self, i: usize, count: usize) -> LoadResult<&[Raw<'_>]> {
        match self.operands.get(i) {
            Some(Raw::List(list)) if list.len() == count && count > 1 => Ok(list),
            Some(raw) if count == 1 && !matches!(raw, Raw::List(_)) => Ok(std::slice::from_ref(raw)),
            _ => self.error(format!("a vector of {count} was expected")),
        }
    }

    fn load(&mut self) -> LoadResult<Op> {
        let (space, order, scope) = self.access(true)?;
        let (count, ty) = self.vector()?;
        self.count(2..=2)?;
        let d: LoadResult<Vec<Option<Reg>>> = self
            .elements(0, count)?
            .iter()
            .map(|raw| match raw {
                Raw::Sink if count > 1 => Ok(None),
                Raw::Reg(reg) => self.check_size(*reg, ty, !ty.is_float() || ty.bytes() == 2).map(Some),
                other => self.error(format!("{other:?} is not a register")),
            })
            .collect();
        if matches!(space, Space::Param | Space::Const) && order.is_strong() {
            return self.error("this space has no orderings");
        }
        Ok(Op::Ld { access: Access { space, order, scope, ty }, d: d?, addr: self.addr(1, space)? })
    }

    fn store(&mut self) -> LoadResult<Op> {
        let (space, order, scope) = self.access(false)?;
        let (count, ty) = self.vector()?;
        self.count(2..=2)?;
        let a: LoadResult<Vec<Val>> =
            self.elements(1, count)?.iter().map(|raw| self.val_of(raw, ty, true)).collect();
        let addr = self.addr(0, space)?;
        let written = !matches!(
            (space, addr.base),
            (Space::Const, _) | (Space::Param, Base::Param | Base::Reg(_) | Base::None)
        );
        if !written || (space == Space::Param && order.is_strong()) {
            return self.error("this space is read-only");
        }
        Ok(Op::St { access: Access { space, order, scope, ty }, a: a?, addr })
    }

    fn atomic(&mut self) -> LoadResult<Op> {
        let order = self.take_if(|m| {
            Some(match m {
                "relaxed" => Order::Relaxed,
                "acquire" => Order::Acquire,
                "release" => Order::Release,
                "acq_rel" => Order::AcqRel,
                _ => return None,
            })
        });
        // An atomic without order and scope is relaxed, at the scope of the GPU.
        let early = self.take_if(parse_space);
        let scope = self.take_if(Scope::parse).unwrap_or(Scope::Gpu);
        let space = early.or_else(|| self.take_if(parse_space)).unwrap_or(Space::Generic);
        let op = self.want("an operation", |m| {
            Some(match m {
                "add" => AtomOp::Add,
                "and" => AtomOp::And,
                "or" => AtomOp::Or,
                "xor" => AtomOp::Xor,
                "min" => AtomOp::Min,
                "max" => AtomOp::Max,
                "exch" => AtomOp::Exch,
                "cas" => AtomOp::Cas,
                "inc" => AtomOp::Inc,
                "dec" => AtomOp::Dec,
                _ => return None,
            })
        })?;
        let ty = self.ty()?;
        let wide = ty.bytes() == 4 || ty.bytes() == 8;
        let fits = match op {
            AtomOp::Add => wide && (ty.is_integer() || ty.is_float()),
            AtomOp::And | AtomOp::Or | AtomOp::Xor | AtomOp::Exch => matches!(ty, Type::B32 | Type::B64),
            AtomOp::Cas => matches!(ty, Type::B16 | Type::B32 | Type::B64),
            AtomOp::Min | AtomOp::Max => wide && ty.is_integer(),
            AtomOp::Inc | AtomOp::Dec => ty == Type::U32,
        };
        let first = usize::from(self.name == "atom");
        let sources = if op == AtomOp::Cas { 2 } else { 1 };
        if !fits || !matches!(space, Space::Generic | Space::Global | Space::Shared | Space::SharedCluster) {
            return self.error("not for this type");
        }
        if first == 0 && matches!(op, AtomOp::Exch | AtomOp::Cas) {
            return self.error("no reduction");
        }
        self.count(first + 1 + sources..=first + 1 + sources)?;
        let d = match self.operands[0] {
            Raw::Sink if first == 1 => None,
            _ if first == 1 => Some(self.reg(0, ty)?),
            _ => None,
        };
        let access = Access { space, order: order.unwrap_or(Order::Relaxed), scope, ty };
        let b = self.val(first + 1, ty)?;
        let c = if op == AtomOp::Cas { self.val(first + 2, ty)? } else { Val::Imm(0) };
        Ok(Op::Atom { op, access, d, addr: self.addr(first, space)?, b, c })
    }

    /// Parses `mapa` and `getctarank`.
    fn map_address(&mut self) -> LoadResult<Op> {
        let space = match self.take("shared::cluster") {
            true => Space::SharedCluster,
            false => Space::Generic,
        };
        let maps = self.name == "mapa";
        let ty = self.ty_of(|ty| ty == Type::U64 || ty == Type::U32)?;
        self.count(if maps { 3..=3 } else { 2..=2 })?;
        if space == Space::Generic && maps && ty == Type::U32 {
            return self.error("a generic address has 64 bits");
        }
        let a = match self.operands[1] {
            Raw::Reg(reg) => Addr { base: Base::Reg(self.check_size(reg, ty, false)?), offset: 0 },
            Raw::Name(name, offset) if space == Space::SharedCluster => match (self.context.variable)(name) {
                Some((Space::Shared, base, at)) => Addr { base, offset: offset.wrapping_add(at as i64) },
                _ => return self.error(format!("{name:?} is not in this space")),
            },
            _ => return self.error("an address was expected"),
        };
        let rank = if maps { Some(self.val(2, Type::U32)?) } else { None };
        Ok(Op::Mapa { space, d: self.reg(0, if maps { ty } else { Type::U32 })?, a, rank })
    }

    fn convert_address(&mut self) -> LoadResult<Op> {
        let to_space = self.take("to");
        let space = self.want("a space", |m| parse_space(m).filter(|&space| space != Space::Generic))?;
        let ty = self.ty_of(|ty| ty == Type::U64)?;
        self.count(2..=2)?;
        let a = match self.operands[1] {
            Raw::Reg(reg) => Addr { base: Base::Reg(self.check_size(reg, ty, false)?), offset: 0 },
            Raw::Name(name, offset) if !to_space => match (self.context.variable)(name) {
                Some((own, base, at))
                    if own == space || (own, space) == (Space::Shared, Space::SharedCluster) =>
                {
                    Addr { base, offset: offset.wrapping_add(at as i64) }
                }
                _ => return self.error(format!("{name:?} is not in this space")),
            },
            _ => return self.error("an address was expected"),
        };
        Ok(Op::Cvta { to_space, space, d: self.reg(0, ty)?, a })
    }
}

fn parse_space(text: &str) -> Option<Space> {
    Some(match text {
        "global" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "shared::cluster" => Space::SharedCluster,
        // `.param::entry` and `.param::func` repeat what the operand shows.
        "param" | "param::entry" | "param::func" => Space::Param,
        "local" => Space::Local,
        "const" => Space::Const,
        _ => return None,
    })
}

/// Parses a special register. Also returns its size in bytes.
fn parse_special(name: &str) -> Option<(Special, u32)> {
    let axis = |text: &str| match text {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((stem, of)) = name.rsplit_once('.') {
        let of = axis(of)?;
        return Some(match stem {
            "%tid" => (Special::Tid(of), 4),
            "%ntid" => (Special::Ntid(of), 4),
            "%ctaid" => (Special::Ctaid(of), 4),
            "%nctaid" => (Special::Nctaid(of), 4),
            "%cluster_ctaid" => (Special::ClusterCtaid(of), 4),
            "%cluster_nctaid" => (Special::ClusterNctaid(of), 4),
            "%clusterid" => (Special::Clusterid(of), 4),
            "%nclusterid" => (Special::Nclusterid(of), 4),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => (Special::Laneid, 4),
        "%warpid" => (Special::Warpid, 4),
        "%cluster_ctarank" => (Special::ClusterCtarank, 4),
        "%cluster_nctarank" => (Special::ClusterNctarank, 4),
        "%is_explicit_cluster" => (Special::IsExplicitCluster, 1),
        "%dynamic_smem_size" => (Special::DynamicSmemSize, 4),
        "%nwarpid" => (Special::Nwarpid, 4),
        "%lanemask_lt" => (Special::LaneMask(Mask::Lt), 4),
        "%lanemask_le" => (Special::LaneMask(Mask::Le), 4),
        "%lanemask_eq" => (Special::LaneMask(Mask::Eq), 4),
        "%lanemask_ge" => (Special::LaneMask(Mask::Ge), 4),
        "%lanemask_gt" => (Special::LaneMask(Mask::Gt), 4),
        "%clock" => (Special::Clock, 4),
        "%clock64" => (Special::Clock64, 8),
        "%globaltimer" => (Special::GlobalTimer, 8),
        _ => return None,
    })
}
