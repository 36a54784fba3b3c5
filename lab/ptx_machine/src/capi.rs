//! The machine for programs in C and C++: ptx_machine.h.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::context::MOST_PARTS;
use crate::coverage;
use crate::environment::environment;
use crate::run::Launch;
use crate::{fatbin, Memory, Program, Range};

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

/// Copies what fits, and a zero.
///
/// # Safety
///
/// `to` has so many bytes.
unsafe fn say(text: &str, to: *mut c_char, bytes: usize) {
    if bytes > 0 {
        let length = text.len().min(bytes - 1);
        // SAFETY: of the caller; a text and a place for one do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), length);
            *to.add(length) = 0;
        }
    }
}

/// # Safety
///
/// A container of the size that it says, or a text that ends with a zero.
unsafe fn text_of<'a>(image: *const u8) -> Result<&'a str, String> {
    // SAFETY: a container has a header of 16 bytes; a shorter text ends with a zero before.
    let starts = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    if starts.len() >= 4 && fatbin::is_fatbin(starts) {
        // SAFETY: it is a container.
        let header = unsafe { std::slice::from_raw_parts(image, 16) };
        let size = fatbin::size(header).filter(|&size| size < 1 << 30).ok_or("no size of a fatbin")?;
        // SAFETY: so many bytes it says that it has.
        let texts = fatbin::texts(unsafe { std::slice::from_raw_parts(image, size) })?;
        return texts.first().copied().ok_or_else(|| "the fatbin has no PTX".to_owned());
    }
    std::str::from_utf8(starts).map_err(|error| error.to_string())
}

/// The module of a text: the same again for the same text.
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

/// The program of a file, if one is named.
fn load_file(path: Option<&PathBuf>) -> Loaded {
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        text.and_then(|text| load(&text)).map_err(|error| format!("{}: {error}", path.display()))
    };
    path.map(read).transpose()
}

/// The kernels of `PTX_MACHINE_KERNELS`.
fn replacements() -> Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| load_file(environment().kernels.as_ref())).clone()
}

/// What `PTX_MACHINE_MODULE` names, for every module.
fn module() -> Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| load_file(environment().module.as_ref())).clone()
}

/// The program that a kernel of a module is launched from.
fn program_of<'a>(module: &'a Program, kernel: &str) -> &'a Program {
    let replacement = replacements().ok().flatten();
    replacement.filter(|program| program.parameters(kernel).is_some()).unwrap_or(module)
}

/// What a caller in another language gets of a panic.
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
            // SAFETY: of the caller.
            None => unsafe { text_of(image) }.and_then(load),
        }
    };
    match guarded(loaded) {
        Ok(program) => program,
        Err(why) => {
            // SAFETY: of the caller.
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
    // SAFETY: of the caller.
    let (program, kernel) = unsafe { (&*program, CStr::from_ptr(kernel)) };
    let parameters = |kernel| program_of(program, kernel).parameters(kernel);
    let Some(parameters) = kernel.to_str().ok().and_then(parameters) else {
        return 0;
    };
    let (at, size) = parameters.get(number as usize).copied().unwrap_or((0, 0));
    // SAFETY: of the caller.
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
    // SAFETY: of the caller.
    let (program, own) = unsafe { (&*program, &*launch) };
    let run = || {
        // SAFETY: of the caller.
        let kernel = unsafe { CStr::from_ptr(own.kernel) }.to_str().map_err(|error| error.to_string())?;
        // SAFETY: of the caller.
        let params = unsafe { std::slice::from_raw_parts(own.parameters, own.parameter_bytes) };
        let program = program_of(program, kernel);
        let settings = environment().settings();
        let memory = CMemory(own);
        let launch = Launch { kernel, grid: own.grid, block: own.block, params, memory: &memory };
        let result = program.launch(&[launch], settings);
        coverage::note(program, kernel);
        Ok(result)
    };
    let (code, why) = match guarded(run) {
        Ok(Ok(())) => return 0,
        Ok(Err(failed)) => (failed.fault as u32, failed.to_string()),
        Err(why) => (u32::MAX, why),
    };
    // SAFETY: of the caller.
    unsafe { say(&why, error, bytes) };
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fatbin::tests::container;

    /// What the driver is told of an image that is not loaded.
    fn refusal(image: &[u8]) -> String {
        let mut error = [0 as c_char; 256];
        // SAFETY: an image and a place for a text, of their sizes.
        let program = unsafe { ptx_load(image.as_ptr(), error.as_mut_ptr(), error.len()) };
        assert!(program.is_null(), "the image was loaded");
        // SAFETY: a text with a zero at its end.
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
        // A header that says less than the entry behind it.
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
        // SAFETY: of its size.
        unsafe { say("abcdef", place.as_mut_ptr(), place.len()) };
        assert_eq!(place, [b'a' as c_char, b'b' as c_char, b'c' as c_char, 0]);
    }
}
