#!/usr/bin/env python3
"""Writes the tables of README.md from bench/results/*.jsonl, between their markers.

A cell is the last line of a file that the row's words pick out: it holds all of `words` in its case and
`command` in its command. With --check nothing is written: the exit status says whether the page is up to date.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"


def line(file, words, command=None, peer=None, bench=None, commit=None):
    """The last line of the file that fits. `command`: how its command ends."""
    found = None
    for text in (ROOT / "bench/results" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        r = json.loads(text)
        if (all(word in r["case"] for word in words) and (command is None or r["command"].endswith(command))
                and (peer is None or peer in (r["peer"] or "")) and bench in (None, r["bench"])
                and commit in (None, r["commit"])):
            found = r
    if found is None:
        sys.exit(f"bench/results/{file}.jsonl has no line with {words}, {command}, {peer}")
    return found


NANO = ["prompt to frames", "nano 36 layers, 1280x720, 189 frames"]
RUNS = [("dense", "e2e nano", "vLLM-Omni 208.4 and diffusers 239.6 on an H200, both as published"),
        ("10 dense steps, then 28 of 36 layers sparse", "nano-mixed-layers-shared.json",
         "published 159.4 on a GH200"),
        ("all generation layers sparse, 75 % target", "nano-static-sparse-shared.json", "published 131.2 on a GH200")]


def nano():
    rows = ["| run | seconds | beside it |", "|---|---|---|"]
    for name, command, beside in RUNS:
        run = line("h200-model", NANO, command)
        seconds = run["value"]
        # Against the dense run of the same code.
        dense = line("h200-model", NANO, RUNS[0][1], commit=run["commit"])["value"]
        own = "" if seconds == dense else f"{dense / seconds:.2f}x faster than dense ({dense:.1f} s with the same build); "
        rows.append(f"| {name} | {seconds:.1f} | {own}{beside} |")
    for name, words, command in [("dense, 320x192", ["prompt to frames", "320x192, 189 frames"], "height=192 width=320"),
                                 ("dense, one image of 1280x720", ["prompt to frames", "1280x720, 1 frames"], "num-frames=1")]:
        rows.append(f'| {name} | {line("h200-model", words, command)["value"]:.2f} | |')
    decode = line("h200-model", ["VAE decode: nano 36 layers, 1280x720"], "vae nano")
    rows.append(f'| VAE decode of the first run alone | {decode["value"]:.2f} | diffusers 9.0 |')
    return rows


def hopper():
    shape = "Sq 44160 Skv 44672 32/8 heads of 128"
    dense = line("h200-attention", ["dense", shape], peer="cuDNN")
    rows = ["| Hopper attention, 44160 x 44672 tokens, 32/8 heads of 128, bf16 | ms | ratio in the same process |", "|---|---|---|",
            f'| dense, ours against {dense["peer"]} | {dense["value"]:.1f} | {dense["ratio"]:.2f} |']
    for name, lists in [("per-head lists", "per head, 64 x 64"), ("lists shared by four heads", "4 heads share, 64 x 64")]:
        r = line("h200-attention", [shape, "kept 184/698", lists], peer="own dense", bench="attention_sparse")
        rows.append(f'| block-sparse, 184 of 698 blocks, {name}, against dense | {r["value"]:.1f} | '
                    f'{1 / r["ratio"]:.3f} of dense |')
    return rows


def cpu():
    total = line("cpu-e2e", ["total", "256x256"])
    memory = line("cpu-e2e", ["peak resident memory"])
    return [f'On {total["device"].removeprefix("cpu: ")}, the shipped checkpoint at 256x256, 33 frames, 20 steps with guidance: '
            f'{total["value"]:.1f} s from', f'opening the model to the last frame, {memory["value"]:.0f} MB of memory.']


def mesh():
    rows = ["| one step of the same request on two H200 | seconds | over one |", "|---|---|---|"]
    for name, command in [("dense", "meshes=cp2,cfg2,tp2,cp2@1048576 timeline=1"),
                          ("all generation layers sparse", "nano-static-sparse-shared.json timeline=1")]:
        for axis, words in [("context", "one step, cp 2:"), ("guidance", "one step, cfg 2:"), ("tensor", "one step, tp 2:")]:
            if name != "dense" and axis != "context":
                continue
            r = line("h200-mesh", [words], command)
            rows.append(f'| {name}, {axis} parallel | {r["value"]:.2f} | {r["ratio"]:.2f}x |')
    r = line("h200-mesh", ["VAE decode, cp 2:"])
    rows.append(f'| VAE decode | {r["value"]:.2f} | {r["ratio"]:.2f}x |')
    return rows


def main():
    page = PAGE.read_text(encoding="utf-8")
    fresh = page
    for name, table in [("nano", nano), ("mesh", mesh), ("hopper", hopper), ("cpu", cpu)]:
        begin, end = f"<!-- results: {name} -->\n", "<!-- results: end -->\n"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
        if not pattern.search(fresh):
            sys.exit(f"{PAGE} has no table named {name}")
        fresh = pattern.sub(lambda _: begin + "\n".join(table()) + "\n" + end, fresh)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == page else f"{PAGE}: its tables are not those of bench/results; run tools/results_table.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
