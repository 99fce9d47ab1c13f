//! How values are shown to a person: ages, times, commands, tables. JSON output does not pass through here.
//!
//! Notes and commands come from other users, so nothing in them may reach the terminal as a control character.

use std::fmt::Write as _;
use std::io::{self, Write};

use jiff::Timestamp;

/// Longest note or command in a table, in characters.
const CELL_CHARS: usize = 60;
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
    if shown.chars().count() <= CELL_CHARS {
        return shown;
    }
    shown.chars().take(CELL_CHARS - 1).chain(['…']).collect()
}

/// Writes rows as columns aligned on the left, two blanks apart.
pub fn table<'a>(out: &mut impl Write, heads: impl AsRef<[&'a str]>, rows: &[impl AsRef<[String]>]) -> io::Result<()> {
    let heads: Vec<String> = heads.as_ref().iter().map(|head| (*head).to_owned()).collect();
    let mut widths: Vec<usize> = heads.iter().map(String::len).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut line = String::new();
    for row in std::iter::once(heads.as_slice()).chain(rows.iter().map(AsRef::as_ref)) {
        line.clear();
        for (width, cell) in widths.iter().zip(row) {
            let _ = write!(line, "{cell:width$}  ");
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
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
        assert_eq!(cell(&"é".repeat(100)).chars().count(), CELL_CHARS);
    }

    #[test]
    fn columns_are_aligned_and_lines_end_without_blanks() {
        let mut out = Vec::new();
        let rows = [["a/long/key".to_owned(), "1".to_owned()], ["é".to_owned(), "22".to_owned()]];
        table(&mut out, ["KEY", "N"], &rows).expect("written");
        assert_eq!(String::from_utf8_lossy(&out), "KEY         N\na/long/key  1\né           22\n");
    }
}
