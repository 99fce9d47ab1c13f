//! How much, how long, and with which seed; from the environment.
use std::time::{Duration, Instant};

/// What a suite is told to do.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// `LEASEFS_SEED`, or a random one.
    pub seed: u64,
    /// `LEASEFS_CLAIMS`: exclusive claims in one round, at least.
    pub claims: u64,
    /// `LEASEFS_SECONDS`: how long a round of S3 takes.
    pub hostile: Duration,
    /// `LEASEFS_LONG`: rounds go on for so long. Without it there is one.
    pub long: Option<Duration>,
    started: Instant,
}

impl Settings {
    /// The settings of a suite, which it prints.
    pub fn read(suite: &str) -> Settings {
        let settings = Settings {
            seed: number("LEASEFS_SEED").unwrap_or_else(rand::random),
            claims: number("LEASEFS_CLAIMS").unwrap_or(12_000),
            hostile: Duration::from_secs(number("LEASEFS_SECONDS").unwrap_or(30)),
            long: number("LEASEFS_LONG").map(Duration::from_secs),
            started: Instant::now(),
        };
        println!("{suite}: LEASEFS_SEED={} LEASEFS_CLAIMS={}", settings.seed, settings.claims);
        settings
    }

    /// The seeds of the rounds: one, or as many as fit the long form.
    pub fn rounds(self) -> impl Iterator<Item = u64> {
        (0..).take_while(move |&round| round == 0 || self.long.is_some_and(|long| self.started.elapsed() < long))
    }
}

/// The number in an environment variable.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}
