//! The progress line of a run on the terminal.

use std::io::{IsTerminal, Write};

/// Draws on standard error if that is a terminal.
pub struct Progress {
    total: usize,
    done: usize,
    is_shown: bool,
}

impl Progress {
    /// `total` is the number of steps; 0 if it is unknown.
    pub fn new(total: usize) -> Self {
        Self { total, done: 0, is_shown: std::io::stderr().is_terminal() }
    }

    /// Shows the current step.
    pub fn show(&self, what: &str) {
        const WIDTH: usize = 30;
        if !self.is_shown {
            return;
        }
        if self.total == 0 {
            return draw(what);
        }
        let (done, total) = (self.done, self.total);
        draw(&format!("[{:-<WIDTH$}] {done}/{total} {what}", "#".repeat(WIDTH * done / total)));
    }

    /// Clears the line before other output.
    pub fn clear(&self) {
        if self.is_shown {
            draw("");
        }
    }

    /// Counts one more step.
    pub fn advance(&mut self) {
        self.done += 1;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn draw(line: &str) {
    // An error here must not end a measurement.
    let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
}
