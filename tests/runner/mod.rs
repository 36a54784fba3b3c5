//! Test runner for targets whose tests need things that a machine may lack: a driver, a device, a library, memory, a
//! privilege.
//!
//! A test whose requirement is missing is counted as ignored, with the reason. `FAST_ALLREDUCE_REQUIRE` is a
//! comma-separated list of requirements that must be met: a test that misses one of those fails. `selected` in it
//! requires that each filter selects a test. The arguments are those of the built-in runner. Output of tests is not
//! captured.

#![allow(dead_code, unused_macros)] // Each target uses a part of it.

use std::process::ExitCode;

use clap::Parser;
use libtest_mimic::{Arguments, Completion, Failed};

pub use libtest_mimic::Trial;

const REQUIRE: &str = "FAST_ALLREDUCE_REQUIRE";

/// A missing requirement: its name in `FAST_ALLREDUCE_REQUIRE`, and why it is missing.
pub struct Missing {
    what: &'static str,
    reason: String,
}

impl Missing {
    pub fn new(what: &'static str, reason: impl ToString) -> Self {
        Self { what, reason: reason.to_string() }
    }

    fn is_required(&self) -> bool {
        is_required(self.what)
    }
}

fn is_required(what: &str) -> bool {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    required.split(',').any(|name| name.trim() == what)
}

/// What a requirement provides to its tests, or that it is missing.
pub type Found<T> = Result<T, Missing>;

/// Returns the requirement of tests that need nothing.
pub fn always() -> Found<()> {
    Ok(())
}

/// A test function, with or without a parameter for what its requirement provides.
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

/// Makes a test from its path (with the crate). Evaluates `need` right before the test runs.
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

/// Defines `fn tests() -> Vec<Trial>` with a module's tests, grouped by requirement.
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
    /// Filters after the first: a test must match any of them.
    more: Vec<String>,
}

/// Runs the tests; the last statement of `main`.
pub fn run(tests: Vec<Trial>) -> ExitCode {
    let Options { known: mut arguments, more } = Options::parse();
    let mut tests = tests;
    let filters: Vec<_> = arguments.filter.take().into_iter().chain(more).collect();
    if !filters.is_empty() {
        let matches = |test: &Trial, filter: &String| match arguments.exact {
            true => test.name() == filter,
            false => test.name().contains(filter),
        };
        let empty = filters.iter().find(|filter| !tests.iter().any(|test| matches(test, filter)));
        if let Some(filter) = empty.filter(|_| is_required("selected")) {
            eprintln!("no test has `{filter}` in its name, and {REQUIRE} has selected");
            return ExitCode::FAILURE;
        }
        tests.retain(|test| filters.iter().any(|filter| matches(test, filter)));
    }
    libtest_mimic::run(&arguments, tests).exit_code()
}
