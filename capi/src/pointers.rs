//! Access to the caller's pointers: results and lists.

use crate::status::{argument, Failure};

/// Writes a result.
///
/// # Safety
///
/// `pointer` is null or valid for a write.
pub unsafe fn give<T>(pointer: *mut T, value: T) -> Result<(), Failure> {
    check_result(pointer)?;
    // SAFETY: the caller guarantees it.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Borrows a list; `pointer` may be null if `count` is 0.
///
/// # Safety
///
/// `pointer` is aligned and valid for reads of `count` elements while the slice lives.
pub unsafe fn list<'a, T>(what: &str, pointer: *const T, count: usize) -> Result<&'a [T], Failure> {
    match (count, pointer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(argument(format!("{what} is null"))),
        // SAFETY: the caller guarantees it.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Refuses a null pointer for a result.
pub fn check_result<T>(pointer: *mut T) -> Result<(), Failure> {
    match pointer.is_null() {
        true => Err(argument("the pointer for the result is null")),
        false => Ok(()),
    }
}
