//! The name of an agent: who a holder works for, as it says itself. For people, and for tools that find their own by it;
//! no rule of a lease looks at it.

use std::sync::Arc;

use crate::error::Error;

/// Longest name, in bytes.
pub const MAX_BYTES: usize = 255;

/// A name from its bytes: 1 to [`MAX_BYTES`] of UTF-8, without control characters, so that it is one line anywhere.
///
/// # Errors
/// [`Error::Invalid`].
pub fn name(bytes: &[u8]) -> Result<Arc<str>, Error> {
    let fits = (1..=MAX_BYTES).contains(&bytes.len());
    match std::str::from_utf8(bytes) {
        Ok(name) if fits && !name.chars().any(char::is_control) => Ok(Arc::from(name)),
        _ => Err(Error::Invalid("an agent's name has 1 to 255 bytes of UTF-8 without control characters")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_line_of_text() {
        let longest = "é".repeat(127) + "x";
        for good in ["a", " ", "coder 7/ü", &longest] {
            assert_eq!(name(good.as_bytes()).as_deref(), Ok(good));
        }
        let too_long = longest.clone() + "x";
        for bad in [&b""[..], b"a\nb", b"a\0", b"\x1b[2J", "\u{85}".as_bytes(), b"\xff", too_long.as_bytes()] {
            assert!(name(bad).is_err(), "{bad:?}");
        }
    }
}
