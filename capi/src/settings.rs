//! Settings of a communicator, by name.

use std::ffi::{c_char, CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

use fast_allreduce::Settings;

use crate::pointers::{check_result, give};
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Settings of a communicator, by name. docs/tuning.md has a table of all settings.
#[derive(Clone, Default)]
pub struct fast_allreduce_settings {
    settings: Settings,
}

impl fast_allreduce_settings {
    /// Reads the caller's settings; null means defaults.
    ///
    /// # Safety
    ///
    /// `given` is null or live.
    pub unsafe fn read(given: *const Self) -> Settings {
        // SAFETY: the caller guarantees it.
        unsafe { given.as_ref() }.cloned().unwrap_or_default().settings
    }
}

/// Creates settings. A setting that is not set comes from the environment, or has its default.
///
/// # Safety
///
/// `settings` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_new(
    settings: *mut *mut fast_allreduce_settings,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(settings)?;
        // SAFETY: the caller guarantees it.
        unsafe { give(settings, Box::into_raw(Box::default())) }
    })
}

/// Sets one setting: ("device", "cuda:1"), ("timeout", "2.5"), ("order", "any"), ... For an unknown name or an invalid
/// value it returns FAST_ALLREDUCE_STATUS_INVALID_SETTING, and fast_allreduce_last_error lists what is valid. Values
/// that the device does not support are refused by fast_allreduce_init.
///
/// # Safety
///
/// `settings` is live, and no other thread uses it. `name` and `value` are null-terminated strings.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_set(
    settings: *mut fast_allreduce_settings,
    name: *const c_char,
    value: *const c_char,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let (settings, name, value) =
            unsafe { (settings.as_mut(), text("the name", name)?, text("the value", value)?) };
        let settings = settings.ok_or_else(|| argument("the settings are null"))?;
        Ok(settings.settings.set(&name.to_string_lossy(), OsStr::from_bytes(value.to_bytes()))?)
    })
}

/// Frees settings; does nothing for null. Communicators do not refer to the settings that they were created with.
///
/// # Safety
///
/// `settings` is null, or live and not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_free(settings: *mut fast_allreduce_settings) {
    if !settings.is_null() {
        // SAFETY: the pointer comes from a box, and the caller does not use it afterwards.
        drop(unsafe { Box::from_raw(settings) });
    }
}

/// Borrows a string.
///
/// # Safety
///
/// `pointer` is null, or a null-terminated string that is valid while the reference lives.
unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<&'a CStr, Failure> {
    match pointer.is_null() {
        true => Err(argument(format!("{what} is null"))),
        // SAFETY: the caller guarantees it.
        false => Ok(unsafe { CStr::from_ptr(pointer) }),
    }
}
