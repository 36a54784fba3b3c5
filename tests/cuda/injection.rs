//! What the stand-in driver does for tests: driver calls that fail on demand, and counts of what this process holds.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};

use crate::gpu::stand_in;

tests! {
    stand_in => a_call_fails_once_and_what_is_live_is_counted;
}

/// The address of a function of the stand-in: the driver's, or one that it has besides.
pub fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the library is the one that cudarc loads, whose initialisers do nothing but allocate.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "there is no libcuda.so.1");
    // SAFETY: the handle is of a library that is never closed.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?} is not in the driver: it is not the stand-in");
    address
}

/// Whose calls count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    Process,
    ThisThread,
}

/// Lets the `nth` call from now of a driver function, counted from 1, return `code` and do nothing else.
pub fn fail(function: &str, nth: u64, code: u32, of: Of) {
    type Fail = unsafe extern "C" fn(*const c_char, u64, c_uint, c_int);
    let function = CString::new(function).unwrap();
    // SAFETY: declared so in lab/stand_in_driver/functions.h; the name is copied before it returns.
    unsafe {
        let fail = std::mem::transmute::<*mut c_void, Fail>(symbol(c"stand_in_fail"));
        fail(function.as_ptr(), nth, code, c_int::from(of == Of::ThisThread));
    }
}

/// How many of the failures that were asked for have not happened yet; they are taken back.
pub fn take_back() -> u32 {
    type Fail = unsafe extern "C" fn(*const c_char, u64, c_uint, c_int);
    type Left = unsafe extern "C" fn() -> c_uint;
    // SAFETY: declared so in lab/stand_in_driver/functions.h.
    unsafe {
        let left = std::mem::transmute::<*mut c_void, Left>(symbol(c"stand_in_failures_left"))();
        std::mem::transmute::<*mut c_void, Fail>(symbol(c"stand_in_fail"))(std::ptr::null(), 0, 0, 0);
        left
    }
}

/// Runs a test's own driver calls: they are neither counted nor fail.
pub fn aside<R>(body: impl FnOnce() -> R) -> R {
    type Pause = unsafe extern "C" fn(c_int);
    // SAFETY: declared so in lab/stand_in_driver/functions.h.
    let pause = unsafe { std::mem::transmute::<*mut c_void, Pause>(symbol(c"stand_in_pause")) };
    // SAFETY: sets a variable of this thread.
    unsafe { pause(1) };
    let result = body();
    // SAFETY: as above.
    unsafe { pause(0) };
    result
}

/// How often this thread has called each driver function; those that it has not called are left out.
pub fn own_calls() -> BTreeMap<String, u64> {
    calls_by(c"stand_in_calls_of_thread")
}

/// How often this process has called each driver function.
pub fn calls() -> BTreeMap<String, u64> {
    calls_by(c"stand_in_calls")
}

fn calls_by(counter: &CStr) -> BTreeMap<String, u64> {
    type Name = unsafe extern "C" fn(c_uint) -> *const c_char;
    type Calls = unsafe extern "C" fn(*const c_char) -> u64;
    let mut all = BTreeMap::new();
    // SAFETY: declared so in lab/stand_in_driver/functions.h; names live as long as the library.
    unsafe {
        let name_of = std::mem::transmute::<*mut c_void, Name>(symbol(c"stand_in_function"));
        let calls_of = std::mem::transmute::<*mut c_void, Calls>(symbol(counter));
        for index in 0.. {
            let name = name_of(index);
            if name.is_null() {
                return all;
            }
            let calls = calls_of(name);
            if calls > 0 {
                all.insert(CStr::from_ptr(name).to_string_lossy().into_owned(), calls);
            }
        }
    }
    all
}

/// What this process holds of the driver, by the function that makes it; what there is none of is left out.
pub fn live() -> BTreeMap<String, u64> {
    type Live = unsafe extern "C" fn(c_uint, *mut u64) -> *const c_char;
    let mut all = BTreeMap::new();
    // SAFETY: declared so in lab/stand_in_driver/functions.h; names live as long as the library.
    unsafe {
        let live = std::mem::transmute::<*mut c_void, Live>(symbol(c"stand_in_live"));
        for index in 0.. {
            let mut count = 0;
            let name = live(index, &mut count);
            if name.is_null() {
                return all;
            }
            if count > 0 {
                all.insert(CStr::from_ptr(name).to_string_lossy().into_owned(), count);
            }
        }
    }
    all
}

/// In a process of its own, so that no other test's calls are counted.
fn a_call_fails_once_and_what_is_live_is_counted() {
    use crate::processes::{part, this_test, Process};
    if part().is_none() {
        let test = "injection::a_call_fails_once_and_what_is_live_is_counted";
        Process::start(&mut this_test(test, "alone")).finish().unwrap();
        return;
    }
    let context = crate::gpu::context(0);
    let before = live();
    let stream = context.new_stream().unwrap();
    fail("cuMemAllocAsync", 2, 2, Of::ThisThread);
    let first = stream.alloc_zeros::<u8>(100).unwrap();
    assert_eq!(stream.alloc_zeros::<u8>(100).unwrap_err().0 as u32, 2);
    let second = stream.alloc_zeros::<u8>(100).unwrap();
    assert_eq!(calls()["cuMemAllocAsync"], 3);
    assert_eq!(live()["cuMemAllocAsync"], 2);
    assert_ne!(live(), before);
    drop((first, second, stream));
    assert_eq!(live(), before);
    fail("cuMemAllocAsync", 1, 2, Of::Process);
    assert_eq!((take_back(), take_back()), (1, 0));
}
