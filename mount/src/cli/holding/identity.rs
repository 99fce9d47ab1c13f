//! Who one is: the processes one comes from and the session one is in, as they are told apart later.
//!
//! What cannot be seen has no identity, and so proves nothing.

use nix::unistd::{getppid, getsid};

use crate::cli::proc::{self, Pid, Stat};

/// Comes in the place of any parent that ended before its children, so descending from it means nothing.
const ADOPTERS: [&str; 3] = ["systemd", "init", "launchd"];

/// The processes this one comes from, parent first.
pub fn ancestors() -> Vec<Pid> {
    parent().map(Pid::family).unwrap_or_default()
}

/// The leader of this process's session, if it lives.
pub fn session_leader() -> Option<Pid> {
    let session = own_session().filter(|session| *session > 0)?;
    // A number that is used again is no leader of its own session.
    let leader = Stat::of(session).filter(|stat| stat.session == session)?;
    Some(Pid { pid: session, start_time: leader.start_time })
}

/// The parent, if descending from it tells anything of who one is.
///
/// A parent in another session starts commands for many (a terminal multiplexer, say), so it counts for a named agent
/// only; one that adopts orphans, never.
pub fn telling_parent(is_named: bool) -> Option<Pid> {
    let parent = parent().filter(|parent| parent.pid > 1)?;
    let session = Stat::of(parent.pid).filter(|stat| stat.start_time == parent.start_time)?.session;
    let adopts = proc::name(parent.pid).is_none_or(|name| ADOPTERS.contains(&name.as_str()));
    let tells = !adopts && (is_named || Some(session) == own_session());
    tells.then_some(parent)
}

fn parent() -> Option<Pid> {
    Pid::of(u32::try_from(getppid().as_raw()).ok()?)
}

/// 0 outside of this pid namespace.
fn own_session() -> Option<u32> {
    u32::try_from(getsid(None).ok()?.as_raw()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_comes_from_ones_parent() {
        let parent = parent().expect("it can be seen");
        assert_eq!(ancestors().first(), Some(&parent));
        assert_eq!(parent.to_string().parse(), Ok(parent));
        assert!("7".parse::<Pid>().is_err() && "x:1".parse::<Pid>().is_err());
    }
}
