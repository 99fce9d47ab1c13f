//! The drawing of a [`Plan`] as SVG, by hand: rectangles, a few shapes and text. Everything that others named is escaped.

use std::fmt::Write as _;
use std::io::{self, Write};

use super::mark::Mark;
use super::plan::{Bar, Plan, Row};
use super::text::{escaped, middle_out};
use crate::cli::show::{self, width};

/// Of the whole drawing.
const TOTAL: f64 = 1_200.0;
const MARGIN: f64 = 16.0;
/// A character of the font that keys are written in, at its size.
const CHARACTER: f64 = 7.25;
const FONT: f64 = 12.0;
/// Widest that the names of keys may get, in characters.
const LONGEST_KEY: usize = 44;
const TITLE_HEIGHT: f64 = 52.0;
const AXIS_HEIGHT: f64 = 24.0;
const BAR_HEIGHT: f64 = 16.0;
/// A wait, below the bar; one lane each for those at the same time.
const LANE_HEIGHT: f64 = 5.0;
const WAIT_HEIGHT: f64 = 3.0;
const MOST_LANES: usize = 6;
const ROW_GAP: f64 = 12.0;
/// So that the shortest attempt is seen.
const NARROWEST: f64 = 1.5;
/// Between two marks of one kind in a row, that they can be told apart.
const MARK_GAP: f64 = 9.0;

const WAIT_COLOUR: &str = "#8a8f98";
const WAITING_COLOUR: &str = "#b8860b";

/// How attempts of an outcome look: colours that people who see colours otherwise tell apart too.
struct Outcome {
    name: &'static str,
    fill: &'static str,
    words: &'static str,
}

const OUTCOMES: [Outcome; 6] = [
    Outcome { name: "holding", fill: "#56b4e9", words: "still lasts" },
    Outcome { name: "released", fill: "#7f9cc0", words: "released" },
    Outcome { name: "completed", fill: "#009e73", words: "completed" },
    Outcome { name: "expired", fill: "#e69f00", words: "expired" },
    Outcome { name: "evicted", fill: "#d55e00", words: "evicted" },
    Outcome { name: "lost", fill: "#a05195", words: "lost" },
];

fn outcome(bar: &Bar) -> &'static Outcome {
    let name = bar.outcome.as_deref().unwrap_or("holding");
    // One that is not known ended all the same.
    OUTCOMES.iter().find(|outcome| outcome.name == name).unwrap_or(&OUTCOMES[1])
}

/// Where things are.
struct Frame<'a> {
    plan: &'a Plan,
    /// Where the axis begins and ends.
    left: f64,
    right: f64,
}

impl Frame<'_> {
    fn x(&self, at_ms: i64) -> f64 {
        let (from, to) = (self.plan.from_ms, self.plan.to_ms);
        let part = (at_ms.clamp(from, to) - from) as f64 / (to - from).max(1) as f64;
        self.left + part * (self.right - self.left)
    }
}

/// Writes the drawing.
///
/// # Errors
/// Those of writing.
pub fn write(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let longest = plan.rows.keys().map(|key| width(&show::plain(key))).max().unwrap_or(0).min(LONGEST_KEY);
    let left = MARGIN + longest as f64 * CHARACTER + 12.0;
    let frame = Frame { plan, left, right: TOTAL - MARGIN };
    let rows: Vec<_> = plan.rows.iter().map(|(key, row)| (key, row, lanes(row, plan.now_ms, plan.from_ms))).collect();
    let heights: f64 = rows.iter().map(|(_, _, lanes)| row_height(lanes)).sum();
    let bottom = TITLE_HEIGHT + AXIS_HEIGHT + heights;
    let height = bottom + MARGIN;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{TOTAL}\" height=\"{height:.0}\" viewBox=\"0 0 {TOTAL} \
         {height:.0}\" font-family=\"'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, monospace\" \
         font-size=\"{FONT}\" role=\"img\">"
    )?;
    writeln!(out, "<title>Attempts in {}, {}</title>", escaped(&plan.place), escaped(&plan.day))?;
    writeln!(out, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>")?;
    title(out, plan)?;
    axis(out, &frame, bottom)?;
    let mut y = TITLE_HEIGHT + AXIS_HEIGHT;
    for (number, (key, row, lanes)) in rows.iter().enumerate() {
        let height = row_height(lanes);
        if number % 2 == 0 {
            let wide = TOTAL - 2.0 * MARGIN + 8.0;
            writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{height:.1}\" fill=\"#000000\" \
                 fill-opacity=\"0.035\"/>",
                MARGIN - 4.0
            )?;
        }
        one_row(out, &frame, (key, row, lanes), y + ROW_GAP / 2.0)?;
        y += height;
    }
    writeln!(out, "</svg>")
}

fn row_height(lanes: &Lanes) -> f64 {
    BAR_HEIGHT + lanes.count as f64 * LANE_HEIGHT + ROW_GAP
}

/// What is shown, when, and what the colours mean.
fn title(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let keys = plan.rows.len();
    let attempts: usize = plan.rows.values().map(|row| row.bars.len()).sum();
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let mut text = format!("{} · {} · {}, {}", plan.place, plan.day, plural(keys, "key"), plural(attempts, "attempt"));
    if plan.keys_left_out + plan.bars_left_out > 0 {
        let _ = write!(text, " ({} and {} not drawn)", plural(plan.keys_left_out, "key"), plan.bars_left_out);
    }
    // Half of the characters that do not fit are of the path.
    let room = ((TOTAL - 2.0 * MARGIN) / CHARACTER) as usize;
    writeln!(out, "<text x=\"{MARGIN}\" y=\"22\" font-weight=\"bold\">{}</text>", escaped(&middle_out(&text, room)))?;
    writeln!(out, "<g class=\"legend\" font-size=\"11\" fill=\"#333333\">")?;
    let mut x = MARGIN;
    let y = 34.0;
    for Outcome { name, fill, words } in &OUTCOMES {
        writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"14\" height=\"10\" fill=\"{fill}\"/>")?;
        if let Some(mark) = Mark::of(name) {
            mark.draw(out, x + 7.0, y + 5.0, "")?;
        }
        writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{words}</text>", x + 19.0, y + 9.0)?;
        x += 19.0 + words.len() as f64 * 6.7 + 18.0;
    }
    for (colour, words) in [(WAIT_COLOUR, "waited before"), (WAITING_COLOUR, "waits now")] {
        writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"{WAIT_HEIGHT}\" fill=\"{colour}\"/>",
            y + 4.0
        )?;
        writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{words}</text>", x + 19.0, y + 9.0)?;
        x += 19.0 + words.len() as f64 * 6.7 + 18.0;
    }
    Mark::Commit.draw(out, x + 5.0, y + 5.0, "")?;
    writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">result</text>", x + 14.0, y + 9.0)?;
    writeln!(out, "</g>")
}

/// Times above, and a line through all rows for each.
fn axis(out: &mut impl Write, frame: &Frame, bottom: f64) -> io::Result<()> {
    let y = TITLE_HEIGHT + 15.0;
    writeln!(out, "<g class=\"axis\" font-size=\"11\" fill=\"#555555\" stroke-width=\"1\">")?;
    let mut free_from = f64::MIN;
    for tick in &frame.plan.ticks {
        let x = frame.x(tick.at_ms);
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" stroke=\"#d5d8dd\"/>",
            TITLE_HEIGHT + AXIS_HEIGHT - 4.0
        )?;
        let half = tick.label.len() as f64 * 6.7 / 2.0;
        // Whole, also at the edges, and never over the one before.
        let middle = x.clamp(frame.left + half - 12.0, frame.right - half + 12.0);
        if middle - half > free_from {
            writeln!(
                out,
                "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
                escaped(&tick.label)
            )?;
            free_from = middle + half + 8.0;
        }
    }
    if frame.plan.now_ms == frame.plan.to_ms {
        let x = frame.right;
        writeln!(
            out,
            "<line class=\"now\" x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" stroke=\"#c0392b\" \
             stroke-dasharray=\"3 3\"><title>now</title></line>",
            TITLE_HEIGHT + AXIS_HEIGHT - 4.0
        )?;
    }
    writeln!(out, "</g>")
}

/// Which lane each wait is in, so that those at the same time are below each other.
struct Lanes {
    count: usize,
    /// Of the bars, then of those who wait now.
    of: Vec<usize>,
}

fn lanes(row: &Row, now_ms: i64, from_ms: i64) -> Lanes {
    let past = row.bars.iter().map(|bar| (bar.waited_ms > 0).then_some((bar.begin_ms(), bar.since_ms)));
    let present = row.waiting.iter().map(|wait| Some((wait.since_ms, now_ms)));
    let mut waits: Vec<(usize, i64, i64)> = past
        .chain(present)
        .enumerate()
        .filter_map(|(at, wait)| wait.map(|(from, to)| (at, from, to)))
        .filter(|(_, _, to)| *to >= from_ms)
        .collect();
    waits.sort_by_key(|(_, from, _)| *from);
    let mut free_from: Vec<i64> = Vec::new();
    let mut of = vec![0; row.bars.len() + row.waiting.len()];
    for (at, from, to) in waits {
        let lane = free_from.iter().position(|free| *free <= from).unwrap_or(free_from.len()).min(MOST_LANES - 1);
        if lane == free_from.len() {
            free_from.push(to);
        }
        free_from[lane] = free_from[lane].max(to);
        of[at] = lane;
    }
    Lanes { count: free_from.len(), of }
}

fn one_row(out: &mut impl Write, frame: &Frame, (key, row, lanes): (&str, &Row, &Lanes), y: f64) -> io::Result<()> {
    let (plan, shown) = (frame.plan, show::plain(key));
    writeln!(out, "<g class=\"key\">")?;
    writeln!(
        out,
        "<text x=\"{MARGIN}\" y=\"{:.1}\" fill=\"#111111\">{}<title>{}</title></text>",
        y + 12.5,
        escaped(&middle_out(&shown, LONGEST_KEY)),
        escaped(&shown)
    )?;
    let lane_y = |at: usize| y + BAR_HEIGHT + 1.5 + lanes.of[at] as f64 * LANE_HEIGHT;
    for (at, bar) in row.bars.iter().enumerate() {
        if bar.waited_ms > 0 && bar.since_ms >= plan.from_ms {
            let (from, to) = (frame.x(bar.begin_ms()), frame.x(bar.since_ms));
            writeln!(
                out,
                "<rect class=\"wait\" x=\"{from:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{WAIT_HEIGHT}\" \
                 fill=\"{WAIT_COLOUR}\"><title>epoch {} waited {}</title></rect>",
                lane_y(at),
                (to - from).max(NARROWEST),
                bar.epoch,
                show::span(bar.waited_ms)
            )?;
        }
    }
    for (at, wait) in row.waiting.iter().enumerate() {
        let (from, to) = (frame.x(wait.since_ms), frame.x(plan.now_ms));
        writeln!(
            out,
            "<rect class=\"waiting\" x=\"{from:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{WAIT_HEIGHT}\" \
             fill=\"{WAITING_COLOUR}\"><title>{} waits since {}, for {}</title></rect>",
            lane_y(row.bars.len() + at),
            (to - from).max(NARROWEST),
            escaped(&wait.who),
            leasefs::time::rfc3339(wait.since_ms),
            show::span(plan.now_ms - wait.since_ms)
        )?;
    }
    for bar in &row.bars {
        attempt(out, frame, bar, y)?;
    }
    marks(out, frame, row, y)?;
    writeln!(out, "</g>")
}

fn attempt(out: &mut impl Write, frame: &Frame, bar: &Bar, y: f64) -> io::Result<()> {
    let Outcome { name, fill, .. } = outcome(bar);
    let (from, to) = (frame.x(bar.since_ms), frame.x(bar.to_ms(frame.plan.now_ms)));
    let wide = (to - from).max(NARROWEST);
    // A bar at the very end is still within the drawing.
    let from = from.min(frame.right - NARROWEST);
    writeln!(
        out,
        "<g class=\"attempt {name}\"><title>{}</title><rect x=\"{from:.2}\" y=\"{y:.1}\" width=\"{wide:.2}\" \
         height=\"{BAR_HEIGHT}\" fill=\"{fill}\"{}/>",
        escaped(&tooltip(bar, frame.plan.now_ms)),
        if wide >= 6.0 { " stroke=\"#ffffff\" stroke-width=\"0.75\"" } else { "" }
    )?;
    let number = bar.epoch.to_string();
    let fits = |text: &str| width(text) as f64 * 6.7 + 8.0 <= wide;
    let long = bar.agent.as_deref().map(|agent| format!("{number} {}", show::plain(agent))).filter(|text| fits(text));
    if let Some(text) = long.or(Some(number).filter(|text| fits(text))) {
        let ink = if matches!(*name, "completed" | "evicted" | "lost") { "#ffffff" } else { "#10222e" };
        writeln!(
            out,
            "<text x=\"{:.2}\" y=\"{:.1}\" font-size=\"11\" fill=\"{ink}\" pointer-events=\"none\">{}</text>",
            from + 4.0,
            y + 12.0,
            escaped(&text)
        )?;
    }
    writeln!(out, "</g>")
}

fn tooltip(bar: &Bar, now_ms: i64) -> String {
    let mut text = format!("epoch {}\n{}", bar.epoch, bar.who);
    let mut line = |name: &str, value: &str| {
        let _ = write!(text, "\n{name}{}", show::plain(value.trim_end()));
    };
    if let Some(agent) = &bar.agent {
        line("agent ", agent);
    }
    let span = show::span(bar.to_ms(now_ms) - bar.since_ms);
    match (&bar.outcome, bar.ended_ms) {
        (Some(outcome), Some(ended_ms)) => {
            line("", &format!("{outcome} after {span}, {}", leasefs::time::rfc3339(ended_ms)));
        }
        _ => line("", &format!("lasts for {span}")),
    }
    if let Some(why) = bar.why.as_deref().filter(|why| !why.is_empty()) {
        line("why: ", why);
    }
    line("since ", &leasefs::time::rfc3339(bar.since_ms));
    if bar.waited_ms > 0 {
        line("waited ", &show::span(bar.waited_ms));
    }
    if let Some(committed_ms) = bar.committed_ms {
        line("result committed ", &leasefs::time::rfc3339(committed_ms));
    }
    if let Some(note) = &bar.note {
        line("note: ", note);
    }
    text
}

/// Marks over the bars, so far apart that each can be seen.
fn marks(out: &mut impl Write, frame: &Frame, row: &Row, y: f64) -> io::Result<()> {
    let plan = frame.plan;
    let mut last: [(Option<Mark>, f64); 4] = [(None, f64::MIN); 4];
    for bar in &row.bars {
        let commit =
            bar.committed_ms.map(|at_ms| (Mark::Commit, at_ms, format!("epoch {}: result committed", bar.epoch)));
        let end = bar.outcome.as_deref().and_then(Mark::of).zip(bar.ended_ms);
        let end = end.map(|(mark, at_ms)| {
            let outcome = bar.outcome.as_deref().unwrap_or_default();
            (mark, at_ms, format!("epoch {}: {outcome}", bar.epoch))
        });
        for (mark, at_ms, title) in commit.into_iter().chain(end) {
            if !(plan.from_ms..=plan.to_ms).contains(&at_ms) {
                continue;
            }
            let x = frame.x(at_ms);
            let before = &mut last[mark as usize];
            if before.0.is_none() || x - before.1 >= MARK_GAP {
                *before = (Some(mark), x);
                // Results above, so that both are seen where an attempt ends with its result.
                let down = if mark == Mark::Commit { 1.0 } else { BAR_HEIGHT - 5.0 };
                mark.draw(out, x, y + down, &title)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::plan::{Wait, plan};
    use super::*;

    const NOW: i64 = 1_800_000_000_000;

    fn drawn(rows: &[(&str, Row)]) -> String {
        let rows: BTreeMap<String, Row> = rows.iter().map(|(key, row)| ((*key).to_owned(), row.clone())).collect();
        let mut out = Vec::new();
        write(&mut out, &plan("/mnt/leases", rows, NOW, Some(60_000)).expect("a plan")).expect("written");
        String::from_utf8(out).expect("text")
    }

    fn bar(epoch: u64, ago_ms: i64, lasted_ms: i64, outcome: &str) -> Bar {
        let since_ms = NOW - ago_ms;
        let ended_ms = Some(since_ms + lasted_ms);
        Bar {
            epoch,
            since_ms,
            ended_ms,
            outcome: Some(outcome.to_owned()),
            who: "pid 7 (sh)".to_owned(),
            ..Bar::default()
        }
    }

    #[test]
    fn there_is_a_bar_for_each_attempt_and_a_mark_for_what_ended_badly() {
        let bars = vec![
            bar(1, 50_000, 5_000, "released"),
            Bar { committed_ms: Some(NOW - 41_000), ..bar(2, 44_000, 4_000, "completed") },
            Bar { waited_ms: 3_000, ..bar(3, 30_000, 9_000, "expired") },
            bar(4, 20_000, 1_000, "evicted"),
            Bar { outcome: None, ended_ms: None, ..bar(5, 10_000, 0, "") },
        ];
        let waiting = vec![Wait { since_ms: NOW - 4_000, who: "pid 9 (flock)".to_owned() }];
        let text = drawn(&[("team/a", Row { bars, waiting })]);
        let count = |what: &str| text.matches(what).count();
        assert_eq!(count("class=\"attempt "), 5);
        for class in ["attempt released", "attempt completed", "attempt expired", "attempt evicted", "attempt holding"]
        {
            assert_eq!(count(class), 1, "{class}");
        }
        assert_eq!((count("class=\"wait\""), count("class=\"waiting\"")), (1, 1));
        // One each is the legend's.
        assert_eq!(
            (count("mark commit"), count("mark expiry"), count("mark eviction"), count("mark loss")),
            (2, 2, 2, 1)
        );
        assert!(text.contains("epoch 3 waited 3s") && text.contains("lasts for 10s"), "{text}");
    }

    #[test]
    fn what_others_named_is_text_and_nothing_else() {
        let evil = Bar {
            agent: Some("a</title><script>x</script>".to_owned()),
            note: Some("\u{1b}[2J\u{0}\u{ffff}&".to_owned()),
            ..bar(1, 30_000, 20_000, "released")
        };
        let text = drawn(&[("a<b>&\"c", Row { bars: vec![evil], waiting: vec![] })]);
        assert!(text.contains("a&lt;b&gt;&amp;&quot;c") && !text.contains("<script"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{0}') && !text.contains('\u{ffff}'));
        assert!(text.contains("\\u{1b}[2J\\u{0}"), "{text}");
    }

    #[test]
    fn waits_at_the_same_time_are_below_each_other() {
        let waits = |from: i64| Wait { since_ms: NOW - from, who: String::new() };
        let row = Row { bars: vec![], waiting: vec![waits(3), waits(2), waits(1)] };
        let found = lanes(&row, NOW, 0);
        assert_eq!((found.count, found.of), (3, vec![0, 1, 2]));
        let bars = vec![
            Bar { waited_ms: 1_000, ..bar(1, 50_000, 1, "released") },
            Bar { waited_ms: 1_000, ..bar(2, 40_000, 1, "released") },
        ];
        assert_eq!(lanes(&Row { bars, waiting: vec![] }, NOW, 0).count, 1);
    }
}
