//! `leasefs top`: the keys that are held, as they are now, on a terminal.
//!
//! [`entry`] is one key and what its columns show, [`model`] all that is known and in which order, [`draw`] what of it fits
//! on a screen, [`details`] the part of that about one key, [`follow`] what finds it out: threads of its own ask the tree,
//! so a tree that hangs leaves the screen and its keys at work. Here keys, news and the clock meet.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal, raise};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::complain;
use super::deadlock;
use super::listing;
use super::progress::Progress;
use super::table::{Look, wants_colour};
use super::tree::{Tree, TreeArgs};
use entry::Column;
use follow::{Follower, News};
use model::Model;

mod details;
mod draw;
mod entry;
mod follow;
mod model;

/// Between two looks at who has the selected key's handle, while nothing is heard of that key.
const WHO: Duration = Duration::from_secs(10);
/// Between two drawings that nobody asked for by a key, at least.
const SHORTEST: Duration = Duration::from_millis(100);

/// What to show, and in which order.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Keys: q quits. Up, Down, PageUp, PageDown, Home and End choose a key, of which Enter shows or hides everything: its holder's
whole command, note, result, who waits, and every process that has the handle. / filters by prefix (Enter takes it, Esc
drops it), f shows the free keys too. k s e p c n g a t l w sort by key, state, epoch, pid, command, container, agent,
age, TTL left, line and longest wait; r turns the order round.

CONTAINER is the container, or else the service, of a holder that can be seen. Where the screen is narrow, columns that say
less are left out. A line in red tells of processes that wait for each other in a ring.

Exit codes: 0 ended by q, a signal, or after one table; 2 bad usage or failure.")]
pub struct Args {
    /// Only keys that begin with this; `team/` for the keys of a namespace
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    pub prefix: String,
    /// Print one table and end, also where there is no terminal
    #[arg(short, long)]
    pub batch: bool,
    /// Also keys that are free
    #[arg(short, long)]
    pub all: bool,
    /// Sort by key, state, epoch, pid, command, container, agent, age, ttl, line or wait
    #[arg(long, value_enum, default_value_t = Column::Age, value_name = "COLUMN", hide_possible_values = true)]
    pub sort: Column,
    /// Turn the order round
    #[arg(short, long)]
    pub reverse: bool,
    /// Seconds between two looks at the clock; changes of the tree are shown at once
    #[arg(long, value_name = "SECS", value_parser = super::seconds, default_value = "1")]
    pub interval: Duration,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.prefix))?;
    let prefix = listing::prefix(&tree, &args.prefix)?;
    let mut model = Model::new(tree.root(), prefix);
    (model.shows_free, model.sort, model.is_reversed) = (args.all, args.sort, args.reverse);
    if args.batch {
        return once(&tree, &mut model);
    }
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        bail!("top: its input and output have to be a terminal: use `leasefs top --batch` for one table");
    }
    live(&tree, model, args.interval.max(SHORTEST))?;
    Ok(ExitCode::SUCCESS)
}

fn once(tree: &Tree, model: &mut Model) -> Result<ExitCode> {
    let progress = Progress::new("reading keys", None);
    let walk = if model.shows_free { listing::walk } else { listing::walk_used };
    let listing = walk(tree, &model.prefix, &mut |_| progress.add(1))?;
    drop(progress);
    let rings = deadlock::among(tree.root(), &listing.found);
    let mut containers = follow::Containers::default();
    for status in listing.found {
        model.put(containers.entry(status));
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    draw::plain(model).write(&mut out, Look::of_stdout())?;
    out.flush()?;
    for ring in rings {
        complain(ring.text);
    }
    Ok(ExitCode::SUCCESS)
}

/// Something that may change the screen.
enum Happened {
    /// A key, or another size.
    Input(Event),
    /// The tree.
    News(News),
    /// Time to end.
    End,
}

fn live(tree: &Tree, mut model: Model, interval: Duration) -> Result<()> {
    let (sender, happened) = mpsc::channel();
    // Before any thread is: all of them leave these signals to one.
    let ends = SigSet::from_iter([Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM]);
    ends.thread_block().context("signals")?;
    let on_signal = sender.clone();
    start("signals", move || {
        let _ = ends.wait();
        let _ = on_signal.send(Happened::End);
    })?;
    let on_news = sender.clone();
    let follower = Follower::start(tree, &model.prefix, move |news| on_news.send(Happened::News(news)).is_ok())?;
    let mut screen = ratatui::try_init().context("the terminal")?;
    let read = move || {
        while let Ok(event) = ratatui::crossterm::event::read() {
            if sender.send(Happened::Input(event)).is_err() {
                return;
            }
        }
        let _ = sender.send(Happened::End);
    };
    let outcome = start("keys", read).and_then(|()| show(&mut screen, &mut model, &follower, &happened, interval));
    ratatui::restore();
    outcome
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).context("a thread")?;
    Ok(())
}

/// Draws whenever something changed, and as time goes by; until the end.
fn show(
    screen: &mut ratatui::DefaultTerminal,
    model: &mut Model,
    follower: &Follower,
    happened: &Receiver<Happened>,
    interval: Duration,
) -> Result<()> {
    let is_coloured = wants_colour();
    let (mut asked, mut again_at) = (None, Instant::now());
    loop {
        let mut view = draw::View::default();
        let began = Instant::now();
        screen.draw(|frame| view = draw::screen(frame, model, is_coloured)).context("the terminal")?;
        follower.is_shown(view.keys);
        let drawn = Instant::now();
        // Very many keys take a while to be put in order: most of the time is left to others.
        let pause = SHORTEST.max((drawn - began) * 4);
        let question = model.question();
        if question.is_some() && (question != asked || drawn >= again_at) {
            follower.ask_who(question.as_ref().map(|(key, _, _)| key.clone()).unwrap_or_default());
            again_at = drawn + WHO;
        }
        asked = question;
        // Nothing on the screen grows older where there is nothing.
        let tick = drawn + if model.is_empty() { Duration::from_secs(60) } else { interval };
        let mut until = tick;
        loop {
            let event = match happened.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            match event {
                Happened::End => return Ok(()),
                Happened::News(news) => {
                    model.hear(news);
                    until = until.min(drawn + pause);
                }
                Happened::Input(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    match press(model, key, view.rows) {
                        Pressed::Quit => return Ok(()),
                        Pressed::Stop => stop(screen)?,
                        Pressed::Nothing => {}
                    }
                    until = Instant::now();
                }
                Happened::Input(_) => until = Instant::now(),
            }
        }
    }
}

/// Ctrl-Z: gives the terminal back for as long as this process is stopped.
fn stop(screen: &mut ratatui::DefaultTerminal) -> Result<()> {
    ratatui::restore();
    raise(Signal::SIGSTOP).context("SIGSTOP")?;
    *screen = ratatui::try_init().context("the terminal")?;
    screen.clear().context("the terminal")
}

/// What a key asks of others than the model.
#[derive(Debug, PartialEq, Eq)]
enum Pressed {
    Quit,
    Stop,
    Nothing,
}

/// What a key does. `page` is how many keys are on the screen.
fn press(model: &mut Model, key: KeyEvent, page: usize) -> Pressed {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Pressed::Quit,
            KeyCode::Char('z') => Pressed::Stop,
            _ => Pressed::Nothing,
        };
    }
    if let Some(typed) = &mut model.typed {
        match key.code {
            KeyCode::Char(c) => typed.push(c),
            KeyCode::Backspace => drop(typed.pop()),
            KeyCode::Esc => model.typed = None,
            KeyCode::Enter => {
                let typed = model.typed.take().unwrap_or_default();
                model.set_filter(typed);
            }
            _ => {}
        }
        return Pressed::Nothing;
    }
    match key.code {
        KeyCode::Char('q') => return Pressed::Quit,
        KeyCode::Char('/') => model.typed = Some(model.filter.clone()),
        KeyCode::Esc => model.set_filter(model.prefix.clone()),
        KeyCode::Char('f') => model.set_shows_free(!model.shows_free),
        KeyCode::Char('r') => model.set_sort(model.sort, !model.is_reversed),
        KeyCode::Char(letter) => {
            if let Some(column) = Column::of_letter(letter) {
                model.set_sort(column, model.sort == column && !model.is_reversed);
            }
        }
        KeyCode::Enter => model.shows_details = !model.shows_details,
        KeyCode::Up => model.select(-1),
        KeyCode::Down => model.select(1),
        KeyCode::PageUp => model.select(-isize::try_from(page).unwrap_or(1).max(1)),
        KeyCode::PageDown => model.select(isize::try_from(page).unwrap_or(1).max(1)),
        KeyCode::Home => model.select(isize::MIN),
        KeyCode::End => model.select(isize::MAX),
        _ => {}
    }
    Pressed::Nothing
}
