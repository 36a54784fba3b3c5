//! Groups: messages of a thread that are sent and received together.

use std::cell::RefCell;
use std::sync::Arc;

use fast_allreduce::{AnyCommunicator, Transfer};
use pyo3::prelude::*;

use crate::buffers::Operand;
use crate::errors::invalid;
use crate::interpreter::in_call;
use crate::streams::Streams;

/// The messages of one communicator on one stream.
struct Part {
    any: Arc<AnyCommunicator>,
    stream: u64,
    transfers: Vec<Transfer>,
    buffers: Vec<(Operand, Streams)>,
}

/// The groups that a thread has open. Nested ones end with the outermost.
#[derive(Default)]
struct Open {
    depth: usize,
    parts: Vec<Part>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// Adds a message to this thread's group. Returns the buffer if no group is open.
pub fn gathered(
    any: &Arc<AnyCommunicator>,
    stream: u64,
    transfer: Transfer,
    buffer: (Operand, Streams),
) -> Option<(Operand, Streams)> {
    let mut buffer = Some(buffer);
    // A thread that has dropped its thread-locals has no group open.
    let _ = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        if open.depth == 0 {
            return;
        }
        let is_same = |part: &Part| Arc::ptr_eq(&part.any, any) && part.stream == stream;
        let index = open.parts.iter().position(is_same).unwrap_or_else(|| {
            let (transfers, buffers) = (Vec::new(), Vec::new());
            open.parts.push(Part { any: Arc::clone(any), stream, transfers, buffers });
            open.parts.len() - 1
        });
        open.parts[index].transfers.push(transfer);
        open.parts[index].buffers.extend(buffer.take());
    });
    buffer
}

/// The context manager that `fast_allreduce.group()` returns.
#[pyclass(module = "fast_allreduce", frozen)]
pub struct Group;

#[pymethods]
impl Group {
    #[new]
    fn new() -> Self {
        Self
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let opened = OPEN.try_with(|open| open.borrow_mut().depth += 1);
        opened.map_err(|_| invalid(py, "this thread is ending, and can open no group"))
    }

    #[pyo3(signature = (kind, _value, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let parts = OPEN.try_with(|open| {
            let mut open = open.borrow_mut();
            open.depth = open.depth.checked_sub(1)?;
            Some(if open.depth == 0 { std::mem::take(&mut open.parts) } else { Vec::new() })
        });
        let parts = parts.ok().flatten().ok_or_else(|| invalid(py, "this thread has no group open"))?;
        // After an exception none of the group's messages is sent or received.
        if !kind.is_none() {
            return Ok(());
        }
        for part in parts {
            let Part { any, stream, transfers, buffers } = part;
            in_call(py, any, |any| {
                buffers.iter().try_for_each(|(_, streams)| streams.before(any))?;
                // SAFETY: the operands hold the memory, which is on the communicator's device. The program leaves the
                // buffers of a group alone until it ends.
                unsafe { any.transfer(stream, &transfers) }?;
                buffers.iter().try_for_each(|(_, streams)| streams.after(any))
            })?;
        }
        Ok(())
    }
}
