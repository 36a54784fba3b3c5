//! `cli/src/harness/rivals/mpi_names.rs`: MPI's types and operations.

use super::GENERATED;
use crate::ops::OPS;
use crate::types::TYPES;

/// Returns the program's file.
pub fn names() -> String {
    let types = TYPES.iter().filter_map(|one| Some((one.variant, one.mpi?)));
    let ops = OPS.iter().filter_map(|op| Some((op.variant, op.mpi?)));
    format!(
        "//! {GENERATED}\n\nuse fast_allreduce::{{DType, ReduceOp}};\nuse mpi::ffi;\n\n{}\n{}",
        lookup("datatype(dtype: DType) -> Option<ffi::MPI_Datatype>", "dtype", "DType", types),
        lookup("operation(op: ReduceOp) -> Option<ffi::MPI_Op>", "op", "ReduceOp", ops),
    )
}

fn lookup<'a>(
    signature: &str,
    of: &str,
    name: &str,
    rows: impl Iterator<Item = (&'a str, &'a str)>,
) -> String {
    let rows: String =
        rows.map(|(variant, mpi)| format!("            {name}::{variant} => ffi::RSMPI_{mpi},\n")).collect();
    format!(
        "pub(super) fn {signature} {{
    // SAFETY: these statics are constants of the MPI library.
    unsafe {{
        Some(match {of} {{
{rows}            // MPI has no equivalent.
            _ => return None,
        }})
    }}
}}
"
    )
}
