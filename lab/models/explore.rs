//! Exploration of a model: it holds in every execution, or a planted bug is found in one.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use loom::model::Builder;

use crate::tier;

/// loom's panic for two accesses that nothing orders.
pub const RACE: &str = "Causality violation";
/// loom's panic when no thread makes progress.
pub const HANG: &str = "maximum number of branches";

/// Maximum number of executions of a model of three ranks, or of a model with a planted bug and a bound on
/// preemptions.
const MOST_EXECUTIONS: usize = 40_000;

/// Maximum number of executions of any model by default.
const QUICK_EXECUTIONS: usize = 5_000;

fn explore(
    preemptions: Option<usize>,
    most: Option<usize>,
    model: impl Fn() + Send + Sync + 'static,
) -> usize {
    let executions = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&executions);
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    // Longer than any execution that still makes progress.
    builder.max_branches = 3000;
    builder.max_permutations = most;
    // loom checks the number of executions at each checkpoint.
    builder.checkpoint_interval = QUICK_EXECUTIONS;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    executions.load(Ordering::Relaxed)
}

/// Checks that the model holds in every execution; by default, in the first [`QUICK_EXECUTIONS`]. Prints how
/// many there were.
pub fn exhaustively(model: impl Fn() + Send + Sync + 'static) {
    holds(None, None, model);
}

/// Checks that the model holds in every execution with at most `preemptions` preemptions, or, if there are
/// more than [`MOST_EXECUTIONS`] (by default [`QUICK_EXECUTIONS`]), in the first of them. Prints how many
/// there were.
pub fn within(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    holds(Some(preemptions), Some(MOST_EXECUTIONS), model);
}

fn holds(preemptions: Option<usize>, all: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let most = if tier::is_full() { all } else { Some(QUICK_EXECUTIONS) };
    let executions = explore(preemptions, most, model);
    // loom stops one short.
    let is_cut = most.is_some_and(|most| executions + 1 >= most);
    if is_cut && !tier::is_full() {
        let test = std::thread::current().name().unwrap_or("a model").to_owned();
        tier::left_out(&format!("{test}: the first {executions} executions"));
    }
    let all = if is_cut { "not all" } else { "all" };
    let bound =
        preemptions.map_or("that are possible".to_owned(), |most| format!("with up to {most} preemptions"));
    println!("explored {executions} executions: {all} {bound}");
    assert!(executions > 1, "a model without a choice");
}

/// Checks that some execution with at most `preemptions` preemptions ends in a panic whose text contains one
/// of `what`.
pub fn found(what: &[&str], preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let result =
        catch_unwind(AssertUnwindSafe(|| explore(preemptions, preemptions.map(|_| MOST_EXECUTIONS), model)));
    let panic = match result {
        Ok(executions) => panic!("nothing was found in {executions} executions"),
        Err(panic) => panic,
    };
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text");
    assert!(what.iter().any(|what| text.contains(what)), "found something else: {text}");
}
