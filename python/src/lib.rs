//! fast-allreduce for Python: the module `fast_allreduce._native`. What Python sees is documented in its stub,
//! `fast_allreduce/_native.pyi`.

#![allow(missing_docs)]

mod any_buffer;
mod buffer;
mod buffer_protocol;
mod calls;
mod collectives;
mod communicator;
mod dlpack;
mod errors;
mod fused;
mod group;
mod interface;
mod interrupt;
mod memory;
mod messages;
mod named;
mod settings;
mod stream_sources;
mod streams;
mod torch;
mod user_code;
mod values;
mod view;

use pyo3::prelude::*;

/// The compiled part of fast_allreduce.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("MAX_RANKS", fast_allreduce::MAX_RANKS)?;
    module.add("communicators", named::communicators(module.py())?)?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<communicator::Counters>()?;
    module.add_class::<any_buffer::RawBuffer>()?;
    module.add_class::<memory::RegisteredBuffer>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<values::UniqueId>()?;
    module.add_function(wrap_pyfunction!(values::get_unique_id, module)?)?;
    module.add_function(wrap_pyfunction!(values::build_facts, module)?)?;
    Ok(())
}
