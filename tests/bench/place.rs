//! Which CPUs this process, and so all it starts, may run on.

use std::fmt;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The thread that asks.
const THIS: Pid = Pid::from_raw(0);

/// Where clients and servers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Clients and server share one CPU: nobody has to wake another CPU
    OneCpu,
    /// The kernel places them
    Free,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Placement::OneCpu => "clients and server on one CPU",
            Placement::Free => "placed by the kernel",
        })
    }
}

/// Gives the process its CPUs back when dropped.
pub struct Entered(CpuSet);

impl Placement {
    /// Moves this process there until the value returned is dropped.
    pub fn enter(self) -> Result<Entered> {
        let before = sched_getaffinity(THIS).context("cannot read the CPU affinity")?;
        if self == Placement::OneCpu {
            // The last CPU allowed: the first serves most interrupts.
            let last = (0..CpuSet::count()).rev().find(|cpu| before.is_set(*cpu) == Ok(true));
            let mut one = CpuSet::new();
            one.set(last.context("no CPU allowed")?)?;
            sched_setaffinity(THIS, &one).context("cannot set the CPU affinity")?;
        }
        Ok(Entered(before))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Err(error) = sched_setaffinity(THIS, &self.0) {
            eprintln!("bench: cannot restore the CPU affinity: {error}");
        }
    }
}
