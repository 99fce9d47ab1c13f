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
    /// Left out where the terminal is too narrow, the highest first; 0: never.
    spare: u8,
    right: bool,
}

impl Column {
    /// A column of this head, which keeps its width.
    pub fn new(head: &'static str) -> Column {
        Column { head, min: None, spare: 0, right: false }
    }

    /// The same, which gives way down to `min` columns of the terminal where the table is too wide.
    pub fn shrinks_to(self, min: usize) -> Column {
        Column { min: Some(min.max(self.head.len())), ..self }
    }

    /// The same, which is left out where the table would be too wide though all is shortened: the highest first.
    pub fn spare(self, spare: u8) -> Column {
        Column { spare, ..self }
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
        let (kept, widths) = self.layout(look.width);
        let heads: Vec<String> = self.columns.iter().map(|column| column.head.to_owned()).collect();
        let bold: Vec<_> = (0..heads.len()).map(|at| (at, Style::new().bold())).collect();
        self.line(out, &heads, &bold, (&kept, &widths), look)?;
        for (row, styles) in self.rows.iter().zip(&self.styles) {
            self.line(out, row, styles, (&kept, &widths), look)?;
        }
        Ok(())
    }

    fn line(
        &self,
        out: &mut impl Write,
        cells: &[String],
        styles: &[(usize, Style)],
        (kept, widths): (&[usize], &[usize]),
        look: Look,
    ) -> io::Result<()> {
        let last = kept.iter().rposition(|at| !cells[*at].is_empty()).unwrap_or(0);
        let mut blanks = 0;
        for at in kept.iter().copied().take(last + 1) {
            let (wide, column) = (widths[at], &self.columns[at]);
            let text = clip(&cells[at], wide);
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

    /// Which columns are shown, and what each takes. Where that is too much, the widest of those that may gives way
    /// first; where that is not enough, whole columns do.
    fn layout(&self, limit: Option<usize>) -> (Vec<usize>, Vec<usize>) {
        let mut widths: Vec<usize> = self.columns.iter().map(|column| width(column.head)).collect();
        for row in &self.rows {
            for (wide, cell) in widths.iter_mut().zip(row) {
                *wide = (*wide).max(width(cell));
            }
        }
        let mut kept: Vec<usize> = (0..widths.len()).collect();
        let Some(limit) = limit else { return (kept, widths) };
        let gaps = |kept: &[usize]| GAP * kept.len().saturating_sub(1);
        let least = |at: usize| self.columns[at].min.map_or(widths[at], |min| min.min(widths[at]));
        while kept.iter().map(|at| least(*at)).sum::<usize>() + gaps(&kept) > limit {
            let spare = |at: &usize| self.columns[*at].spare;
            let Some(most) = kept.iter().copied().max_by_key(spare).filter(|at| spare(at) > 0) else { break };
            kept.retain(|at| *at != most);
        }
        let taken = kept.iter().map(|at| widths[*at]).sum::<usize>() + gaps(&kept);
        for _ in limit..taken {
            let may = |at: &usize| self.columns[*at].min.is_some_and(|min| widths[*at] > min);
            let Some(widest) = kept.iter().copied().filter(may).max_by_key(|at| widths[*at]) else { break };
            widths[widest] -= 1;
        }
        (kept, widths)
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
    fn a_column_that_can_be_spared_goes_where_the_rest_would_not_fit() {
        let mut table = Table::new([
            Column::new("KEY").shrinks_to(4),
            Column::new("UID").spare(2),
            Column::new("STATE").spare(1),
            Column::new("AGE"),
        ]);
        table.push(["a/long/key", "0", "held", "3s"].map(str::to_owned));
        let at = |width| written(&table, Look { width: Some(width), colour: false });
        assert_eq!(at(21), "KEY   UID  STATE  AGE\na/l…  0    held   3s\n");
        assert_eq!(at(20), "KEY       STATE  AGE\na/long/…  held   3s\n");
        assert_eq!(at(11), "KEY     AGE\na/lon…  3s\n");
        assert_eq!(at(1), "KEY   AGE\na/l…  3s\n");
        assert!(written(&table, Look::plain()).starts_with("KEY         UID  STATE  AGE\n"), "a pipe gets everything");
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
