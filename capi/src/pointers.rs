//! What a caller points at: where results go, and lists.

use crate::status::{argument, Failure};

/// Writes a value where the caller wants it.
///
/// # Safety
///
/// `place` is null or valid for a write.
pub unsafe fn give<T>(place: *mut T, value: T) -> Result<(), Failure> {
    if place.is_null() {
        return Err(argument("where to put the result is null"));
    }
    // SAFETY: the caller's.
    unsafe { place.write(value) };
    Ok(())
}

/// Elements at a caller's pointer, which may be null where there are none.
///
/// # Safety
///
/// `pointer` is valid for reads of `count` elements as long as the slice lives, and aligned.
pub unsafe fn list<'a, T>(what: &str, pointer: *const T, count: usize) -> Result<&'a [T], Failure> {
    match (count, pointer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(argument(format!("{what} is null"))),
        // SAFETY: the caller's.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

pub fn wanted<T>(place: *mut T) -> Result<(), Failure> {
    match place.is_null() {
        true => Err(argument("where to put the result is null")),
        false => Ok(()),
    }
}
