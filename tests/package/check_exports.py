#!/usr/bin/env python3
"""check_exports.py LIBRARY HEADERS...: the shared library exports what the headers declare, no more."""
import pathlib
import re
import subprocess
import sys


def main() -> int:
    library, headers = sys.argv[1], sys.argv[2:]
    declared = set(re.findall(r"\w+", "\n".join(pathlib.Path(h).read_text() for h in headers)))
    listing = subprocess.run(["nm", "-DC", "--defined-only", library], check=True,
                             capture_output=True, text=True).stdout
    names = [line.split(" ", 2)[2] for line in listing.splitlines()]
    faults = [f"{h}: names of this header are not exported; write namespace ORRERY_API orrery"
              for h in headers if "namespace " in (text := pathlib.Path(h).read_text())
              and "namespace ORRERY_API orrery {" not in text]
    for name in names:
        # "typeinfo for orrery::Error", "orrery::Engine::open(...)", "orrery::version[abi:cxx11]()"
        match = re.search(r"\borrery::(\w+)", name)
        if not match or match.group(1) not in declared:
            faults.append(name)
    for wanted in ("orrery::Engine::open(", "orrery::save_output(", "typeinfo for orrery::Error"):
        if not any(wanted in name for name in names):
            faults.append(f"missing: {wanted}")
    print("\n".join(faults) if faults else f"{len(names)} symbols, all declared in public headers")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
