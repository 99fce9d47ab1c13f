//! The part of the screen that tells everything about the selected key.

use leasefs::client::Status;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Wrap};

use super::entry::Entry;
use super::model::Model;
use crate::cli::ls;
use crate::cli::show::{self, NOTHING, clip, width};

/// Most of those in line that are named.
const IN_LINE: usize = 20;
/// The names on the left.
const NAME_WIDTH: usize = 8;

/// Lines that a text takes at a width.
pub fn height_of(text: &str, columns: u16) -> u16 {
    u16::try_from(width(text).div_ceil(usize::from(columns.max(1)))).unwrap_or(u16::MAX).max(1)
}

/// Lines that everything takes at a width.
pub fn height(model: &Model, columns: u16) -> u16 {
    let Some(entry) = model.selected() else { return 0 };
    let lines = facts(entry, model.who(), show::now_ms());
    let wide = columns.saturating_sub(NAME_WIDTH as u16);
    lines.iter().fold(1, |sum, (_, text)| height_of(text, wide).saturating_add(sum))
}

/// Draws it below a rule with the key's name.
pub fn draw(frame: &mut Frame, area: Rect, model: &Model, rule_style: Style) {
    let Some(entry) = model.selected() else { return };
    let rule = format!("─ {} ", show::plain(&entry.status.key));
    let rule = clip(&rule, usize::from(area.width)).into_owned();
    let rest = usize::from(area.width).saturating_sub(width(&rule));
    let mut lines = vec![Line::styled(format!("{rule}{}", "─".repeat(rest)), rule_style)];
    for (name, text) in facts(entry, model.who(), show::now_ms()) {
        let name = Span::styled(format!("{name:NAME_WIDTH$}"), Style::new().add_modifier(Modifier::BOLD));
        lines.push(Line::from(vec![name, Span::raw(text)]));
    }
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }), area);
}

/// What there is to say, by name.
fn facts(entry: &Entry, who: Option<&[String]>, now_ms: i64) -> Vec<(&'static str, String)> {
    let status = &entry.status;
    let mut facts = vec![("state", state(status, now_ms))];
    if let Some(why) = &status.orphaned_why {
        facts.push(("because", show::plain(why)));
    }
    if let Some(holder) = &status.holder {
        let agent = status.agent.as_ref().map_or_else(String::new, |agent| format!(", agent {}", show::plain(agent)));
        let container = entry.container.as_ref().map_or_else(String::new, |name| format!(", in {}", show::plain(name)));
        facts.push((
            "holder",
            format!("{} {}, uid {}{agent}{container}", holder.pid, show::cell(&holder.command), holder.uid),
        ));
        facts.push(("who", who.map_or_else(|| "…".to_owned(), |lines| lines.join(", "))));
    }
    if status.waiters > 0 {
        facts.push(("line", line_in_words(status, now_ms)));
    }
    if status.sharers > 0 {
        facts.push(("shared", sharers_in_words(status)));
    }
    if let Some(note) = status.note.as_deref().filter(|note| !note.is_empty()) {
        facts.push(("note", show::plain(note.trim_end())));
    }
    if let Some(result) = &status.result {
        let committed = since(&result.committed, now_ms);
        facts.push(("result", format!("{} bytes, of epoch {}, committed {committed} ago", result.size, result.epoch)));
    }
    facts
}

fn state(status: &Status, now_ms: i64) -> String {
    let mut text = format!("{}, epoch {}", status.state, status.epoch);
    if let Some(age) = ls::age_ms(status, now_ms) {
        text += &format!(", for {}", show::span(age));
    }
    if let Some(via) = &status.via {
        text += &format!(", by {via}");
    }
    if status.holder.is_some() {
        if let Some(renewed) = &status.renewed {
            text += &format!(", renewed {} ago", since(renewed, now_ms));
        }
        if let Some(left) = ls::left_ms(status, now_ms) {
            text += &format!(", ends in {}", show::span(left));
        }
    }
    if let Some(outcome) = &status.outcome {
        text += &format!("; the last that ended was {outcome}");
    }
    text
}

fn since(time: &str, now_ms: i64) -> String {
    show::parse_ms(time).map_or_else(|| NOTHING.to_owned(), |at_ms| show::span(now_ms - at_ms))
}

/// Who waits, for how long, in order.
fn line_in_words(status: &Status, now_ms: i64) -> String {
    let named = status.line.iter().take(IN_LINE).map(|waiting| {
        let shared = if waiting.mode == "shared" { ", to share it" } else { "" };
        format!("{} {} ({}{shared})", waiting.pid, show::cell(&waiting.command), since(&waiting.since, now_ms))
    });
    listed(named.collect(), status.waiters)
}

fn sharers_in_words(status: &Status) -> String {
    let named = status.sharing.iter().take(IN_LINE).map(|who| format!("{} {}", who.pid, show::cell(&who.command)));
    listed(named.collect(), status.sharers)
}

/// The names, and how many are not named.
fn listed(named: Vec<String>, count: u64) -> String {
    let more = usize::try_from(count).unwrap_or(usize::MAX).saturating_sub(named.len());
    match (named.is_empty(), more) {
        (true, more) => more.to_string(),
        (false, 0) => named.join(", "),
        (false, more) => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::held;
    use super::*;

    #[test]
    fn everything_that_is_known_is_said() {
        let mut entry = held("k", 7, 10, &[20, 30]);
        entry.status.note = Some("half\n".to_owned());
        entry.status.agent = Some("planner".to_owned());
        let facts = facts(&entry, Some(&["7 make (claimed, fd 3)".to_owned()]), 70_000);
        let fact = |name: &str| facts.iter().find(|(known, _)| *known == name).map(|(_, text)| text.as_str());
        assert_eq!(fact("state"), Some("held, epoch 7, for 1m00s, ends in 59m00s"));
        assert_eq!(fact("holder"), Some("7 make, uid 0, agent planner"));
        assert_eq!(fact("who"), Some("7 make (claimed, fd 3)"));
        assert_eq!(fact("line"), Some("9 flock (50s), 9 flock (40s)"));
        assert_eq!((fact("note"), fact("result")), (Some("half"), None));
        assert_eq!(listed(vec!["a".to_owned()], 3), "a and 2 more");
        assert_eq!((height_of("", 80), height_of("abc", 2)), (1, 2));
    }
}
