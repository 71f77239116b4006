#!/usr/bin/env python3
"""Opens a model folder with diffusers and transformers from PyPI and runs one step: proof that what
`orrery make-checkpoint` writes is what the public stack reads.

    orrery make-checkpoint --config nano --num-layers 1 --out DIR
    python3 bench/open_with_diffusers.py DIR [--venv DIR]

The virtual environment is made when it is missing (torch, diffusers, transformers, accelerate)."""
import argparse
import pathlib
import subprocess
import sys

CHILD = """
import sys, torch
from diffusers import Cosmos3OmniPipeline
from transformers import AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/text_tokenizer")
text = "A red circle. \\u00e9"
assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, "the tokenizer does not give back its text"
pipe = Cosmos3OmniPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, enable_safety_checker=False)
pipe.set_progress_bar_config(disable=True)
call = dict(prompt="A red circle.", height=32, width=32, num_frames=5, num_inference_steps=1,
            guidance_scale=1.0, enable_safety_check=False, generator=torch.Generator("cpu").manual_seed(1))
if pipe.sound_tokenizer is not None:
    call["enable_sound"] = True
out = pipe(**call)
print("components:", ", ".join(name for name, part in pipe.components.items() if part is not None))
print("one step ran:", type(out).__name__)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--venv", type=pathlib.Path, default=pathlib.Path("build/diffusers-venv"))
    options = parser.parse_args()
    python = options.venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(options.venv)], check=True)
        packages = ["torch", "diffusers", "transformers", "accelerate"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return subprocess.run([str(python), "-c", CHILD, str(options.model)]).returncode


if __name__ == "__main__":
    sys.exit(main())
