//! Kill points: named places where a test has the server kill itself. A release build has none.
//!
//! `LEASEFS_TEST_ABORT` in the environment of `leasefs mount` says where, as a list separated by commas, or is the
//! absolute path of a file that says so in the same way and may be written and removed while the tree is in use:
//!
//! `POINT[=TEXT][:FIRST[-[LAST]]]`
//!
//! | form | kills |
//! |---|---|
//! | `after-commit` | the first time; from a file, which it removes: the next time |
//! | `after-commit:7` | the seventh time, counted over all servers of the connection |
//! | `handling=poison:1-` | every time a request names a file whose name contains `poison` |
//!
//! The points are those of [`leasefs::probe`], `handling` and `interrupted`.

use std::sync::Arc;

use crate::flight::Flight;

/// A request that names a file is about to be handled.
pub const HANDLING: &str = "handling";

/// The kernel has said that a signal came for somebody, and nothing was made of it yet.
pub const INTERRUPTED: &str = "interrupted";

/// Reads what the environment asks for.
pub fn arm(flight: &Arc<Flight>) {
    #[cfg(debug_assertions)]
    armed::arm(flight);
    #[cfg(not(debug_assertions))]
    let _ = flight;
}

/// Kills this process if a test wants that at this request.
pub fn kill_point(point: &'static str, name: &[u8]) {
    #[cfg(debug_assertions)]
    armed::pass(point, name);
    #[cfg(not(debug_assertions))]
    let _ = (point, name);
}

#[cfg(debug_assertions)]
mod armed {
    use std::path::PathBuf;
    use std::sync::{Arc, OnceLock};

    use super::Flight;

    /// One place to end at.
    #[derive(Debug, PartialEq, Eq)]
    pub struct Order {
        point: String,
        text: String,
        passes: Option<(u64, u64)>,
    }

    enum Source {
        Fixed(Vec<Order>, Arc<Flight>),
        File(PathBuf),
    }

    static SOURCE: OnceLock<Source> = OnceLock::new();

    pub fn arm(flight: &Arc<Flight>) {
        let Some(said) = std::env::var("LEASEFS_TEST_ABORT").ok().filter(|said| !said.is_empty()) else { return };
        let source = match PathBuf::from(&said) {
            path if path.is_absolute() => Source::File(path),
            _ => Source::Fixed(parse(&said), Arc::clone(flight)),
        };
        let _ = SOURCE.set(source);
        leasefs::probe::observe(|point| pass(point, b""));
    }

    pub fn parse(said: &str) -> Vec<Order> {
        said.split([',', '\n']).map(str::trim).filter(|order| !order.is_empty()).map(order).collect()
    }

    fn order(said: &str) -> Order {
        let (place, passes) = match said.rsplit_once(':') {
            Some((place, passes)) => {
                let (first, last) = match passes.split_once('-') {
                    Some((first, "")) => (first, "18446744073709551615"),
                    Some(both) => both,
                    None => (passes, passes),
                };
                (place, Some((first.parse().unwrap_or(1), last.parse().unwrap_or(u64::MAX))))
            }
            None => (said, None),
        };
        let (point, text) = place.split_once('=').unwrap_or((place, ""));
        Order { point: point.into(), text: text.into(), passes }
    }

    impl Order {
        pub fn is_at(&self, point: &str, name: &[u8]) -> bool {
            let text = self.text.as_bytes();
            self.point == point && (text.is_empty() || name.windows(text.len()).any(|part| part == text))
        }
    }

    pub fn pass(point: &str, name: &[u8]) {
        match SOURCE.get() {
            None => {}
            Some(Source::Fixed(orders, flight)) => {
                for (number, order) in orders.iter().enumerate().filter(|(_, order)| order.is_at(point, name)) {
                    let (first, last) = order.passes.unwrap_or((1, 1));
                    if (first..=last).contains(&flight.pass(number)) {
                        end(point);
                    }
                }
            }
            Some(Source::File(path)) => {
                let Ok(said) = std::fs::read_to_string(path) else { return };
                if let Some(order) = parse(&said).iter().find(|order| order.is_at(point, name)) {
                    if order.passes.is_none() {
                        let _ = std::fs::remove_file(path);
                    }
                    end(point);
                }
            }
        }
    }

    fn end(point: &str) {
        tracing::warn!("kill point {point}");
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::SIGKILL);
        // No instruction that matters is to be reached by any thread before the signal is.
        loop {
            std::thread::park();
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn orders_are_read() {
            let of = |point: &str, text: &str, passes| Order { point: point.into(), text: text.into(), passes };
            let orders = parse("after-commit, handling=poi:1-\nexpiry:3,publish:2-4");
            let expected = [
                of("after-commit", "", None),
                of("handling", "poi", Some((1, u64::MAX))),
                of("expiry", "", Some((3, 3))),
                of("publish", "", Some((2, 4))),
            ];
            assert_eq!(orders, expected);
            assert!(orders[1].is_at("handling", b"a-poison") && !orders[1].is_at("handling", b"a-potion"));
            assert!(orders[0].is_at("after-commit", b"") && !orders[0].is_at("before-commit", b""));
        }
    }
}
