//! What `top` knows of the keys, and in which order it shows them. It asks nobody and draws nothing.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use super::entry::{Column, Entry};
use super::follow::News;
use crate::cli::deadlock::Ring;
use crate::cli::show;

/// How many keys there are of what kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Held, kept by a draft or orphaned.
    pub held: usize,
    /// Shared by readers.
    pub shared: usize,
    /// Lock requests in line.
    pub waiting: u64,
    /// Held, but their connection is gone.
    pub orphaned: usize,
    /// Finished.
    pub finished: usize,
}

/// Everything the screen shows.
pub struct Model {
    /// The tree.
    pub root: String,
    /// Keys that do not begin with this are not known.
    pub prefix: String,
    /// Keys have to begin with this to be shown.
    pub filter: String,
    /// A filter that is being typed.
    pub typed: Option<String>,
    /// Free keys are shown too.
    pub shows_free: bool,
    /// What is sorted by.
    pub sort: Column,
    /// The other way round.
    pub is_reversed: bool,
    /// Everything about the selected key is shown.
    pub shows_details: bool,
    /// Rings of processes that wait for each other.
    pub rings: Vec<Ring>,
    /// What went wrong with the tree, while it does.
    pub trouble: Option<String>,
    /// Every key was read once.
    pub is_loaded: bool,
    /// Namespaces that may not be read.
    pub shut: usize,
    /// First key on the screen.
    pub first: usize,
    selected: Option<String>,
    who: Option<(String, Vec<String>)>,
    entries: BTreeMap<String, Entry>,
    order: Vec<String>,
    totals: Totals,
    is_stale: bool,
}

impl Model {
    /// Nothing is known yet.
    pub fn new(root: &Path, prefix: String) -> Model {
        Model {
            root: show::plain(&root.display().to_string()),
            filter: prefix.clone(),
            prefix,
            typed: None,
            shows_free: false,
            sort: Column::Age,
            is_reversed: false,
            shows_details: true,
            rings: Vec::new(),
            trouble: None,
            is_loaded: false,
            shut: 0,
            first: 0,
            selected: None,
            who: None,
            entries: BTreeMap::new(),
            order: Vec::new(),
            totals: Totals::default(),
            is_stale: true,
        }
    }

    /// Takes in what was found out.
    pub fn hear(&mut self, news: News) {
        match news {
            News::Changed(changes) => {
                self.trouble = None;
                for (key, entry) in changes {
                    match entry {
                        // Most of what is read again is as it was, and putting all in order is work.
                        Some(entry) if self.is_known(&entry) => {}
                        Some(entry) => self.put(entry),
                        None => {
                            let gone = self.entries.remove(&key);
                            self.is_stale |= gone.is_some_and(|entry| entry.is_shown(self.shows_free));
                        }
                    }
                }
            }
            News::Loaded { keys, shut } => {
                let keys: HashSet<String> = keys.into_iter().collect();
                self.entries.retain(|key, _| keys.contains(key));
                (self.is_loaded, self.shut, self.is_stale) = (true, shut, true);
            }
            News::Rings(rings) => self.rings = rings,
            News::Who(key, lines) => self.who = Some((key, lines)),
            News::Trouble(trouble) => self.trouble = Some(trouble),
        }
    }

    fn is_known(&self, entry: &Entry) -> bool {
        let known = self.entries.get(&entry.status.key);
        known.is_some_and(|known| known.status.json() == entry.status.json() && known.container == entry.container)
    }

    /// Enters a key, in place of what was known of it.
    pub fn put(&mut self, entry: Entry) {
        let counts = |entry: &Entry| entry.is_shown(self.shows_free);
        let is_counted = counts(&entry);
        let before = self.entries.insert(entry.status.key.clone(), entry);
        // Most keys that something happens to are free before and after, however many there are.
        self.is_stale |= is_counted || before.as_ref().is_some_and(counts);
    }

    /// Shows the free keys too, or no more.
    pub fn set_shows_free(&mut self, shows_free: bool) {
        (self.shows_free, self.is_stale) = (shows_free, true);
    }

    /// Shows the keys that begin so.
    pub fn set_filter(&mut self, filter: String) {
        (self.filter, self.is_stale) = (filter, true);
    }

    /// Sorts otherwise.
    pub fn set_sort(&mut self, column: Column, is_reversed: bool) {
        (self.sort, self.is_reversed, self.is_stale) = (column, is_reversed, true);
    }

    /// The keys that are shown, in order.
    pub fn order(&mut self) -> &[String] {
        if std::mem::take(&mut self.is_stale) {
            self.settle();
        }
        &self.order
    }

    fn settle(&mut self) {
        let selected_at = self.selected_at();
        let is_shown = |entry: &&Entry| entry.is_shown(self.shows_free) && entry.status.key.starts_with(&self.filter);
        let mut shown: Vec<&Entry> = self.entries.values().filter(is_shown).collect();
        shown.sort_by(|one, two| one.order(two, self.sort));
        if self.is_reversed {
            shown.reverse();
        }
        self.order = shown.iter().map(|entry| entry.status.key.clone()).collect();
        self.totals = totals(self.entries.values().filter(|entry| entry.status.key.starts_with(&self.filter)));
        // The one that takes the place of a key that is gone is selected.
        if self.selected_at().is_none() {
            let at = selected_at.unwrap_or(0).min(self.order.len().saturating_sub(1));
            self.selected = self.order.get(at).cloned();
        }
    }

    /// Counts of the keys that match the filter.
    pub fn totals(&mut self) -> Totals {
        self.order();
        self.totals
    }

    /// Nothing is shown.
    pub fn is_empty(&mut self) -> bool {
        self.order().is_empty()
    }

    /// A key.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// Where the selected key is in the order.
    pub fn selected_at(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.order.iter().position(|key| key == selected)
    }

    /// The selected key.
    pub fn selected(&self) -> Option<&Entry> {
        self.entries.get(self.selected.as_ref()?)
    }

    /// The attempt of which it is to be found out who has its handle, and how many wait for it: none where that is not
    /// shown.
    pub fn question(&self) -> Option<(String, u64, u64)> {
        let Entry { status, .. } = self.selected().filter(|_| self.shows_details)?;
        Some((status.key.clone(), status.epoch, status.waiters))
    }

    /// Who has the selected key's handle, a line each; none while that is being found out.
    pub fn who(&self) -> Option<&[String]> {
        let (key, lines) = self.who.as_ref()?;
        (Some(key) == self.selected.as_ref()).then_some(lines)
    }

    /// Selects a key so many places on.
    pub fn select(&mut self, by: isize) {
        let last = self.order().len().saturating_sub(1);
        let at = self.selected_at().unwrap_or(0).saturating_add_signed(by).min(last);
        self.selected = self.order.get(at).cloned();
    }
}

fn totals<'a>(entries: impl Iterator<Item = &'a Entry>) -> Totals {
    let mut totals = Totals::default();
    for Entry { status, .. } in entries {
        totals.waiting += status.waiters;
        match status.state.as_str() {
            "held" | "reporting" => totals.held += 1,
            "orphaned" => (totals.held, totals.orphaned) = (totals.held + 1, totals.orphaned + 1),
            "shared" => totals.shared += 1,
            "finished" => totals.finished += 1,
            _ => {}
        }
    }
    totals
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A key held since `since` seconds after 1970, with TTL of an hour and so many in line since `waits`.
    pub fn held(key: &str, pid: u32, since: u32, waits: &[u32]) -> Entry {
        let at = |seconds: u32| leasefs::time::rfc3339(i64::from(seconds) * 1_000);
        let line: Vec<_> = waits
            .iter()
            .map(|seconds| {
                serde_json::json!({
                    "pid": 9, "start_time": 1, "uid": 0, "command": "flock", "since": at(*seconds), "mode": "exclusive",
                })
            })
            .collect();
        let status = serde_json::json!({
            "key": key, "state": "held", "epoch": 7, "since": at(since), "expires": at(since + 3_600),
            "holder": { "pid": pid, "start_time": 1, "uid": 0, "gid": 0, "command": "make" },
            "waiters": waits.len(), "line": line,
        });
        Entry::new(serde_json::from_value(status).expect("a status"), None)
    }

    pub fn model(entries: impl IntoIterator<Item = Entry>) -> Model {
        let mut model = Model::new(Path::new("/mnt/leases"), String::new());
        entries.into_iter().for_each(|entry| model.put(entry));
        model
    }

    #[test]
    fn each_column_sorts_by_what_it_shows() {
        let mut model = model([held("a", 3, 30, &[]), held("b", 1, 10, &[50, 60]), held("c", 2, 20, &[40])]);
        for (column, order) in [
            (Column::Key, ["a", "b", "c"]),
            (Column::Pid, ["b", "c", "a"]),
            (Column::Age, ["b", "c", "a"]),
            (Column::Ttl, ["b", "c", "a"]),
            (Column::Line, ["b", "c", "a"]),
            (Column::Wait, ["c", "b", "a"]),
            (Column::Agent, ["a", "b", "c"]),
        ] {
            model.set_sort(column, false);
            assert_eq!(model.order(), order, "{column:?}");
            model.set_sort(column, true);
            let mut turned = order;
            turned.reverse();
            assert_eq!(model.order(), turned, "{column:?}");
        }
    }

    #[test]
    fn the_selection_stays_with_its_key_and_passes_on_when_that_is_gone() {
        let mut model = model([held("a", 1, 10, &[]), held("b", 2, 20, &[]), held("c", 3, 30, &[])]);
        model.order();
        model.select(1);
        model.set_sort(Column::Age, true);
        model.order();
        assert_eq!(model.selected().map(|entry| entry.status.key.as_str()), Some("b"));
        model.hear(News::Changed(vec![("b".to_owned(), None)]));
        assert_eq!(model.order(), ["c", "a"]);
        assert_eq!(model.selected().map(|entry| entry.status.key.as_str()), Some("a"));
        model.select(isize::MIN);
        assert_eq!(model.selected_at(), Some(0));
        model.select(isize::MAX);
        assert_eq!(model.selected_at(), Some(1));
    }

    #[test]
    fn what_is_not_shown_puts_nothing_in_order_anew() {
        let mut model = model([held("a", 1, 10, &[])]);
        assert_eq!(model.order(), ["a"]);
        let free = |key: &str, epoch: u64| {
            let status = serde_json::json!({ "key": key, "state": "free", "epoch": epoch });
            Entry::new(serde_json::from_value(status).expect("a status"), None)
        };
        model.put(free("b", 1));
        model.put(free("b", 2));
        assert!(!model.is_stale);
        model.put(free("a", 8));
        assert!(model.is_stale, "it was shown");
        assert_eq!(model.order(), [""; 0]);
        model.set_shows_free(true);
        assert_eq!(model.order(), ["a", "b"]);
        model.put(free("b", 3));
        assert!(model.is_stale, "it is shown");
    }

    #[test]
    fn a_full_reading_drops_what_it_did_not_find() {
        let mut model = model([held("a", 1, 10, &[]), held("team/b", 2, 20, &[40])]);
        assert_eq!(model.totals(), Totals { held: 2, waiting: 1, ..Totals::default() });
        model.hear(News::Loaded { keys: vec!["team/b".to_owned()], shut: 0 });
        assert_eq!(model.order(), ["team/b"]);
        model.set_filter("other".to_owned());
        assert!(model.is_empty());
    }
}
