//! Text in HTML.

use std::fmt;

/// Escapes a text for HTML and SVG, also in quoted attributes.
pub struct Text<'a>(pub &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|character| match character {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            // HTML cannot represent other control characters.
            control if control.is_control() && control != '\n' => f.write_str("\u{fffd}"),
            other => write!(f, "{other}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_text() {
        let text = Text("<b a=\"1\" c='2'>&amp;\0</b>\u{1b}\n").to_string();
        assert_eq!(text, "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;\u{fffd}&lt;/b&gt;\u{fffd}\n");
    }
}
