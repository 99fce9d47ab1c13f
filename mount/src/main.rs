//! The `leasefs` binary: see [`cli`] for its commands, [`server`] for what serves a mount.

mod cli;
mod clock;
mod errno;
mod fs;
mod ino;
mod kernel_mount;
mod mountinfo;
mod openfiles;
mod process;
mod server;
mod timekeeper;
mod watcher;

fn main() -> std::process::ExitCode {
    cli::main()
}
