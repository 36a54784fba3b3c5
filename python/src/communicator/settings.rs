//! Settings of a communicator, as keyword arguments.

use std::ffi::OsString;
use std::path::PathBuf;

use fast_allreduce::Settings;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::OrRaise;

/// Converts keywords to settings, and checks them before the rank joins. None is the default.
pub fn checked(py: Python<'_>, device: &str, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Settings> {
    let mut settings = Settings::new();
    settings.set("device", device).or_raise(py)?;
    for (name, value) in keywords.into_iter().flatten() {
        let name = name.extract::<String>()?;
        // An unknown name is an error whatever its value.
        if !value.is_none() || !Settings::NAMES.contains(&&*name) {
            settings.set(&name, text(&value)?).or_raise(py)?;
        }
    }
    settings.check().or_raise(py)?;
    Ok(settings)
}

/// Converts a value to the text that settings parse. A bool may also be numpy's.
fn text(value: &Bound<'_, PyAny>) -> PyResult<OsString> {
    if let Ok(is_on) = value.extract::<bool>() {
        return Ok(if is_on { "1" } else { "0" }.into());
    }
    match value.extract::<PathBuf>() {
        Ok(word_or_path) => Ok(word_or_path.into()),
        Err(_) => Ok(value.str()?.to_str()?.into()),
    }
}
