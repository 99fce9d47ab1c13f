//! The screen of `top`: what of the model fits into it, and how it looks. It changes nothing but the first line shown.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Wrap};

use super::details;
use super::entry::{Column, Entry};
use super::model::Model;
use crate::cli::show::{self, clip, width};
use crate::cli::table::{self, Table};

/// Between two columns.
const GAP: usize = 1;
/// Fewest lines of keys that details may leave.
const FEWEST: u16 = 6;
/// Most lines of what a person must not miss.
const MOST_ALARMS: u16 = 3;
/// What gives way first where columns do not fit.
const LEAST: [Column; 5] = [Column::Container, Column::Epoch, Column::Ttl, Column::Pid, Column::Agent];

/// What is on the screen.
#[derive(Default)]
pub struct View {
    /// The keys.
    pub keys: Vec<String>,
    /// How many there is room for.
    pub rows: usize,
}

/// Colours, or none.
#[derive(Clone, Copy)]
struct Palette(bool);

impl Palette {
    fn fg(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }

    fn state(self, entry: &Entry) -> Style {
        match entry.status.state.as_str() {
            "held" if entry.status.waiters > 0 => self.fg(Color::Yellow),
            "held" => self.fg(Color::Green),
            "shared" => self.fg(Color::Cyan),
            "reporting" => self.fg(Color::Magenta),
            "orphaned" => self.fg(Color::Red),
            _ => Style::new().add_modifier(Modifier::DIM),
        }
    }

    fn alarm(self) -> Style {
        self.fg(Color::Red).add_modifier(Modifier::BOLD)
    }
}

/// The keys as a plain table, all columns of which some key has something.
pub fn plain(model: &mut Model) -> Table {
    let now_ms = show::now_ms();
    let order = model.order().to_vec();
    let entries: Vec<&Entry> = order.iter().filter_map(|key| model.entry(key)).collect();
    let columns: Vec<Column> = Column::ALL.into_iter().filter(|column| is_there(*column, &entries)).collect();
    let shown = |column: &Column| match (least(*column), table::Column::new(column.head())) {
        (Some(least), shown) => shown.shrinks_to(least),
        (None, shown) if is_number(*column) => shown.right(),
        (None, shown) => shown,
    };
    let mut table = Table::new(columns.iter().map(shown));
    for entry in entries {
        table.push(columns.iter().map(|column| entry.cell(*column, now_ms)));
    }
    table
}

/// Agents and containers have a column where there are any.
fn is_there(column: Column, entries: &[&Entry]) -> bool {
    match column {
        Column::Agent => entries.iter().any(|entry| entry.status.agent.is_some()),
        Column::Container => entries.iter().any(|entry| entry.container.is_some()),
        _ => true,
    }
}

/// Narrowest that a column may become; none for those that keep their width.
fn least(column: Column) -> Option<usize> {
    match column {
        Column::Key => Some(16),
        Column::Command => Some(8),
        Column::Container => Some(12),
        Column::Agent => Some(8),
        _ => None,
    }
}

fn is_number(column: Column) -> bool {
    matches!(column, Column::Epoch | Column::Pid | Column::Age | Column::Ttl | Column::Line | Column::Wait)
}

/// Draws everything.
pub fn screen(frame: &mut Frame, model: &mut Model, is_coloured: bool) -> View {
    let palette = Palette(is_coloured);
    let area = frame.area();
    frame.render_widget(Clear, area);
    let alarms = alarms(model);
    let alarm_lines = alarms.iter().map(|text| details::height_of(text, area.width)).sum::<u16>().min(MOST_ALARMS);
    let rest = area.height.saturating_sub(alarm_lines + 3);
    let details = if model.shows_details && !model.is_empty() && rest > FEWEST + 5 {
        details::height(model, area.width).clamp(5, 9.max(area.height / 3)).min(rest - FEWEST)
    } else {
        0
    };
    let [head, alarm, heads, keys, below, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(alarm_lines),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(details),
        Constraint::Length(1),
    ])
    .areas(area);
    header(frame, head, model, palette);
    let lines: Vec<Line> = alarms.into_iter().map(|text| Line::styled(text, palette.alarm())).collect();
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), alarm);
    let view = list(frame, (heads, keys), model, palette);
    if details > 0 {
        details::draw(frame, below, model, palette.fg(Color::Blue));
    }
    footer(frame, foot, model, palette);
    view
}

/// What a person must not miss.
fn alarms(model: &Model) -> Vec<String> {
    let trouble = model.trouble.iter().cloned();
    let mut lines: Vec<String> = trouble.chain(model.rings.iter().map(|ring| ring.text.clone())).collect();
    if lines.len() > 3 {
        let more = lines.len() - 2;
        lines.truncate(2);
        lines.push(format!("and {more} more rings of processes that wait for each other"));
    }
    lines
}

fn header(frame: &mut Frame, area: Rect, model: &mut Model, palette: Palette) {
    let totals = model.totals();
    let count = |number: usize, what: &str| format!("{number} {what}");
    let mut counts = vec![
        (count(totals.held, "held"), palette.fg(Color::Green)),
        (format!("{} waiting", totals.waiting), palette.fg(Color::Yellow)),
        (count(totals.orphaned, "orphaned"), if totals.orphaned > 0 { palette.alarm() } else { Style::new() }),
    ];
    if totals.shared > 0 {
        counts.push((count(totals.shared, "shared"), palette.fg(Color::Cyan)));
    }
    if totals.finished > 0 {
        counts.push((count(totals.finished, "finished"), Style::new()));
    }
    if model.shut > 0 {
        counts.push((count(model.shut, "shut in"), Style::new()));
    }
    if !model.is_loaded {
        counts.push(("reading…".to_owned(), palette.fg(Color::Yellow)));
    }
    let mut right = vec![];
    for (text, style) in counts {
        if !right.is_empty() {
            right.push(Span::raw(" · "));
        }
        right.push(Span::styled(text, style));
    }
    let filter = if model.filter.is_empty() { String::new() } else { format!("  {}*", show::plain(&model.filter)) };
    let right_width: usize = right.iter().map(Span::width).sum();
    let room = usize::from(area.width).saturating_sub(right_width + 2);
    let left = format!("leasefs {}{filter}", model.root);
    let left = clip(&left, room).into_owned();
    let blanks = usize::from(area.width).saturating_sub(width(&left) + right_width);
    let mut spans = vec![Span::styled(left, Style::new().add_modifier(Modifier::BOLD)), Span::raw(" ".repeat(blanks))];
    spans.extend(right);
    frame.render_widget(Paragraph::new(Line::from(spans)), area);
}

/// The heads and the keys below them.
fn list(frame: &mut Frame, (heads, area): (Rect, Rect), model: &mut Model, palette: Palette) -> View {
    let rows = usize::from(area.height);
    let length = model.order().len();
    let selected = model.selected_at().unwrap_or(0);
    // As little as possible is moved.
    let first = model.first.min(length.saturating_sub(rows)).min(selected).max((selected + 1).saturating_sub(rows));
    model.first = first;
    let keys: Vec<String> = model.order().iter().skip(first).take(rows).cloned().collect();
    let now_ms = show::now_ms();
    let entries: Vec<&Entry> = keys.iter().filter_map(|key| model.entry(key)).collect();
    let columns: Vec<Column> = Column::ALL.into_iter().filter(|column| is_there(*column, &entries)).collect();
    let cells: Vec<Vec<String>> =
        entries.iter().map(|entry| columns.iter().map(|column| entry.cell(*column, now_ms)).collect()).collect();
    let wanted: Vec<(Column, usize)> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            (*column, cells.iter().map(|row| width(&row[at])).max().unwrap_or(0).max(head_width(*column, model.sort)))
        })
        .collect();
    let widths = fit(&wanted, model.sort, usize::from(area.width));

    let mut head = Vec::new();
    for (column, wide) in columns.iter().zip(&widths) {
        let Some(wide) = wide else { continue };
        let is_sort = *column == model.sort;
        let mark = match (is_sort, model.is_reversed) {
            (false, _) => "",
            (true, false) => "▾",
            (true, true) => "▴",
        };
        let style =
            Style::new().add_modifier(if is_sort { Modifier::BOLD | Modifier::UNDERLINED } else { Modifier::BOLD });
        head.push((padded(&format!("{}{mark}", column.head()), *wide, is_number(*column)), style));
    }
    frame.render_widget(Paragraph::new(line_of(head)), heads);

    let mut lines = Vec::new();
    for (at, (entry, row)) in entries.iter().zip(&cells).enumerate() {
        let mut spans = Vec::new();
        for ((column, wide), cell) in columns.iter().zip(&widths).zip(row) {
            let Some(wide) = wide else { continue };
            let style = match column {
                Column::State => palette.state(entry),
                Column::Wait | Column::Line if entry.status.waiters > 0 => palette.fg(Color::Yellow),
                _ => Style::new(),
            };
            spans.push((padded(cell, *wide, is_number(*column)), style));
        }
        let mut line = line_of(spans);
        if first + at == selected {
            let rest = usize::from(area.width).saturating_sub(line.width());
            line.push_span(Span::raw(" ".repeat(rest)));
            line = line.style(Style::new().add_modifier(Modifier::REVERSED));
        }
        lines.push(line);
    }
    if lines.is_empty() {
        let text = match (model.is_loaded, model.filter.is_empty()) {
            (false, _) => "reading the keys…",
            (true, true) => "nothing is held; f shows the free keys too",
            (true, false) => "nothing that begins so is held; Esc drops the filter",
        };
        lines.push(Line::styled(text, Style::new().add_modifier(Modifier::DIM)));
    }
    frame.render_widget(Paragraph::new(lines), area);
    View { keys, rows }
}

/// A head is marked where it is sorted by.
fn head_width(column: Column, sort: Column) -> usize {
    column.head().len() + usize::from(column == sort)
}

fn line_of(cells: Vec<(String, Style)>) -> Line<'static> {
    let mut spans = Vec::new();
    for (text, style) in cells {
        if !spans.is_empty() {
            spans.push(Span::raw(" ".repeat(GAP)));
        }
        spans.push(Span::styled(text, style));
    }
    Line::from(spans)
}

fn padded(text: &str, wide: usize, is_right: bool) -> String {
    let text = clip(text, wide);
    let blanks = " ".repeat(wide - width(&text));
    if is_right { format!("{blanks}{text}") } else { format!("{text}{blanks}") }
}

/// What each column takes of the width; none for those that are left out. The widest of those that may gives way first,
/// then whole columns, those that say least first.
fn fit(wanted: &[(Column, usize)], sort: Column, total: usize) -> Vec<Option<usize>> {
    let mut widths: Vec<Option<usize>> = wanted.iter().map(|(_, wide)| Some(*wide)).collect();
    let mut leave_out = LEAST.into_iter();
    loop {
        let taken = |widths: &[Option<usize>]| {
            let shown = widths.iter().flatten().count();
            widths.iter().flatten().sum::<usize>() + GAP * shown.saturating_sub(1)
        };
        while taken(&widths) > total {
            let room = |at: usize| {
                let (column, least) = (wanted[at].0, least(wanted[at].0)?);
                widths[at].filter(|wide| *wide > least.max(head_width(column, sort)))
            };
            let Some(widest) = (0..widths.len()).filter(|at| room(*at).is_some()).max_by_key(|at| widths[*at]) else {
                break;
            };
            widths[widest] = widths[widest].map(|wide| wide - 1);
        }
        let excess = taken(&widths).saturating_sub(total);
        if excess == 0 {
            return widths;
        }
        let Some(column) = leave_out.next() else { return widths };
        // With that column gone the others have more room again.
        for (width, (other, wide)) in widths.iter_mut().zip(wanted) {
            *width = width.filter(|_| *other != column).map(|_| *wide);
        }
    }
}

fn footer(frame: &mut Frame, area: Rect, model: &Model, palette: Palette) {
    let line = match &model.typed {
        Some(typed) => Line::from(vec![
            Span::styled("keys that begin with: ", Style::new().add_modifier(Modifier::BOLD)),
            Span::raw(show::plain(typed)),
            Span::styled("▏", palette.fg(Color::Yellow)),
            Span::styled("  Enter takes it, Esc drops it", Style::new().add_modifier(Modifier::DIM)),
        ]),
        None => {
            let sorts: String = Column::ALL.iter().map(|column| column.letter()).collect();
            let free = if model.shows_free { "f no free" } else { "f free" };
            let text = format!("q quit  / filter  {free}  ⏎ details  r turn round  sort: {sorts}");
            let names: Vec<String> = Column::ALL
                .iter()
                .map(|column| format!("{} {}", column.letter(), column.head().to_lowercase()))
                .collect();
            let long = format!("q quit  / filter  {free}  ⏎ details  r turn round  sort: {}", names.join(" "));
            let text = if width(&long) <= usize::from(area.width) { long } else { text };
            Line::styled(clip(&text, usize::from(area.width)).into_owned(), Style::new().add_modifier(Modifier::DIM))
        }
    };
    frame.render_widget(Paragraph::new(line), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::{held, model};
    use super::*;

    fn drawn(model: &mut Model, (columns, lines): (u16, u16)) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).expect("a terminal");
        terminal.draw(|frame| drop(screen(frame, model, true))).expect("drawn");
        let buffer = terminal.backend().buffer();
        let line = |y| (0..columns).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..lines).map(|y| line(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn everything_that_matters_fits_into_80_columns() {
        let mut waited_for = held("a/key/with/a/long/name/that/does/not/fit/anywhere/at/all", 4_194_304, 10, &[20]);
        waited_for.container = Some("docker:0123456789ab".to_owned());
        waited_for.status.agent = Some("planner".to_owned());
        let mut model = model([waited_for, held("b", 2, 20, &[])]);
        let lines = drawn(&mut model, (80, 24));
        assert!(lines[0].starts_with("leasefs /mnt/leases") && lines[0].contains("2 held · 1 waiting"), "{lines:#?}");
        for head in ["KEY", "STATE", "PID", "COMMAND", "AGENT", "AGE▾", "LINE", "WAIT"] {
            assert!(lines[1].contains(head), "{head}: {lines:#?}");
        }
        assert!(lines[2].contains('…') && lines[2].contains("4194304") && lines[2].contains("planner"), "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("docker:0123456789ab")), "in the details: {lines:#?}");
        assert!(lines[23].starts_with("q quit") && lines[23].ends_with("ksepcngatlw"), "{lines:#?}");
    }

    #[test]
    fn a_wide_screen_shows_every_column_whole() {
        let long = "a/key/with/a/long/name/that/does/not/fit/anywhere/at/all";
        let mut entry = held(long, 7, 10, &[]);
        entry.container = Some("docker:0123456789ab".to_owned());
        let lines = drawn(&mut model([entry]), (200, 40));
        assert!(lines[1].contains("CONTAINER") && lines[1].contains("EPOCH"), "{lines:#?}");
        assert!(lines[2].starts_with(long) && lines[2].contains("docker:0123456789ab"), "{lines:#?}");
    }

    #[test]
    fn the_selected_key_stays_on_the_screen() {
        let mut model = model((0..100).map(|number| held(&format!("k{number:02}"), 1, 10, &[])));
        model.set_sort(Column::Key, false);
        model.shows_details = false;
        assert!(drawn(&mut model, (80, 24))[2].starts_with("k00"));
        model.select(50);
        let lines = drawn(&mut model, (80, 24));
        assert!(lines[22].starts_with("k50"), "{lines:#?}");
        model.select(-1);
        assert!(drawn(&mut model, (80, 24))[22].starts_with("k50"), "nothing moves that need not");
        model.select(isize::MAX);
        assert!(drawn(&mut model, (80, 24))[22].starts_with("k99"));
    }

    #[test]
    fn no_screen_is_too_small() {
        let mut model = model([held("k", 1, 10, &[20])]);
        model.rings = vec![crate::cli::deadlock::Ring { keys: vec!["k".into()], text: "deadlock: k".into() }; 5];
        for size in [(1, 1), (5, 2), (20, 4), (80, 10)] {
            drawn(&mut model, size);
        }
        let lines = drawn(&mut model, (80, 24));
        assert_eq!(
            lines[1..4],
            ["deadlock: k", "deadlock: k", "and 3 more rings of processes that wait for each other"]
        );
    }
}
