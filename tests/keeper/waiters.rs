//! Calls that wait when the server is killed.

use std::process::{Child, Command, Stdio};

use crate::common::agent::Agent;
use crate::common::{end, read_in_time, wait_for};
use crate::place::Place;

/// A `flock(2)` that is not tried again, and says what came of it.
struct Waiter(Child);

impl Waiter {
    fn new(place: &Place, key: &str) -> Waiter {
        let script = r#"open(my $f, "<", $ARGV[0]) or die; print(flock($f, 2) ? "locked" : $! + 0)"#;
        let child = Command::new("perl").args(["-e", script]).arg(place.claim(key)).stdout(Stdio::piped()).spawn();
        Waiter(child.expect("perl"))
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().expect("wait").is_some()
    }

    fn said(&mut self) -> String {
        read_in_time(self.0.stdout.take())
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

fn waiting(place: &Place, key: &str) -> u64 {
    let text = std::fs::read_to_string(place.mnt().join("status").join(key)).unwrap_or_default();
    serde_json::from_str::<serde_json::Value>(&text).map_or(0, |status| status["waiters"].as_u64().expect("a number"))
}

/// How many requests the newest server was sent again.
fn handled_again(place: &Place) -> u64 {
    let log = place.log();
    let count = log.rsplit_once(" requests were handled again").and_then(|(before, _)| before.rsplit(' ').next());
    count.map_or(0, |count| count.parse().expect("a number"))
}

#[test]
fn locks_are_asked_again_on_every_kernel() {
    for options in [&[][..], &["--no-resend"]] {
        let mut place = Place::mount(options, &[]);
        let how = if options.is_empty() { "(resend): nobody notices" } else { "takes over, without resend" };
        assert!(place.log().contains(how), "{}", place.log());
        let holder = Agent::new();
        let fd = holder.create(&place.claim("k")).expect("free key");
        let mut waiters: Vec<Waiter> = (0..8).map(|_| Waiter::new(&place, "k")).collect();
        wait_for("all wait", || waiting(&place, "k") == 8);
        place.kill_server();
        wait_for("they are asked again", || handled_again(&place) >= 8);
        holder.close(fd);
        drop(holder);
        wait_for("they end: nobody hangs", || waiters.iter_mut().all(Waiter::has_ended));
        for waiter in &mut waiters {
            // Above all not 512: ERESTARTSYS, which the kernel makes of an EINTR that no signal caused.
            assert_eq!(waiter.said(), "locked");
        }
        let text = std::fs::read_to_string(place.mnt().join("status/k")).expect("status");
        assert!(text.contains("\"epoch\":9"), "one epoch each: {text}");
        place.unmount();
    }
}

#[test]
fn a_read_of_events_is_asked_again_or_ends_with_eintr() {
    for options in [&[][..], &["--no-resend"]] {
        let mut place = Place::mount(options, &[]);
        let script = r#"open(my $f, "<", $ARGV[0]) or die; mkdir($ARGV[1]); sysread($f, my $b, 4096) or print $! + 0"#;
        let (events, opened) = (place.mnt().join(".leasefs/events"), place.path("opened"));
        let child = Command::new("perl").args(["-e", script]).args([&events, &opened]).stdout(Stdio::piped()).spawn();
        let mut reader = Waiter(child.expect("perl"));
        let pid = reader.0.id();
        wait_for("it waits", || {
            opened.exists()
                && std::fs::read_to_string(format!("/proc/{pid}/wchan"))
                    .is_ok_and(|text| text.contains("fuse") || text.contains("request_wait"))
        });
        // Requests come in order: the server has this one, too, once it answers a later one.
        assert!(place.number("pid").is_some());
        place.kill_server();
        if options.is_empty() {
            wait_for("it is asked again", || handled_again(&place) >= 1);
        } else {
            wait_for("it ends", || reader.has_ended());
            assert_eq!(reader.said(), libc::EINTR.to_string());
        }
        drop(reader);
        place.unmount();
    }
}
