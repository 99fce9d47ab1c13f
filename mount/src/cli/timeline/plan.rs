//! What a timeline shows: which span of time, which keys and attempts, which marks its axis has. It draws nothing.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, ZonedDateTime};

/// The span that is shown unless another is asked for.
const HOUR_MS: i64 = 3_600_000;
/// Shortest span, so that a single instant is no line.
const SHORTEST_MS: i64 = 1_000;
/// Most keys and attempts of one drawing: a browser has to be able to show it.
const MOST_KEYS: usize = 300;
const MOST_BARS: usize = 20_000;
/// Ticks that an axis has at most.
const MOST_TICKS: i64 = 10;
/// Between two ticks, in milliseconds, where that is less than a day.
const STEPS_MS: [i64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    900_000, 1_800_000, 3_600_000, 10_800_000, 21_600_000,
];
/// The same in days.
const STEPS_DAYS: [i64; 8] = [1, 2, 7, 14, 30, 60, 180, 365];
const DAY_MS: i64 = 86_400_000;

/// An attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bar {
    /// Its epoch.
    pub epoch: u64,
    /// Its grant, in Unix milliseconds, as all times here.
    pub since_ms: i64,
    /// Its end; none while it lasts.
    pub ended_ms: Option<i64>,
    /// How long it stood in line before.
    pub waited_ms: i64,
    /// When its result was committed.
    pub committed_ms: Option<i64>,
    /// How it ended.
    pub outcome: Option<String>,
    /// Why.
    pub why: Option<String>,
    /// Whose it was.
    pub who: String,
    /// The agent it was for.
    pub agent: Option<String>,
    /// Its note.
    pub note: Option<String>,
}

/// Somebody who waits now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Since when.
    pub since_ms: i64,
    /// Who.
    pub who: String,
}

/// A key's attempts, and who waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Attempts, by epoch.
    pub bars: Vec<Bar>,
    /// Those in line.
    pub waiting: Vec<Wait>,
}

/// A mark of the axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tick {
    /// When.
    pub at_ms: i64,
    /// What is written there.
    pub label: String,
}

/// What is drawn.
#[derive(Debug)]
pub struct Plan {
    /// The tree, for the title.
    pub place: String,
    /// The span that is shown.
    pub from_ms: i64,
    /// Its end.
    pub to_ms: i64,
    /// The present, where what lasts ends.
    pub now_ms: i64,
    /// Keys by name.
    pub rows: BTreeMap<String, Row>,
    /// The axis.
    pub ticks: Vec<Tick>,
    /// The day and the time zone of the axis.
    pub day: String,
    /// Keys that there was no room for.
    pub keys_left_out: usize,
    /// Attempts that there was no room for.
    pub bars_left_out: usize,
}

impl Bar {
    /// Where it begins, its wait included.
    pub fn begin_ms(&self) -> i64 {
        self.since_ms.saturating_sub(self.waited_ms)
    }

    /// Where it ends so far. A clock that was set back makes no bar run backwards.
    pub fn to_ms(&self, now_ms: i64) -> i64 {
        self.ended_ms.unwrap_or(now_ms).max(self.since_ms)
    }
}

/// Plans a drawing; none where there is nothing to draw.
pub fn plan(place: &str, mut rows: BTreeMap<String, Row>, now_ms: i64, since_ms: Option<i64>) -> Option<Plan> {
    let (from_ms, to_ms) = span(&rows, now_ms, since_ms)?;
    for row in rows.values_mut() {
        row.bars.retain(|bar| bar.to_ms(now_ms) >= from_ms && bar.begin_ms() <= to_ms);
        row.waiting.retain(|wait| wait.since_ms <= to_ms);
    }
    rows.retain(|_, row| !row.bars.is_empty() || !row.waiting.is_empty());
    if rows.is_empty() {
        return None;
    }
    let keys_left_out = keep_newest_keys(&mut rows, now_ms);
    let bars_left_out = keep_newest_bars(&mut rows);
    let zone = TimeZone::system();
    let ticks = ticks(from_ms, to_ms, &zone);
    let day = day(from_ms, to_ms, &zone);
    Some(Plan { place: place.to_owned(), from_ms, to_ms, now_ms, rows, ticks, day, keys_left_out, bars_left_out })
}

/// Which time is shown.
fn span(rows: &BTreeMap<String, Row>, now_ms: i64, since_ms: Option<i64>) -> Option<(i64, i64)> {
    if let Some(since_ms) = since_ms {
        let from_ms = now_ms.saturating_sub(since_ms.max(SHORTEST_MS));
        return Some((from_ms, now_ms));
    }
    let bars = || rows.values().flat_map(|row| &row.bars);
    let waiting = || rows.values().flat_map(|row| &row.waiting);
    let newest = bars().map(|bar| bar.to_ms(now_ms)).max();
    let is_lately = waiting().next().is_some() || newest? > now_ms - HOUR_MS;
    let to_ms = if is_lately { now_ms } else { newest? };
    let within = to_ms - HOUR_MS;
    let oldest = bars()
        .filter(|bar| bar.to_ms(now_ms) >= within)
        .map(Bar::begin_ms)
        .chain(waiting().map(|wait| wait.since_ms))
        .min()?
        .max(within);
    // A little room beside the first bar.
    let margin_ms = ((to_ms - oldest) / 50).max(SHORTEST_MS / 10);
    Some(((oldest - margin_ms).max(within).min(to_ms - SHORTEST_MS), to_ms))
}

fn keep_newest_keys(rows: &mut BTreeMap<String, Row>, now_ms: i64) -> usize {
    let Some(excess) = rows.len().checked_sub(MOST_KEYS).filter(|excess| *excess > 0) else { return 0 };
    let newest = |row: &Row| match row.waiting.is_empty() {
        true => row.bars.iter().map(|bar| bar.to_ms(now_ms)).max().unwrap_or(i64::MIN),
        false => i64::MAX,
    };
    let mut by_age: Vec<(i64, String)> = rows.iter().map(|(key, row)| (newest(row), key.clone())).collect();
    by_age.sort();
    for (_, key) in by_age.into_iter().take(excess) {
        rows.remove(&key);
    }
    excess
}

fn keep_newest_bars(rows: &mut BTreeMap<String, Row>) -> usize {
    let mut starts: Vec<i64> = rows.values().flat_map(|row| row.bars.iter().map(|bar| bar.since_ms)).collect();
    let Some(excess) = starts.len().checked_sub(MOST_BARS).filter(|excess| *excess > 0) else { return 0 };
    starts.sort_unstable();
    let first = starts[excess];
    let mut dropped = 0;
    for row in rows.values_mut() {
        let before = row.bars.len();
        row.bars.retain(|bar| bar.since_ms >= first);
        dropped += before - row.bars.len();
    }
    rows.retain(|_, row| !row.bars.is_empty() || !row.waiting.is_empty());
    dropped
}

fn zoned(at_ms: i64, zone: &TimeZone) -> Option<ZonedDateTime> {
    Some(Timestamp::from_millisecond(at_ms).ok()?.to_zoned_datetime(zone.clone()))
}

/// Marks at round local times.
fn ticks(from_ms: i64, to_ms: i64, zone: &TimeZone) -> Vec<Tick> {
    let span_ms = (to_ms - from_ms).max(1);
    match STEPS_MS.into_iter().find(|step| span_ms / step <= MOST_TICKS) {
        Some(step_ms) => within_days(from_ms, to_ms, step_ms, zone),
        None => {
            let days = STEPS_DAYS.into_iter().find(|days| span_ms / DAY_MS / days <= MOST_TICKS).unwrap_or(365);
            at_midnights(from_ms, to_ms, days, zone)
        }
    }
}

fn within_days(from_ms: i64, to_ms: i64, step_ms: i64, zone: &TimeZone) -> Vec<Tick> {
    let Some(first) = zoned(from_ms, zone) else { return Vec::new() };
    // Counted from the local midnight. Where the clocks change within, later marks are off by that.
    let offset_ms = i64::from(first.offset().seconds()) * 1_000;
    let mut at_ms = (from_ms + offset_ms).div_euclid(step_ms) * step_ms - offset_ms;
    let mut ticks = Vec::new();
    while at_ms <= to_ms {
        if let Some(time) = zoned(at_ms, zone).filter(|_| at_ms >= from_ms) {
            let is_midnight = (at_ms + offset_ms).rem_euclid(DAY_MS) == 0;
            let format = match step_ms {
                _ if is_midnight && step_ms >= 60_000 => "%b %d",
                ..1_000 => "%H:%M:%S%.3f",
                1_000..60_000 => "%H:%M:%S",
                _ => "%H:%M",
            };
            ticks.push(Tick { at_ms, label: time.strftime(format).to_string() });
        }
        at_ms += step_ms;
    }
    ticks
}

fn at_midnights(from_ms: i64, to_ms: i64, days: i64, zone: &TimeZone) -> Vec<Tick> {
    let midnight = zoned(from_ms, zone).and_then(|time| time.start_of_day().ok());
    let Some(mut at) = midnight else { return Vec::new() };
    let mut ticks = Vec::new();
    loop {
        let at_ms = at.timestamp().as_millisecond();
        if at_ms > to_ms {
            return ticks;
        }
        if at_ms >= from_ms {
            let format = if days >= 180 { "%b %Y" } else { "%b %d" };
            ticks.push(Tick { at_ms, label: at.strftime(format).to_string() });
        }
        match at.checked_add(days.days()) {
            Ok(next) => at = next,
            Err(_) => return ticks,
        }
    }
}

/// `2026-01-01 (UTC+01:00)`, or two days where it goes over midnight.
fn day(from_ms: i64, to_ms: i64, zone: &TimeZone) -> String {
    let (Some(from), Some(to)) = (zoned(from_ms, zone), zoned(to_ms, zone)) else { return String::new() };
    let date = |time: &ZonedDateTime| time.strftime("%Y-%m-%d").to_string();
    let days = if from.date() == to.date() { date(&from) } else { format!("{} to {}", date(&from), date(&to)) };
    format!("{days} (UTC{})", from.strftime("%:z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000_000;

    fn bar(epoch: u64, since_ms: i64, ended_ms: Option<i64>) -> Bar {
        Bar { epoch, since_ms, ended_ms, ..Bar::default() }
    }

    fn rows(of: &[(&str, Vec<Bar>)]) -> BTreeMap<String, Row> {
        of.iter().map(|(key, bars)| ((*key).to_owned(), Row { bars: bars.clone(), ..Row::default() })).collect()
    }

    #[test]
    fn the_last_hour_is_shown_or_less_where_all_is_newer() {
        let minutes = |minutes: i64| NOW - minutes * 60_000;
        let newer = rows(&[("k", vec![bar(1, minutes(10), Some(minutes(5)))])]);
        let newer = plan("t", newer, NOW, None).expect("a plan");
        assert!(newer.from_ms < minutes(10) && newer.from_ms > minutes(11) && newer.to_ms == NOW);
        let both = rows(&[("k", vec![bar(1, minutes(200), Some(minutes(190))), bar(2, minutes(90), None)])]);
        let both = plan("t", both, NOW, None).expect("a plan");
        assert_eq!((both.from_ms, both.rows["k"].bars.len()), (minutes(60), 1));
        let old = rows(&[("k", vec![bar(1, minutes(500), Some(minutes(490)))])]);
        let old = plan("t", old, NOW, None).expect("a plan");
        assert!(old.to_ms == minutes(490) && old.from_ms < minutes(500));
    }

    #[test]
    fn what_was_asked_for_is_shown_whatever_there_is() {
        let all = rows(&[("k", vec![bar(1, NOW - 5_000, Some(NOW - 4_000))]), ("old", vec![bar(1, 5, Some(6))])]);
        let shown = plan("t", all.clone(), NOW, Some(3_600_000)).expect("a plan");
        assert_eq!((shown.from_ms, shown.rows.len()), (NOW - 3_600_000, 1));
        assert!(plan("t", all, NOW, Some(2_000)).is_none());
        assert!(plan("t", BTreeMap::new(), NOW, None).is_none());
    }

    #[test]
    fn there_are_a_few_ticks_at_round_times_whatever_the_span() {
        for span_ms in [1_000, 7_500, 61_000, 3_600_000, 10 * 3_600_000, 3 * DAY_MS, 40 * DAY_MS, 800 * DAY_MS] {
            for zone in [TimeZone::UTC, TimeZone::fixed(jiff::tz::offset(5))] {
                let ticks = ticks(NOW - span_ms, NOW, &zone);
                assert!((2..=11).contains(&ticks.len()), "{span_ms}: {ticks:?}");
                assert!(ticks.windows(2).all(|two| two[0].at_ms < two[1].at_ms && two[0].label != two[1].label));
            }
        }
        let ticks = ticks(NOW - 3_600_000, NOW, &TimeZone::UTC);
        assert_eq!(ticks.first().map(|tick| tick.label.as_str()), Some("07:00"));
    }

    #[test]
    fn too_much_is_cut_to_the_newest() {
        let many: Vec<Bar> =
            (0..25_000).map(|number| bar(number + 1, NOW - 25_000 + number as i64, Some(NOW))).collect();
        let shown = plan("t", rows(&[("k", many)]), NOW, None).expect("a plan");
        assert_eq!((shown.bars_left_out, shown.rows["k"].bars.len()), (5_000, 20_000));
        assert_eq!(shown.rows["k"].bars.first().map(|bar| bar.epoch), Some(5_001));
        let many = (0..400).map(|n| (format!("k{n:03}"), Row { bars: vec![bar(1, NOW - n, None)], ..Row::default() }));
        assert_eq!(plan("t", many.collect(), NOW, None).expect("a plan").keys_left_out, 100);
    }

    #[test]
    fn a_clock_that_was_set_back_makes_no_bar_run_backwards() {
        assert_eq!(bar(1, 100, Some(50)).to_ms(NOW), 100);
    }
}
