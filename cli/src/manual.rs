//! `completions` and `man`: descriptions of the command line for shells and readers. Packagers run both at build time.

use std::io::Write as _;
use std::path::Path;

use clap_complete::Shell;

use crate::arguments::{self, Man};
use crate::failure::Failure;

/// Prints the completions of a shell.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    let mut command = arguments::command();
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut text);
    print(&text)
}

/// Writes the pages of all commands to a folder, or prints the program's page.
pub fn man(options: &Man) -> Result<(), Failure> {
    match &options.folder {
        None => {
            let mut text = Vec::new();
            clap_mangen::Man::new(arguments::command()).render(&mut text)?;
            print(&text)
        }
        Some(folder) => write_all(folder).map_err(|error| Failure::File(folder.clone(), error)),
    }
}

fn write_all(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(arguments::command(), folder)
}

/// Prints and flushes, so that errors are noticed.
fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)?;
    Ok(out.flush()?)
}
