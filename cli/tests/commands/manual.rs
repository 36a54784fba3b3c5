//! The output of `completions` and `man` contains all commands and options.

use crate::program::temporary::Folder;
use crate::program::{results, run, text};

#[test]
fn completions_of_each_shell_name_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = results(&format!("completions {shell}"));
        for word in ["bench", "compare", "topology", "join-timeout"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(run("completions nonsense").status.code(), Some(2));
}

#[test]
fn bash_reads_its_completions() {
    let script = results("completions bash");
    let output = std::process::Command::new("bash").args(["-n", "-c", &script]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn each_command_has_a_page() {
    let page = results("man");
    assert!(page.contains(".TH fast-allreduce 1") && page.contains("fast\\-allreduce\\-bench(1)"), "{page}");
    let folder = Folder::new();
    results(&format!("man {}", folder.path().display()));
    for command in ["bench", "compare", "topology", "plan", "tune", "soak", "gpu-check", "completions"] {
        let page =
            std::fs::read_to_string(folder.path().join(format!("fast-allreduce-{command}.1"))).unwrap();
        assert!(page.contains(&format!(".TH fast-allreduce-{command} 1")), "{page}");
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let output = run("man /proc/none");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: cannot write /proc/none: ") && error.lines().count() == 1, "{error}");
}
