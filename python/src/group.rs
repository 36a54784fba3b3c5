//! Messages of a thread that go together.

use std::cell::RefCell;
use std::sync::Arc;

use fast_allreduce::{AnyCommunicator, Transfer};
use pyo3::prelude::*;

use crate::buffer::Operand;
use crate::errors::invalid;
use crate::interrupt::in_call;
use crate::streams::Streams;

/// The messages of one communicator on one stream.
struct Part {
    any: Arc<AnyCommunicator>,
    stream: u64,
    transfers: Vec<Transfer>,
    buffers: Vec<(Operand, Streams)>,
}

#[derive(Default)]
struct Open {
    depth: usize,
    parts: Vec<Part>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// Puts a message into this thread's group; gives its buffer back if there is none.
pub fn gathered(
    any: &Arc<AnyCommunicator>,
    stream: u64,
    transfer: Transfer,
    buffer: (Operand, Streams),
) -> Option<(Operand, Streams)> {
    let mut buffer = Some(buffer);
    // A thread that is ending, whose variables have gone, has no group open.
    let _ = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        if open.depth == 0 {
            return;
        }
        let same = |part: &&mut Part| Arc::ptr_eq(&part.any, any) && part.stream == stream;
        match open.parts.iter_mut().find(same) {
            Some(part) => {
                part.transfers.push(transfer);
                part.buffers.extend(buffer.take());
            }
            None => open.parts.push(Part {
                any: Arc::clone(any),
                stream,
                transfers: vec![transfer],
                buffers: buffer.take().into_iter().collect(),
            }),
        }
    });
    buffer
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

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let begun = OPEN.try_with(|open| open.borrow_mut().depth += 1);
        begun.map_err(|_| invalid(py, "this thread is ending, and can open no group"))
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
        // After an exception nothing of the group is carried out.
        if !kind.is_none() {
            return Ok(());
        }
        for part in parts {
            let Part { any, stream, transfers, buffers } = part;
            in_call(py, any, |any| {
                buffers.iter().try_for_each(|(_, streams)| streams.before(any))?;
                // SAFETY: the operands hold the memory, which is of the communicator's device; whoever gave buffers to
                // the group leaves them alone until it ends.
                unsafe { any.transfer(stream, &transfers) }?;
                buffers.iter().try_for_each(|(_, streams)| streams.after(any))
            })?;
        }
        Ok(())
    }
}
