//! Leases and shared locks whose connection was lost: who still has the handle open, and what is free because nobody has
//! (§5).
//!
//! What an orphan needs to be ended is the proof that no process has its old handle open. There are two proofs.
//! - **The kernel's.** The filesystem of the lost connection is gone, which it is only once nothing whatever refers to it.
//!   It says nothing while any other file of the old tree is open.
//! - **Ours.** Every file of every thread was looked at (see [`look`]), more than once.
//!
//! # Why looking twice is enough
//! A lost connection gives no new handles: what there is can only be copied, by `fork`, by `unshare`, through a socket or
//! by `pidfd_getfd`. A look takes time, so a handle can pass from who was not looked at yet to who was, if the giver also
//! lets go of it in between. It has to do so in every look, each time behind our back:
//! - within one look, processes that appeared meanwhile are looked at too, until a listing shows nobody new;
//! - a copy on its way through a socket is counted by the kernel, and anything on its way means "not proven";
//! - two looks in a row have to find nothing, and then no process or thread may have begun during the second of them,
//!   which rules out `fork`. Where processes begin all the time, four looks in a row have to find nothing.
//!
//! A process that only forks and exits, as a daemon does when it starts, is found by the second look. One that evades
//! four looks at distances of [`AGAIN`] passes its handle on all the time, and can lose nothing but its own lease.
//!
//! What we cannot see (another pid namespace, a process whose files may not be read, `hidepid`) proves nothing: then the
//! lease or the lock stays until its TTL, and the status says why. So does a handle of the key that never had it: the kernel
//! does not say which one did. For the same reason the shared locks of a key end together.
//!
//! Not covered: a private mapping of a claim file that outlives its descriptor (a shared one is refused), and an
//! `io_uring` whose ring is open in no process. Both are unknown in practice; the kernel's proof covers them.
//!
//! It runs on a thread of its own, which ends with the last orphan: none come to be while a server runs. Whoever wants to
//! know at once has it look at once: [`Reap`].

mod fdinfo;
mod look;
mod reap;
mod sight;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasefs::KeyId;
use leasefs::engine::Orphaned;
use leasefs::machine::Input;

use crate::clock;
use crate::dead_mount::Connections;
use crate::fs::Shared;
use crate::ino::Node;
pub use reap::Reap;

/// Between two looks while something may be proven.
const AGAIN: Duration = Duration::from_millis(50);
/// After a look that found somebody; then doubled up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);
/// The same where it found nobody, but something on its way, which may be there at the next look.
const PASSING: Duration = Duration::from_secs(1);
/// What is on its way may be so for hours: no more of the time than one part in so many is spent looking.
const SHARE: u32 = 10;
/// Looks in a row that find nothing, where no process or thread began during the last.
const QUIET_LOOKS: u32 = 2;
/// Looks in a row that find nothing, whatever began.
const BUSY_LOOKS: u32 = 4;

/// Ends what is proven dead, says of the rest why it is held, until nothing is orphaned.
pub fn look_after(shared: &Shared, connections: &Connections) {
    let mut nobody: HashMap<(KeyId, Orphaned), u32> = HashMap::new();
    let mut pause = FIRST;
    loop {
        // Those that were ordered before this look are answered by it.
        if shared.reap.begin_look() {
            pause = FIRST;
        }
        let orphans = shared.engine.orphans();
        if orphans.is_empty() {
            shared.answer_orders(shared.reap.end());
            return;
        }
        if connections.is_all_gone() {
            for (key, orphaned) in orphans {
                lose(shared, key, orphaned, "the kernel has let go of its lost connection");
            }
            continue;
        }
        let name = |key| shared.engine.view(key, |entry, _| entry.key.split().1.to_owned()).unwrap_or_default();
        let asked = orphans.iter().map(|(key, _)| (Node::Claim(*key).ino().0, name(*key))).collect();
        let began = Instant::now();
        let look = look::look(&asked, connections);
        let passing = PASSING.max(began.elapsed() * SHARE);
        nobody.retain(|orphan, _| orphans.contains(orphan));
        let mut longest = LONGEST;
        for (key, orphaned) in orphans {
            let Some(why) = look.why_held(Node::Claim(key).ino().0) else {
                let looks = nobody.entry((key, orphaned)).and_modify(|looks| *looks += 1).or_insert(1);
                if *looks >= if look.is_quiet { QUIET_LOOKS } else { BUSY_LOOKS } {
                    lose(shared, key, orphaned, "no process has its handle open");
                }
                continue;
            };
            nobody.remove(&(key, orphaned));
            if look.is_held_in_passing(Node::Claim(key).ino().0) {
                longest = passing;
            }
            shared.engine.explain_orphan(key, orphaned, &why);
        }
        if nobody.is_empty() {
            shared.answer_orders(shared.reap.looked());
            shared.reap.sleep(pause.min(longest));
            pause = (pause * 2).min(LONGEST);
        } else {
            std::thread::sleep(AGAIN);
        }
    }
}

fn lose(shared: &Shared, key: KeyId, orphaned: Orphaned, proof: &'static str) {
    let now = clock::now();
    let (input, what) = match orphaned {
        Orphaned::Attempt(epoch) => (Input::Lose { epoch, why: Arc::from(proof) }, format!("attempt {epoch}")),
        Orphaned::Shares => (Input::LoseShares, "what is left of the shared locks".to_owned()),
    };
    // Stale where it ended in the meantime, or its holder took it back.
    shared.engine.submit(key, input, now, Box::new(|_| ()));
    if shared.engine.is_urgent() {
        shared.flush(now);
    }
    shared.timekeeper.need(shared.next_ns());
    shared.announce();
    tracing::info!("{what} of key number {key} is lost: {proof}");
}
