//! C interface of the machine: ptx_machine.h.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::fatbin;
use crate::context::MOST_PARTS;
use crate::coverage;
use crate::driver::environment::environment;
use crate::launch::run::Launch;
use crate::{Memory, Program, Range};

#[repr(C)]
struct CLaunch {
    kernel: *const c_char,
    grid: [u32; 3],
    block: [u32; 3],
    parameters: *const u8,
    parameter_bytes: usize,
    find: extern "C" fn(*mut c_void, u64, *mut u64, *mut u64) -> c_int,
    multicast: extern "C" fn(*mut c_void, u64, u64, *mut u64) -> u32,
    memory: *mut c_void,
}

struct CMemory<'a>(&'a CLaunch);

impl Memory for CMemory<'_> {
    fn find(&self, address: u64) -> Option<Range> {
        let mut range = Range { low: 0, bytes: 0 };
        let found = (self.0.find)(self.0.memory, address, &mut range.low, &mut range.bytes);
        (found != 0).then_some(range)
    }

    fn multicast(&self, address: u64, bytes: u32, parts: &mut [u64; MOST_PARTS]) -> usize {
        (self.0.multicast)(self.0.memory, address, bytes.into(), parts.as_mut_ptr()) as usize
    }
}

/// Copies as much of the text as fits, and a terminating zero.
///
/// # Safety
///
/// `to` points to `bytes` writable bytes.
unsafe fn say(text: &str, to: *mut c_char, bytes: usize) {
    if bytes > 0 {
        let length = text.len().min(bytes - 1);
        // SAFETY: the caller vouches for `to`; at most `bytes - 1` bytes and a zero are written; the two do
        // not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), length);
            *to.add(length) = 0;
        }
    }
}

/// Returns the PTX of an image.
///
/// # Safety
///
/// The image is a container of the size in its header, or a text that ends with a zero.
unsafe fn text_of<'a>(image: *const u8) -> Result<&'a str, String> {
    // SAFETY: a container's header of 16 bytes has a zero, and a text ends with one.
    let starts = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    if starts.len() >= 4 && fatbin::is_fatbin(starts) {
        // SAFETY: the image is a container, whose header has 16 bytes.
        let header = unsafe { std::slice::from_raw_parts(image, 16) };
        let size = fatbin::size(header).filter(|&size| size < 1 << 30).ok_or("no size of a fatbin")?;
        // SAFETY: the caller vouches that a container has the size in its header.
        let texts = fatbin::texts(unsafe { std::slice::from_raw_parts(image, size) })?;
        return texts.first().copied().ok_or_else(|| "the fatbin has no PTX".to_owned());
    }
    std::str::from_utf8(starts).map_err(|error| error.to_string())
}

/// Returns the program of a text. Loading an equal text again returns the existing program.
fn load(text: &str) -> Result<&'static Program, String> {
    static LOADED: Mutex<Option<HashMap<(u64, usize), &'static Program>>> = Mutex::new(None);
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let key = (hasher.finish(), text.len());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_with(HashMap::new);
    if let Some(program) = loaded.get(&key) {
        return Ok(program);
    }
    let program = Program::load(text, environment().observes()).map_err(|error| error.to_string())?;
    let program: &'static Program = Box::leak(Box::new(program));
    loaded.insert(key, program);
    Ok(program)
}

type Loaded = Result<Option<&'static Program>, String>;

/// Loads the program of a file, if one is given.
fn load_file(path: Option<&PathBuf>) -> Loaded {
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        text.and_then(|text| load(&text)).map_err(|error| format!("{}: {error}", path.display()))
    };
    path.map(read).transpose()
}

/// Returns the program named by `PTX_MACHINE_KERNELS`, whose kernels replace those of modules.
fn replacements() -> Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| load_file(environment().kernels.as_ref())).clone()
}

/// Returns the program named by `PTX_MACHINE_MODULE`, which replaces every module.
fn module() -> Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| load_file(environment().module.as_ref())).clone()
}

/// Returns the program that a module's kernel is launched from.
fn program_of<'a>(module: &'a Program, kernel: &str) -> &'a Program {
    let replacement = replacements().ok().flatten();
    replacement.filter(|program| program.parameters(kernel).is_some()).unwrap_or(module)
}

/// Turns a panic into an error: panics must not cross into other languages.
fn guarded<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| Err("the machine itself failed".to_owned()))
}

/// # Safety
///
/// See ptx_machine.h.
#[no_mangle]
unsafe extern "C" fn ptx_load(image: *const u8, error: *mut c_char, bytes: usize) -> *const Program {
    let loaded = || {
        replacements()?;
        match module()? {
            Some(program) => Ok(program),
            // SAFETY: the caller fulfils ptx_machine.h.
            None => unsafe { text_of(image) }.and_then(load),
        }
    };
    match guarded(loaded) {
        Ok(program) => program,
        Err(why) => {
            // SAFETY: the caller passes the buffer with its size.
            unsafe { say(&why, error, bytes) };
            std::ptr::null()
        }
    }
}

/// # Safety
///
/// See ptx_machine.h.
#[no_mangle]
unsafe extern "C" fn ptx_parameter(
    program: *const Program,
    kernel: *const c_char,
    number: u32,
    offset: *mut u32,
    bytes: *mut u32,
) -> c_int {
    // SAFETY: the caller passes a loaded module and a zero-terminated name.
    let (program, kernel) = unsafe { (&*program, CStr::from_ptr(kernel)) };
    let parameters = |kernel| program_of(program, kernel).parameters(kernel);
    let Some(parameters) = kernel.to_str().ok().and_then(parameters) else {
        return 0;
    };
    let (at, size) = parameters.get(number as usize).copied().unwrap_or((0, 0));
    // SAFETY: the caller passes valid places for the results.
    unsafe {
        *offset = at;
        *bytes = size;
    }
    1
}

/// # Safety
///
/// See ptx_machine.h.
#[no_mangle]
unsafe extern "C" fn ptx_launch(
    program: *const Program,
    launch: *const CLaunch,
    error: *mut c_char,
    bytes: usize,
) -> u32 {
    // SAFETY: the caller passes a loaded module and a valid launch.
    let (program, own) = unsafe { (&*program, &*launch) };
    let run = || {
        // SAFETY: the caller passes a zero-terminated name.
        let kernel = unsafe { CStr::from_ptr(own.kernel) }.to_str().map_err(|error| error.to_string())?;
        // SAFETY: the caller passes the parameters with their size.
        let params = unsafe { std::slice::from_raw_parts(own.parameters, own.parameter_bytes) };
        let program = program_of(program, kernel);
        let settings = environment().settings();
        let memory = CMemory(own);
        let launch = Launch {
            kernel,
            grid: own.grid,
            block: own.block,
            cluster: [1; 3],
            dynamic_shared: 0,
            params,
            memory: &memory,
        };
        let result = program.launch(&[launch], settings);
        coverage::note(program, kernel);
        Ok(result)
    };
    let (code, why) = match guarded(run) {
        Ok(Ok(())) => return 0,
        Ok(Err(failed)) => (failed.fault as u32, failed.to_string()),
        Err(why) => (u32::MAX, why),
    };
    // SAFETY: the caller passes the buffer with its size.
    unsafe { say(&why, error, bytes) };
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fatbin::tests::container;

    /// Returns the error text for an image that cannot be loaded.
    fn refusal(image: &[u8]) -> String {
        let mut error = [0 as c_char; 256];
        // SAFETY: the image is complete, and the buffer is passed with its size.
        let program = unsafe { ptx_load(image.as_ptr(), error.as_mut_ptr(), error.len()) };
        assert!(program.is_null(), "the image was loaded");
        // SAFETY: `ptx_load` ends its text with a zero.
        unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn images_that_cannot_be_loaded() {
        let newer = b".version 99.0\n.target sm_90\n.address_size 64\n";
        assert!(refusal(&container(0, newer)).contains("99.0 is newer"));
        assert!(refusal(&container(0x2000, newer)).contains("compressed"));
        assert!(
            refusal(&container(0, &[0xFF])).contains("UTF-8")
                || refusal(&container(0, &[0xFF])).contains("utf-8")
        );
        assert!(refusal(b"no PTX\0").contains(".version"));
        assert!(refusal(b"\0").contains(".version"));
        // The header's size is less than that of the entry after it.
        let mut cut = container(0, newer);
        cut[8] -= 5;
        assert!(refusal(&cut).contains("truncated"));
        let mut endless = container(0, newer);
        endless[8..16].fill(0xFF);
        assert!(refusal(&endless).contains("no size"));
    }

    #[test]
    fn a_text_that_is_too_long_is_cut() {
        let mut place = [1 as c_char; 4];
        // SAFETY: the buffer is passed with its size.
        unsafe { say("abcdef", place.as_mut_ptr(), place.len()) };
        assert_eq!(place, [b'a' as c_char, b'b' as c_char, b'c' as c_char, 0]);
    }
}
