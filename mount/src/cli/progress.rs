//! Tells a person what takes so long: a line on stderr that comes after a second, only on a terminal, and goes when the
//! work is done.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::show;

/// What is done sooner is done without a word.
const AFTER: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);

/// Work that may take long. The line goes when the value does.
pub struct Progress {
    bar: ProgressBar,
    /// Dropping it ends the thread that waits to show the line.
    shown: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Work described by words such as `reading keys`. `of` is how many steps it has, where that is known.
    pub fn new(doing: &str, of: Option<u64>) -> Progress {
        let bar = ProgressBar::with_draw_target(of, ProgressDrawTarget::hidden());
        bar.set_style(style(of));
        bar.set_message(show::plain(doing));
        let shown = io::stderr().is_terminal().then(|| show_late(&bar)).flatten();
        Progress { bar, shown }
    }

    /// So many steps are done.
    pub fn add(&self, steps: u64) {
        self.bar.inc(steps);
    }

    /// So many steps are done by now.
    pub fn set(&self, steps: u64) {
        self.bar.set_position(steps);
    }

    /// Another part of the work begins, of so many steps where that is known.
    pub fn next(&self, doing: &str, of: Option<u64>) {
        self.bar.reset();
        match of {
            Some(of) => self.bar.set_length(of),
            None => self.bar.unset_length(),
        }
        self.bar.set_style(style(of));
        self.bar.set_message(show::plain(doing));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((waits, thread)) = self.shown.take() {
            drop(waits);
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

fn style(of: Option<u64>) -> ProgressStyle {
    let (counted, uncounted) =
        ("{spinner} {msg}: {human_pos} of {human_len}, {eta} left", "{spinner} {msg}: {human_pos}, {elapsed}");
    ProgressStyle::with_template(if of.is_some() { counted } else { uncounted })
        .unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// Shows the line once the work has taken long.
fn show_late(bar: &ProgressBar) -> Option<(Sender<()>, JoinHandle<()>)> {
    let bar = bar.clone();
    let (waits, ended) = mpsc::channel();
    let thread = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
        if ended.recv_timeout(AFTER) == Err(RecvTimeoutError::Timeout) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(TICK);
        }
    });
    thread.ok().map(|thread| (waits, thread))
}
