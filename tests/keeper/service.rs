//! What a service manager is told.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;

use nix::sys::signal::Signal;

use crate::common::{PATIENCE, wait_for};
use crate::place::Place;

#[test]
fn readiness_upgrades_and_the_end_are_told() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("socket");
    manager.set_read_timeout(Some(PATIENCE)).expect("timeout");
    let told = || {
        let mut bytes = [0; 4096];
        // A receive with a timeout ends with EINTR, whoever was stopped in it and goes on.
        let length = loop {
            match manager.recv(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                received => break received.expect("a message"),
            }
        };
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let mut place = Place::mount(&[], &[("NOTIFY_SOCKET", path.to_str().expect("UTF-8"))]);
    let ready = told();
    let lines: Vec<&str> = ready.lines().collect();
    assert!(lines.contains(&"READY=1"), "{ready}");
    assert!(lines.contains(&format!("MAINPID={}", place.keeper()).as_str()), "{ready}");
    assert!(ready.contains(&format!("STATUS=serving {}", place.mnt().display())), "{ready}");
    // A server that is replaced after a crash is ready again, too.
    place.kill_server();
    assert!(told().contains("(server 2)"));
    place.signal(place.keeper(), Signal::SIGHUP);
    let reloading = told();
    assert!(reloading.contains("RELOADING=1") && reloading.contains("MONOTONIC_USEC="), "{reloading}");
    assert!(told().contains("READY=1"));
    wait_for("the next server", || place.number("starts") == Some(3));
    place.signal(place.keeper(), Signal::SIGTERM);
    assert!(told().contains("STOPPING=1"));
    assert!(place.wait().success());
    // All have ended: what is not there now does not come any more.
    manager.set_nonblocking(true).expect("a flag");
    let mut more = [0; 4096];
    while let Ok(length) = manager.recv(&mut more) {
        assert!(more[..length].starts_with(b"STOPPING=1\n"), "{}", String::from_utf8_lossy(&more[..length]));
    }
}
