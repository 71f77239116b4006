#!/usr/bin/env python3
"""Holds every #include against the layer table: down only, siblings never."""
import pathlib
import re
import sys

# Folder under src/ -> folders it may include. ARCHITECTURE.md says why.
ALLOWED = {
    "base": set(),
    "tensor": {"base"},
    "backend": {"tensor", "base"},
    "dist": {"tensor", "base"},
    "cpu": {"backend", "tensor", "base"},
    "cuda": {"backend", "tensor", "base"},
    "io": {"tensor", "base"},
    "text": {"tensor", "base"},
    "attention": {"backend", "dist", "tensor", "base"},
    "model": {"attention", "io", "backend", "dist", "tensor", "base"},
    "engine": {"model", "attention", "text", "io", "cpu", "cuda", "dist", "backend", "tensor", "base"},
}
# Tools of the program, folders of apps/. The command line itself includes orrery/ and these only. They measure and
# write what no public call offers, so that they may include any layer.
TOOLS = {"bench", "compare", "published"}
# Hardware and collectives stay out of the model: only these files may name them.
ONLY_IN = {"cpu": {"engine/backends.cpp"}, "cuda": {"engine/backends.cpp"}}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    faults = []
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        name = path.relative_to(root / "src").as_posix()
        layer = name.split("/")[0]
        is_test = path.stem.endswith("_test") or path.stem.startswith("test_")
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match or "/" not in match.group(1):
                continue
            target = match.group(1).split("/")[0]
            if target in TOOLS and not is_test:
                faults.append(f"{name}:{number}: a layer may not include the tool {match.group(1)}")
            if target == layer or target not in ALLOWED:
                continue
            if is_test and target in {"cpu", "io"}:
                continue  # tests run on the CPU backend
            if target not in ALLOWED[layer]:
                faults.append(f"{name}:{number}: {layer}/ may not include {match.group(1)}")
            elif target in ONLY_IN and name not in ONLY_IN[target]:
                faults.append(f"{name}:{number}: only {', '.join(ONLY_IN[target])} may include {match.group(1)}")
    for path in sorted((root / "apps").rglob("*.[ch]*")):
        if path.relative_to(root / "apps").parts[0] in TOOLS:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match and match.group(1).split("/")[0] in ALLOWED:
                faults.append(f"{path.relative_to(root)}:{number}: the command line includes orrery/ and tools only")
    print("\n".join(faults) if faults else "layers: every include points down")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
