#!/usr/bin/env python3
"""Times one run of the program with 0, 1 and 2 busy neighbours on two cores; prints a JSON line each.

    bench/neighbours.py NAME=PROGRAM ... > bench/results/neighbours.jsonl

Programs take turns within each repeat, so that what else the machine does falls on all alike; a
line holds the median of the repeats and all of them.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUEST = ["generate", "--model", str(ROOT / "models/cosmos3-pico"), "--prompt",
           "A small red circle.", "--height", "256", "--width", "256", "--num-frames", "1",
           "--num-inference-steps", "10", "--guidance-scale", "4", "--quiet"]


def seconds(program, cores, output):
    start = time.monotonic()
    subprocess.run(["taskset", "-c", cores, program, *REQUEST, "--output", output],
                   check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="+", metavar="NAME=PROGRAM")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    programs = [text.split("=", 1) for text in arguments.programs]
    with tempfile.TemporaryDirectory() as folder:
        for neighbours in range(3):
            loop = ["taskset", "-c", arguments.cores, sys.executable, "-c", "while True: pass"]
            busy = [subprocess.Popen(loop) for _ in range(neighbours)]
            times = {name: [] for name, _ in programs}
            try:
                for _ in range(arguments.repeats):
                    for name, program in programs:
                        output = os.path.join(folder, "x.png")
                        times[name].append(seconds(program, arguments.cores, output))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            for name, _ in programs:
                print(json.dumps({"bench": "neighbours",
                                  "case": f"{name}, {neighbours} busy neighbours",
                                  "value": round(statistics.median(times[name]), 3), "unit": "s",
                                  "repeats": [round(t, 3) for t in times[name]],
                                  "load_before": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
