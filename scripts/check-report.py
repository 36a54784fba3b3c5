#!/usr/bin/env python3
"""Renders pages of --report in a browser, and checks their layout.

usage: scripts/check-report.py [--out FOLDER] [--browser PROGRAM] PAGE.html...
       scripts/check-report.py --self-test PAGE.html

Each page is rendered 400 and 1200 pixels wide, light and dark; the screenshots are kept in FOLDER (target/report).
--self-test breaks copies of a page in known ways and asserts that each is noticed.
"""

import argparse
import base64
import contextlib
import itertools
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

WIDTHS = [400, 1200]
SCHEMES = ["light", "dark"]

# Returns facts about the page's layout.
MEASURE = r"""
(() => {
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const scroller = document.querySelector(".scroll");
  return {
    width: document.documentElement.scrollWidth,
    background: numbers(getComputedStyle(document.body).backgroundColor),
    ink: numbers(getComputedStyle(document.body).color),
    scroller: scroller && { label: scroller.getAttribute("aria-label"), tabindex: scroller.tabIndex,
                            rows: scroller.querySelectorAll("tbody tr").length },
    facts: document.querySelectorAll("dt").length,
    command: (document.querySelector("pre code") || {}).textContent,
    charts: [...document.querySelectorAll("svg")].map((svg) => ({
      box: box(svg),
      title: (svg.querySelector(":scope > title") || {}).textContent,
      desc: (svg.querySelector(":scope > desc") || {}).textContent,
      labelled: (svg.getAttribute("aria-labelledby") || "").split(" ").every((id) => document.getElementById(id)),
      lines: [...svg.querySelectorAll(".series .line")].map((line) => ({
        length: line.getTotalLength(), box: box(line), color: getComputedStyle(line).stroke })),
      marks: svg.querySelectorAll(".mark").length,
      texts: [...svg.querySelectorAll("text")].map((text) => ({
        text: text.textContent, box: box(text), is_name: text.classList.contains("name"),
        pixels:
          parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,
        color: numbers(getComputedStyle(text).fill) })),
      axis: [...svg.querySelectorAll(".base")].map(box),
    })),
  };
})()
"""


class Browser:
    """A headless Chromium, driven over a pipe by the DevTools protocol: JSON messages, each followed by a zero byte."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory()
        to_browser, self.send_end = os.pipe()
        self.receive_end, from_browser = os.pipe()

        def descriptors():
            # Copied first, because either may have the number to which the other is moved.
            ends = os.dup(to_browser), os.dup(from_browser)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}",
             "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "TMPDIR": self.profile.name})
        os.close(to_browser)
        os.close(from_browser)
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Network", "Runtime"]:
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if getattr(self, "session", None):
            message["sessionId"] = self.session
        os.write(self.send_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self, seconds=60):
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            if not select.select([self.receive_end], [], [], max(0, deadline - time.monotonic()))[0]:
                sys.exit(f"the browser has not answered for {seconds} s")
            piece = os.read(self.receive_end, 1 << 16)
            if not piece:
                sys.exit(f"the browser has ended with status {self.process.wait()}")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def load(self, page, width, scheme):
        """Shows a page. Returns the addresses that it requested."""
        self.call("Emulation.setDeviceMetricsOverride",
                  width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())
        # Waits for requests that the page makes after it has been shown.
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        asked = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            sys.exit(f"the page cannot be measured: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, path):
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def close(self):
        # The browser's helper processes outlive it briefly and write to the profile. Killing the group ends them.
        self.process.terminate()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for end in [self.send_end, self.receive_end]:
            os.close(end)
        deadline = time.monotonic() + 10
        while True:
            try:
                return self.profile.cleanup()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def luminance(color):
    """Returns the relative luminance as defined by WCAG 2."""
    parts = [part / 255 for part in color[:3]]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    light, dark = sorted([luminance(a), luminance(b)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def overlap(a, b, slack=1.0):
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


def problems_of_source(text):
    """Yields problems of the page's source: what loads other files, and scripts."""
    loads = [r"https?:", r"<script", r"url\(", r"@import", r"<(img|iframe|object|embed|audio|video)\b", r"\son\w+="]
    for pattern in loads:
        if re.search(pattern, text, re.IGNORECASE):
            yield f"its source has {pattern}"


def problems(facts, width, scheme, asked):
    """Yields problems of the page's layout."""
    others = [address for address in asked[1:] if not address.startswith("data:")]
    if others:
        yield f"it asks for {others}"
    if facts["width"] > width:
        yield f"it is {facts['width']} pixels wide, not {width}"
    if (luminance(facts["background"]) < 0.2) != (scheme == "dark"):
        yield f"its background is {facts['background']}"
    if contrast(facts["background"], facts["ink"]) < 7:
        yield "its text has too little contrast"
    if not facts["command"] or "fast-allreduce" not in facts["command"]:
        yield "it does not show its command"
    if facts["facts"] < 10:
        yield "the machine's facts are missing"
    scroller = facts["scroller"]
    if not scroller or not scroller["label"] or scroller["tabindex"] != 0 or scroller["rows"] == 0:
        yield f"its table is empty or cannot be reached: {scroller}"
    if not facts["charts"]:
        yield "it has no chart"
    for chart in facts["charts"]:
        for problem in problems_of_chart(chart, facts, width):
            yield f"{chart.get('title')}: {problem}"


def problems_of_chart(chart, facts, width):
    texts, names = chart["texts"], [text for text in chart["texts"] if text["is_name"]]
    description = chart.get("desc", "")
    if not chart.get("title") or not description or not chart["labelled"]:
        yield "it does not say what it is"
    if not names or len(chart["lines"]) != len(names):
        yield f"{len(chart['lines'])} lines have {len(names)} names"
    for line in chart["lines"]:
        if line["length"] < 10 and chart["marks"] > len(names):
            yield "a line is not drawn"
    said = {name["text"] for name in names}
    described = [name for name in said if f"{name}: " not in description]
    if described or len(said) != len(names):
        yield f"its names {sorted(said)} are not those of its description"
    if len({line["color"] for line in chart["lines"]}) != len(chart["lines"]):
        yield "two lines have one colour"
    for text in texts:
        if not (0 <= text["box"][0] and text["box"][2] <= width):
            yield f"'{text['text']}' leaves the page"
        if text["pixels"] < 9.5:
            yield f"'{text['text']}' is {text['pixels']:.1f} pixels high"
        if contrast(text["color"], facts["background"]) < 4.5:
            yield f"'{text['text']}' has a contrast of {contrast(text['color'], facts['background']):.1f}"
        # The axis is a horizontal line: its box has no height.
        if any(text["box"][1] < axis[1] < text["box"][3] and axis[0] < text["box"][2] for axis in chart["axis"]):
            yield f"'{text['text']}' is on the axis"
    for a, b in itertools.combinations(texts, 2):
        # The boxes of adjacent lines of text touch.
        if overlap(a["box"], b["box"], 3.0):
            yield f"'{a['text']}' is on '{b['text']}'"
    for text in names:
        if any(text["box"][0] < line["box"][2] for line in chart["lines"]):
            yield f"'{text['text']}' is on a line"


def check(browser, page, out):
    """Returns all problems of a page, in all widths and colour schemes."""
    found = list(problems_of_source(page.read_text()))
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        asked = browser.load(page, width, scheme)
        facts = browser.evaluate(MEASURE)
        found += [f"{width} pixels, {scheme}: {problem}" for problem in problems(facts, width, scheme, asked)]
        if out:
            browser.screenshot(out / f"{page.stem}-{width}-{scheme}.png")
    return found


# Each breaks a page in one way: a name, a replacement, and words of the problem that must be reported.
BREAKAGES = [
    ("an image from elsewhere", "</h1>", "</h1><img src=\"https://example.org/a.png\">", "https"),
    ("a style from a file", "<style>", "<link rel=\"stylesheet\" href=\"style.css\"><style>", "asks for"),
    ("a wide element", "<footer>", "<footer><div style=\"width: 1500px\">x</div>", "pixels wide"),
    ("no dark theme", "prefers-color-scheme: dark", "prefers-color-scheme: none", "background"),
    ("faint names", "svg text.name { fill: currentColor; }", "svg text.name { fill: #888888; }", "contrast"),
    ("small type", "svg text { font-size: 11.5px;", "svg text { font-size: 7px;", "pixels high"),
    ("a line without a name", "class=\"name s0\"", "class=\"s0\"", "names"),
    ("no description", "<desc", "<metadata", "does not say"),
    ("text on the axis", "</svg>", "<text x=\"60\" y=\"249\">text</text></svg>", "on the axis"),
    ("two names in one place", "</svg>",
     "<text class=\"name\" x=\"330\" y=\"60\">a</text><text x=\"330\" y=\"60\">b</text></svg>",
     "is on 'b'"),
    ("no command", "<pre><code>", "<pre><code></code>", "command"),
    ("a table out of reach", "tabindex=\"0\"", "", "cannot be reached"),
]


def self_test(browser, page):
    """Returns the breakages that are not noticed."""
    text, missed = page.read_text(), []
    with tempfile.TemporaryDirectory() as folder:
        for what, old, new, words in BREAKAGES:
            copy = pathlib.Path(folder) / "broken.html"
            assert old in text, f"{what}: the page has no {old}"
            copy.write_text(text.replace(old, new))
            if not any(words in problem for problem in check(browser, copy, None)):
                missed.append(what)
    return [f"not noticed: {what}" for what in missed]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/report"))
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    browser = Browser(arguments.browser)
    try:
        found = []
        for page in arguments.pages:
            of_page = self_test(browser, page) if arguments.self_test else check(browser, page, arguments.out)
            found += [f"{page}: {problem}" for problem in of_page]
    finally:
        browser.close()
    print("\n".join(found) if found else f"{len(arguments.pages)} pages are right; screenshots are in {arguments.out}"
          if not arguments.self_test else f"{len(BREAKAGES)} breakages are noticed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
