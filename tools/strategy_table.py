#!/usr/bin/env python3
"""Writes the table of docs/attention.md from bench/results/pico-strategies.jsonl, between its two markers.

With --check nothing is written: the exit status says whether the page is up to date.
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/pico-strategies.jsonl"
PAGE = ROOT / "docs/attention.md"
BEGIN, END = "<!-- strategies: begin -->\n", "<!-- strategies: end -->\n"


def table(lines):
    rows = ["| strategy | seconds | speed-up | blocks kept | latent error | PSNR, mean and worst | SSIM | colour and motion |",
            "|---|---|---|---|---|---|---|---|"]
    for r in lines:
        psnr = "equal" if r["psnr"] is None else f'{r["psnr"]:.1f}, {r["worst_psnr"]:.1f} dB'
        shows = "right" if r["shows"] == "yes" else r["shows"]
        rows.append(f'| {r["case"]} | {r["value"]:.2f} | {r["ratio"]:.2f}x | {100 * r["kept_share"]:.0f}% | '
                    f'{r["latent_error"]:.3f} | {psnr} | {r["ssim"]:.4f} | {shows} |')
    return "\n".join(rows) + "\n"


def main():
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines() if line]
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    fresh = head + BEGIN + table(lines) + END + tail
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == page else f"{PAGE}: the table is not that of {RESULTS}; run tools/strategy_table.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
