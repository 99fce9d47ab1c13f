//! What processes and users can do to each other's leases by way of the kernel's own numbers and caches: nothing.

use std::fs;

use libc::{F_SETLK, F_WRLCK, LOCK_EX, LOCK_NB, O_CREAT, O_RDWR};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::{Mount, assert_ok, set_mode, shown_once, stdout};

/// The kernel numbers POSIX lock owners by an address it uses again once the process is gone.
#[test]
fn a_lock_owner_that_is_gone_lends_its_number_to_nobody() {
    let mount = Mount::new();
    let holder = Agent::new();
    let fd = holder.handle(&mount.claim("k"));
    holder.lock(fd, F_SETLK, F_WRLCK).expect("free key");
    let heir = holder.fork();
    holder.exit();
    let output = mount.python(
        "import fcntl, os\n\
         got = 0\n\
         for n in range(2000):\n\
         \x20   pid = os.fork()\n\
         \x20   if pid == 0:\n\
         \x20       fd = os.open(os.environ['M'] + '/claims/k', os.O_RDWR | os.O_CREAT)\n\
         \x20       try: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n\
         \x20       except BlockingIOError: fcntl.lockf(fd, fcntl.LOCK_UN); os._exit(0)\n\
         \x20       os._exit(1)\n\
         \x20   got += os.waitpid(pid, 0)[1] != 0\n\
         print(got)\n",
    );
    assert_ok(&output);
    assert_eq!(stdout(&output).trim(), "0", "the heir's copy holds the key");
    assert_eq!(heir.epoch(fd), Ok(1));
}

#[test]
fn a_namespace_that_had_keys_does_not_change_hands() {
    let mount = Mount::shared();
    let (owner, other) = (Agent::user(12_001, 12_001, &[]), Agent::user(12_002, 12_002, &[]));
    let path = mount.claim("mine");
    owner.call("mkdir", json!([path, 0o770])).expect("mkdir");
    let fd = owner.create(&path.join("k")).expect("free key");
    let result = owner.handle(&mount.result("mine/k", 1));
    owner.write(result, "secret").expect("registered");
    owner.close(result);
    owner.close(fd);
    owner.unlink(&path.join("k")).expect("one's own finished key");
    assert_eq!(other.call("rmdir", json!([path])).map(drop), Err(Errno::EPERM));
    owner.call("rmdir", json!([path])).expect("the owner may");
}

#[test]
fn a_namespace_made_again_works_while_a_file_of_the_old_one_is_open() {
    let mount = Mount::new();
    let agent = Agent::new();
    let path = mount.claim("t");
    for round in 1..=3 {
        fs::create_dir(&path).expect("mkdir");
        let fd = agent.open(&path.join("k"), O_RDWR | O_CREAT).expect("a handle to lock");
        agent.flock(fd, LOCK_EX | LOCK_NB).expect("free key");
        assert_eq!(agent.epoch(fd), Ok(round), "the key goes on where it was");
        agent.flock(fd, libc::LOCK_UN).expect("unlock");
        fs::remove_dir(&path).expect("rmdir while the handle is open");
    }
}

/// Reading a process's command line waits for its memory map, which may wait for an answer of the server.
#[test]
fn a_process_that_maps_a_key_while_it_opens_another_stops_nobody() {
    let mount = Mount::new();
    let output = mount.python(
        "import ctypes, mmap, os, threading, time\n\
         M = os.environ['M']\n\
         libc = ctypes.CDLL(None)\n\
         fd = os.open(M + '/claims/k', os.O_RDWR | os.O_CREAT | os.O_EXCL)\n\
         end = time.monotonic() + 3\n\
         mapped = 0\n\
         def touch():\n\
         \x20   global mapped\n\
         \x20   while time.monotonic() < end or not mapped:\n\
         \x20       m = mmap.mmap(fd, 100, flags=mmap.MAP_PRIVATE); m[0]; m.close()\n\
         \x20       mapped += 1\n\
         def rename():\n\
         \x20   n = 0\n\
         \x20   while time.monotonic() < end:\n\
         \x20       n += 1\n\
         \x20       libc.prctl(15, b'n%d' % n, 0, 0, 0)\n\
         \x20       os.close(os.open(M + '/claims/o%d' % (n % 7), os.O_RDWR | os.O_CREAT))\n\
         ts = [threading.Thread(target=t) for t in (touch, touch, rename, rename)]\n\
         [t.start() for t in ts]; [t.join() for t in ts]\n\
         print('mapped' if mapped else 'never')\n",
    );
    assert_ok(&output);
    assert_eq!(stdout(&output).trim(), "mapped", "{output:?}");
}

#[test]
fn a_listing_neighbour_does_not_delay_claims() {
    let mount = Mount::new();
    set_mode(&mount.claim(""), 0o755);
    let script = "import os, threading, time\n\
         M = os.environ['M']\n\
         stop = threading.Event()\n\
         def list():\n\
         \x20   while not stop.is_set():\n\
         \x20       os.close(os.open(M + '/claims', os.O_RDONLY | os.O_DIRECTORY)); time.sleep(0.0003)\n\
         t = threading.Thread(target=list); t.start()\n\
         late = 0\n\
         for n in range(400):\n\
         \x20   began = time.monotonic()\n\
         \x20   fd = os.open(M + '/claims/c', os.O_RDWR | os.O_CREAT | os.O_EXCL)\n\
         \x20   late += time.monotonic() - began > 0.015\n\
         \x20   os.close(fd)\n\
         stop.set(); t.join(); print(late)\n";
    // A processor that others use is late now and then, too; the timer always is.
    shown_once("claims that wait for no timer", || {
        let output = mount.python(script);
        assert_ok(&output);
        let late: u32 = stdout(&output).trim().parse().expect("a number");
        if late < 40 { Ok(()) } else { Err(format!("{late} of 400 claims waited for the lazy timer")) }
    });
}
