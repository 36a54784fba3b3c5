//! Predictions as one self-contained HTML page: a chart for each number of ranks, with published figures.

use std::fmt::{self, Write};

use crate::plan;
use crate::results::{in_words, size, Results};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 660.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 370.0;
const COLOURS: [&str; 8] =
    ["#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e", "#a16207", "#475569"];

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:960px;margin:2em auto;\
padding:0 1em;color:#1a1a1a}\
table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}\
svg{width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#333}\
.grid{stroke:#e3e3e3}.published{stroke-dasharray:5 4}\
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}text{fill:#ccc}\
.grid{stroke:#333}td,th{border-color:#333}}";

struct Line {
    name: String,
    is_published: bool,
    points: Vec<(usize, f64)>,
}

/// Logarithmic axes that contain all points.
struct Frame {
    bytes: (f64, f64),
    us: (f64, f64),
}

impl Frame {
    fn around(lines: &[Line]) -> Self {
        let all = || lines.iter().flat_map(|line| &line.points);
        let range = |values: &dyn Fn() -> Vec<f64>| {
            let values = values();
            let low = values.iter().copied().fold(f64::MAX, f64::min);
            (low, values.iter().copied().fold(low * 2.0, f64::max))
        };
        let bytes = range(&|| all().map(|&(bytes, _)| (bytes as f64).log2()).collect());
        let us = range(&|| all().map(|&(_, us)| us.log10()).collect());
        Self { bytes, us: (us.0.floor(), us.1.ceil().max(us.0.floor() + 1.0)) }
    }

    fn at(&self, bytes: usize, us: f64) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| (value - low) / (high - low);
        let x = LEFT + part((bytes as f64).log2(), self.bytes) * (RIGHT - LEFT);
        (x, BOTTOM - part(us.log10(), self.us) * (BOTTOM - TOP))
    }

    fn axes(&self, out: &mut String) -> fmt::Result {
        for decade in self.us.0 as i32..=self.us.1 as i32 {
            for step in [1.0, 2.0, 5.0] {
                let us = step * 10f64.powi(decade);
                if us.log10() > self.us.1 {
                    continue;
                }
                let (_, y) = self.at(1, us);
                writeln!(
                    out,
                    "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
                )?;
                writeln!(
                    out,
                    "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{us}</text>",
                    LEFT - 6.0,
                    y + 4.0
                )?;
            }
        }
        for power in (self.bytes.0.ceil() as u32..=self.bytes.1 as u32).filter(|power| power % 2 == 0) {
            let (x, _) = self.at(1 << power, 1.0);
            writeln!(out, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/>")?;
            let label = size(1 << power);
            writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                BOTTOM + 18.0
            )?;
        }
        writeln!(out, "<text x=\"{LEFT}\" y=\"{}\">bytes; us of a call</text>", BOTTOM + 40.0)
    }
}

fn chart(out: &mut String, title: &str, lines: &[Line]) -> fmt::Result {
    writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">")?;
    let frame = Frame::around(lines);
    frame.axes(out)?;
    for (i, line) in lines.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let class = if line.is_published { "published" } else { "predicted" };
        let places: Vec<(f64, f64)> = line.points.iter().map(|&(bytes, us)| frame.at(bytes, us)).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let path = path.join(" ");
        writeln!(
            out,
            "<polyline class=\"{class}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
        points=\"{path}\"/>"
        )?;
        for ((bytes, us), (x, y)) in line.points.iter().zip(&places) {
            writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{}, {} B: {us:.2} \
                us</title></circle>",
                line.name,
                size(*bytes)
            )?;
        }
        let y = TOP + 18.0 * i as f64 + 10.0;
        let key = RIGHT + 20.0;
        writeln!(
            out,
            "<line class=\"{class}\" x1=\"{key}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" \
            stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            key + 26.0,
            key + 34.0,
            y + 4.0,
            line.name
        )?;
    }
    writeln!(out, "</svg>")
}

fn lines(results: &Results, ranks: usize) -> Vec<Line> {
    let points = |name: &str| {
        let at = |bytes| Some((bytes, results.at(ranks, name, bytes)?.us()));
        results.sizes(ranks).into_iter().filter_map(at).collect()
    };
    let own = results.algorithms(ranks).into_iter().map(|name| Line {
        name: name.to_owned(),
        is_published: false,
        points: points(name),
    });
    let published = results.published(ranks).map(|published| Line {
        name: format!("{}, published", published.title()),
        is_published: true,
        points: published.points.to_vec(),
    });
    own.chain(published).filter(|line| !line.points.is_empty()).collect()
}

/// Renders the page.
pub fn page(results: &Results) -> Result<String, fmt::Error> {
    let mut out = String::new();
    let name = &results.machine.name;
    writeln!(
        out,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Predictions for {name}</title>"
    )?;
    writeln!(out, "<style>{STYLE}</style><h1>Predictions for {name}, {}</h1>", results.dtype)?;
    writeln!(
        out,
        "<p>Simulated from the PTX of the kernels, not measured: lab/gpu-model.md has the model, its error and its \
         sources. With + the inputs are registered. Dashed lines are published measurements of others.</p>"
    )?;
    for ranks in results.ranks() {
        writeln!(out, "<h2>{ranks} ranks</h2>")?;
        chart(&mut out, &format!("{ranks} ranks"), &lines(results, ranks))?;
        for (what, registered) in [("Any input", false), ("Registered inputs", true)] {
            let found = in_words(&plan::crossovers(results, ranks, registered));
            writeln!(out, "<p>{what}, fastest: {found}.</p>")?;
        }
        let names = results.algorithms(ranks);
        writeln!(out, "<table><tr><th>us</th>")?;
        names.iter().try_for_each(|name| write!(out, "<th>{name}</th>"))?;
        writeln!(out, "<th>the plan has</th></tr>")?;
        for bytes in results.sizes(ranks) {
            write!(out, "<tr><td>{}</td>", size(bytes))?;
            for name in &names {
                match results.at(ranks, name, bytes) {
                    Some(result) => write!(out, "<td>{:.2}</td>", result.us())?,
                    None => write!(out, "<td></td>")?,
                }
            }
            let planned = plan::planned(&results.rows, ranks, bytes).map_or("", |row| &row.algorithm);
            writeln!(out, "<td>{planned}</td></tr>")?;
        }
        writeln!(out, "</table>")?;
    }
    if !results.compared.is_empty() {
        writeln!(
            out,
            "<h2>Reference kernels</h2><table><tr><th>published</th><th>ranks</th><th>bytes</th><th>us</th>"
        )?;
        writeln!(out, "<th>kernel</th><th>predicted</th><th>off by</th></tr>")?;
        for one in &results.compared {
            writeln!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.2}</td><td>{:+.0} %</td></tr>",
                one.published.title(),
                one.published.ranks,
                size(one.bytes),
                one.us,
                one.reference,
                one.predicted_us,
                one.off()
            )?;
        }
        writeln!(out, "</table>")?;
    }
    writeln!(
        out,
        "<h2>Constants</h2><table><tr><th>name</th><th>value</th><th>unit</th><th>meaning</th></tr>"
    )?;
    for (name, value, unit, what) in results.machine.constants() {
        writeln!(out, "<tr><td>{name}</td><td>{value}</td><td>{unit}</td><td>{what}</td></tr>")?;
    }
    writeln!(out, "</table></html>")?;
    Ok(out)
}
