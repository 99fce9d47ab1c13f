//! What a service manager is told (`sd_notify`), where there is one.

use sd_notify::NotifyState;

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("sd_notify: {error}");
    }
}

/// The tree answers.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::MainPid(std::process::id()), NotifyState::Status(status)]);
}

/// Another program is about to take over, or to be refused; [`ready`] says which.
pub fn reloading() {
    let mut states = vec![NotifyState::Reloading, NotifyState::Status("upgrading")];
    states.extend(NotifyState::monotonic_usec_now());
    notify(&states);
}

/// The tree is going away.
pub fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("unmounting")]);
}
