//! Whether this process can see every other: else a look proves nothing.

use std::fs;
use std::io;

use crate::privileges::{CAP_SYS_PTRACE, FIRST_PID_NAMESPACE, Privileges};

/// What keeps this process from seeing every other, if anything does.
pub fn blindness() -> Option<String> {
    let unseen = || Some("other pid namespaces cannot be seen".to_owned());
    match fs::read_link("/proc/self/ns/pid") {
        Ok(namespace) if namespace.as_os_str() == FIRST_PID_NAMESPACE => {}
        _ => return unseen(),
    }
    // Another namespace's /proc does not have us, or not by this number.
    let own_pid = std::process::id().to_string();
    if !fs::read_link("/proc/self").is_ok_and(|own| own.as_os_str() == own_pid.as_str()) {
        return unseen();
    }
    let hidden = || Some("/proc is mounted with hidepid, which hides processes".to_owned());
    match hides_processes() {
        Ok(false) => None,
        Ok(true) | Err(_) => hidden(),
    }
}

/// Whether `/proc` leaves processes out for us.
fn hides_processes() -> io::Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let Some(proc) = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some("/proc")) else { return Ok(true) };
    let option = proc.rsplit(' ').next().unwrap_or_default().split(',').find_map(|o| o.strip_prefix("hidepid="));
    if matches!(option, None | Some("0" | "off")) {
        return Ok(false);
    }
    let whole = "0 0 4294967295";
    let initial = fs::read_to_string("/proc/self/uid_map")?.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    Ok(!Privileges::of_this_process().has(CAP_SYS_PTRACE) || initial != whole)
}
