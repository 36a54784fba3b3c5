//! The runner of test targets that need what a machine may not have: a driver, a device, a library, memory, a
//! privilege.
//!
//! A test that lacks what it needs is counted as ignored, and its line says why. `FAST_ALLREDUCE_REQUIRE`, a list of
//! names with commas between them, says what must be there: a test that lacks one of those fails. Arguments are those
//! of the built-in runner. What tests print is not kept back.

#![allow(dead_code, unused_macros)] // Each target uses a part of it.

use std::process::ExitCode;

use clap::Parser;
use libtest_mimic::{Arguments, Completion, Failed};

pub use libtest_mimic::Trial;

const REQUIRE: &str = "FAST_ALLREDUCE_REQUIRE";

/// What is not there: by the name that it can be required by, and why.
pub struct Missing {
    what: &'static str,
    reason: String,
}

impl Missing {
    pub fn new(what: &'static str, reason: impl ToString) -> Self {
        Self { what, reason: reason.to_string() }
    }

    fn is_required(&self) -> bool {
        let required = std::env::var(REQUIRE).unwrap_or_default();
        required.split(',').any(|name| name.trim() == self.what)
    }
}

/// What a test needs, and gets where it asks for it.
pub type Found<T> = Result<T, Missing>;

/// Of tests that need nothing.
pub fn always() -> Found<()> {
    Ok(())
}

/// A function that takes what was found, or that does not; it is there until the function returns.
pub trait Body<T, Form> {
    fn run(self, found: T);
}

impl<T, F: FnOnce(T)> Body<T, fn(T)> for F {
    fn run(self, found: T) {
        self(found);
    }
}

impl<T, F: FnOnce()> Body<T, fn()> for F {
    fn run(self, _found: T) {
        self();
    }
}

/// A test by its path, crate and all. `need` is looked for when the test's turn comes.
pub fn test<T, Form>(
    path: &str,
    need: impl FnOnce() -> Found<T> + Send + 'static,
    body: impl Body<T, Form> + Send + 'static,
) -> Trial {
    let (_crate_name, name) = path.split_once("::").expect("a crate and a name");
    Trial::ignorable_test(name, move || match need() {
        Ok(found) => {
            body.run(found);
            Ok(Completion::Completed)
        }
        Err(missing) if missing.is_required() => {
            Err(Failed::from(format!("{REQUIRE} has {}: {}", missing.what, missing.reason)))
        }
        Err(missing) => Ok(Completion::ignored_with(missing.reason)),
    })
}

/// Makes `fn tests() -> Vec<Trial>` of a module's tests, by what they need.
macro_rules! tests {
    ($($need:expr => $($name:ident),+;)+) => {
        pub(crate) fn tests() -> Vec<$crate::runner::Trial> {
            vec![$($($crate::runner::test(concat!(module_path!(), "::", stringify!($name)), $need, $name)),+),+]
        }
    };
}

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    known: Arguments,
    /// Filters after the first: a test must match one of them all.
    more: Vec<String>,
}

/// The rest of `main`.
pub fn run(tests: Vec<Trial>) -> ExitCode {
    let Options { known: mut arguments, more } = Options::parse();
    let mut tests = tests;
    if !more.is_empty() {
        let filters: Vec<_> = arguments.filter.take().into_iter().chain(more).collect();
        let matches = |test: &Trial, filter: &String| match arguments.exact {
            true => test.name() == filter,
            false => test.name().contains(filter),
        };
        tests.retain(|test| filters.iter().any(|filter| matches(test, filter)));
    }
    libtest_mimic::run(&arguments, tests).exit_code()
}
