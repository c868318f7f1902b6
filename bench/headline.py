"""Draws docs/headline.svg: the times of bench/compare_cuda.py beside flash-linear-attention, as bars.

python bench/headline.py bench/results/2026-11-18-h200-train-fla.json bench/results/2026-11-15-h200-compare.json \
    docs/headline.svg
"""

from __future__ import annotations

import json
import pathlib
import sys

NAMES = {"gdn": "GDN", "delta_rule": "DeltaNet", "kda": "KDA", "ttt": "TTT-Linear"}
PANELS = [  # title, unit, milliseconds in it, the bars: (op, mode, B)
    (
        "Training, B=1, T=8192, H=96, D=128 (TTT-Linear: B=4, T=4096, H=32, D=64)",
        "ms",
        1,
        [("gdn", "train", 1), ("delta_rule", "train", 1), ("kda", "train", 1), ("ttt", "train", 4)],
    ),
    (
        "Forward, B=1, T=8192, H=96, D=128 (TTT-Linear: B=4, T=4096, H=32, D=64)",
        "ms",
        1,
        [("gdn", "forward", 1), ("delta_rule", "forward", 1), ("kda", "forward", 1), ("ttt", "forward", 4)],
    ),
    ("One-token step, one sequence, H=32, D=128", "us", 1e-3, [("gdn", "step", 1), ("kda", "step", 1)]),
    ("One-token step, 256 sequences, H=32, D=128", "us", 1e-3, [("gdn", "step", 256), ("kda", "step", 256)]),
]
LEFT, WIDTH, LONGEST = 120, 860, 560  # of the bars: where they begin; of the picture; of the longest bar
BAR, GROUP, TITLE = 15, 44, 34  # heights
OURS, THEIRS = "#0072b2", "#b0b0b0"

STYLE = (
    "<style>.title{font-weight:bold;fill:#222;font-size:14px}.name{fill:#222}.value{fill:#333;font-size:12px}"
    ".ratio{fill:#0072b2;font-weight:bold;font-size:12px}.note{fill:#555;font-size:12px}</style>"
)


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.2f}"


def text(x: float, y: float, style: str, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{content}</text>'


def bar(y: float, length: float, colour: str, label: str, ratio: str = "") -> list[str]:
    shape = f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
    parts = [shape, text(LEFT + length + 6, y + BAR - 3, "value", label)]
    return [*parts, text(LEFT + length + 76, y + BAR - 3, "ratio", ratio)] if ratio else parts


def picture(records: list[dict]) -> str:
    times = {}
    for r in records:  # of several shapes with one B, the first
        times.setdefault((r["op"], r["mode"], r["B"], r["library"]), r["median_ms"])
    parts, y = [], 62.0
    for title, unit, scale, rows in PANELS:
        parts.append(text(24, y + 14, "title", title))
        y += TITLE
        pairs = [(op, times[op, mode, B, "fastweight"] / scale, times[op, mode, B, "fla"] / scale)
                 for op, mode, B in rows]  # fmt: skip
        longest = max(max(ours, theirs) for _, ours, theirs in pairs)
        for op, ours, theirs in pairs:
            parts.append(text(LEFT - 10, y + BAR + 4, "name", NAMES[op], "end"))
            parts += bar(y, ours / longest * LONGEST, OURS, f"{number(ours)} {unit}", f"{theirs / ours:.2f} x")
            parts += bar(y + BAR + 2, theirs / longest * LONGEST, THEIRS, f"{number(theirs)} {unit}")
            y += GROUP
        y += 8
    gpu = next(r["gpu"] for r in records)
    legend = [
        f'<rect x="24" y="22" width="14" height="14" rx="2" fill="{OURS}"/>',
        text(44, 34, "name", "fastweight"),
        f'<rect x="134" y="22" width="14" height="14" rx="2" fill="{THEIRS}"/>',
        text(154, 34, "name", "flash-linear-attention (Triton)"),
        text(WIDTH - 24, 34, "note", f"{gpu}, bf16, medians, shorter is faster; x: fla over fastweight", "end"),
    ]
    height = y + 4
    frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d0d0d0"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="13">'
    )
    title = "<title>Times of fastweight and flash-linear-attention on one GPU</title>"
    return "\n".join([head, title, STYLE, frame, *legend, *parts, "</svg>"]) + "\n"


def main() -> None:
    *sources, destination = sys.argv[1:]
    records = [record for source in sources for record in json.loads(pathlib.Path(source).read_text())]
    with open(destination, "w") as file:
        file.write(picture(records))


if __name__ == "__main__":
    main()
