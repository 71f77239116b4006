#!/usr/bin/env python3
"""Predicts a guided step on 4 and 8 GPUs from measurements on one and two.

    bench/scaling_model.py [FILE.jsonl ...]        default: bench/results/*.jsonl

Reads the lines of `bench step` and `bench link` (docs/parallelism.md says how to make them) and prints one table for
each request and attention strategy that was measured on one device and on meshes of two. The model, per evaluation:

    T = (E - R - F) / (tp cp) + R / cp + F + exposed * communication,        step = evaluations / cfg * T + G

E is a whole evaluation on one device; F, of it, is what no axis cuts, and R what tp does not cut (norms of whole
rows): both are what the measured meshes took beyond their share and their communication. G is what cfg 2 adds. The
communication is bytes over the measured rate. `exposed` is what of it compute did not hide: known when a mesh was
also measured with parts so large that nothing overlaps (cp2@1048576), else 1.
"""
import json
import math
import re
import sys
from pathlib import Path

# hidden, heads, key/value heads, layers
SIZES = {"nano": (4096, 32, 8, 36), "super": (5120, 64, 8, 64), "edge": (2048, 16, 8, 28)}
HEAD_DIM, PATCH, CHANNELS, SPATIAL, TEMPORAL = 128, 2, 48, 16, 4
MESHES = ["cp 4", "tp 4", "cp 2 x cfg 2", "tp 2 x cfg 2", "tp 2 x cp 2",
          "cp 8", "tp 8", "cp 4 x cfg 2", "tp 4 x cfg 2", "tp 2 x cp 2 x cfg 2", "tp 2 x cp 4"]
NO_OVERLAP = 1 << 20  # parts of so many rows: one part


def degrees(mesh):
    found = dict.fromkeys(("tp", "cp", "cfg"), 1)
    for axis, degree in re.findall(r"(tp|cp|cfg) (\d+)", mesh):
        found[axis] = int(degree)
    return found["tp"], found["cp"], found["cfg"]


class Request:
    """Sizes of one benchmarked request, read from the text behind the colon of its case."""

    def __init__(self, text):
        self.text = text
        m = re.match(r"(\w+) (\d+) layers, (\d+)x(\d+), (\d+) frames, (\d) x (\d+) text tokens, (\w+)", text)
        name, layers, width, height, frames, self.evaluations = m[1], *map(int, m.groups()[1:6])
        self.hidden, self.heads, self.kv_heads, _ = SIZES[name]
        self.layers = layers
        self.bytes = 2 if m[8] == "bf16" else 4
        rows, columns = height // SPATIAL, width // SPATIAL
        latent_frames = (frames - 1) // TEMPORAL + 1
        self.tokens = latent_frames * math.ceil(rows / PATCH) * math.ceil(columns / PATCH)

    def exchanged(self, tp, cp):
        """Bytes that leave a rank in an evaluation to exchange sequence for heads."""
        if cp == 1:
            return 0
        heads, kv = self.heads // tp, self.kv_heads // tp
        q = heads // cp
        kv_each = q // math.gcd(heads // kv, q)
        rows = math.ceil(self.tokens / cp)
        layer = (cp - 1) * rows * (2 * q + 2 * kv_each) * HEAD_DIM * self.bytes
        return self.layers * layer + (cp - 1) * rows * PATCH * PATCH * CHANNELS * self.bytes

    def summed(self, tp, cp):
        """Bytes that leave a rank in an evaluation to sum over tp, as a ring sends them."""
        rows = math.ceil(self.tokens / cp)
        return self.layers * 2 * 2 * (tp - 1) / tp * rows * self.hidden * self.bytes


def read(files):
    """{(request text, attention): {"step": {(mesh, overlaps): s}}}, and {"exchange" or "sum": bytes a second}."""
    steps, rates = {}, {}
    for file in files:
        for line in Path(file).read_text().splitlines():
            record = json.loads(line)
            case, _, text = record.get("case", "").partition(": ")
            command = record.get("command", "")
            if record.get("bench") == "step" and record.get("unit") == "s" and case.startswith("one step, "):
                attention = re.search(r"attention[= ]('[^']*'|\S+)", command)
                mesh, _, rows = case.removeprefix("one step, ").partition(", parts of ")
                overlaps = not rows or int(rows.split()[0]) < NO_OVERLAP
                key = (text, Path(attention[1]).stem if attention else "dense")
                steps.setdefault(key, {})[mesh, overlaps] = record["value"]
            if record.get("bench") == "link" and record.get("unit") == "GB/s":
                kind = "sum" if case.startswith("sum") else "exchange" if case.startswith("exchange of q") else None
                if kind:
                    rates[kind] = record["value"] * 1e9
    return steps, rates


class Model:
    def __init__(self, request, measured, rates):
        self.request, self.rates = request, rates
        one = measured["one device", True]
        self.evaluation = one / request.evaluations
        self.guidance = max(0.0, measured["cfg 2", True] - one / 2) if ("cfg 2", True) in measured else 0.0
        self.exposed = {"tp": 1.0, "cp": 1.0}
        self.fixed = self.replicated = 0.0
        for axis in ("cp", "tp"):
            mesh = f"{axis} 2"
            plain = measured.get((mesh, False))
            overlapped = measured.get((mesh, True), plain)
            if overlapped is None:
                continue
            tp, cp, _ = degrees(mesh)
            travel = self.communication(tp, cp)
            if plain is not None:
                hidden = (plain - overlapped) / request.evaluations / travel
                self.exposed[axis] = min(1.0, max(0.0, 1 - hidden))
            beyond = overlapped / request.evaluations - self.exposed[axis] * travel - self.evaluation / 2
            if axis == "cp":
                self.fixed = max(0.0, 2 * beyond)
            else:
                self.replicated = max(0.0, 2 * beyond - self.fixed)

    def communication(self, tp, cp):
        """Seconds of an evaluation, were nothing hidden."""
        return (self.request.exchanged(tp, cp) / self.rates["exchange"] if cp > 1 else 0) + \
               (self.request.summed(tp, cp) / self.rates["sum"] if tp > 1 else 0)

    def step(self, mesh):
        """(seconds, of them communication that shows)."""
        tp, cp, cfg = degrees(mesh)
        cut = self.evaluation - self.replicated - self.fixed
        compute = cut / (tp * cp) + self.replicated / cp + self.fixed
        shown = 0.0
        if cp > 1:
            shown += self.exposed["cp"] * self.request.exchanged(tp, cp) / self.rates["exchange"]
        if tp > 1:
            shown += self.exposed["tp"] * self.request.summed(tp, cp) / self.rates["sum"]
        rounds = self.request.evaluations / cfg
        return rounds * (compute + shown) + (self.guidance if cfg > 1 else 0), rounds * shown


def main():
    files = sys.argv[1:] or sorted((Path(__file__).parent / "results").glob("*.jsonl"))
    steps, rates = read(files)
    printed = False
    for (text, attention), measured in steps.items():
        has_mesh = any(mesh in ("cp 2", "tp 2") for mesh, _ in measured)
        if ("one device", True) not in measured or not has_mesh or len(rates) < 2:
            continue
        printed = True
        model = Model(Request(text), measured, rates)
        one = measured["one device", True]
        print(f"\n{text}; attention {attention}. Links: {rates['exchange'] / 1e9:.0f} GB/s leave a GPU in an exchange, "
              f"{rates['sum'] / 1e9:.0f} in a sum. Exposed: {model.exposed['cp']:.0%} of an exchange, "
              f"{model.exposed['tp']:.0%} of a sum.\n")
        print("| GPUs | mesh | step, s | speed-up | per GPU | communication that shows | |")
        print("|---:|---|---:|---:|---:|---:|---|")
        print(f"| 1 | one device | {one:.3f} | 1.00 | 100 % | 0 % | measured |")
        for mesh in ["cp 2", "cfg 2", "tp 2"]:
            if (mesh, True) in measured:
                seconds = measured[mesh, True]
                print(f"| 2 | {mesh} | {seconds:.3f} | {one / seconds:.2f} | {one / seconds / 2:.0%} | | measured |")
        for mesh in MESHES:
            tp, cp, cfg = degrees(mesh)
            request = model.request
            fits = request.kv_heads % tp == 0 and (request.heads // tp) % cp == 0 and request.evaluations % cfg == 0
            if not fits:
                continue
            seconds, shown = model.step(mesh)
            print(f"| {tp * cp * cfg} | {mesh} | {seconds:.3f} | {one / seconds:.2f} | "
                  f"{one / seconds / (tp * cp * cfg):.0%} | {shown / seconds:.1%} | predicted |")
    if not printed:
        sys.exit("scaling_model: no request was measured on one device and on cp 2 or tp 2, with link rates beside it; "
                 "docs/parallelism.md says how to measure them")


if __name__ == "__main__":
    main()
