//! Addresses in the shared memory of a cluster.

use cranelift_codegen::ir::{types, InstBuilder, Value};

use super::{int, Lower};
use crate::errors::LoadResult;
use crate::ir::{Addr, Reg, Val};
use crate::launch::cluster::what;
use crate::types::Space;

impl Lower<'_, '_> {
    /// Lowers `mapa`, or, without a rank, `getctarank`.
    pub(super) fn map_address(
        &mut self,
        space: Space,
        d: Reg,
        a: &Addr,
        rank: Option<Val>,
    ) -> LoadResult<()> {
        let generic = space == Space::Generic;
        let a = self.address(a)?;
        let value = match rank {
            Some(rank) => {
                let rank = self.val(rank, 4);
                self.in_cluster(if generic { what::MAP } else { what::MAP_WINDOW }, a, Some(rank))
            }
            None => {
                let a = if generic { a } else { self.in_cluster(what::TO_GENERIC, a, None) };
                self.in_cluster(what::RANK, a, None)
            }
        };
        let bytes = self.function.registers[d as usize].ty.bytes();
        let value = if bytes < 8 { self.b.ins().ireduce(int(bytes), value) } else { value };
        self.set(d, value);
        Ok(())
    }

    /// Asks the runtime about an address in the shared memory of the cluster.
    pub(super) fn in_cluster(&mut self, what: u32, a: Value, rank: Option<Value>) -> Value {
        let what = self.b.ins().iconst(types::I32, i64::from(what));
        let rank = rank.unwrap_or_else(|| self.b.ins().iconst(types::I32, 0));
        self.call(self.helpers.cluster, &[self.context, what, a, rank])
    }
}
