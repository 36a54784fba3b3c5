//! A page with a timeline: a lane for each rank, its calls as bars, its waits in the colour of the awaited rank.

use std::fmt::{self, Write};

use fast_allreduce::flight::{FlightRecord, RankRecord, RecordedCall};

use super::escape::Text;
use super::origin;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 8.0;
const LANE: f64 = 26.0;
const BAR: f64 = 18.0;

/// Calls that are drawn of each rank, with a row of the table for each.
const DRAWN: usize = 256;

/// A call on the timeline, in ns.
struct Bar<'a> {
    call: &'a RecordedCall,
    begin: u64,
    end: u64,
    /// It was timed only at its end, or lies between calls that were timed.
    is_estimate: bool,
    has_ended: bool,
}

/// Renders the flight records of some worlds.
pub fn timeline(worlds: &[FlightRecord]) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, worlds);
    out
}

fn write(out: &mut String, worlds: &[FlightRecord]) -> fmt::Result {
    writeln!(out, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">")?;
    writeln!(out, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">")?;
    writeln!(out, "<meta name=\"color-scheme\" content=\"light dark\">")?;
    writeln!(out, "<link rel=\"icon\" href=\"data:,\">\n<title>Flight record</title>")?;
    writeln!(out, "<style>\n{}</style>\n</head>\n<body>\n<main>", include_str!("style.css"))?;
    writeln!(out, "<header>\n<h1>Flight record</h1>\n<p class=\"subject\">{}</p>", Text(&origin::date()))?;
    writeln!(out, "</header>")?;
    for (index, world) in worlds.iter().enumerate() {
        write_world(out, index, world)?;
    }
    writeln!(out, "<section>\n<h2>How to read it</h2>\n<p class=\"notes\">")?;
    writeln!(
        out,
        "A lane is a rank, a bar a call. The coloured end of a bar is the wait for the rank with that colour. Pale \
         bars are estimates: the call was not timed, and lies between the calls beside it. A bar that is an outline \
         has not ended."
    )?;
    writeln!(out, "</p>\n</section>\n<section>\n<h2>Command</h2>")?;
    writeln!(out, "<pre><code>{}</code></pre>\n</section>", Text(&origin::command()))?;
    writeln!(out, "<footer>fast-allreduce {}</footer>\n</main>\n</body>\n</html>", env!("CARGO_PKG_VERSION"))
}

fn write_world(out: &mut String, index: usize, world: &FlightRecord) -> fmt::Result {
    writeln!(out, "<section>\n<h2>World {}, {} ranks</h2>", Text(&world.world), world.world_size)?;
    writeln!(out, "<ul class=\"findings\">")?;
    world.findings().iter().try_for_each(|finding| writeln!(out, "<li>{}</li>", Text(finding)))?;
    for unread in &world.unread {
        writeln!(out, "<li>rank {}: {}</li>", unread.rank, Text(&unread.reason))?;
    }
    writeln!(out, "</ul>\n<figure class=\"timeline\">")?;
    write_chart(out, index, world)?;
    writeln!(out, "</figure>\n<div class=\"scroll\" role=\"region\" aria-label=\"Ranks\" tabindex=\"0\">")?;
    writeln!(out, "<table>\n<thead>\n<tr>")?;
    let columns = ["rank", "process", "state", "calls", "behind", "doing", "waited for, ms by rank"];
    for column in columns {
        writeln!(out, "<th scope=\"col\">{column}</th>")?;
    }
    writeln!(out, "</tr>\n</thead>\n<tbody>")?;
    for rank in &world.ranks {
        let waited: Vec<_> = rank.waited_ns.iter().map(|&ns| format!("{:.1}", ns as f64 / 1e6)).collect();
        writeln!(
            out,
            "<tr class=\"first\"><th scope=\"row\">{}</th><td>{}</td><td class=\"word\">{}</td><td>{}</td><td>{}</td>\
             <td class=\"word\">{}</td><td>{}</td></tr>",
            rank.rank,
            rank.process,
            rank.state.name(),
            rank.begun,
            rank.behind,
            Text(&rank.doing()),
            waited.join(" ")
        )?;
    }
    writeln!(out, "</tbody>\n</table>\n</div>\n</section>")
}

/// Writes the lanes; nothing if no call was timed.
fn write_chart(out: &mut String, index: usize, world: &FlightRecord) -> fmt::Result {
    let lanes: Vec<_> = world.ranks.iter().map(|rank| (rank, bars(rank, world.now_ns))).collect();
    let all = || lanes.iter().flat_map(|(_, bars)| bars);
    let (Some(first), Some(last)) = (all().map(|bar| bar.begin).min(), all().map(|bar| bar.end).max()) else {
        return writeln!(out, "<p class=\"notes\">No call was timed yet.</p>");
    };
    let span = last.saturating_sub(first).max(1) as f64;
    let at = |time: u64| LEFT + (RIGHT - LEFT) * time.saturating_sub(first) as f64 / span;
    let bottom = TOP + LANE * lanes.len() as f64;
    let height = bottom + 34.0;
    writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"w{index}-t\">")?;
    writeln!(
        out,
        "<title id=\"w{index}-t\">Calls of the ranks over time; the table has the same ranks</title>"
    )?;
    for (lane, (rank, bars)) in lanes.iter().enumerate() {
        let y = TOP + LANE * lane as f64;
        let colour = rank.rank % 6;
        let (x, middle) = (LEFT - 8.0, y + BAR * 0.75);
        writeln!(
            out,
            "<text class=\"axis\" x=\"{x}\" y=\"{middle:.1}\" text-anchor=\"end\">rank {}</text>",
            rank.rank
        )?;
        writeln!(out, "<path class=\"swatch s{colour}\" d=\"M2 {y:.1}h5v{BAR}h-5z\"/>")?;
        for bar in bars {
            let (from, to) = (at(bar.begin), at(bar.end).max(at(bar.begin) + 0.6));
            let class = match bar {
                Bar { has_ended: false, .. } => "bar open",
                Bar { is_estimate: true, .. } => "bar estimate",
                _ => "bar",
            };
            let width = to - from;
            writeln!(out, "<path class=\"{class}\" d=\"M{from:.1} {y:.1}h{width:.1}v{BAR}h-{width:.1}z\">")?;
            writeln!(out, "<title>{}</title></path>", Text(&label(bar)))?;
            let awaited = bar.call.waited_for.or(rank.waiting_for.filter(|_| !bar.has_ended));
            if let Some(awaited) = awaited {
                let waited =
                    if bar.has_ended { bar.call.waited_ns } else { bar.end.saturating_sub(bar.begin) };
                let width = (at(bar.end) - at(bar.end.saturating_sub(waited))).min(width).max(0.6);
                let (x, colour) = (to - width, awaited % 6);
                writeln!(
                    out,
                    "<path class=\"wait s{colour}\" d=\"M{x:.1} {y:.1}h{width:.1}v{BAR}h-{width:.1}z\">"
                )?;
                writeln!(out, "<title>waits for rank {awaited}</title></path>")?;
            }
        }
    }
    writeln!(out, "<path class=\"base\" d=\"M{LEFT} {bottom:.1}H{RIGHT}\"/>")?;
    let (y, unit) = (bottom + 18.0, if span < 1e6 { ("µs", 1e3) } else { ("ms", 1e6) });
    writeln!(out, "<text x=\"{LEFT}\" y=\"{y:.1}\">0</text>")?;
    writeln!(
        out,
        "<text x=\"{RIGHT}\" y=\"{y:.1}\" text-anchor=\"end\">{:.3} {}</text>\n</svg>",
        span / unit.1,
        unit.0
    )
}

/// Places the calls of a rank in time. A call that was not timed lies between its neighbours that were.
fn bars(rank: &RankRecord, now: u64) -> Vec<Bar<'_>> {
    let calls = &rank.calls[rank.calls.len().saturating_sub(DRAWN)..];
    // The end of the last call whose end is known, and the calls since.
    let (mut known, mut since): (Option<u64>, Vec<&RecordedCall>) = (None, Vec::new());
    let mut bars = Vec::new();
    for call in calls {
        let has_ended = call.number <= rank.ended;
        let Some(end) = call.end_ns.or((!has_ended).then_some(now)) else {
            since.push(call);
            continue;
        };
        let least = end.saturating_sub(call.waited_ns);
        let begin = match (call.begin_ns, has_ended) {
            (Some(begin), _) => begin.min(end),
            (None, true) => least,
            (None, false) => end.saturating_sub(rank.unchanged_ns.unwrap_or(0)),
        };
        place(&mut bars, &mut since, known.unwrap_or(begin), begin);
        known = Some(end);
        bars.push(Bar { call, begin, end, is_estimate: call.begin_ns.is_none(), has_ended });
    }
    bars
}

/// Places calls that were not timed evenly between two times, if there is time between these.
fn place<'a>(bars: &mut Vec<Bar<'a>>, calls: &mut Vec<&'a RecordedCall>, from: u64, to: u64) {
    let step = to.saturating_sub(from) / (calls.len() as u64).max(1);
    for (index, call) in (0..).zip(calls.drain(..)).filter(|_| step > 0) {
        let begin = from + index * step;
        bars.push(Bar { call, begin, end: begin + step, is_estimate: true, has_ended: true });
    }
}

fn label(bar: &Bar) -> String {
    let Bar { call: RecordedCall { number, call, .. }, begin, end, .. } = bar;
    let took = end.saturating_sub(*begin) as f64 / 1e3;
    match bar {
        Bar { has_ended: false, .. } => {
            format!("call {number}, {call}: has not ended, at least {took:.1} µs")
        }
        Bar { is_estimate: true, .. } => format!("call {number}, {call}: about {took:.1} µs"),
        _ => format!("call {number}, {call}: {took:.1} µs"),
    }
}
