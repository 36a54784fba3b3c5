//! Settings of a communicator, as keyword arguments.

use std::ffi::OsString;
use std::path::PathBuf;

use fast_allreduce::Settings;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::errors::raised;

/// Checks them, before a rank joins with them. None is the default.
pub fn settings(py: Python<'_>, device: &str, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Settings> {
    let mut settings = Settings::new();
    settings.set("device", device).map_err(|error| raised(py, error))?;
    for (name, value) in keywords.into_iter().flatten() {
        let name = name.extract::<String>()?;
        if !value.is_none() || !Settings::NAMES.contains(&&*name) {
            settings.set(&name, text(&value)?).map_err(|error| raised(py, error))?;
        }
    }
    settings.check().map_err(|error| raised(py, error))?;
    Ok(settings)
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
