#!/usr/bin/env python3
"""Holds every C++ and CUDA file against .clang-format.

Releases of clang-format differ. The tree is formatted by release 14 (Debian 12); with another one
nothing is checked and the exit status is 77."""
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "include", "apps", "tests", "bench", "examples")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def main() -> int:
    tool = shutil.which("clang-format-14") or shutil.which("clang-format")
    asked = subprocess.run([tool, "--version"], capture_output=True, text=True) if tool else None
    version = asked.stdout if asked else ""
    if "version 14." not in version:
        print(f"format not checked: no clang-format 14 ({version.strip() or 'none found'})")
        return 77
    files = [str(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))
             if path.suffix in SUFFIXES]
    jobs = os.cpu_count() or 1

    def check(part: int) -> int:
        return subprocess.run([tool, "--dry-run", "-Werror", *files[part::jobs]]).returncode

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        statuses = list(pool.map(check, range(jobs)))
    if any(statuses):
        print("run clang-format -i on these files")
        return 1
    print(f"format: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
