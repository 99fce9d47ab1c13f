//! What this process may do that others may not.

use std::fs;

/// `CAP_SYS_PTRACE`: looking into the processes of others.
pub const CAP_SYS_PTRACE: u32 = 19;
/// `CAP_SYS_ADMIN`: mounting.
pub const CAP_SYS_ADMIN: u32 = 21;
/// The number of the first pid namespace, in which every process can be seen. The kernel never gives it to another.
pub const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// What this process may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Privileges {
    /// Its effective capabilities.
    pub effective: u64,
    /// No program it starts gains any.
    pub no_new: bool,
}

impl Privileges {
    /// Those this process has; none where that cannot be read.
    pub fn of_this_process() -> Privileges {
        Privileges::parse(&fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    fn parse(status: &str) -> Privileges {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Privileges {
            effective: field("CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0),
            no_new: field("NoNewPrivs:") == Some("1"),
        }
    }

    /// Whether it has a capability.
    pub fn has(self, capability: u32) -> bool {
        self.effective & (1 << capability) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn privileges_are_read() {
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000080000\nNoNewPrivs:\t1\n";
        let found = Privileges::parse(status);
        assert!(found.has(CAP_SYS_PTRACE) && !found.has(CAP_SYS_ADMIN) && found.no_new);
    }
}
