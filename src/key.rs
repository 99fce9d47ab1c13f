//! A key: the path below `claims/`, exactly as it was given. Contract §1.

use std::fmt;
use std::sync::Arc;

/// Most bytes in one part of a key.
pub const MAX_PART_BYTES: usize = 255;
/// Most bytes in a whole key.
pub const MAX_KEY_BYTES: usize = 1024;

/// A validated key. Nothing is folded: two keys are the same when their bytes are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Key(Arc<str>);

/// Why some bytes are no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// Empty, `.`, `..`, an empty part, or a control character. `EINVAL`.
    #[error("a key is a path of parts of 1 to 255 bytes without control characters")]
    Malformed,
    /// `EILSEQ`.
    #[error("a key is valid UTF-8")]
    NotUtf8,
    /// `ENAMETOOLONG`.
    #[error("a part of a key has at most 255 bytes, a key at most 1,024")]
    TooLong,
}

/// Checks one part of a key, or the name of a namespace.
///
/// # Errors
/// What §1 of the contract rules out, as [`BadKey`].
pub fn part(bytes: &[u8]) -> Result<&str, BadKey> {
    if bytes.len() > MAX_PART_BYTES {
        return Err(BadKey::TooLong);
    }
    let name = std::str::from_utf8(bytes).map_err(|_| BadKey::NotUtf8)?;
    if name.is_empty() || name == "." || name == ".." || name.contains('/') || name.chars().any(char::is_control) {
        return Err(BadKey::Malformed);
    }
    Ok(name)
}

impl Key {
    /// Reads a whole key.
    ///
    /// # Errors
    /// What §1 of the contract rules out, as [`BadKey`].
    pub fn parse(text: &str) -> Result<Key, BadKey> {
        if text.len() > MAX_KEY_BYTES {
            return Err(BadKey::TooLong);
        }
        for piece in text.split('/') {
            part(piece.as_bytes())?;
        }
        Ok(Key(text.into()))
    }

    /// The key `name` in the namespace with this path (empty for the root).
    ///
    /// # Errors
    /// What §1 of the contract rules out, as [`BadKey`].
    pub fn join(namespace: &str, name: &[u8]) -> Result<Key, BadKey> {
        let name = part(name)?;
        let path = if namespace.is_empty() { name.to_owned() } else { format!("{namespace}/{name}") };
        if path.len() > MAX_KEY_BYTES { Err(BadKey::TooLong) } else { Ok(Key(path.into())) }
    }

    /// The whole path.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of the namespace it is in, and its name there.
    pub fn split(&self) -> (&str, &str) {
        self.0.rsplit_once('/').unwrap_or(("", &self.0))
    }
}

impl TryFrom<String> for Key {
    type Error = BadKey;

    fn try_from(text: String) -> Result<Key, BadKey> {
        Key::parse(&text)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_contract_rules_out_is_refused() {
        for text in ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a\nb", "a\u{7f}", "a\u{85}b"] {
            assert_eq!(Key::parse(text), Err(BadKey::Malformed), "{text:?}");
        }
        assert_eq!(Key::parse(&"x".repeat(256)), Err(BadKey::TooLong));
        assert_eq!(Key::parse(&["x".repeat(250).as_str(); 5].join("/")), Err(BadKey::TooLong));
        assert_eq!(Key::join("", b"\xff"), Err(BadKey::NotUtf8));
    }

    #[test]
    fn nothing_is_folded() {
        let forms = ["a", "A", "á", "a\u{301}", " a", "a ", "..a", "a.b", "-"];
        for (i, a) in forms.iter().enumerate() {
            for (j, b) in forms.iter().enumerate() {
                assert_eq!(Key::parse(a).unwrap() == Key::parse(b).unwrap(), i == j);
            }
        }
    }

    #[test]
    fn joining_and_splitting_are_inverse() {
        let key = Key::join("a/b", b"c").unwrap();
        assert_eq!((key.as_str(), key.split()), ("a/b/c", ("a/b", "c")));
        assert_eq!(Key::join("", b"c").unwrap().split(), ("", "c"));
    }
}
