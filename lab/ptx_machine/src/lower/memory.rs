//! Memory accesses: checked first, then executed by the CPU.

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{types, AtomicRmwOp, InstBuilder, Value};
use std::mem::{offset_of, size_of};

use super::{flags, int, Lower, Watch, FRAME_HEAD};
use crate::context::{self, reason, Context};
use crate::errors::{Fault, LoadResult};
use crate::ir::{Access, Addr, AtomOp, Base, Mask, Op, Reg, Special, Val};
use crate::launch::cluster::what as cluster;
use crate::memory::multimem::Spec;
use crate::runtime::what;
use crate::soft;
use crate::types::{Order, Space};

impl Lower<'_, '_> {
    pub(super) fn memory(&mut self, op: &Op) -> LoadResult<()> {
        match op {
            Op::MovSpecial { d, a } => {
                let value = self.special(*a);
                self.set(*d, value);
            }
            Op::MovAddress { d, a } => {
                let bytes = self.function.registers[*d as usize].ty.bytes();
                let value = match a.base {
                    // An offset in its space, which begins at 0.
                    Base::Shared | Base::Dynamic | Base::Local => self.address(a)?,
                    _ => self.address(a)?,
                };
                let value = if bytes == 4 { self.b.ins().ireduce(types::I32, value) } else { value };
                self.set(*d, value);
            }
            Op::Cvta { to_space, space, d, a } => self.convert_address(*to_space, *space, *d, a)?,
            Op::Isspacep { space, d, a } => {
                let a = self.val(*a, 8);
                let value = self.is_in(*space, a);
                self.set(*d, value);
            }
            Op::Mapa { space, d, a, rank } => self.map_address(*space, *d, a, *rank)?,
            Op::Ld { access, d, addr } => self.load(access, d, addr)?,
            Op::St { access, a, addr } => self.store(access, a, addr)?,
            Op::Atom { op, access, d, addr, b, c } => self.atomic(*op, access, *d, addr, *b, *c)?,
            Op::MultimemLd { op, wide, access, d, addr } => {
                let spec = Spec { op: Some(*op), wide: *wide, ty: access.ty, count: d.len() as u32 };
                self.multimem(spec, what::access(what::READ, access), addr)?;
                for (i, d) in d.iter().enumerate() {
                    if let &Some(d) = d {
                        let value = self.load_context(int(access.ty.bytes()), Self::value_at(i));
                        self.set_typed(d, value, access.ty);
                    }
                }
            }
            Op::MultimemSt { op, access, a, addr } => {
                for (i, &value) in a.iter().enumerate() {
                    let value = self.val(value, access.ty.bytes());
                    self.store_context(value, Self::value_at(i));
                }
                let spec = Spec { op: *op, wide: false, ty: access.ty, count: a.len() as u32 };
                let kind = if op.is_some() { what::UPDATE } else { what::WRITE };
                self.multimem(spec, what::access(kind, access), addr)?;
            }
            // Aliases are one memory here, where accesses take effect at once.
            Op::AliasFence => _ = self.b.ins().fence(),
            Op::Fence { order, scope } => {
                self.b.ins().fence();
                if self.watch >= Watch::Races {
                    let (zero, code) = (self.constant(0, 8), what::fence(*order, *scope));
                    self.observe(zero, 0, code);
                }
            }
            Op::Call { name, returns, args } => self.call_function(name, *returns, args)?,
            _ => return self.error("no access"),
        }
        Ok(())
    }

    fn value_at(i: usize) -> usize {
        offset_of!(Context, values) + i * size_of::<u64>()
    }

    fn multimem(&mut self, spec: Spec, code: u32, addr: &Addr) -> LoadResult<()> {
        let a = self.address(addr)?;
        let (spec, code) = (
            self.b.ins().iconst(types::I32, i64::from(spec.encode())),
            self.b.ins().iconst(types::I32, i64::from(code)),
        );
        let here = self.here();
        let failed = self.call(self.helpers.multimem, &[self.context, a, spec, code, here]);
        self.or_trap(failed);
        Ok(())
    }

    fn special(&mut self, special: Special) -> Value {
        let at = |field: usize, i: u8| field + usize::from(i) * 4;
        let lane = offset_of!(Context, lane);
        let offset = match special {
            Special::Tid(i) => at(offset_of!(Context, tid), i),
            Special::Ntid(i) => at(offset_of!(Context, ntid), i),
            Special::Ctaid(i) => at(offset_of!(Context, ctaid), i),
            Special::Nctaid(i) => at(offset_of!(Context, nctaid), i),
            Special::ClusterCtaid(i) => at(offset_of!(Context, cluster_ctaid), i),
            Special::ClusterNctaid(i) => at(offset_of!(Context, cluster_nctaid), i),
            Special::Clusterid(i) => at(offset_of!(Context, clusterid), i),
            Special::Nclusterid(i) => at(offset_of!(Context, nclusterid), i),
            Special::ClusterCtarank => offset_of!(Context, cluster_rank),
            Special::ClusterNctarank => offset_of!(Context, cluster_blocks),
            Special::DynamicSmemSize => offset_of!(Context, dynamic_shared),
            Special::IsExplicitCluster => {
                return self.load_context(types::I8, offset_of!(Context, has_clusters))
            }
            Special::Laneid => lane,
            Special::Warpid => offset_of!(Context, warp),
            Special::Nwarpid => offset_of!(Context, warps),
            Special::LaneMask(mask) => {
                let lane = self.load_context(types::I32, lane);
                let one = self.constant(1, 4);
                let own = self.b.ins().ishl(one, lane);
                let below = self.b.ins().iadd_imm_s(own, -1);
                let up_to = self.b.ins().bor(own, below);
                return match mask {
                    Mask::Eq => own,
                    Mask::Lt => below,
                    Mask::Le => up_to,
                    Mask::Ge => self.b.ins().bnot(below),
                    Mask::Gt => self.b.ins().bnot(up_to),
                };
            }
            Special::Clock | Special::Clock64 => {
                let now = self.call(self.helpers.timer, &[]);
                // 8 cycles in a nanosecond: no CPU executes dependent instructions faster than one in a cycle.
                let cycles = self.b.ins().ishl_imm_u(now, 3);
                return match special {
                    Special::Clock => self.b.ins().ireduce(types::I32, cycles),
                    _ => cycles,
                };
            }
            Special::GlobalTimer => return self.call(self.helpers.timer, &[]),
        };
        self.load_context(types::I32, offset)
    }

    /// Returns the host address of a base that is not a register, or the content of the register.
    pub(super) fn address(&mut self, addr: &Addr) -> LoadResult<Value> {
        let base = match addr.base {
            Base::Reg(reg) => {
                let value = self.get(reg);
                if self.b.func.dfg.value_type(value) == types::I32 {
                    self.b.ins().uextend(types::I64, value)
                } else {
                    value
                }
            }
            Base::None => self.constant(0, 8),
            Base::Param => self.params,
            Base::Return => match self.returned {
                Some(returned) => returned,
                None => return self.error("a kernel returns nothing"),
            },
            Base::Slot(slot) => match self.function.kept.get(&slot) {
                Some(&at) => self.b.ins().iadd_imm_u(self.frame, i64::from(FRAME_HEAD + at)),
                None => self.b.ins().stack_addr(types::I64, self.slots[slot as usize], 0),
            },
            Base::Data => self.load_context(types::I64, offset_of!(Context, data)),
            Base::Shared | Base::Local => self.constant(0, 8),
            Base::Dynamic => self.constant(u64::from(self.dynamic), 8),
        };
        Ok(self.b.ins().iadd_imm_s(base, addr.offset))
    }

    fn local_base(&mut self) -> LoadResult<Value> {
        if !self.function.is_entry {
            return self.error("local memory of a called function is not supported");
        }
        Ok(self.b.ins().iadd_imm_u(self.frame, i64::from(FRAME_HEAD)))
    }

    fn convert_address(&mut self, to_space: bool, space: Space, d: Reg, a: &Addr) -> LoadResult<()> {
        let a = self.address(a)?;
        if space == Space::SharedCluster {
            let what = if to_space { cluster::TO_WINDOW } else { cluster::TO_GENERIC };
            let value = self.in_cluster(what, a, None);
            self.set(d, value);
            return Ok(());
        }
        let base = match space {
            Space::Shared => self.load_context(types::I64, offset_of!(Context, shared)),
            Space::Local => self.local_base()?,
            // Addresses of these spaces are also generic addresses.
            _ => self.constant(0, 8),
        };
        let value = if to_space { self.b.ins().isub(a, base) } else { self.b.ins().iadd(a, base) };
        self.set(d, value);
        Ok(())
    }

    fn is_in(&mut self, space: Space, a: Value) -> Value {
        let code = self.b.ins().iconst(types::I32, space as i64);
        let yes = self.call(self.helpers.is_in, &[self.context, a, code]);
        self.b.ins().ireduce(types::I8, yes)
    }

    /// Returns the host address of an access of `bytes` bytes, after all checks.
    fn checked(&mut self, access: &Access, addr: &Addr, bytes: u32, code: u32) -> LoadResult<Value> {
        let a = self.address(addr)?;
        let fixed =
            |size: u32, a: &Addr| a.offset >= 0 && a.offset as u64 + u64::from(bytes) <= u64::from(size);
        let aligned = addr.offset % i64::from(bytes) == 0;
        match (access.space, addr.base) {
            (_, Base::Slot(slot)) => {
                self.within(fixed(self.function.slots[slot as usize].max(8), addr), aligned)?
            }
            (_, Base::Return) => self.within(fixed(self.function.return_bytes, addr), true)?,
            (_, Base::Param) => self.within(fixed(self.function.param_bytes, addr), aligned)?,
            (Space::Param, _) => {
                let offset = self.b.ins().isub(a, self.params);
                self.in_window(offset, self.function.param_bytes, bytes);
            }
            (Space::Local, _) => {
                self.in_window(a, self.function.local_bytes, bytes);
                let base = self.local_base()?;
                return Ok(self.b.ins().iadd(a, base));
            }
            (Space::Shared, _) => {
                let (bytes, code) = (
                    self.b.ins().iconst(types::I32, i64::from(bytes)),
                    self.b.ins().iconst(types::I32, i64::from(code)),
                );
                let here = self.here();
                let failed = self.call(self.helpers.shared, &[self.context, a, bytes, code, here]);
                self.or_trap(failed);
                let base = self.load_context(types::I64, offset_of!(Context, shared));
                return Ok(self.b.ins().iadd(a, base));
            }
            (space, _) => {
                let a = match space {
                    Space::SharedCluster => self.in_cluster(cluster::TO_GENERIC, a, None),
                    _ => a,
                };
                self.check_global(a, bytes, code);
                if self.watch >= Watch::Races {
                    self.observe(a, bytes, code);
                }
                return Ok(a);
            }
        }
        Ok(a)
    }

    fn within(&mut self, fits: bool, aligned: bool) -> LoadResult<()> {
        match (fits, aligned) {
            (true, true) => Ok(()),
            (false, _) => self.error("outside of the variable"),
            (_, false) => self.error("a misaligned access"),
        }
    }

    fn in_window(&mut self, offset: Value, size: u32, bytes: u32) {
        let low = self.b.ins().band_imm_u(offset, i64::from(bytes) - 1);
        let aligned = self.b.ins().icmp_imm_s(IntCC::Equal, low, 0);
        self.or_fault(aligned, Fault::Misaligned);
        let last = i64::from(size) - i64::from(bytes);
        let inside = if last < 0 {
            self.constant(0, 1)
        } else {
            self.b.ins().icmp_imm_u(IntCC::UnsignedLessThanOrEqual, offset, last)
        };
        self.or_fault(inside, Fault::IllegalAddress);
    }

    /// Checks an access against the range that this site was last allowed to reach; the runtime decides
    /// about others.
    fn check_global(&mut self, a: Value, bytes: u32, code: u32) {
        let site = i64::from(self.facts.sites) * size_of::<context::Site>() as i64;
        self.facts.sites += 1;
        let site = self.b.ins().iadd_imm_u(self.sites, site);
        let low = self.b.ins().load(types::I64, flags(), site, offset_of!(context::Site, low) as i32);
        let span = self.b.ins().load(types::I64, flags(), site, offset_of!(context::Site, span) as i32);
        let offset = self.b.ins().isub(a, low);
        let known = self.b.ins().icmp(IntCC::UnsignedLessThanOrEqual, offset, span);
        let ok = if bytes > 1 {
            let rest = self.b.ins().band_imm_u(a, i64::from(bytes) - 1);
            let aligned = self.b.ins().icmp_imm_s(IntCC::Equal, rest, 0);
            self.b.ins().band(known, aligned)
        } else {
            known
        };
        let (slow, good) = (self.b.create_block(), self.b.create_block());
        self.b.set_cold_block(slow);
        self.b.ins().brif(ok, good, &[], slow, &[]);
        self.b.switch_to_block(slow);
        let (bytes, code) = (
            self.b.ins().iconst(types::I32, i64::from(bytes)),
            self.b.ins().iconst(types::I32, i64::from(code)),
        );
        let here = self.here();
        let failed = self.call(self.helpers.access, &[self.context, a, bytes, code, site, here]);
        self.b.ins().brif(failed, self.trap, &[], good, &[]);
        self.b.switch_to_block(good);
    }

    /// Reports an access or a fence to the observer.
    fn observe(&mut self, a: Value, bytes: u32, code: u32) {
        let (bytes, code) = (
            self.b.ins().iconst(types::I32, i64::from(bytes)),
            self.b.ins().iconst(types::I32, i64::from(code)),
        );
        let here = self.here();
        let failed = self.call(self.helpers.observe, &[self.context, a, bytes, code, here]);
        self.or_trap(failed);
    }

    /// Reports the thread's position to the clock. Only for kernels.
    pub(super) fn tell_clock(&mut self, code: u32) {
        if self.watch == Watch::Clock && self.function.is_entry {
            let zero = self.constant(0, 8);
            self.observe(zero, 0, code);
        }
    }

    /// Stops before the first look of a block, for the clock. The block's other looks are at about the same
    /// time.
    fn stop_to_look(&mut self, access: &Access, addr: &Addr) -> LoadResult<()> {
        let outside = matches!(access.space, Space::Generic | Space::Global | Space::SharedCluster);
        let is_kernel = self.function.is_entry;
        if self.watch != Watch::Clock || !outside || !is_kernel || self.looked == Some(self.block) {
            return Ok(());
        }
        if self.function.code[self.at].guard.is_none() {
            self.looked = Some(self.block);
        }
        let mut a = self.address(addr)?;
        if access.space == Space::SharedCluster {
            a = self.in_cluster(cluster::TO_GENERIC, a, None);
        }
        self.store_context(a, offset_of!(Context, request) + offset_of!(context::Request, args));
        let here = self.here();
        self.store_context(here, offset_of!(Context, request) + offset_of!(context::Request, at));
        let live = self.flow.live_before(self.function, self.block, self.at);
        self.stop(reason::LOOK, &live);
        Ok(())
    }

    fn load(&mut self, access: &Access, d: &[Option<Reg>], addr: &Addr) -> LoadResult<()> {
        if access.order.is_strong() {
            self.stop_to_look(access, addr)?;
        }
        let bytes = access.ty.bytes();
        let code = what::access(what::READ, access);
        let a = self.checked(access, addr, bytes * d.len() as u32, code)?;
        let strong = access.order.is_strong() && access.space != Space::Param;
        for (i, d) in d.iter().enumerate() {
            let at = i as u32 * bytes;
            let value = if strong {
                let at = self.b.ins().iadd_imm_u(a, i64::from(at));
                self.b.ins().atomic_load(int(bytes), flags(), at)
            } else {
                self.b.ins().load(int(bytes), flags(), a, at as i32)
            };
            if let &Some(d) = d {
                self.set_typed(d, value, access.ty);
            }
        }
        Ok(())
    }

    fn store(&mut self, access: &Access, values: &[Val], addr: &Addr) -> LoadResult<()> {
        let bytes = access.ty.bytes();
        let code = what::access(what::WRITE, access);
        let a = self.checked(access, addr, bytes * values.len() as u32, code)?;
        // Accesses before a release come before each of its parts.
        if access.order == Order::Release {
            self.b.ins().fence();
        }
        let strong = access.order.is_strong() && matches!(access.space, Space::Generic | Space::Global);
        if strong && values.len() == 2 && self.function.is_entry {
            return self.torn_store(values, bytes, a, addr);
        }
        if let (true, Order::Relaxed, &[value]) = (strong && self.watch == Watch::Races, access.order, values)
        {
            self.store_unless_held(value, bytes, a);
            return Ok(());
        }
        for (i, &value) in values.iter().enumerate() {
            let value = self.val(value, bytes);
            self.b.ins().store(flags(), value, a, (i as u32 * bytes) as i32);
        }
        Ok(())
    }

    /// Performs a relaxed store, unless the runtime holds it back.
    fn store_unless_held(&mut self, value: Val, bytes: u32, a: Value) {
        let value = self.val(value, bytes);
        let word = if bytes < 8 { self.b.ins().uextend(types::I64, value) } else { value };
        let size = self.b.ins().iconst(types::I32, i64::from(bytes));
        let held = self.call(self.helpers.hold, &[self.context, a, size, word]);
        let (now, on) = (self.b.create_block(), self.b.create_block());
        self.b.ins().brif(held, on, &[], now, &[]);
        self.b.switch_to_block(now);
        self.b.ins().store(flags(), value, a, 0);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
    }

    /// Stores a strong vector part by part, in either order: its parts are separate accesses, and other
    /// threads may run between them.
    fn torn_store(&mut self, values: &[Val], bytes: u32, a: Value, addr: &Addr) -> LoadResult<()> {
        let (first, second) = (self.val(values[0], bytes), self.val(values[1], bytes));
        let tear = self.load_context(types::I32, offset_of!(Context, tear));
        let backwards = self.b.ins().band_imm_u(tear, 2);
        let above = self.b.ins().iadd_imm_u(a, i64::from(bytes));
        let (at, value) =
            (self.b.ins().select(backwards, above, a), self.b.ins().select(backwards, second, first));
        self.b.ins().store(flags(), value, at, 0);
        let (stops, on) = (self.b.create_block(), self.b.create_block());
        let (at, value) =
            (self.b.ins().select(backwards, a, above), self.b.ins().select(backwards, first, second));
        let torn = self.b.ins().band_imm_u(tear, 1);
        let direct = self.b.create_block();
        self.b.ins().brif(torn, stops, &[], direct, &[]);
        self.b.switch_to_block(direct);
        self.b.ins().store(flags(), value, at, 0);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(stops);
        self.b.set_cold_block(stops);
        // The lowest bit of the request says which part remains; the result returns it.
        self.store_context(at, offset_of!(Context, request) + offset_of!(context::Request, args));
        let here = self.here();
        self.store_context(here, offset_of!(Context, request) + offset_of!(context::Request, at));
        let live = self.flow.live_before(self.function, self.block, self.at);
        self.stop(reason::TORN, &live);
        let at = self.load_context(types::I64, offset_of!(Context, result));
        let again = self.address(addr)?;
        let is_first = self.b.ins().icmp(IntCC::Equal, at, again);
        let (first, second) = (self.val(values[0], bytes), self.val(values[1], bytes));
        let value = self.b.ins().select(is_first, first, second);
        self.b.ins().store(flags(), value, at, 0);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
        Ok(())
    }

    fn atomic(
        &mut self,
        op: AtomOp,
        access: &Access,
        d: Option<Reg>,
        addr: &Addr,
        b: Val,
        c: Val,
    ) -> LoadResult<()> {
        self.stop_to_look(access, addr)?;
        let bytes = access.ty.bytes();
        let a = self.checked(access, addr, bytes, what::access(what::UPDATE, access))?;
        let (b, c) = (self.val(b, bytes), self.val(c, bytes));
        let ty = int(bytes);
        let signed = access.ty.is_signed();
        let rmw = match op {
            AtomOp::Add if !access.ty.is_float() => Some(AtomicRmwOp::Add),
            AtomOp::And => Some(AtomicRmwOp::And),
            AtomOp::Or => Some(AtomicRmwOp::Or),
            AtomOp::Xor => Some(AtomicRmwOp::Xor),
            AtomOp::Exch => Some(AtomicRmwOp::Xchg),
            AtomOp::Min if signed => Some(AtomicRmwOp::Smin),
            AtomOp::Min => Some(AtomicRmwOp::Umin),
            AtomOp::Max if signed => Some(AtomicRmwOp::Smax),
            AtomOp::Max => Some(AtomicRmwOp::Umax),
            _ => None,
        };
        let value = match (rmw, op) {
            (Some(rmw), _) => self.b.ins().atomic_rmw(ty, flags(), rmw, a, b),
            (None, AtomOp::Cas) => self.b.ins().atomic_cas(flags(), a, b, c),
            (None, _) => {
                let code = self.b.ins().iconst(types::I32, i64::from(soft::atomic_code(op, access.ty)));
                let b = if bytes < 8 { self.b.ins().uextend(types::I64, b) } else { b };
                let value = self.call(self.helpers.atomic, &[code, a, b]);
                if bytes < 8 {
                    self.b.ins().ireduce(ty, value)
                } else {
                    value
                }
            }
        };
        if let Some(d) = d {
            self.set(d, value);
        }
        Ok(())
    }

    fn call_function(&mut self, name: &str, returns: Option<u32>, args: &[u32]) -> LoadResult<()> {
        use cranelift_codegen::ir::{StackSlotData, StackSlotKind};
        let Some(&(callee, function)) = self.callees.get(name) else {
            return self.error("a call of an undefined function");
        };
        let bytes = function.param_bytes.max(8);
        let passed =
            self.b.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, bytes, 4));
        for (&slot, &(offset, bytes)) in args.iter().zip(&function.params) {
            let mut at = 0;
            while at < bytes {
                let part = [8, 4, 2, 1].into_iter().find(|part| at + part <= bytes).unwrap_or(1);
                let value =
                    self.b.ins().stack_load(types::I64, int(part), self.slots[slot as usize], at as i32);
                self.b.ins().stack_store(types::I64, value, passed, (offset + at) as i32);
                at += part;
            }
        }
        let args = self.b.ins().stack_addr(types::I64, passed, 0);
        let returned = match returns {
            Some(slot) => self.b.ins().stack_addr(types::I64, self.slots[slot as usize], 0),
            None => args,
        };
        let failed = self.call(callee, &[self.context, args, returned]);
        self.or_trap(failed);
        Ok(())
    }
}
