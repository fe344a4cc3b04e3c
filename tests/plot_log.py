"""
The loss curves of one or more runs as an SVG: train (thin) and val (dots) over tokens.

    python tests/plot_log.py out/quickstart/log.jsonl --out=quickstart.svg
    python tests/plot_log.py AdamW=out/a/log.jsonl Muon=out/b/log.jsonl --out=both.svg --top=8
"""
import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 20, 20, 50
COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d", "#8a5ab0", "#7a7a7a", "#b8527f")


def read_curves(path):
    """log.jsonl -> [(tokens, loss)] of train and of val."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    train = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    per_step = next(row["tokens"] / row["step"] for row in rows if "loss" in row)
    return train, [(row["step"] * per_step, row["val_loss"]) for row in rows if "val_loss" in row]


def ticks(low, high, wanted=6):
    """Round numbers from low to high, about as many as wanted."""
    raw = (high - low) / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(curves, top):
    """{name: (train, val)} -> the SVG's text. Losses above top are cut off."""
    points = [point for pair in curves.values() for curve in pair for point in curve]
    x_max, high = max(x for x, _ in points), min(top, max(y for _, y in points))
    low = min(y for _, y in points)
    low -= 0.03 * (high - low)
    unit, word = (1e9, "billion") if x_max >= 2e9 else (1e6, "million") if x_max >= 2e6 else (1e3, "thousand")

    def at(x, y):
        return (f"{LEFT + x / x_max * (WIDTH - LEFT - RIGHT):.1f},"
                f"{TOP + (high - min(y, high)) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}")

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13" '
           'font-family="sans-serif">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for y in ticks(low, high):
        (x0, level), (x1, _) = at(0, y).split(","), at(x_max, y).split(",")
        out.append(f'<path d="M{x0},{level}H{x1}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{float(level) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks(0, x_max / unit):
        place = at(x * unit, low).split(",")[0]
        out.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">'
               f'{word} tokens</text>')
    out.append(f'<text x="16" y="{HEIGHT / 2 - 15:.0f}" text-anchor="middle" '
               f'transform="rotate(-90 16 {HEIGHT / 2 - 15:.0f})">loss, nats per token</text>')
    for i, (name, (train, val)) in enumerate(curves.items()):
        colour, y = COLOURS[i % len(COLOURS)], TOP + 14 + 20 * i
        line = " ".join(at(*point) for point in train)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity="0.5"/>')
        for point in val:
            x, level = at(*point).split(",")
            out.append(f'<circle cx="{x}" cy="{level}" r="3" fill="{colour}"/>')
        label = f"{name}: " * bool(name) + f"train (line), val (dots), {val[-1][1]:.3f} at the end"
        out.append(f'<text x="{WIDTH - RIGHT - 8}" y="{y}" text-anchor="end" fill="{colour}">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", help="log.jsonl, or name=log.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--top", type=float, default=math.inf, help="cut off losses above")
    args = parser.parse_args()
    named = [log.rpartition("=")[::2] for log in args.logs]
    args.out.write_text(draw({name: read_curves(path) for name, path in named}, args.top), encoding="utf-8")


if __name__ == "__main__":
    main()
