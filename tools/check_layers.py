#!/usr/bin/env python3
"""Holds every #include, and the table in ARCHITECTURE.md, against src/layers.txt."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders of apps/ that are tools of the program: they measure and write what no public call offers,
# so they may include any layer. Other folders of apps/ include orrery/ and tools only.
TOOLS = {"bench", "compare", "published"}
# The model does not know where it runs: only these files name a backend of their layer's.
ONLY_IN = {"cpu": {"engine/backends.cpp"}, "cuda": {"engine/backends.cpp"}}
# Tests of a layer run on the CPU backend, with files and with random weights.
TESTS_MAY = {"cpu", "io", "published"}
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"/]+)/([^"]+)"')


def read_layers() -> dict[str, set[str]]:
    lines = (ROOT / "src/layers.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {row[0]: set(row[1:]) for row in rows}


def includes(folder: pathlib.Path):
    """(file, line number, first folder of the included path, included path)"""
    for path in sorted(p for p in folder.rglob("*") if p.suffix in SOURCES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := INCLUDE.match(line):
                yield path, number, match.group(1), "/".join(match.groups())


def check_source(layers: dict[str, set[str]]) -> list[str]:
    faults = []
    for path, number, target, included in includes(ROOT / "src"):
        name = path.relative_to(ROOT / "src").as_posix()
        layer = name.split("/")[0]
        if path.stem.endswith("_test") or path.stem.startswith("test_"):
            if target in TESTS_MAY:
                continue
        if target == layer or target not in set(layers) | TOOLS:
            continue
        if target not in layers[layer]:
            faults.append(f"src/{name}:{number}: {layer}/ may not include {included}")
        elif target in ONLY_IN and name not in ONLY_IN[target]:
            only = ", ".join(ONLY_IN[target])
            faults.append(f"src/{name}:{number}: only {only} may include {included}")
    return faults


def check_apps(layers: dict[str, set[str]]) -> list[str]:
    faults = []
    for path, number, target, included in includes(ROOT / "apps"):
        name = path.relative_to(ROOT)
        if name.parts[1] not in TOOLS and target in layers:
            faults.append(f"{name}:{number}: {included} is a layer; include orrery/ and tools only")
    return faults


def check_page(layers: dict[str, set[str]]) -> list[str]:
    """Rows of the page: | level | `src/a`, `src/b` | what | may include |"""
    faults, told = [], {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or not cells[0].isdigit():
            continue
        for folder in re.findall(r"`src/(\w+)`", cells[1]):
            words = set(re.findall(r"\w+", cells[3])) & set(layers)
            told[folder] = set(layers) - {folder} if cells[3] == "everything below" else words
    for layer, allowed in layers.items():
        if told.get(layer) != allowed:
            faults.append(f"ARCHITECTURE.md: {layer} includes {told.get(layer)}, not {allowed}")
    return faults


def main() -> int:
    layers = read_layers()
    faults = check_source(layers) + check_apps(layers) + check_page(layers)
    print("\n".join(faults) if faults else "layers: every include points down")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
