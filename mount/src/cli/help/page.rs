//! A page of help: its parts, as text for a terminal and as roff for a man page. Words in backticks are what one types.

use clap_mangen::roff::{Inline, Roff, bold, roman};

/// How far an entry's text is set in.
const INDENT: usize = 8;

/// The term of an entry that is an item of a list.
pub const ITEM: &str = "-";

/// A part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// A heading.
    Head(String),
    /// A paragraph.
    Text(String),
    /// A term and what it means.
    Entry(String, String),
    /// Lines that stay as they are.
    Code(String),
}

/// A page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page(pub Vec<Block>);

impl Page {
    /// Adds a heading.
    pub fn head(&mut self, text: impl Into<String>) -> &mut Page {
        self.0.push(Block::Head(text.into()));
        self
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) -> &mut Page {
        self.0.push(Block::Text(text.into()));
        self
    }

    /// Adds a term and what it means.
    pub fn entry(&mut self, term: impl Into<String>, text: impl Into<String>) -> &mut Page {
        self.0.push(Block::Entry(term.into(), text.into()));
        self
    }

    /// Adds lines that stay as they are.
    pub fn code(&mut self, text: impl Into<String>) -> &mut Page {
        self.0.push(Block::Code(text.into()));
        self
    }
}

/// The page as text in lines of at most `width` characters.
pub fn render(page: &Page, width: usize) -> String {
    let mut out = String::new();
    let mut after_entry = false;
    for block in &page.0 {
        let is_entry = matches!(block, Block::Entry(..));
        let goes_on = out.is_empty() || (after_entry && is_entry);
        if !goes_on {
            out.push('\n');
        }
        match block {
            Block::Head(text) => out += &format!("{text}\n"),
            Block::Text(text) => fill(&mut out, text, 0, width),
            Block::Entry(term, text) => {
                // A short term has its text beside it.
                let beside = term.chars().count() + 4 <= INDENT;
                out += &format!("  {term}");
                if beside {
                    let mut body = String::new();
                    fill(&mut body, text, INDENT, width);
                    let blanks = INDENT - 2 - term.chars().count();
                    out += &" ".repeat(blanks);
                    out += body.trim_start();
                } else {
                    out.push('\n');
                    fill(&mut out, text, INDENT, width);
                }
            }
            Block::Code(text) => text.lines().for_each(|line| out += &format!("    {line}\n")),
        }
        after_entry = is_entry;
    }
    out
}

/// Appends text in lines of at most `width`, set in by `indent`.
pub fn fill(out: &mut String, text: &str, indent: usize, width: usize) {
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            *out += &" ".repeat(indent);
            column = indent;
        } else {
            out.push(' ');
            column += 1;
        }
        *out += word;
        column += length;
    }
    out.push('\n');
}

/// Appends the page to a man page, below the heading that is there.
pub fn to_roff(page: &Page, roff: &mut Roff) {
    let mut after_head = true;
    for block in &page.0 {
        // A heading begins a paragraph by itself.
        if matches!(block, Block::Text(_) | Block::Code(_)) && !after_head {
            roff.control("PP", []);
        }
        after_head = matches!(block, Block::Head(_));
        match block {
            Block::Head(text) => {
                roff.control("SS", [text.as_str()]);
            }
            Block::Text(text) => {
                roff.text(inline(text));
            }
            Block::Entry(term, text) if term == ITEM => {
                roff.control("IP", [ITEM, "2"]);
                roff.text(inline(text));
            }
            Block::Entry(term, text) => {
                roff.control("TP", []);
                roff.text([bold(term.replace('`', ""))]);
                roff.text(inline(text));
            }
            Block::Code(text) => {
                roff.control("RS", ["4"]);
                roff.control("nf", []);
                for line in text.lines() {
                    roff.text([roman(line)]);
                }
                roff.control("fi", []);
                roff.control("RE", []);
            }
        }
    }
}

/// Text with what is in backticks in bold.
fn inline(text: &str) -> Vec<Inline> {
    let pieces = text.split('`').enumerate().filter(|(_, piece)| !piece.is_empty());
    pieces.map(|(at, piece)| if at % 2 == 1 { bold(piece) } else { roman(piece) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::default();
        page.head("Words").text("one two three four").entry("0", "a short one").entry("a-long-term", "text");
        page.code("x  y\n z");
        page
    }

    #[test]
    fn text_keeps_to_its_width_and_code_stays_as_it_is() {
        let text = render(&page(), 14);
        let expected = "Words\n\none two three\nfour\n\n  0     a\n        short\n        one\n  a-long-term\n        \
                        text\n\n    x  y\n     z\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn roff_has_the_same_parts() {
        let mut roff = Roff::new();
        to_roff(&page(), &mut roff);
        let text = roff.to_roff();
        for part in [".SS Words\n", ".TP\n\\fB0\\fR\na short one\n", ".nf\nx  y\n z\n.fi\n"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(inline("run `ls -l` now").len(), 3);
    }
}
