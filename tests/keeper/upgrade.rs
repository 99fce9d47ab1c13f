//! Another program takes over, or is refused.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output};

use nix::sys::signal::Signal;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, assert_ok, read_in_time, stdout, wait_for};
use crate::place::Place;

fn upgrade(place: &Place) -> Output {
    Command::new("timeout").args(["60", LEASEFS, "upgrade"]).arg(place.mnt()).output_in_time()
}

fn assert_refused(place: &Place, words: &[&str]) {
    let server = place.server();
    let output = upgrade(place);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}{}", stdout(&output));
    assert!(said.starts_with("leasefs: not upgraded: ") && said.lines().count() == 1, "{said}");
    for word in words {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(place.server(), server, "the one that serves goes on");
}

#[test]
fn the_program_on_disk_takes_over() {
    let mut place = Place::mount_copy();
    let agent = Agent::new();
    let fd = agent.create(&place.claim("k")).expect("free key");
    let before = place.server();
    place.install(LEASEFS.as_ref());
    let output = upgrade(&place);
    assert_ok(&output);
    assert!(stdout(&output).starts_with(&format!("upgraded to {}", env!("CARGO_PKG_VERSION"))), "{output:?}");
    let after = place.server();
    assert_ne!(after, before);
    assert_eq!(place.number("starts"), Some(2));
    let exe = std::fs::read_link(format!("/proc/{after}/exe")).expect("exe");
    assert_eq!(exe, place.program(), "the new one, not the deleted one");
    assert!(place.claim("k").exists());
    // A signal does the same.
    place.signal(place.keeper(), Signal::SIGHUP);
    wait_for("the next server", || place.number("starts") == Some(3));
    agent.close(fd);
    drop(agent);
    place.unmount();
}

#[test]
fn a_program_that_cannot_take_over_is_refused() {
    let mut place = Place::mount_copy();
    let agent = Agent::new();
    agent.create(&place.claim("k")).expect("free key");
    // Another program, one that never ends, one that is none, and nothing at all.
    place.install("/bin/true".as_ref());
    assert_refused(&place, &["ended without a word"]);
    std::fs::write(place.path("text"), "not a program").expect("file");
    std::fs::set_permissions(place.path("text"), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    place.install(&place.path("text"));
    assert_refused(&place, &["leasefs"]);
    std::fs::remove_file(place.program()).expect("rm");
    assert_refused(&place, &["No such file"]);
    // A crash meanwhile is met by the program that served.
    place.kill_server();
    assert!(place.claim("k").exists());
    // One that knows less of the registry than what wrote it.
    place.install(LEASEFS.as_ref());
    let registry = rusqlite::Connection::open(place.state().join("registry.db")).expect("registry");
    let version: u32 = registry.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("version");
    registry.execute_batch("PRAGMA user_version = 9999").expect("SQL");
    assert_refused(&place, &["newer", "9999"]);
    registry.execute_batch(&format!("PRAGMA user_version = {version}")).expect("SQL");
    drop(registry);
    assert_ok(&upgrade(&place));
    drop(agent);
    place.unmount();
}

/// Whoever is stopped between connecting and saying what it wants is heard when it goes on, and holds up nobody meanwhile.
#[test]
fn an_order_that_comes_late_is_carried_out_and_nobody_waits_for_it() {
    let mut place = Place::mount_copy();
    let connect = || UnixStream::connect(place.state().join("keeper.sock")).expect("the keeper listens");
    let (mut late, rubbish) = (connect(), connect());
    (&rubbish).write_all(b"upgrade me").expect("the keeper reads");
    place.kill_server();
    assert!(place.claim("k").parent().is_some_and(std::path::Path::is_dir), "the next server");
    assert_ok(&upgrade(&place));
    assert_eq!(read_in_time(Some(rubbish)), "", "hung up on");
    late.write_all(b"upgra").expect("the keeper reads");
    assert_ok(&upgrade(&place));
    late.write_all(b"de\n").expect("the keeper reads");
    let answer = read_in_time(Some(late));
    assert!(answer.starts_with("upgraded to "), "{answer}");
    assert_eq!(place.number("starts"), Some(5));
    place.unmount();
}

/// There is a limit to them, and whoever is one too many is told, and not left to believe that it was done.
#[test]
fn one_too_many_that_says_nothing_is_refused_until_another_has_gone() {
    let mut place = Place::mount_copy();
    let connect = || UnixStream::connect(place.state().join("keeper.sock")).expect("the keeper listens");
    let silent: Vec<UnixStream> = (0..16).map(|_| connect()).collect();
    let answer = read_in_time(Some(connect()));
    assert!(answer.starts_with("refused: 16 others"), "{answer}");
    drop(silent);
    assert_ok(&upgrade(&place));
    place.unmount();
}

#[test]
fn a_handover_of_another_protocol_is_refused_in_so_many_words() {
    let script = format!(r#"LEASEFS_HANDOVER='{{"protocol":99,"fds":{{"report":5}}}}' {LEASEFS} serve --check 5>&1"#);
    let output = Command::new("bash").args(["-c", &script]).output_in_time();
    assert_eq!(output.status.code(), Some(1));
    let said = stdout(&output);
    assert!(said.contains("protocol 99") && said.contains("knows 1"), "{said}");
}
