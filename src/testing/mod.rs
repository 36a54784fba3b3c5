//! Fixtures for the unit tests of several modules: damaged messages, machines and temporary folders. Decoders for
//! `lab/fuzz`.

#[cfg(test)]
pub(crate) mod damaged;
#[cfg(test)]
pub(crate) mod machines;
#[cfg(test)]
pub(crate) mod temporary;

/// Exports a decoder as a function of bytes with this name, for `lab/fuzz`, whose build script finds each use.
#[cfg(fuzzing)]
macro_rules! decoder {
    ($name:ident, |$bytes:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        pub extern "Rust" fn $name($bytes: &[u8]) {
            let _ = $body;
        }
    };
}
#[cfg(fuzzing)]
pub(crate) use decoder;
