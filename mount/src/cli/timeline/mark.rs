//! Marks of a timeline: shapes for what deserves to be seen in a row of many bars, told apart without colours.

use std::io::{self, Write};

use super::text::escaped;

/// What deserves to be seen in a row of many bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A result was committed.
    Commit,
    /// The TTL ran out.
    Expiry,
    /// An operator ended it.
    Eviction,
    /// It was lost with its connection.
    Loss,
}

impl Mark {
    /// The mark of an end; none for those that need none.
    pub fn of(outcome: &str) -> Option<Mark> {
        match outcome {
            "expired" => Some(Mark::Expiry),
            "evicted" => Some(Mark::Eviction),
            "lost" => Some(Mark::Loss),
            _ => None,
        }
    }

    /// Draws it around a point, with a tooltip unless that is empty.
    ///
    /// # Errors
    /// Those of writing.
    pub fn draw(self, out: &mut impl Write, x: f64, y: f64, title: &str) -> io::Result<()> {
        let (class, shape) = match self {
            Mark::Commit => ("commit", format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0)),
            Mark::Expiry => ("expiry", format!("M{:.1} {:.1}h6l-6 6h6z", x - 3.0, y - 3.0)),
            Mark::Eviction => ("eviction", format!("M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0)),
            Mark::Loss => ("loss", format!("M{:.1} {y:.1}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", x - 3.0)),
        };
        let look = match self {
            Mark::Commit => "fill=\"#ffffff\" stroke=\"#00563f\" stroke-width=\"1.5\"",
            Mark::Eviction => "fill=\"none\" stroke=\"#1a1a1a\" stroke-width=\"2\"",
            _ => "fill=\"#ffffff\" stroke=\"#1a1a1a\" stroke-width=\"1.2\"",
        };
        let title = if title.is_empty() { String::new() } else { format!("<title>{}</title>", escaped(title)) };
        writeln!(out, "<path class=\"mark {class}\" d=\"{shape}\" {look}>{title}</path>")
    }
}
