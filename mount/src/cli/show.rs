//! How values are shown to a person: ages, times, commands, who holds a key. JSON output does not pass through here; tables
//! are in [`super::table`].
//!
//! Notes and commands come from other users, so nothing in them may reach the terminal as a control character.

use std::borrow::Cow;
use std::fmt::Write as _;

use jiff::Timestamp;
use leasefs::client::Status;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Longest note or command in a table, in columns of the terminal.
const CELL_WIDTH: usize = 60;
/// Stands where there is nothing to show.
pub const NOTHING: &str = "-";

/// The wall clock in Unix milliseconds.
pub fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

/// An RFC 3339 time in Unix milliseconds.
pub fn parse_ms(rfc3339: &str) -> Option<i64> {
    rfc3339.parse::<Timestamp>().ok().map(Timestamp::as_millisecond)
}

/// A span in its two largest units: `340ms`, `12s`, `3m05s`, `2h40m`, `5d03h`. Negative spans are shown as none.
pub fn span(ms: i64) -> String {
    let ms = ms.max(0);
    let (secs, mins, hours) = (ms / 1_000, ms / 60_000, ms / 3_600_000);
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{secs}s"),
        60_000..3_600_000 => format!("{mins}m{:02}s", secs % 60),
        3_600_000..86_400_000 => format!("{hours}h{:02}m", mins % 60),
        _ => format!("{}d{:02}h", hours / 24, hours % 24),
    }
}

/// Text with control characters escaped.
pub fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            let _ = write!(shown, "{}", c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Text for one cell of a table: escaped, shortened, never empty.
pub fn cell(text: &str) -> String {
    let shown = plain(text.trim_end());
    if shown.is_empty() {
        return NOTHING.to_owned();
    }
    clip(&shown, CELL_WIDTH).into_owned()
}

/// Who is in the way and for how long: `held by pid 7 (make), uid 0, agent planner, for 3s`.
pub fn in_the_way(status: &Status) -> String {
    let mut text = match (&status.holder, status.state.as_str()) {
        (Some(holder), _) => {
            let agent = status.agent.as_deref().map(|name| format!(", agent {}", cell(name)));
            format!(
                "{} by pid {} ({}), uid {}{}",
                status.state,
                holder.pid,
                cell(&holder.command),
                holder.uid,
                agent.unwrap_or_default()
            )
        }
        (None, "shared") => format!("shared by {}", status.sharers),
        (None, "free") if status.waiters > 0 => format!("promised to the first of {} waiting", status.waiters),
        (None, state) => state.to_owned(),
    };
    if let Some(since_ms) = status.since.as_deref().and_then(parse_ms) {
        text += &format!(", for {}", span(now_ms() - since_ms));
    }
    text
}

/// How many columns of a terminal a text takes.
pub fn width(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// A text that takes at most so many columns of a terminal, with `…` where something was left out.
pub fn clip(text: &str, max: usize) -> Cow<'_, str> {
    if width(text) <= max {
        return Cow::Borrowed(text);
    }
    let (mut shown, mut used) = (String::new(), 0);
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used + 1 > max {
            break;
        }
        shown.push(c);
    }
    if max > 0 {
        shown.push('…');
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_shown_in_two_units() {
        for (ms, text) in [
            (-5, "0ms"),
            (999, "999ms"),
            (59_999, "59s"),
            (185_000, "3m05s"),
            (9_600_000, "2h40m"),
            (442_800_000, "5d03h"),
        ] {
            assert_eq!(span(ms), text);
        }
    }

    #[test]
    fn nothing_in_a_note_can_drive_the_terminal() {
        assert_eq!(plain("a\x1b[2J\nb"), "a\\u{1b}[2J\\nb");
        assert_eq!(cell(""), NOTHING);
        assert_eq!(width(&cell(&"é".repeat(100))), CELL_WIDTH);
    }

    #[test]
    fn who_is_in_the_way_is_told_on_one_line() {
        let text = r#"{"key":"k","state":"held","epoch":3,"holder":{"pid":7,"uid":0,"gid":0,"command":"make\nall"}}"#;
        assert_eq!(in_the_way(&text.parse().expect("a status")), "held by pid 7 (make\\nall), uid 0");
    }

    #[test]
    fn what_is_clipped_fits_also_where_characters_are_wide() {
        assert_eq!(clip("team/job", 8), "team/job");
        assert_eq!(clip("team/job", 5), "team…");
        assert_eq!(clip("鍵鍵鍵", 6), "鍵鍵鍵");
        assert_eq!(clip("鍵鍵鍵", 4), "鍵…");
        assert_eq!((clip("ab", 1), clip("ab", 0)), ("…".into(), "".into()));
    }
}
