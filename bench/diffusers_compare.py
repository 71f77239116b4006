#!/usr/bin/env python3
"""Orrery against diffusers from PyPI: the same checkpoint, prompt, seed and size, whole processes,
start-up included, both in fp32 on the CPU. Prints a table and appends a line to
bench/results/cpu-e2e.jsonl.

    python3 bench/diffusers_compare.py [--venv DIR] [--runs N]

The virtual environment is made when it is missing (torch, diffusers, transformers, accelerate)."""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/cosmos3-pico"
PROMPT = "A small red circle moves left on a black background."
CALL = dict(height=256, width=256, num_frames=33, num_inference_steps=20, guidance_scale=4.0)
SEED = 42

CHILD = """
import sys, torch
from diffusers import Cosmos3OmniPipeline
from diffusers.utils import export_to_video
pipe = Cosmos3OmniPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.float32, enable_safety_checker=False)
pipe.set_progress_bar_config(disable=True)
out = pipe(prompt=%r, generator=torch.Generator('cpu').manual_seed(%d), enable_safety_check=False, **%r)
import numpy, imageio.v3
frames = [numpy.asarray(f) for f in (out.video[0] if isinstance(out.video[0], list) else out.video)]
numpy.save(sys.argv[2], numpy.stack(frames))
""" % (PROMPT, SEED, CALL)


def timed(command):
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build/diffusers-venv")
    parser.add_argument("--orrery", type=pathlib.Path, default=ROOT / "build/release/orrery")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    python = args.venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
        subprocess.run([args.venv / "bin/pip", "install", "-q", "torch", "diffusers", "transformers", "accelerate",
                        "imageio"], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in CALL.items()]
        orrery_command = [args.orrery, "generate", "--model", MODEL, "--prompt", PROMPT, f"--seed={SEED}", *flags,
                          "--output", f"{scratch}/orrery.mp4", "--quiet"]
        orrery = min(timed(orrery_command) for _ in range(args.runs))
        peer = min(timed([python, "-c", CHILD, MODEL, f"{scratch}/diffusers.npy"]) for _ in range(args.runs))
    version = subprocess.run([python, "-c", "import diffusers, torch; print(f'diffusers {diffusers.__version__}, torch {torch.__version__}')"],
                             check=True, capture_output=True, text=True).stdout.strip()
    print(f"orrery     {orrery:7.2f} s\ndiffusers  {peer:7.2f} s   ({version})\nratio      {peer / orrery:7.2f}")
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = dict(bench="e2e", case="pico 256x256, 33 frames, 20 steps, guidance 4, fp32, start-up included",
                  device=f"{cpu}, 2 cores", driver="", commit=commit, date=str(datetime.date.today()),
                  command="bench/diffusers_compare.py", value=round(orrery, 3), unit="s", floor=None,
                  peer=version, peer_value=round(peer, 3), ratio=round(peer / orrery, 3))
    with open(ROOT / "bench/results/cpu-e2e.jsonl", "a") as out:
        out.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
