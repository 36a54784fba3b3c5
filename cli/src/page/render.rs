//! A page as HTML.

use std::fmt::{self, Write};

use super::chart::{self, Measure};
use super::escape::Text;
use super::origin;
use super::{Page, Panel, Table};

const LATENCY: Measure = Measure {
    key: "latency",
    title: "Latency",
    axis: "Latency of a call, p50 (µs)",
    unit: "µs",
    of: |point| point.latency_us,
};

const BANDWIDTH: Measure = Measure {
    key: "bandwidth",
    title: "Bus bandwidth",
    axis: "Bus bandwidth (GB/s)",
    unit: "GB/s",
    of: |point| point.busbw_gbs,
};

/// Renders the page, with the current time and the command of this process.
pub fn render(page: &Page) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, page, &origin::date(), &origin::command());
    out
}

fn write(out: &mut String, page: &Page, date: &str, command: &str) -> fmt::Result {
    let (heading, subject) = (Text(&page.heading), Text(&page.subject));
    writeln!(out, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">")?;
    writeln!(out, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">")?;
    writeln!(out, "<meta name=\"color-scheme\" content=\"light dark\">")?;
    // Without an icon, a browser requests one.
    writeln!(out, "<link rel=\"icon\" href=\"data:,\">")?;
    writeln!(out, "<title>{heading}: {subject}</title>")?;
    writeln!(out, "<style>\n{}</style>\n</head>\n<body>\n<main>", include_str!("style.css"))?;
    writeln!(out, "<header>\n<h1>{heading}</h1>\n<p class=\"subject\">{subject}, {}</p>", Text(date))?;
    let (class, verdict) = match page.wrong {
        None => ("", "Results were not checked.".into()),
        Some(0) => ("right", "Every checked element is right.".into()),
        Some(1) => ("wrong", "1 element is wrong.".into()),
        Some(wrong) => ("wrong", format!("{wrong} elements are wrong.")),
    };
    writeln!(out, "<p class=\"verdict {class}\">{verdict}</p>")?;
    for warning in &page.warnings {
        writeln!(out, "<p class=\"warning\">{}</p>", Text(warning))?;
    }
    if !page.findings.is_empty() {
        writeln!(out, "<ul class=\"findings\">")?;
        page.findings.iter().try_for_each(|finding| writeln!(out, "<li>{}</li>", Text(finding)))?;
        writeln!(out, "</ul>")?;
    }
    writeln!(out, "</header>")?;
    for (index, panel) in page.panels.iter().enumerate() {
        write_panel(out, index, panel)?;
    }
    writeln!(out, "<section>\n<h2>Columns</h2>\n<p class=\"notes\">{}</p>\n</section>", Text(page.notes))?;
    writeln!(out, "<section>\n<h2>Command</h2>\n<pre><code>{}</code></pre>\n</section>", Text(command))?;
    writeln!(out, "<section>\n<h2>Machine and settings</h2>\n<dl>")?;
    for (name, value) in &page.facts {
        writeln!(out, "<dt>{}</dt><dd>{}</dd>", Text(name), Text(value))?;
    }
    writeln!(out, "</dl>\n</section>")?;
    let version = env!("CARGO_PKG_VERSION");
    writeln!(out, "<footer>fast-allreduce {version}</footer>\n</main>\n</body>\n</html>")
}

fn write_panel(out: &mut String, index: usize, panel: &Panel) -> fmt::Result {
    let Panel { title, series, table } = panel;
    writeln!(out, "<section>\n<h2>{}</h2>\n<div class=\"charts\">", Text(title))?;
    for measure in [LATENCY, BANDWIDTH] {
        let mut svg = String::new();
        chart::write(&mut svg, measure, index, title, series)?;
        if !svg.is_empty() {
            writeln!(out, "<figure>\n{svg}</figure>")?;
        }
    }
    writeln!(out, "</div>")?;
    let label = format!("All numbers, {title}");
    writeln!(out, "<div class=\"scroll\" role=\"region\" aria-label=\"{}\" tabindex=\"0\">", Text(&label))?;
    write_table(out, table)?;
    writeln!(out, "</div>\n</section>")
}

fn write_table(out: &mut String, table: &Table) -> fmt::Result {
    writeln!(out, "<table>\n<thead>\n<tr class=\"groups\">")?;
    // For each column: its name and unit, and whether it is the first of a group.
    let mut columns = Vec::new();
    for group in table.groups {
        let start = columns.len();
        let shown = group.columns.iter().filter(|column| column.on_page);
        columns.extend(shown.enumerate().map(|(index, column)| (column, index == 0)));
        let class = if start > 0 { " class=\"starts\"" } else { "" };
        match (columns.len() - start, group.name) {
            (0, _) => {}
            (span, "") => writeln!(out, "<td colspan=\"{span}\"{class}></td>")?,
            (span, name) => {
                writeln!(out, "<th scope=\"colgroup\" colspan=\"{span}\"{class}>{}</th>", Text(name))?;
            }
        }
    }
    writeln!(out, "</tr>\n<tr>")?;
    let class = |column: usize, text: &str| {
        let starts = if column > 0 && columns[column].1 { "starts" } else { "" };
        let word = if text.starts_with(|first: char| first.is_alphabetic()) { "word" } else { "" };
        match (starts, word) {
            ("", "") => String::new(),
            (a, b) => format!(" class=\"{}\"", format!("{a} {b}").trim()),
        }
    };
    for (index, (column, _)) in columns.iter().enumerate() {
        let like = table.rows.first().and_then(|row| row.get(index)).map_or("", |cell| cell);
        let unit = if column.unit == "us" { "µs" } else { column.unit };
        let (class, name) = (class(index, like), Text(column.name));
        writeln!(out, "<th scope=\"col\"{class}>{name}<span class=\"unit\">{}</span></th>", Text(unit))?;
    }
    writeln!(out, "</tr>\n</thead>\n<tbody>")?;
    let mut last = None;
    for row in &table.rows {
        // A line above the first row of each size.
        let is_first = last.replace(row.first()) != Some(row.first());
        write!(out, "{}", if is_first { "<tr class=\"first\">" } else { "<tr>" })?;
        for (index, cell) in row.iter().enumerate() {
            let (class, cell) = (class(index, cell), Text(cell));
            match index {
                0 => write!(out, "<th scope=\"row\"{class}>{cell}</th>")?,
                _ => write!(out, "<td{class}>{cell}</td>")?,
            }
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody>\n</table>")
}
