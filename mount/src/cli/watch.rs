//! `leasefs watch`: what happens in the tree, as it happens, from its events.
//!
//! Lines are passed on whole and at once. Who holds a key is looked up when its grant is shown: for the newest grant of
//! each key that came in one go, and only if it is still that attempt's.

use std::collections::HashMap;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use leasefs::Key;

use super::events::{self, Event, Events, Wait};
use super::listing;
use super::show;
use super::tree::{Tree, TreeArgs};
use super::{EXIT_NO, complain};

/// Width of the names of events.
const NAME_WIDTH: usize = 11;

/// What to follow, and until when.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Shows what happens from now on: granted, denied, waiting, interrupted (whoever waited gave up, was killed or ran out of
time), refused (whoever waited got an error instead), renewed, released, expired, evicted, completed, finished, lost, stale
(a handle that lost its lease was refused), shared, unshared, forgotten, pruned. `gap` says that so many events were
missed: this reader was too slow, or the server started anew; what is so now, `leasefs ls` shows. Goes on through restarts
and upgrades of the server, until Ctrl-C.

Exit codes: 0 as many events as --count says were shown, -w was over and no --count given, or its reader closed the pipe; 1
-w was over before so many came; 2 bad usage or failure.")]
pub struct Args {
    /// Only keys that begin with this; `team/` for the keys of a namespace
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    pub prefix: String,
    /// The lines of .leasefs/events as they are, one JSON object each
    #[arg(long)]
    pub json: bool,
    /// End after this many events
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// End after this long
    #[arg(short = 'w', long = "wait", value_name = "SECS", value_parser = super::seconds)]
    pub wait: Option<Duration>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let tree = Tree::find(&args.tree, std::slice::from_ref(&args.prefix))?;
    let prefix = listing::prefix(&tree, &args.prefix)?;
    let deadline = args.wait.map(|wait| Instant::now() + wait);
    let mut events = Events::open(&tree)?;
    let mut left = args.count;
    let mut out = io::stdout().lock();
    while left != Some(0) {
        let Some(lines) = events.wait(deadline)? else {
            return Ok(over(left));
        };
        let wanted: Vec<_> = events::parse(&lines).filter(|(_, event)| concerns(event.as_ref(), &prefix)).collect();
        let wanted =
            &wanted[..wanted.len().min(left.map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX)))];
        let mut shown = Vec::new();
        if args.json {
            for (line, _) in wanted {
                shown.extend_from_slice(line);
                shown.push(b'\n');
            }
        } else {
            let holders = holders(&tree, wanted);
            for (at, (line, event)) in wanted.iter().enumerate() {
                let text = match event {
                    Some(event) => for_a_person(event, holders.get(&at)),
                    None => show::plain(&String::from_utf8_lossy(line)),
                };
                writeln!(shown, "{text}")?;
            }
        }
        // In one go, so that whoever is killed or loses its reader leaves whole lines.
        out.write_all(&shown)?;
        out.flush()?;
        left = left.map(|left| left.saturating_sub(wanted.len() as u64));
    }
    Ok(ExitCode::SUCCESS)
}

/// The time is over: as was wanted, unless a number of events was.
fn over(left: Option<u64>) -> ExitCode {
    match left {
        Some(left) => {
            complain(format_args!("the time was over before {left} more events came: give -w more to wait longer"));
            ExitCode::from(EXIT_NO)
        }
        None => ExitCode::SUCCESS,
    }
}

/// A gap concerns everybody, and what is not understood may.
fn concerns(event: Option<&Event>, prefix: &str) -> bool {
    event.is_none_or(|event| event.is_gap() || event.key.as_ref().is_some_and(|key| key.starts_with(prefix)))
}

/// Who holds what was granted, by the place of the event: nobody for what is over again.
fn holders(tree: &Tree, events: &[(&[u8], Option<Event>)]) -> HashMap<usize, String> {
    let mut newest = HashMap::new();
    for (at, (_, event)) in events.iter().enumerate() {
        if let Some(Event { event, key: Some(key), epoch, .. }) = event
            && event == "granted"
        {
            newest.insert(key.as_str(), (at, *epoch));
        }
    }
    let who = |(key, (at, epoch))| {
        let status = tree.status(&Key::parse(key).ok()?).ok().flatten().filter(|status| status.epoch == epoch)?;
        let holder = status.holder?;
        let agent = status.agent.map_or_else(String::new, |agent| format!(", agent {}", show::cell(&agent)));
        Some((at, format!("pid {} ({}), uid {}{agent}", holder.pid, show::cell(&holder.command), holder.uid)))
    };
    newest.into_iter().filter_map(who).collect()
}

fn for_a_person(event: &Event, holder: Option<&String>) -> String {
    if event.is_gap() {
        return format!(
            "{:12}  {:NAME_WIDTH$}  {} events were missed: see `leasefs ls` for what is so now",
            "", "gap", event.missed
        );
    }
    let key = show::plain(event.key.as_deref().unwrap_or_default());
    let mut text =
        format!("{}  {:NAME_WIDTH$}  {key}  epoch {}", clock(&event.time), show::plain(&event.event), event.epoch);
    if let Some(holder) = holder {
        text += &format!("  {holder}");
    }
    if let Some(Wait { pid, uid, command, waited_ms }) = &event.wait {
        let waited = show::span(*waited_ms);
        text += &format!("  pid {pid} ({}), uid {uid}, after {waited} in line", show::cell(command));
    }
    text
}

/// The local time of day: whoever watches knows the day.
fn clock(rfc3339: &str) -> String {
    match rfc3339.parse::<jiff::Timestamp>() {
        Ok(time) => time.to_zoned_datetime(jiff::tz::TimeZone::system()).strftime("%H:%M:%S%.3f").to_string(),
        Err(_) => show::plain(rfc3339),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> Event {
        serde_json::from_str(text).expect("an event")
    }

    #[test]
    fn a_line_says_what_happened_to_what() {
        let granted = event(r#"{"seq":1,"time":"bad\u001b","event":"granted","key":"a\u001bb","epoch":3}"#);
        let text = for_a_person(&granted, Some(&"pid 7 (make), uid 0".to_owned()));
        assert_eq!(text, "bad\\u{1b}  granted      a\\u{1b}b  epoch 3  pid 7 (make), uid 0");
        let gap = for_a_person(&event(r#"{"event":"gap","missed":12}"#), None);
        assert!(gap.contains("gap          12 events were missed"), "{gap}");
    }

    #[test]
    fn a_line_says_who_waited_in_vain_and_for_how_long() {
        let line = r#"{"seq":1,"time":"now","event":"interrupted","key":"job","epoch":3,
            "pid":7,"uid":1000,"command":"ma\u001bke","waited_ms":30400}"#;
        let text = for_a_person(&event(line), None);
        assert_eq!(text, "now  interrupted  job  epoch 3  pid 7 (ma\\u{1b}ke), uid 1000, after 30s in line");
    }

    #[test]
    fn a_gap_concerns_whoever_watches_anything() {
        let of_key = event(r#"{"event":"granted","key":"team/a","epoch":1}"#);
        assert!(concerns(Some(&of_key), "team/") && !concerns(Some(&of_key), "teams"));
        assert!(concerns(Some(&event(r#"{"event":"gap","missed":1}"#)), "teams"));
        assert!(concerns(None, "teams"));
    }
}
