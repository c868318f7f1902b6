"""Draws docs/training.svg and writes docs/training.md from a record of `examples/train_lm.py --compare fla --json`.

python bench/training.py bench/results/2026-11-16-h200-train_lm.json docs/training
"""

from __future__ import annotations

import json
import pathlib
import sys
import textwrap

WIDTH, LEFT, RIGHT = 860, 70, 24
CURVES, DIFFERENCES, GAP, TOP = 300, 90, 46, 64  # heights of the two panels, between them, above them
OURS, THEIRS = "#0072b2", "#d55e00"

STYLE = (
    "<style>.title{font-weight:bold;fill:#222;font-size:14px}.name{fill:#222}.note{fill:#555;font-size:12px}"
    ".tick{fill:#555;font-size:11px}.grid{stroke:#e4e4e4}.axis{stroke:#999}</style>"
)


def label(record: dict) -> str:
    if record["library"] == "fastweight":
        return "fastweight"
    return "flash-linear-attention" + (", check of Triton's version removed" if record["unchecked"] else "")


def text(x: float, y: float, style: str, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{content}</text>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high], about `count` of them."""
    raw = (high - low) / count or 1.0
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 1.0
    while power > raw:
        power /= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = -int(-low // step)
    return [step * i for i in range(first, int(high / step + 1e-9) + 1)]


class Panel:
    """Values by step, between two heights of the picture."""

    def __init__(self, top: float, height: float, steps: int, low: float, high: float) -> None:
        self.top, self.height, self.steps, self.low, self.high = top, height, steps, low, high

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(self.steps, 1)

    def y(self, value: float) -> float:
        return self.top + self.height * (self.high - value) / ((self.high - self.low) or 1)

    def frame(self, title: str) -> list[str]:
        parts = [text(LEFT, self.top - 10, "title", title)]
        for value in ticks(self.low, self.high):
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
            parts.append(text(LEFT - 8, y + 4, "tick", f"{value:g}", "end"))
        bottom = self.top + self.height
        for step in ticks(0, self.steps, 6):
            parts.append(text(self.x(step), bottom + 16, "tick", f"{step:g}", "middle"))
        parts.append(f'<line x1="{LEFT}" y1="{bottom:.1f}" x2="{WIDTH - RIGHT}" y2="{bottom:.1f}" class="axis"/>')
        return parts

    def line(self, values: list[float], colour: str, width: float, dash: str = "") -> str:
        points = " ".join(f"{self.x(i + 1):.1f},{self.y(value):.2f}" for i, value in enumerate(values))
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def picture(ours: dict, theirs: dict) -> str:
    a, b = ours["losses"], theirs["losses"]
    steps = len(a)
    losses = Panel(TOP, CURVES, steps, min(0.0, *a, *b), max(*a, *b))
    differences = [x - y for x, y in zip(a, b, strict=True)]
    most = max(abs(x) for x in differences) or 1e-3
    below = Panel(TOP + CURVES + GAP, DIFFERENCES, steps, -most, most)
    height = below.top + DIFFERENCES + 40
    parts = [
        f'<line x1="24" y1="29" x2="44" y2="29" stroke="{OURS}" stroke-width="4"/>',
        text(50, 33, "name", label(ours)),
        f'<line x1="144" y1="29" x2="164" y2="29" stroke="{THEIRS}" stroke-width="1.6" stroke-dasharray="5 3"/>',
        text(170, 33, "name", label(theirs)),
        *losses.frame("Loss by step"),
        losses.line(a, OURS, 3),
        losses.line(b, THEIRS, 1.3, "5 3"),
        *below.frame("Loss with fastweight minus loss with flash-linear-attention"),
        below.line(differences, "#555", 1),
        text(WIDTH - RIGHT, height - 8, "note", f"{ours['device']}, {ours['dtype']}, the same seed and text", "end"),
    ]
    frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d0d0d0"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="13">'
    )
    title = "<title>Loss of the same language model on the operators of two libraries</title>"
    return "\n".join([head, title, STYLE, frame, *parts, "</svg>"]) + "\n"


def table(records: list[dict]) -> list[str]:
    rows = [
        ("tokens per second", lambda r: f"{r['tokens_per_second']:,.0f}"),
        ("first step, s", lambda r: f"{r['first_step_seconds']:.2f}"),
        ("all steps, s", lambda r: f"{r['total_seconds']:.1f}"),
        ("peak memory, GiB", lambda r: f"{r['peak_memory_bytes'] / 2**30:.2f}"),
        ("last loss", lambda r: f"{r['losses'][-1]:.4f}"),
    ]
    if all("answers_right" in r for r in records):
        rows.append(("answers to new questions", lambda r: f"{r['answers_right'] / r['answers_asked']:.1%} right"))
    lines = ["| | " + " | ".join(label(r) for r in records) + " |", "|---|" + "---:|" * len(records)]
    return lines + [f"| {name} | " + " | ".join(show(r) for r in records) + " |" for name, show in rows]


MODEL = """[examples/train_lm.py](../examples/train_lm.py): {blocks} blocks of mixer and MLP, width {width},
{millions:.0f} million parameters. Of four mixers two are `GatedDeltaNet`, one is `KimiDeltaAttention` and one softmax
attention. {steps} steps of {tokens} tokens ({batch} sequences of {length}), AdamW, {dtype}, text: {text}."""
RUNS = """The two runs have the same layers, seed and text, and differ in two functions: `chunk_gated_delta_rule` and
`chunk_kda` are those of one library or of the other. Each ran in a new process; the first step includes what is
loaded, compiled and tuned at the first call. Tokens per second are a median over intervals of 10 steps, without the
first of them."""
UNCHECKED = """flash-linear-attention refuses its backward of the gated delta rule on this GPU with this version of
Triton, which compiles it wrongly. For this run the check was removed: that library's gradients, and so its curve, may
be wrong."""
WARM = """Triton's cache on disk held kernels of flash-linear-attention from runs before: its first step tunes them, and
compiles only what was missing."""
ORIGIN = """{device}, PyTorch {torch}, fastweight {version}, flash-linear-attention {their_version}, {date}. Record:
[{source}](../bench/results/{source}). Made by"""
COMMANDS = """    python examples/train_lm.py --compare fla --fla FOLDER{switch} --json bench/results/{source}
    python bench/training.py bench/results/{source} docs/training"""


def page(records: list[dict], source: str) -> str:
    ours, theirs = records
    values = ours | {
        "millions": ours["parameters"] / 1e6,
        "tokens": ours["batch"] * ours["length"],
        "their_version": theirs["version"],
        "date": ours["date"][:10],
        "source": source,
        "switch": " --fla-unchecked" if theirs["unchecked"] else "",
    }

    def paragraph(template: str) -> str:
        return textwrap.fill(" ".join(template.format(**values).split()), 124, break_on_hyphens=False)

    parts = [
        "# Training a language model",
        paragraph(MODEL),
        paragraph(RUNS),
        "![Two curves of the loss on top of each other, and their difference](training.svg)",
        "\n".join(table(records)),
        *([paragraph(UNCHECKED)] if theirs["unchecked"] else []),
        *([paragraph(WARM)] if theirs.get("warm_cache") else []),
        paragraph(ORIGIN),
        COMMANDS.format(**values),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    source, destination = map(pathlib.Path, sys.argv[1:])
    records = sorted(json.loads(source.read_text()), key=lambda record: record["library"] != "fastweight")
    if [record["library"] for record in records] != ["fastweight", "fla"]:
        sys.exit(f"training: expected records of fastweight and fla in {source}, got {[r['library'] for r in records]}")
    destination.with_suffix(".svg").write_text(picture(*records))
    destination.with_suffix(".md").write_text(page(records, source.name))


if __name__ == "__main__":
    main()
