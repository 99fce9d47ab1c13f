//! Which CPUs this process, and so all it starts, may run on.

use std::fmt;
use std::io;

use anyhow::{Context, Result};

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
pub struct Entered(libc::cpu_set_t);

impl Placement {
    /// Moves this process there until the value returned is dropped.
    pub fn enter(self) -> Result<Entered> {
        let before = affinity().context("cannot read the CPU affinity")?;
        if self == Placement::OneCpu {
            // SAFETY: a cpu_set_t is plain bits, for which all zeroes is the empty set.
            let mut one: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: CPU_ISSET and CPU_SET stay inside the set for indices below CPU_SETSIZE.
            unsafe {
                // The last CPU allowed: the first serves most interrupts.
                let last = (0..libc::CPU_SETSIZE as usize).rev().find(|cpu| libc::CPU_ISSET(*cpu, &before));
                libc::CPU_SET(last.context("no CPU allowed")?, &mut one);
            }
            set_affinity(&one).context("cannot set the CPU affinity")?;
        }
        Ok(Entered(before))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Err(error) = set_affinity(&self.0) {
            eprintln!("bench: cannot restore the CPU affinity: {error}");
        }
    }
}

fn affinity() -> io::Result<libc::cpu_set_t> {
    // SAFETY: as in `enter`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writes of the size given; pid 0 is this thread.
    let answer = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if answer == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

fn set_affinity(set: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: `set` is valid for reads of the size given; pid 0 is this thread.
    let answer = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
