//! Messages of a thread that go together.

use std::cell::RefCell;
use std::sync::Arc;

use fast_allreduce::Transfer;
use pyo3::prelude::*;

use crate::any::Any;
use crate::buffer::Operand;
use crate::errors::{invalid, raised};
use crate::interrupt::{waiting, Wait};

/// The messages of one communicator on one stream.
struct Part {
    any: Arc<Any>,
    stream: u64,
    transfers: Vec<Transfer>,
    operands: Vec<Operand>,
}

#[derive(Default)]
struct Open {
    depth: usize,
    parts: Vec<Part>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// Puts a message into this thread's group; gives the operand back if there is none.
pub fn gathered(any: &Arc<Any>, stream: u64, transfer: Transfer, operand: Operand) -> Option<Operand> {
    OPEN.with_borrow_mut(|open| {
        if open.depth == 0 {
            return Some(operand);
        }
        let same = |part: &&mut Part| Arc::ptr_eq(&part.any, any) && part.stream == stream;
        match open.parts.iter_mut().find(same) {
            Some(part) => {
                part.transfers.push(transfer);
                part.operands.push(operand);
            }
            None => open.parts.push(Part {
                any: Arc::clone(any),
                stream,
                transfers: vec![transfer],
                operands: vec![operand],
            }),
        }
        None
    })
}

/// The context manager that `fast_allreduce.group()` gives.
#[pyclass(module = "fast_allreduce", frozen)]
pub struct Group;

#[pymethods]
impl Group {
    #[new]
    fn new() -> Self {
        Self
    }

    fn __enter__(&self) {
        OPEN.with_borrow_mut(|open| open.depth += 1);
    }

    #[pyo3(signature = (kind, _value, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let parts = OPEN.with_borrow_mut(|open| {
            open.depth = open.depth.checked_sub(1)?;
            Some(if open.depth == 0 { std::mem::take(&mut open.parts) } else { Vec::new() })
        });
        let parts = parts.ok_or_else(|| invalid(py, "this thread has no group open"))?;
        // After an exception nothing of the group is carried out.
        if !kind.is_none() {
            return Ok(());
        }
        for part in parts {
            let Part { any, stream, transfers, operands } = part;
            let call = || {
                // SAFETY: the operands hold the memory, which is of the communicator's device; whoever gave buffers to
                // the group leaves them alone until it ends.
                unsafe { any.transfer(stream, &transfers) }
            };
            let sent = waiting(py, || Wait::Call(Arc::clone(&any)), call)?;
            drop(operands);
            sent.map_err(|error| raised(py, error))?;
        }
        Ok(())
    }
}
