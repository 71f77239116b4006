#!/usr/bin/env python3
"""Draws the timelines that `bench step --timeline` writes: bench/timeline_svg.py FILE.jsonl OUT.svg

One band for each timeline in the file, two lanes each: compute above, transfers between devices below.
"""
import html
import json
import sys
from pathlib import Path

COLOURS = {"attention": "#4878a8", "attention_sparse": "#4878a8", "select_blocks": "#7ba3c8", "linear": "#c8803c",
           "all_reduce": "#a83c3c", "exchange": "#a83c3c", "all_gather": "#a83c3c", "broadcast": "#a83c3c"}
OTHER = "#8f8f8f"
WIDTH, LANE, GAP, TEXT = 1200, 34, 46, 12


def main():
    source, target = sys.argv[1:3]
    records = [json.loads(line) for line in Path(source).read_text().splitlines()]
    bands = [record for record in records if "spans" in record]
    if not bands:
        sys.exit(f"timeline_svg: {source} holds no timeline; run bench step with --timeline")
    longest = max(band["value"] for band in bands)
    height = len(bands) * (2 * LANE + GAP) + TEXT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
           f'font-size="{TEXT}">', f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    for i, band in enumerate(bands):
        top = i * (2 * LANE + GAP) + GAP - TEXT
        out.append(f'<text x="4" y="{top - 6}">{html.escape(band["case"])}; {band["value"]:.2f} ms</text>')
        for span in band["spans"]:
            begin, end = max(0.0, span["begin"]), min(band["value"], span["end"])
            x, width = begin / longest * WIDTH, (end - begin) / longest * WIDTH
            y = top + (LANE if span["lane"] == "link" else 0)
            title = html.escape(f'{span["name"]}, {span["end"] - span["begin"]:.3f} ms')
            out.append(f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{LANE - 3}" '
                       f'fill="{COLOURS.get(span["name"], OTHER)}"><title>{title}</title></rect>')
            if width > 7 * len(span["name"]):
                out.append(f'<text x="{x + 3:.2f}" y="{y + LANE / 2 + 3}" fill="white">{span["name"]}</text>')
    out.append("</svg>")
    Path(target).write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
