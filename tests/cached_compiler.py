"""g++ for the tests of one run: an object that was compiled before from the same text, headers and flags is copied.

Every test has a cache of its own and so would compile the same kernels again. Run as a program: compiler, folder of
objects, then the compiler's arguments. Whatever is not the compilation of one source is left to the compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def _key(arguments: list[str], source: Path, output: str) -> str:
    """Everything that the object depends on, but for headers of the system and of torch, which stay what they are."""
    folders = [source.parent, *(Path(a[2:]) for a in arguments if a.startswith("-I") and a.endswith("/ops"))]
    digest = hashlib.sha256("\n".join(a for a in arguments if a not in (str(source), output)).encode())
    for file in (source, *(header for folder in folders for header in sorted(folder.glob("*.h")))):
        digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def main(compiler: str, folder: str, *arguments: str) -> int:
    """The compiler's exit status."""
    sources = [Path(a) for a in arguments if a.endswith(".cpp")]
    if "-c" not in arguments or "-o" not in arguments or len(sources) != 1 or not sources[0].exists():
        os.execv(compiler, [compiler, *arguments])
    output = arguments[arguments.index("-o") + 1]
    made = Path(folder) / f"{_key([*arguments], sources[0], output)}.o"
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            shutil.copyfile(made, output)
            return 0
        status = subprocess.run([compiler, *arguments]).returncode
        if status == 0:
            partial = made.with_suffix(".partial")
            shutil.copyfile(output, partial)
            partial.replace(made)
        return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
