//! An upgrade: the program on disk is asked whether it can take over, and if so, the next server is of it.

use std::time::{Duration, Instant};

use super::child::{Program, Server};
use super::control::{self, Requester};
use super::{Keeper, service};
use crate::handover::ABLE;

/// How long a program may take to say whether it can take over.
const CHECK_PATIENCE: Duration = Duration::from_secs(10);

/// A program that was asked whether it can take over.
pub(super) struct Check {
    pub child: Server,
    program: Program,
    pub until: Instant,
    requester: Requester,
}

/// A server that was ended so that the next is of another program.
pub(super) struct Upgrade {
    before: Program,
    version: String,
    requester: Requester,
}

impl Keeper {
    /// Asks the program that is on disk now whether it can take over.
    pub(super) fn begin_upgrade(&mut self, requester: Requester) {
        let refuse = |requester: Requester, why: String| {
            tracing::warn!("no upgrade: {why}");
            requester.answer(&format!("{}{why}", control::REFUSED));
        };
        if self.check.is_some() || self.upgrade.is_some() || self.stopping {
            let why = if self.stopping { "the tree is being unmounted" } else { "an upgrade is under way" };
            return refuse(requester, why.to_owned());
        }
        let program = match self.program.on_disk() {
            Ok(program) => program,
            Err(error) => return refuse(requester, format!("{error:#}")),
        };
        match program.start(&self.handover, true) {
            Ok(child) => {
                service::reloading();
                let until = Instant::now() + CHECK_PATIENCE;
                self.check = Some(Check { child, program, until, requester });
            }
            Err(error) => refuse(requester, format!("{}: {error:#}", program.path.display())),
        }
    }

    /// What that program says.
    pub(super) fn hear_check(&mut self) {
        let Some(check) = &mut self.check else { return };
        if !check.child.hear() {
            return;
        }
        let Some(version) = check.child.said.strip_prefix(ABLE).map(str::to_owned) else {
            let why = check.child.said.clone();
            let why = if why.is_empty() { "it ended without a word".into() } else { why };
            return self.refuse_check(format_args!("{why}"));
        };
        let Some(Check { mut child, program, requester, .. }) = self.check.take() else { return };
        child.kill();
        let _ = child.child.wait();
        let before = std::mem::replace(&mut self.program, program);
        self.upgrade = Some(Upgrade { before, version, requester });
        match &mut self.server {
            Some(server) => {
                server.ended_by_keeper = true;
                server.kill();
            }
            None => self.start_at = Some(Instant::now()),
        }
    }

    fn refuse_check(&mut self, why: std::fmt::Arguments<'_>) {
        let Some(Check { mut child, program, requester, .. }) = self.check.take() else { return };
        child.kill();
        let _ = child.child.wait();
        let why = format!("{} cannot take over: {why}", program.path.display());
        tracing::error!("no upgrade: {why}");
        service::ready(&format!("not upgraded: {why}"));
        requester.answer(&format!("{}{why}", control::REFUSED));
    }

    /// Refuses an upgrade whose program did not say in time whether it can take over.
    pub(super) fn give_up_check(&mut self) {
        if self.check.as_ref().is_some_and(|check| check.until <= Instant::now()) {
            self.refuse_check(format_args!("it did not say within {} s", CHECK_PATIENCE.as_secs()));
        }
    }

    /// Looks after a program that was asked and has ended.
    pub(super) fn reap_check(&mut self) {
        if let Some(check) = &mut self.check
            && let Ok(Some(_)) = check.child.child.try_wait()
        {
            self.hear_check();
            if self.check.is_some() {
                self.refuse_check(format_args!("it ended without a word"));
            }
        }
    }

    /// The new program's server is ready.
    pub(super) fn end_upgrade(&mut self) {
        if let Some(Upgrade { version, requester, .. }) = self.upgrade.take() {
            let pid = self.server.as_ref().map_or(0, |server| server.child.id());
            tracing::info!("upgraded to {version}");
            requester.answer(&format!("{}{version} (pid {pid})", control::DONE));
        }
    }

    /// Goes back to the program before, where the server that has just ended was the new one's. True if so.
    pub(super) fn undo_upgrade(&mut self, said: &str) -> bool {
        let Some(Upgrade { before, requester, .. }) = self.upgrade.take() else { return false };
        self.program = before;
        tracing::error!("the new server did not get ready ({said}): going on with the program as it was");
        requester.answer(&format!("{}the new server did not get ready: {said}", control::REFUSED));
        true
    }
}
