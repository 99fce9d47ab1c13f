//! The `leasefs` binary: see [`cli`] for its commands, [`keeper`] for what holds a mount, [`server`] for what serves it.

mod cli;
mod clock;
mod connection;
mod dead_mount;
mod errno;
mod failure;
mod flight;
mod fs;
mod handover;
mod ino;
mod ioctl;
mod keeper;
mod kernel_mount;
mod killpoint;
mod lastread;
mod logfile;
mod mountinfo;
mod openfiles;
mod orphans;
mod privileges;
mod process;
mod reading;
mod server;
mod timekeeper;
mod watcher;

fn main() -> std::process::ExitCode {
    cli::main()
}
