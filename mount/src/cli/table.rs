//! A table for a person: aligned columns, shortened to the terminal where there is one, coloured where that is wanted.

use std::io::{self, IsTerminal, Write};

use anstyle::Style;
use ratatui::crossterm::terminal;

use super::show::{clip, width};

/// Between two columns.
const GAP: usize = 2;

/// One column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    head: &'static str,
    /// Narrowest it may become; none: it is never shortened.
    min: Option<usize>,
    right: bool,
}

impl Column {
    /// A column of this head, which keeps its width.
    pub fn new(head: &'static str) -> Column {
        Column { head, min: None, right: false }
    }

    /// The same, which gives way down to `min` columns of the terminal where the table is too wide.
    pub fn shrinks_to(self, min: usize) -> Column {
        Column { min: Some(min.max(self.head.len())), ..self }
    }

    /// The same, for numbers.
    pub fn right(self) -> Column {
        Column { right: true, ..self }
    }
}

/// Where a table is written to: how wide it may be and whether it is coloured.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Columns of the terminal; none: as wide as it gets.
    pub width: Option<usize>,
    /// Whether colours are wanted.
    pub colour: bool,
}

impl Look {
    /// For pipes and files.
    pub fn plain() -> Look {
        Look { width: None, colour: false }
    }

    /// As standard output is: a terminal's width, and colours unless `NO_COLOR` is set.
    pub fn of_stdout() -> Look {
        if !io::stdout().is_terminal() {
            return Look::plain();
        }
        let width = terminal::size().ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0);
        Look { width, colour: wants_colour() }
    }
}

/// Whether the environment leaves colours on: see <https://no-color.org>.
pub fn wants_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Rows under heads.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    styles: Vec<Vec<(usize, Style)>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Table {
        Table { columns: columns.into_iter().collect(), rows: Vec::new(), styles: Vec::new() }
    }

    /// Appends a row, which has a cell for each column.
    pub fn push(&mut self, cells: impl IntoIterator<Item = String>) {
        self.push_styled(cells, []);
    }

    /// Appends a row of which some cells, by their number, are coloured.
    pub fn push_styled(
        &mut self,
        cells: impl IntoIterator<Item = String>,
        styles: impl IntoIterator<Item = (usize, Style)>,
    ) {
        let row: Vec<String> = cells.into_iter().collect();
        debug_assert_eq!(row.len(), self.columns.len());
        self.rows.push(row);
        self.styles.push(styles.into_iter().collect());
    }

    /// Writes it, two blanks between columns, no blanks at the ends of lines.
    pub fn write(&self, out: &mut impl Write, look: Look) -> io::Result<()> {
        let widths = self.widths(look.width);
        let heads: Vec<String> = self.columns.iter().map(|column| column.head.to_owned()).collect();
        let bold: Vec<_> = (0..heads.len()).map(|at| (at, Style::new().bold())).collect();
        self.line(out, &heads, &bold, &widths, look)?;
        for (row, styles) in self.rows.iter().zip(&self.styles) {
            self.line(out, row, styles, &widths, look)?;
        }
        Ok(())
    }

    fn line(
        &self,
        out: &mut impl Write,
        cells: &[String],
        styles: &[(usize, Style)],
        widths: &[usize],
        look: Look,
    ) -> io::Result<()> {
        let last = cells.iter().rposition(|cell| !cell.is_empty()).unwrap_or(0);
        let mut blanks = 0;
        for (at, ((cell, wide), column)) in cells.iter().zip(widths).zip(&self.columns).enumerate().take(last + 1) {
            let text = clip(cell, *wide);
            let rest = wide - width(&text);
            let (before, after) = if column.right { (rest, 0) } else { (0, rest) };
            write!(out, "{:1$}", "", blanks + before)?;
            match styles.iter().find(|(cell, _)| *cell == at).filter(|_| look.colour) {
                Some((_, style)) => write!(out, "{style}{text}{style:#}")?,
                None => write!(out, "{text}")?,
            }
            blanks = after + GAP;
        }
        writeln!(out)
    }

    /// What each column takes. Where that is too much, the widest of those that may gives way first.
    fn widths(&self, limit: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|column| width(column.head)).collect();
        for row in &self.rows {
            for (wide, cell) in widths.iter_mut().zip(row) {
                *wide = (*wide).max(width(cell));
            }
        }
        let gaps = GAP * widths.len().saturating_sub(1);
        let mut excess = limit.map_or(0, |limit| (widths.iter().sum::<usize>() + gaps).saturating_sub(limit));
        while excess > 0 {
            let may = |at: &usize| self.columns[*at].min.is_some_and(|min| widths[*at] > min);
            let Some(widest) = (0..widths.len()).filter(may).max_by_key(|at| widths[*at]) else { break };
            widths[widest] -= 1;
            excess -= 1;
        }
        widths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(table: &Table, look: Look) -> String {
        let mut out = Vec::new();
        table.write(&mut out, look).expect("written");
        String::from_utf8(out).expect("text")
    }

    fn small() -> Table {
        let mut table = Table::new([Column::new("KEY").shrinks_to(4), Column::new("N").right(), Column::new("NOTE")]);
        table.push(["a/long/key", "1", "x"].map(str::to_owned));
        table.push_styled(["é", "22", ""].map(str::to_owned), [(0, Style::new().bold())]);
        table
    }

    #[test]
    fn columns_are_aligned_and_lines_end_without_blanks() {
        let text = written(&small(), Look::plain());
        assert_eq!(text, "KEY          N  NOTE\na/long/key   1  x\né           22\n");
    }

    #[test]
    fn a_narrow_terminal_shortens_what_may_be_shortened() {
        let look = |width| Look { width: Some(width), colour: false };
        assert_eq!(written(&small(), look(16)), "KEY      N  NOTE\na/lon…   1  x\né       22\n");
        let narrowest = written(&small(), look(3));
        assert!(narrowest.contains("a/l…   1  x\n"), "{narrowest}");
    }

    #[test]
    fn colours_change_no_column() {
        let coloured = written(&small(), Look { width: None, colour: true });
        assert!(coloured.contains("\u{1b}[1mé\u{1b}[0m           22\n"), "{coloured:?}");
        let bare = anstyle_stripped(&coloured);
        assert_eq!(bare, written(&small(), Look::plain()));
    }

    fn anstyle_stripped(text: &str) -> String {
        text.replace("\u{1b}[1m", "").replace("\u{1b}[0m", "")
    }
}
