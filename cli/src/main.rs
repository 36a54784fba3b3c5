//! The program: all of it is in the library of this package.

fn main() -> std::process::ExitCode {
    fast_allreduce_cli::main()
}
