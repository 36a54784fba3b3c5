//! Litmus tests: the protocols of the kernels, enumerated under the axioms of the PTX memory model.
//!
//! A run on one GPU cannot show that a flag's scope is too narrow, and no run proves an ordering. Here small
//! programs (`programs/*/*.litmus`) are executed in every way that the axioms permit. `classic` has tests
//! whose verdicts the PTX ISA and the literature state, which check the enumerator. The other folders have the
//! protocols of this crate, each with the weakenings that must be found. README.md describes the format and
//! the axioms.

mod axioms;
mod enumerate;
mod events;
mod parse;
mod program;
mod relation;

use std::path::Path;
use std::time::Instant;

use enumerate::{enumerate, Answer};
use program::{Case, Question};

/// Returns all cases in a folder of programs.
fn cases(folder: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/litmus/programs").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let parsed = files.iter().map(|file| {
        let text = std::fs::read_to_string(file).unwrap();
        parse::cases(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    });
    parsed.flatten().collect()
}

/// Prints a table of answers, and fails with a witness for each unexpected one.
fn check(folders: &[&str]) {
    let cases: Vec<Case> = folders.iter().flat_map(|folder| cases(folder)).collect();
    let wrong: Vec<String> = cases.iter().flat_map(judge).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn judge(case: &Case) -> Vec<String> {
    let name = &case.program.name;
    let begin = Instant::now();
    let answer = enumerate(&case.program, true);
    let found: Vec<String> = Question::ALL
        .iter()
        .map(|&question| {
            let answer = if answer.witness(question).is_some() { "sometimes" } else { "never" };
            format!("{} {answer:<9}", question.name())
        })
        .collect();
    println!(
        "{} | {:>4} of {:>5} candidates, {:>4} ms | {name}",
        found.join(" "),
        answer.executions,
        answer.candidates,
        begin.elapsed().as_millis()
    );
    let mut wrong = Vec::new();
    // If no execution ends, the answer "never" means nothing.
    let hangs = case.expect.contains(&(Question::Hang, true));
    if answer.executions == 0 && !hangs {
        wrong.push(format!("{name}: no execution ends"));
    }
    for &(question, sometimes) in &case.expect {
        match (sometimes, answer.witness(question)) {
            (true, None) => wrong.push(format!("{name}: {} never, expected sometimes", question.name())),
            (false, Some(witness)) => {
                wrong.push(format!("{name}: {} sometimes, expected never: {witness}", question.name()))
            }
            _ => {}
        }
    }
    wrong
}

#[test]
fn classic_verdicts() {
    check(&["classic"]);
}

#[test]
fn protocols_are_safe_and_weakenings_are_found() {
    check(&["pulls", "packets", "channels", "windows"]);
}

#[test]
fn pruning_changes_no_answer() {
    for case in cases("classic") {
        let (pruned, full) = (enumerate(&case.program, true), enumerate(&case.program, false));
        let answers = |answer: &Answer| {
            (answer.executions, answer.states.clone(), Question::ALL.map(|q| answer.witness(q).is_some()))
        };
        assert_eq!(answers(&pruned), answers(&full), "{}", case.program.name);
    }
}

/// Fence-SC only forbids orders that contradict causality, so it shows only in the number of executions.
#[test]
fn fence_sc_order_follows_causality() {
    let text = "litmus fences on both sides of a barrier
        rank on gpu 0
          cta
            thread a
              fence.sc.sys
              sync: bar.sync
            thread b
              sync: bar.sync
              fence.sc.sys
        expect race never
        variant no barrier
          sync: removed
          expect race never";
    let executions: Vec<usize> =
        parse::cases(text).unwrap().iter().map(|case| enumerate(&case.program, true).executions).collect();
    assert_eq!(executions, [1, 2]);
}
