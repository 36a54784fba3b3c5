//! fast-allreduce for Python: the compiled module `fast_allreduce._native`.
//!
//! The stub `fast_allreduce/_native.pyi` documents what Python sees.

#![allow(missing_docs)]

mod buffers;
mod calls;
mod communicator;
mod errors;
mod interpreter;
mod streams;
mod values;

use pyo3::prelude::*;

/// The compiled part of fast_allreduce.
///
/// `gil_used`: a free-threaded interpreter enables the GIL when it imports the module. Nothing has been tested without.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("MAX_RANKS", fast_allreduce::MAX_RANKS)?;
    module.add("communicators", communicator::named::communicators(module.py())?)?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<communicator::Counters>()?;
    module.add_class::<communicator::Progress>()?;
    module.add_class::<buffers::RawBuffer>()?;
    module.add_class::<buffers::RegisteredBuffer>()?;
    module.add_class::<calls::Group>()?;
    module.add_class::<values::UniqueId>()?;
    module.add_function(wrap_pyfunction!(calls::direct_allreduce, module)?)?;
    module.add_function(wrap_pyfunction!(calls::direct_allreduce_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(communicator::inspect, module)?)?;
    module.add_function(wrap_pyfunction!(communicator::inspect_metrics, module)?)?;
    module.add_function(wrap_pyfunction!(values::get_unique_id, module)?)?;
    module.add_function(wrap_pyfunction!(values::build_facts, module)?)?;
    Ok(())
}
