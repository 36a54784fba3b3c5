//! The interpreter around a call: signal handlers during waits, and Python code that a call runs.

mod interrupt;
mod user_code;

pub use self::interrupt::{drop_detached, in_call, is_main_thread, waiting};
pub use self::user_code::{attribute, call, method, optional_attribute, parking};
