//! Text of items that several files have: enums, lists of variants, and methods that match on variants.

/// Attributes of an enum of facts.
pub const COPY: &str = "derive(Debug, Clone, Copy, PartialEq, Eq, Hash)";
/// Attributes of an enum of facts that recordings of calls have.
pub const SAVED: &str = "derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)";
/// Attribute of a public enum that may get variants.
pub const NON_EXHAUSTIVE: &str = "non_exhaustive";

/// Widest line of a generated file.
const COLUMNS: usize = 120;

/// Adds an enum. Each variant has documentation and a declaration. Lines of documentation are separated by newlines.
pub fn enumeration(
    text: &mut String,
    doc: &str,
    attributes: &[&str],
    name: &str,
    variants: impl Iterator<Item = (String, String)>,
) {
    comment(text, "", doc);
    attributes.iter().for_each(|attribute| *text += &format!("#[{attribute}]\n"));
    *text += &format!("pub enum {name} {{\n");
    for (doc, declaration) in variants {
        comment(text, "    ", &doc);
        *text += &format!("    {declaration},\n");
    }
    *text += "}\n\n";
}

/// Adds documentation.
fn comment(text: &mut String, indent: &str, doc: &str) {
    for line in doc.lines() {
        let space = if line.is_empty() { "" } else { " " };
        *text += &format!("{indent}///{space}{line}\n");
    }
}

/// Begins a block of methods.
pub fn begin_impl(text: &mut String, name: &str) {
    *text += &format!("impl {name} {{\n");
}

/// Ends a block of methods, without an empty line after the last one.
pub fn end_impl(text: &mut String) {
    text.truncate(text.trim_end().len());
    *text += "\n}\n\n";
}

/// Adds a constant array of variants.
pub fn list<'a>(text: &mut String, doc: &str, constant: &str, variants: impl Iterator<Item = &'a str>) {
    let variants: Vec<_> = variants.map(|variant| format!("Self::{variant}")).collect();
    *text += &format!(
        "    /// {doc}\n    {constant}: [Self; {}] = [{}];\n\n",
        variants.len(),
        variants.join(", ")
    );
}

/// A method that returns a column of a table: its documentation, its signature, and its value for a row.
pub type Column<'a, Row> = (&'a str, &'a str, &'a dyn Fn(Row) -> String);

/// Adds a method for each column. `rows` are the patterns of the variants, and their rows.
///
/// Each method is one match, which the compiler folds. With facts behind a pointer, calls of 1 KiB took 20 ns more on
/// the host.
pub fn columns<'a, Row, Rows>(text: &mut String, columns: &[Column<Row>], rows: impl Fn() -> Rows)
where
    Rows: Iterator<Item = (&'a str, Row)>,
{
    for (doc, signature, value) in columns {
        let mut by_value: Vec<(String, Vec<String>)> = Vec::new();
        for (pattern, row) in rows() {
            let (value, pattern) = (value(row), format!("Self::{pattern}"));
            match by_value.iter_mut().find(|(other, _)| *other == value) {
                Some((_, patterns)) => patterns.push(pattern),
                None => by_value.push((value, vec![pattern])),
            }
        }
        *text += &format!("    /// {doc}\n    #[inline]\n    {signature} {{\n        match self {{\n");
        for (value, patterns) in by_value {
            *text += &format!("            {} => {value},\n", patterns.join(" | "));
        }
        *text += "        }\n    }\n\n";
    }
}

/// Adds a constant for errors that lists names.
pub fn names<'a>(text: &mut String, constant: &str, names: impl Iterator<Item = &'a str>) {
    *text += &format!("pub(super) const {constant}: &str = \"{}\";\n\n", one_of(names));
}

/// Lists names in words.
pub fn one_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    format!("one of {}", names.collect::<Vec<_>>().join(", "))
}

/// Formats an optional code.
pub fn option(code: Option<impl ToString>) -> String {
    code.map_or("None".to_owned(), |code| format!("Some({})", code.to_string()))
}

/// Wraps lines that are too wide: comments at words, code after commas and before `|`, long string literals at words.
pub fn filled(text: &str) -> String {
    let mut filled = String::new();
    for line in text.lines() {
        let start = line.trim_start();
        let indent = &line[..line.len() - start.len()];
        let comment = ["/// ", "//! ", "// ", "# "].into_iter().find(|marker| start.starts_with(marker));
        let next = format!("{indent}{}", comment.unwrap_or("    "));
        let (mut rest, mut in_string) = (line.to_owned(), false);
        while rest.chars().count() > COLUMNS {
            let Some(end) = last_break(&rest, next.len(), comment.is_some(), &mut in_string) else { break };
            let (before, after) = rest.split_at(end);
            filled += if in_string { before } else { before.trim_end() };
            filled += if in_string { "\\\n" } else { "\n" };
            rest = format!("{next}{}", after.trim_start());
        }
        filled += &rest;
        filled += "\n";
    }
    filled
}

/// Returns where a line can be broken last. `in_string` is whether the line begins in a string literal, and then
/// whether the break is in one.
fn last_break(line: &str, least: usize, is_comment: bool, in_string: &mut bool) -> Option<usize> {
    let (mut code, mut string, mut is_escaped, mut inside) = (None, None, false, *in_string);
    for (at, character) in line.char_indices().take(COLUMNS) {
        let is_break = at > least && line[..at].ends_with(' ');
        match inside {
            false if is_break && (is_comment || line[..at].ends_with(", ") || character == '|') => {
                code = Some(at)
            }
            true if is_break => string = Some(at),
            _ => {}
        }
        inside ^= character == '"' && !is_escaped && !is_comment;
        is_escaped = character == '\\' && !is_escaped;
    }
    *in_string = code.is_none();
    code.or(string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_lines_are_broken_where_their_meaning_allows_it() {
        let words = "word ".repeat(30);
        let comment = filled(&format!("    /// {words}"));
        assert!(comment.lines().count() == 2 && comment.lines().all(|line| line.starts_with("    /// word")));
        let code = filled(&format!("    a => f(\"{}\", \"{}\"),", "b, ".repeat(20), "c ".repeat(30)));
        let lines: Vec<_> = code.lines().collect();
        assert!(lines[0].ends_with("b, \",") && lines[1].starts_with("        \"c"), "{code}");
        let string = filled(&format!("const A: &str = \"{words}\";"));
        assert!(string.lines().next().unwrap().ends_with("word \\"), "{string}");
        assert_eq!(filled("short,\nlines\n"), "short,\nlines\n");
    }
}
