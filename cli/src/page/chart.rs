//! One chart as SVG: a line for each series on two logarithmic axes, its name at its end.

use std::fmt::{self, Write};

use super::escape::Text;
use super::scale::{plain, Scale};
use super::{Point, Series};
use crate::cells::size;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 292.0;
const LEFT: f64 = 44.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = HEIGHT - 46.0;
/// Distance between the last points and the names.
const GAP: f64 = 16.0;
/// Width of the widest letters of names, at their font size.
const LETTER: f64 = 6.4;
/// Distance from name to name.
const LINE: f64 = 14.0;

/// The quantity that a chart shows.
#[derive(Clone, Copy)]
pub struct Measure {
    /// Part of the ids in the SVG.
    pub key: &'static str,
    pub title: &'static str,
    /// Name and unit of the vertical axis.
    pub axis: &'static str,
    pub unit: &'static str,
    pub of: fn(&Point) -> f64,
}

/// Writes a chart; nothing if no point can be drawn.
pub fn write(
    out: &mut String,
    measure: Measure,
    panel: usize,
    title: &str,
    series: &[Series],
) -> fmt::Result {
    let Some(frame) = Frame::of(measure, series) else { return Ok(()) };
    let Measure { key, axis, .. } = measure;
    let id = format!("p{panel}-{key}");
    writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">")?;
    writeln!(out, "<title id=\"{id}-t\">{}, {}</title>", Text(measure.title), Text(title))?;
    writeln!(out, "<desc id=\"{id}-d\">{}</desc>", Text(&description(measure, series)))?;
    frame.write(out, axis)?;
    let mut names = Vec::new();
    for (index, series) in series.iter().enumerate() {
        let class = if series.is_floor { "floor".into() } else { format!("s{}", index % 6) };
        let marks: Vec<_> = places(measure, series).map(|point| (point, frame.at(measure, &point))).collect();
        let Some(&(_, end)) = marks.last() else { continue };
        writeln!(out, "<g class=\"series {class}\">")?;
        let line: Vec<_> = marks.iter().map(|mark| mark.1).collect();
        writeln!(out, "<path class=\"line\" d=\"{}\"/>", path(&line))?;
        for (point, (x, y)) in marks.iter().filter(|mark| !series.is_floor && frame.holds(mark.1)) {
            let label = format!("{} B: {} {}", size(point.bytes), short((measure.of)(point)), measure.unit);
            let shape = marker(index, *x, *y);
            writeln!(out, "<path class=\"mark\" d=\"{shape}\"><title>{}</title></path>", Text(&label))?;
        }
        writeln!(out, "</g>")?;
        names.push((end, class, &*series.name));
    }
    frame.write_names(out, names)?;
    writeln!(out, "</svg>")
}

/// Returns the points that can be drawn on logarithmic axes.
fn places(measure: Measure, series: &Series) -> impl Iterator<Item = Point> + '_ {
    let is_placed = move |point: &&Point| point.bytes > 0 && (measure.of)(point) > 0.0;
    series.points.iter().filter(is_placed).copied()
}

/// Describes the first and the last size in words, for readers who do not see the chart.
fn description(measure: Measure, series: &[Series]) -> String {
    let ends = series.iter().filter_map(|series| {
        let (first, last) = (places(measure, series).next()?, places(measure, series).last()?);
        let said = |point: &Point| format!("{} at {} B", short((measure.of)(point)), size(point.bytes));
        Some(format!("{}: {}, {}", series.name, said(&first), said(&last)))
    });
    let ends: Vec<_> = ends.collect();
    format!(
        "{} by message size, on logarithmic axes. {}. All numbers are in the table.",
        measure.axis,
        ends.join("; ")
    )
}

/// Formats three significant digits.
fn short(number: f64) -> String {
    let decimals = (2.0 - number.abs().max(1e-6).log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{number:.decimals$}")
}

/// The axes.
struct Frame {
    x: Scale,
    y: Scale,
    right: f64,
}

impl Frame {
    fn of(measure: Measure, series: &[Series]) -> Option<Self> {
        // The lower bound may leave the chart, except for its last point, where its name is.
        let counted = series.iter().flat_map(|series| {
            let hidden = if series.is_floor { places(measure, series).count().saturating_sub(1) } else { 0 };
            places(measure, series).skip(hidden)
        });
        let (mut sizes, mut values) = ((f64::INFINITY, 0.0f64), (f64::INFINITY, 0.0f64));
        for point in counted {
            let (bytes, value) = (point.bytes as f64, (measure.of)(&point));
            sizes = (sizes.0.min(bytes), sizes.1.max(bytes));
            values = (values.0.min(value), values.1.max(value));
        }
        let longest = series.iter().map(|series| series.name.chars().count()).max()? as f64;
        let right = WIDTH - GAP - (LETTER * longest).clamp(30.0, 130.0);
        // Space above and below for at least half a name.
        let air = (values.1 / values.0).powf(LINE / (BOTTOM - TOP)).max(1.3);
        (values.1 > 0.0).then(|| Self {
            x: Scale::new(sizes.0, sizes.1, LEFT + 8.0, right),
            y: Scale::new(values.0 / air, values.1 * air, BOTTOM, TOP),
            right,
        })
    }

    fn at(&self, measure: Measure, point: &Point) -> (f64, f64) {
        (self.x.at(point.bytes as f64), self.y.at((measure.of)(point)))
    }

    fn holds(&self, (_, y): (f64, f64)) -> bool {
        (TOP..=BOTTOM).contains(&y)
    }

    fn write(&self, out: &mut String, axis: &str) -> fmt::Result {
        let (right, middle) = (self.right, (LEFT + self.right) / 2.0);
        writeln!(out, "<text class=\"axis\" x=\"0\" y=\"14\">{}</text>", Text(axis))?;
        let (end, unit) = (HEIGHT - 8.0, "message size (bytes)");
        writeln!(
            out,
            "<text class=\"axis\" x=\"{middle:.1}\" y=\"{end}\" text-anchor=\"middle\">{unit}</text>"
        )?;
        writeln!(out, "<g class=\"grid\">")?;
        for value in self.y.decades() {
            let y = self.y.at(value);
            writeln!(out, "<path d=\"M{LEFT} {y:.1}H{right:.1}\"/>")?;
        }
        writeln!(out, "</g><path class=\"base\" d=\"M{LEFT} {BOTTOM}H{right:.1}\"/><g class=\"ticks\">")?;
        for value in self.y.decades() {
            let (x, y, label) = (LEFT - 6.0, self.y.at(value) + 4.0, plain(value));
            writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>")?;
        }
        for bytes in self.x.sizes() {
            let (x, y) = (self.x.at(bytes as f64), BOTTOM + 17.0);
            let label = size(usize::try_from(bytes).unwrap_or(usize::MAX));
            writeln!(out, "<path d=\"M{x:.1} {BOTTOM}v4\"/>")?;
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>")?;
        }
        writeln!(out, "</g>")
    }

    /// Writes the names next to the ends of their lines, moved apart if these are close.
    fn write_names(&self, out: &mut String, mut names: Vec<((f64, f64), String, &str)>) -> fmt::Result {
        names.sort_by(|a, b| a.0 .1.total_cmp(&b.0 .1));
        let ends: Vec<_> = names.iter().map(|((_, y), ..)| *y).collect();
        let x = self.right + GAP;
        for (((end_x, end_y), class, name), y) in names.iter().zip(apart(&ends)) {
            let (from, to) = (end_x + 5.0, x - 3.0);
            writeln!(out, "<path class=\"leader\" d=\"M{from:.1} {end_y:.1}L{to:.1} {y:.1}\"/>")?;
            writeln!(
                out,
                "<text class=\"name {class}\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
                y + 4.0,
                Text(name)
            )?;
        }
        Ok(())
    }
}

/// Moves sorted positions apart by a line of text, and up if they are below the chart.
fn apart(wanted: &[f64]) -> Vec<f64> {
    let mut positions = wanted.to_vec();
    for index in 1..positions.len() {
        positions[index] = positions[index].max(positions[index - 1] + LINE);
    }
    // Half a line above the axis.
    let mut limit = BOTTOM - LINE / 2.0;
    for position in positions.iter_mut().rev() {
        *position = position.min(limit);
        limit = *position - LINE;
    }
    positions
}

/// Returns the path through points, cut off above and below the chart.
fn path(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    let mut end = None;
    for pair in points.windows(2) {
        let Some((from, to)) = inside(pair[0], pair[1]) else { continue };
        if end != Some(from) {
            let _ = write!(path, "M{:.1} {:.1}", from.0, from.1);
        }
        let _ = write!(path, "L{:.1} {:.1}", to.0, to.1);
        end = Some(to);
    }
    path
}

/// Returns the part of a segment that is in the chart.
fn inside(from: (f64, f64), to: (f64, f64)) -> Option<((f64, f64), (f64, f64))> {
    let rise = to.1 - from.1;
    let cut = |point: (f64, f64)| {
        let y = point.1.clamp(TOP, BOTTOM);
        let share = if rise == 0.0 { 0.0 } else { (y - from.1) / rise };
        if y == point.1 {
            point
        } else {
            (from.0 + share * (to.0 - from.0), y)
        }
    };
    let is_out = (from.1 < TOP && to.1 < TOP) || (from.1 > BOTTOM && to.1 > BOTTOM);
    (!is_out).then(|| (cut(from), cut(to)))
}

/// Returns the shape of a mark: series also differ by shape, for readers who do not see colours.
fn marker(index: usize, x: f64, y: f64) -> String {
    match index % 5 {
        0 => format!("M{:.1} {y:.1}a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z", x - 3.2),
        1 => format!("M{:.1} {:.1}h5.6v5.6h-5.6z", x - 2.8, y - 2.8),
        2 => format!("M{x:.1} {:.1}l3.8 6.6h-7.6z", y - 4.2),
        3 => format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0),
        _ => format!("M{x:.1} {:.1}l-3.8 -6.6h7.6z", y + 4.2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: Measure = Measure {
        key: "latency",
        title: "Latency",
        axis: "Latency (µs)",
        unit: "µs",
        of: |point| point.latency_us,
    };

    fn series(name: &str, is_floor: bool, points: &[(usize, f64)]) -> Series {
        let point = |&(bytes, latency_us): &(usize, f64)| Point { bytes, latency_us, busbw_gbs: 0.0 };
        Series { name: name.into(), is_floor, points: points.iter().map(point).collect() }
    }

    fn chart(series: &[Series]) -> String {
        let mut out = String::new();
        write(&mut out, LATENCY, 1, "f32 <sum>", series).unwrap();
        out
    }

    #[test]
    fn every_series_has_a_line_its_marks_and_a_name() {
        let svg = chart(&[
            series("one & two", false, &[(0, 1.0), (1024, 2.0), (4096, 8.0)]),
            series("memcpy", true, &[(1024, 0.001), (4096, 4.0)]),
        ]);
        assert_eq!(svg.matches("class=\"line\"").count(), 2, "{svg}");
        // 0 bytes cannot be drawn, and a lower bound has no marks.
        assert_eq!(svg.matches("class=\"mark\"").count(), 2, "{svg}");
        assert!(svg.contains(">one &amp; two</text>") && svg.contains("f32 &lt;sum&gt;"), "{svg}");
        assert!(svg.contains("one &amp; two: 2.00 at 1 Ki B, 8.00 at 4 Ki B"), "{svg}");
    }

    #[test]
    fn without_points_there_is_no_chart() {
        assert_eq!(chart(&[series("a", false, &[(0, 1.0), (8, 0.0)])]), "");
        assert_eq!(chart(&[]), "");
    }

    #[test]
    fn names_do_not_overlap_and_stay_in_the_chart() {
        let positions = apart(&[100.0, 101.0, 240.0, 241.0, 242.0]);
        assert!(positions.windows(2).all(|pair| pair[1] - pair[0] >= LINE - 1e-9), "{positions:?}");
        assert!(positions.iter().all(|y| (TOP..=BOTTOM).contains(y)), "{positions:?}");
        assert_eq!(apart(&[50.0, 90.0]), [50.0, 90.0]);
    }

    #[test]
    fn a_line_ends_where_the_chart_does() {
        assert_eq!(inside((0.0, TOP - 10.0), (20.0, TOP + 10.0)), Some(((10.0, TOP), (20.0, TOP + 10.0))));
        assert_eq!(inside((0.0, TOP - 10.0), (20.0, TOP - 1.0)), None);
        assert_eq!(path(&[(0.0, 50.0), (1.0, 60.0), (2.0, 70.0)]), "M0.0 50.0L1.0 60.0L2.0 70.0");
    }
}
