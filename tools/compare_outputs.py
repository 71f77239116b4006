#!/usr/bin/env python3
"""Runs one list of requests over all modes on two builds of the program and compares what they make.

    tools/compare_outputs.py OLD NEW [--only NAME,NAME] [--keep DIR]

Pixels (of videos those that ffmpeg decodes), final latents, actions and sound must be equal byte for
byte; metadata and container layout may differ. Exits with 1 when a case differs or a program fails.
Needs ffmpeg. Everything runs on the CPU with two threads.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICO = ROOT / "models/cosmos3-pico"
TINY = ROOT / "tests/golden/data/pipeline/model"  # random weights, with sound
RED = "A small red circle moves left on a black background."
DISTILLED = {
    "modular_model_index.json": {
        "_class_name": "Cosmos3DistilledModularPipeline",
        "is_distilled": True,
        "distilled_sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625],
    },
    "scheduler/scheduler_config.json": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "stochastic_sampling": True,
        "fixed_step_requires_explicit_sigmas": True,
        "fixed_step_sampler_config": {
            "sample_type": "sde",
            "t_list": [1.0, 0.9375, 0.8333, 0.625],
        },
    },
}


def small(frames, size=64, steps=2, guidance=3.0, prompt=RED):
    return ["--prompt", prompt, "--height", str(size), "--width", str(size), "--num-frames", str(frames),
            "--num-inference-steps", str(steps), "--guidance-scale", str(guidance), "--seed", "7"]


def action(mode):
    return ["--prompt", "Push the white square right.", "--action-mode", mode, "--action-chunk-size", "8",
            "--domain-name", "pusht", "--resolution-tier", "256", "--fps", "10", "--num-inference-steps", "2",
            "--guidance-scale", "1", "--seed", "11"]


def cases(inputs):
    """Name, model, kind of output, flags. `inputs` holds clip.mp4, image.png and actions.json."""
    clip, image = str(inputs / "clip.mp4"), str(inputs / "image.png")
    recipe = str(ROOT / "recipes/attention/pico-dense-mixed-dense.json")
    return [
        ("image", PICO, "png", small(1, 96)),
        ("video", PICO, "mp4", small(9, 96, steps=3) + ["--negative-prompt", "blurred"]),
        ("image-to-video", PICO, "mp4", small(9) + ["--image", image]),
        ("video-to-video", PICO, "mp4", small(13) + ["--video-path", clip]),
        ("video-to-video-last", PICO, "mp4",
         small(13) + ["--video-path", clip, "--condition-video-keep", "last", "--video-fit", "cover"]),
        ("sound", "sound", "mp4", small(9, 32) + ["--enable-sound"]),
        ("policy", PICO, "mp4", action("policy") + ["--image", image]),
        ("forward-dynamics", PICO, "mp4",
         action("forward_dynamics") + ["--image", image, "--action-path", str(inputs / "actions.json")]),
        ("inverse-dynamics", PICO, "mp4", action("inverse_dynamics") + ["--vision-path", clip]),
        ("transfer-chunks", PICO, "mp4",
         small(17, 64) + ["--video-path", clip, "--control", "edge", "--num-video-frames-per-chunk", "9"]),
        ("transfer-two", PICO, "mp4",
         small(13, 64) + ["--video-path", clip, "--control", "edge", "--control", "blur", "--control-weight",
                          "blur=2", "--control-guidance", "1.5", "--control-guidance-interval", "500", "1000",
                          "--num-first-chunk-conditional-frames", "1"]),
        ("sparse", PICO, "mp4", small(17, 128, steps=6) + ["--attention", recipe]),
        ("distilled", "distilled", "mp4",
         ["--prompt", RED, "--height", "32", "--width", "32", "--num-frames", "13", "--seed", "3"]),
        ("tiles", PICO, "png", small(1, 288) + ["--vae-tiling"]),
        ("cuda-noise", PICO, "png", small(1) + ["--rng", "cuda", "--noise-dtype", "bf16"]),
        ("guidance-ranks", PICO, "mp4", small(9) + ["--cfg-degree", "2"]),
        ("context-ranks", PICO, "mp4", small(9) + ["--cp-degree", "2"]),
        ("tensor-ranks", PICO, "mp4", small(9) + ["--tp-degree", "2"]),
        ("transfer-ranks", PICO, "mp4",
         small(17) + ["--video-path", clip, "--control", "edge", "--num-video-frames-per-chunk", "9",
                      "--cfg-degree", "2"]),
    ]


def variant(folder, model, files):
    """A copy of a model folder, of links but for some files of JSON."""
    for path in model.rglob("*"):
        target = folder / path.relative_to(model)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def make_models(work):
    """The models that no folder of the tree is."""
    sound = "sound_tokenizer/config.json"
    config = json.loads((TINY / sound).read_text()) | {"sampling_rate": 8000}  # a rate that AAC has
    return {
        "distilled": variant(work / "distilled-model", PICO, DISTILLED),
        "sound": variant(work / "sound-model", TINY, {sound: config}),
    }


def make_inputs(folder):
    folder.mkdir()
    source = "testsrc=size=96x96:rate=10"
    for output, frames in (("clip.mp4", 17), ("image.png", 1)):
        subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, "-frames:v", str(frames), "-pix_fmt",
                        "rgb24" if frames == 1 else "yuv420p", str(folder / output)], check=True)
    (folder / "actions.json").write_text(json.dumps([[0.1 * i, 0.5 - 0.1 * i] for i in range(8)]))
    return folder


def run(program, model, kind, flags, folder):
    folder.mkdir(parents=True)
    files = [f"out.{kind}", "latents.safetensors", "report.json"]
    command = [program, "generate", "--model", str(model), "--output", files[0], "--save-latents", files[1],
               "--report", files[2], "--threads", "2", "--quiet"] + flags
    if "--action-mode" in flags and "forward_dynamics" not in flags:
        command += ["--save-action", "action.json"]
    if "--enable-sound" in flags:
        command += ["--save-sound", "sound.wav"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr.strip()}"


def png_pixels(data):
    """The decompressed scanlines and the header of a PNG."""
    at, header, body = 8, b"", b""
    while at < len(data):
        size, name = int.from_bytes(data[at:at + 4], "big"), data[at + 4:at + 8]
        chunk = data[at + 8:at + 8 + size]
        if name == b"IHDR":
            header = chunk
        if name == b"IDAT":
            body += chunk
        at += 12 + size
    return header + zlib.decompress(body)


def content(path):
    """What counts of a file."""
    data = path.read_bytes()
    if path.suffix == ".png":
        return png_pixels(data)
    if path.suffix == ".mp4":
        return subprocess.run(["ffmpeg", "-v", "error", "-i", str(path), "-f", "framemd5", "-"], check=True,
                              capture_output=True).stdout
    if path.suffix == ".safetensors":
        return data[8 + int.from_bytes(data[:8], "little"):]
    return data


def compare(a, b):
    """Names of files that differ; the report is not compared."""
    names = sorted({p.name for p in a.iterdir()} | {p.name for p in b.iterdir()})
    faults = []
    for name in names:
        if name == "report.json":
            continue
        if not (a / name).exists() or not (b / name).exists():
            faults.append(f"{name} is missing in one")
        elif content(a / name) != content(b / name):
            faults.append(f"{name} differs")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--keep", help="folder in which everything stays")
    given = parser.parse_args()
    programs = {"old": os.path.abspath(given.old), "new": os.path.abspath(given.new)}
    work = pathlib.Path(given.keep or tempfile.mkdtemp(prefix="orrery-compare-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    inputs = make_inputs(work / "inputs")
    made = make_models(work)
    wanted = given.only.split(",") if given.only else None
    failed = 0
    for name, model, kind, flags in cases(inputs):
        if wanted and name not in wanted:
            continue
        faults = []
        for which, program in programs.items():
            fault = run(program, made.get(model, model), kind, flags, work / which / name)
            if fault:
                faults.append(f"{which}: {fault}")
        faults = faults or compare(work / "old" / name, work / "new" / name)
        failed += bool(faults)
        print(f"{name}: {'; '.join(faults) if faults else 'equal'}", flush=True)
    if not given.keep:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
