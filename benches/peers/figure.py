#!/usr/bin/env python3
"""Draws docs/peers-light.svg and docs/peers-dark.svg from measurements that run.py --json has written.

    benches/peers/figure.py [FILE]        # by default lab/journal/peers.json

Each size has a group of bars: the time of each library divided by ours. Fails if the file lacks a number.
"""

import json
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent.parent
WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 74, 62
# Colours for readers with any kind of colour vision: Okabe and Ito, "Color universal design", 2008.
COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7"]
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0", "line": "#1f2328"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "grid": "#3d444d", "line": "#f0f6fc"},
}
NAMES = {
    "openmpi": "Open MPI", "mpich": "MPICH", "deepspeed": "DeepSpeed", "vllm": "vLLM", "oneccl": "oneCCL",
    "gloo": "Gloo",
}  # fmt: skip
# Higher bars are cut, and show their value.
HIGHEST = 16
TITLE = "Allreduce between 2 CPU processes: time of others, over ours"


def label(count: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} B"


def vertical(ratio: float) -> float:
    """Returns the y coordinate of a ratio, on a logarithmic axis from 1/2 to the highest."""
    share = math.log2(min(ratio, HIGHEST) * 2) / math.log2(HIGHEST * 2)
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def text(
    x: float, y: float, words: str, fill: str, size: int = 12, anchor: str = "middle", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def bar(x: float, width: float, ratio: float, colour: str, muted: str, above: int) -> list[str]:
    top, base = sorted((vertical(ratio), vertical(1)))
    drawn = [f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}" fill="{colour}"/>']
    if ratio > HIGHEST:
        value = f"{ratio:.0f}" if ratio < 1000 else f"{ratio / 1000:.1f}k"
        drawn.append(text(x + width / 2, top - above, value, muted, 8))
    return drawn


def draw(record: dict, theme: dict) -> str:
    sizes = sorted(record["rows"], key=int)
    # A bound, not a library.
    peers = [peer for peer in record["rows"][sizes[0]] if peer != "floor"]
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" role="img">',
        "<title>Time of other libraries over that of fast-allreduce</title>",
        text(LEFT, 20, TITLE, theme["text"], 15, "start", "600"),
    ]
    x = LEFT
    for peer, colour in zip(peers, COLOURS, strict=True):
        drawn.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{colour}"/>')
        drawn.append(text(x + 16, 46, NAMES[peer], theme["text"], 12, "start"))
        x += 36 + 7 * len(NAMES[peer])
    for ratio in (1, 2, 4, 8, HIGHEST):
        y = vertical(ratio)
        stroke, width = (theme["line"], 1.5) if ratio == 1 else (theme["grid"], 1)
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{stroke}" stroke-width="{width}"/>'
        )
        drawn.append(text(LEFT - 8, y + 4, "ours" if ratio == 1 else f"{ratio} x", theme["muted"], 12, "end"))
    group = (WIDTH - LEFT - RIGHT) / len(sizes)
    width = group * 0.84 / len(peers)
    for number, size in enumerate(sizes):
        start = LEFT + group * number
        for index, (peer, colour) in enumerate(zip(peers, COLOURS, strict=True)):
            ratio = record["rows"][size][peer]["ratio"]
            left, above = start + group * 0.08 + width * index, 3 + index % 2 * 9
            drawn += bar(left, width * 0.92, ratio, colour, theme["muted"], above)
        drawn.append(text(start + group / 2, HEIGHT - BOTTOM + 18, label(int(size)), theme["text"]))
        ours = record["rows"][size][peers[0]]["ours"]["us"]
        time = f"{ours:.3g} µs" if ours < 1000 else f"{ours / 1000:.3g} ms"
        drawn.append(text(start + group / 2, HEIGHT - BOTTOM + 33, time, theme["muted"], 11))
    machine = record["machine"]
    where = f"2 cores of {machine['cpu']}, Linux {machine['kernel']}"
    foot = f"f32, sum; {where}; medians of {record['rounds']} interleaved rounds"
    drawn.append(text(LEFT, HEIGHT - 8, foot, theme["muted"], 11, "start"))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "lab/journal/peers.json"
    record = json.loads(source.read_text())
    for name, theme in THEMES.items():
        (ROOT / f"docs/peers-{name}.svg").write_text(draw(record, theme))


if __name__ == "__main__":
    main()
