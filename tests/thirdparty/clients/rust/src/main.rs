//! lock fd-lock|fs4 hold|try PATH: the two crates, as lock.py does.
use std::fs::OpenOptions;
use std::process::exit;
use std::thread::park;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (kind, verb, path) = (arguments[1].as_str(), arguments[2].as_str(), &arguments[3]);
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = opened.unwrap_or_else(|error| kept_out(&error.to_string()));
    if kind == "fd-lock" {
        let mut lock = fd_lock::RwLock::new(file);
        match lock.try_write() {
            Ok(_guard) => got(verb),
            Err(error) => kept_out(&error.to_string()),
        };
    } else {
        match fs4::FileExt::try_lock(&file) {
            Ok(()) => got(verb),
            Err(error) => kept_out(&error.to_string()),
        }
    }
}

fn got(verb: &str) {
    if verb == "hold" {
        println!("held");
        loop {
            park();
        }
    }
}

fn kept_out(why: &str) -> ! {
    eprintln!("{why}");
    exit(1)
}
