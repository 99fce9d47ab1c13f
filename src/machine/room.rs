//! The limit on the keys of one user (§8), judged where a key is granted: at once, or at one's turn in line. Whoever only
//! stands in line holds nothing.

use foldhash::HashMap;

use crate::error::Error;

/// Which users may hold one more key than they do. By default all may.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room<'a> {
    held: Option<&'a HashMap<u32, usize>>,
    counted: Option<u32>,
    most: usize,
}

impl<'a> Room<'a> {
    /// Each may hold so many. `held` says how many each holds; `counted` against whom the key in question is counted there:
    /// whoever is granted it holds no more than before.
    pub fn of(held: &'a HashMap<u32, usize>, counted: Option<u32>, most: usize) -> Room<'a> {
        Room { held: Some(held), counted, most }
    }

    /// Whether this user may be granted the key.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn check(self, uid: u32) -> Result<(), Error> {
        let Some(held) = self.held else { return Ok(()) };
        let others = held.get(&uid).copied().unwrap_or(0) - usize::from(self.counted == Some(uid));
        if others < self.most {
            return Ok(());
        }
        Err(Error::Limit("this uid holds as many keys as --max-keys allows"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_in_question_does_not_count_against_its_holder() {
        let held = HashMap::from_iter([(7, 2), (8, 1)]);
        let room = |counted| Room::of(&held, counted, 2);
        assert!(room(None).check(7).is_err() && room(None).check(8).is_ok() && room(None).check(9).is_ok());
        assert!(room(Some(7)).check(7).is_ok() && room(Some(8)).check(7).is_err());
        assert!(Room::default().check(7).is_ok());
    }
}
