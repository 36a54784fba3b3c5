//! Settings of a communicator, as keyword arguments.

use std::ffi::OsString;
use std::path::PathBuf;

use fast_allreduce::bootstrap::Bootstrap;
#[cfg(feature = "cuda")]
use fast_allreduce::device::cuda::current::CallersContext;
#[cfg(not(feature = "cuda"))]
use fast_allreduce::Error;
use fast_allreduce::{AnyCommunicator, Builder, Place};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::errors::raised;

pub struct Settings {
    pub given: fast_allreduce::Settings,
    builder: Builder,
}

impl Settings {
    /// Checks them, before a rank joins with them. None is the default.
    pub fn of(py: Python<'_>, device: &str, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut given = fast_allreduce::Settings::new();
        given.set("device", device).map_err(|error| raised(py, error))?;
        for (name, value) in keywords.into_iter().flatten() {
            let name = name.extract::<String>()?;
            if !value.is_none() || !fast_allreduce::Settings::NAMES.contains(&&*name) {
                given.set(&name, text(&value)?).map_err(|error| raised(py, error))?;
            }
        }
        let builder = given.builder().map_err(|error| raised(py, error))?;
        Ok(Self { given, builder })
    }

    pub fn build(self, bootstrap: impl Bootstrap + 'static) -> fast_allreduce::Result<AnyCommunicator> {
        match self.given.device() {
            Place::Cpu => self.builder.build(self.given.host()?, bootstrap).map(AnyCommunicator::from),
            #[cfg(feature = "cuda")]
            Place::Cuda(ordinal) => {
                let _context = CallersContext::keep_if_any();
                self.builder.build(self.given.cuda(ordinal)?, bootstrap).map(AnyCommunicator::from)
            }
            #[cfg(not(feature = "cuda"))]
            Place::Cuda(_) => Err(Error::Unavailable {
                what: "the CUDA device".into(),
                reason: "this wheel was built without the feature `cuda`".into(),
            }),
        }
    }
}

/// A value as settings write it.
fn text(value: &Bound<'_, PyAny>) -> PyResult<OsString> {
    if let Ok(switch) = value.cast::<PyBool>() {
        return Ok(if switch.is_true() { "1" } else { "0" }.into());
    }
    match value.extract::<PathBuf>() {
        Ok(word_or_path) => Ok(word_or_path.into()),
        Err(_) => Ok(value.str()?.to_str()?.into()),
    }
}
