//! Settings of a communicator, by name.

use std::ffi::{c_char, CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

use fast_allreduce::Settings;

use crate::pointers::{give, wanted};
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Settings of a communicator, by name: docs/tuning.md has the table of all.
#[derive(Clone, Default)]
pub struct fast_allreduce_settings {
    settings: Settings,
}

impl fast_allreduce_settings {
    /// What a caller gave: null is the defaults.
    ///
    /// # Safety
    ///
    /// `given` is null or live.
    pub unsafe fn read(given: *const Self) -> Settings {
        // SAFETY: the caller's.
        unsafe { given.as_ref() }.cloned().unwrap_or_default().settings
    }
}

/// Makes settings of which none is set: the environment sets them, or they have defaults.
///
/// # Safety
///
/// `settings` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_new(
    settings: *mut *mut fast_allreduce_settings,
) -> fast_allreduce_status {
    guarded(|| {
        wanted(settings)?;
        // SAFETY: the caller's.
        unsafe { give(settings, Box::into_raw(Box::default())) }
    })
}

/// Sets one: ("device", "cuda:1"), ("timeout", "2.5"), ("order", "any"), ... FAST_ALLREDUCE_STATUS_INVALID_SETTING for a name that there
/// is not, and for a value that the setting does not take: fast_allreduce_last_error lists what there is. Values that the device does not
/// take are refused by fast_allreduce_init.
///
/// # Safety
///
/// `settings` is live, and no other thread uses it. `name` and `value` are strings that end with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_set(
    settings: *mut fast_allreduce_settings,
    name: *const c_char,
    value: *const c_char,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let (settings, name, value) =
            unsafe { (settings.as_mut(), text("the name", name)?, text("the value", value)?) };
        let settings = settings.ok_or_else(|| argument("the settings are null"))?;
        Ok(settings.settings.set(&name.to_string_lossy(), OsStr::from_bytes(value.to_bytes()))?)
    })
}

/// Frees settings, of which communicators keep nothing; null is nothing.
///
/// # Safety
///
/// `settings` is null, or live and not used any more.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_settings_free(settings: *mut fast_allreduce_settings) {
    if !settings.is_null() {
        // SAFETY: a box's pointer, which the caller gives back.
        drop(unsafe { Box::from_raw(settings) });
    }
}

/// # Safety
///
/// `pointer` is null, or a string that ends with a zero byte and lives as long as it is used.
unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<&'a CStr, Failure> {
    match pointer.is_null() {
        true => Err(argument(format!("{what} is null"))),
        // SAFETY: the caller's.
        false => Ok(unsafe { CStr::from_ptr(pointer) }),
    }
}
