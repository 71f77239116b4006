#!/usr/bin/env python3
"""Draws an attention strategy's schedule as SVG: layers down, denoising steps across.

  tools/plot_schedule.py recipes/attention/nano-dense-mixed-dense.json --layers 36 --steps 30 > picture.svg

Reads documents with presets and layouts or one layout; the program checks them, this does not.
"""
import argparse
import json
import math
import sys

ROLE = "cosmos3.gen"
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 18, 9, 64, 34, 12, 40
DENSE, SPARSE = "#1f4e79", "#f2b441"


def layout_at(strategy, step, steps):
    """The layout of a step."""
    if "layout" in strategy:
        return strategy["layout"]
    schedule = strategy["schedule"]
    for phase in schedule["phases"]:
        until = phase["until"]
        end = steps if until is None else until
        if schedule["coordinate"] == "step_fraction":
            end = math.ceil(until * steps)
        if step < end:
            return strategy["layouts"][phase["layout"]]
    raise SystemExit("the schedule ends before the last step")


def preset_of(layout, layer):
    for rule in layout.get("overrides", []):
        if rule.get("attention_role", ROLE) == ROLE and layer in rule.get("layers", [layer]):
            return rule["use"]
    return layout["default"]


def is_sparse(preset):
    return isinstance(preset, dict) and preset.get("name") == "block_sparse"


def text(x, y, body, anchor="middle", size=11):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{body}</text>'


def draw(strategy, layers, steps, title):
    width, height = LEFT + steps * CELL_WIDTH + RIGHT, TOP + layers * CELL_HEIGHT + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 18, title, "start", 13),
    ]
    cells = {DENSE: [], SPARSE: []}
    for step in range(steps):
        layout = layout_at(strategy, step, steps)
        for layer in range(layers):
            sparse = is_sparse(strategy["presets"][preset_of(layout, layer)])
            cells[SPARSE if sparse else DENSE].append((LEFT + step * CELL_WIDTH, TOP + layer * CELL_HEIGHT))
    for colour, corners in cells.items():
        box = f"h{CELL_WIDTH - 1}v{CELL_HEIGHT - 1}h{1 - CELL_WIDTH}z"
        out.append(f'<path fill="{colour}" d="' + "".join(f"M{x} {y}{box}" for x, y in corners) + '"/>')
    for layer in range(0, layers, 5 if layers > 10 else 1):
        out.append(text(LEFT - 6, TOP + layer * CELL_HEIGHT + CELL_HEIGHT - 1, layer, "end", 9))
    for step in range(0, steps, 5):
        out.append(text(LEFT + step * CELL_WIDTH + CELL_WIDTH / 2, TOP + layers * CELL_HEIGHT + 12, step, size=9))
    out.append(text(LEFT + steps * CELL_WIDTH, height - 10, "denoising step", "end"))
    middle = TOP + layers * CELL_HEIGHT / 2
    out.append(f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle" '
               'font-size="11">layer</text>')
    for i, (colour, label) in enumerate(((DENSE, "reads every key"), (SPARSE, "reads selected blocks"))):
        x = LEFT + i * 130
        out.append(f'<rect x="{x}" y="{height - 18}" width="9" height="9" fill="{colour}"/>')
        out.append(text(x + 13, height - 10, label, "start", 10))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategy")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    with open(options.strategy, encoding="utf-8") as file:
        strategy = json.load(file)
    sys.stdout.write(draw(strategy, options.layers, options.steps, options.title))


if __name__ == "__main__":
    main()
