//! Text in a drawing: shortened, and escaped so that it is nothing but text.

use crate::cli::show::{self, width};

/// A text shortened in its middle: the end of a key says as much as its beginning.
pub fn middle_out(text: &str, most: usize) -> String {
    if width(text) <= most {
        return text.to_owned();
    }
    let head = most / 2;
    let mut tail = String::new();
    for c in text.chars().rev() {
        if width(&tail) + width(c.encode_utf8(&mut [0; 4])) + head + 1 > most {
            break;
        }
        tail.insert(0, c);
    }
    let mut shown = show::clip(text, head + 1).into_owned();
    shown.push_str(&tail);
    shown
}

/// Text as XML has it. Control characters were made readable before; the few others that XML has no way to write are
/// replaced.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => safe.push('\u{fffd}'),
            c if c.is_control() && c != '\n' => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_keys_keep_both_ends() {
        assert_eq!(middle_out("short", 10), "short");
        let shown = middle_out(&format!("team/{}/build", "x".repeat(90)), 20);
        assert!(shown.starts_with("team/xxxxx…") && shown.ends_with("/build") && width(&shown) == 20, "{shown}");
        assert!(width(&middle_out(&"鍵".repeat(40), 21)) <= 21);
    }
}
