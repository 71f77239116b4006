#!/usr/bin/env python3
"""Writes the tables of docs/attention.md from bench/results/pico-*.jsonl, each between its two markers.

With --check nothing is written: the exit status says whether the page is up to date.
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/attention.md"


def strategies(lines):
    yield "| strategy | seconds | speed-up | blocks kept | latent error | PSNR, mean and worst | SSIM | colour and motion |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in lines:
        psnr = "equal" if r["psnr"] is None else f'{r["psnr"]:.1f}, {r["worst_psnr"]:.1f} dB'
        shows = "right" if r["shows"] == "yes" else r["shows"]
        yield (f'| {r["case"]} | {r["value"]:.2f} | {r["ratio"]:.2f}x | {100 * r["kept_share"]:.0f}% | '
               f'{r["latent_error"]:.3f} | {psnr} | {r["ssim"]:.4f} | {shows} |')


def on_device(lines):
    """Without seconds: the model is too small for them to say anything about a device."""
    yield "| strategy | blocks kept | latent error | PSNR, mean and worst of 5 captions | SSIM |"
    yield "|---|---|---|---|---|"
    for r in lines:
        if r["psnr"] is None:
            continue
        yield (f'| {r["case"]} | {100 * r["kept_share"]:.0f}% | {r["latent_error"]:.3f} | '
               f'{r["psnr"]:.1f}, {r["worst_psnr"]:.1f} dB | {r["ssim"]:.4f} |')


def recall(lines):
    yield "| lists | blocks kept | recall | worst head | best lists of these lengths |"
    yield "|---|---|---|---|---|"
    for r in lines:
        yield (f'| {r["case"]} | {100 * r["kept_share"]:.0f}% | {100 * r["value"]:.1f}% | {100 * r["worst"]:.0f}% | '
               f'{100 * r["peer_value"]:.1f}% |')


# Marker: its results and how they are shown.
TABLES = {
    "strategies": ("pico-strategies.jsonl", strategies),
    "strategies on a device": ("pico-strategies-cuda.jsonl", on_device),
    "recall": ("pico-recall.jsonl", recall),
}


def main():
    page = PAGE.read_text(encoding="utf-8")
    fresh = page
    for marker, (file, rows) in TABLES.items():
        begin, end = f"<!-- {marker}: begin -->\n", f"<!-- {marker}: end -->\n"
        lines = [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines() if line]
        head, rest = fresh.split(begin)
        _, tail = rest.split(end)
        fresh = head + begin + "\n".join(rows(lines)) + "\n" + end + tail
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == page else f"{PAGE}: the tables are not those of {RESULTS}; run tools/strategy_table.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
