"""Starts the compiled `prsmed` program with the libtorch of the installed `torch` package.

The launcher finds `torch` without importing it, checks its version, and replaces itself with the program.
"""

import importlib.metadata
import importlib.util
import os
import shlex
import sys
from pathlib import Path

# The libraries of torch that the program is linked with. Builds of torch for the CPU lack two of them.
LIBRARIES = ["libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so"]


class Unusable(Exception):
    """Why the installed torch cannot be used, and the options of `pip install` that repair it."""


def needed_torch():
    """The requirement of this package's metadata, for example `torch==2.11.*`."""
    return next(line for line in importlib.metadata.requires("prsmed") if line.startswith("torch=="))


def find_libtorch():
    """The folder of libtorch, if the installed torch has the needed version."""
    needed = needed_torch()
    wanted = f"prsmed {importlib.metadata.version('prsmed')} needs {needed}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Unusable(f"torch is not installed; {wanted}") from None
    # "2.11.0+cu130." starts with "2.11.", "2.1.1." does not
    if not f"{version}.".startswith(needed.removeprefix("torch==").removesuffix("*")):
        raise Unusable(f"torch {version} is installed, but {wanted}")
    spec = importlib.util.find_spec("torch")
    folder = Path((spec and spec.submodule_search_locations or ["torch"])[0]) / "lib"
    missing = [name for name in LIBRARIES if not (folder / name).exists()]
    if missing:
        reason = f"torch {version} has no {', '.join(missing)} in {folder}; {wanted} as built for CUDA"
        raise Unusable(reason, "--force-reinstall")
    return folder


def main():
    """Replaces this process with the program; returns exit code 2 if that is impossible."""
    try:
        folder = find_libtorch()
    except Unusable as error:
        reason, *options = error.args
        command = [sys.executable, "-m", "pip", "install", *options, needed_torch()]
        print(f"error: {reason}\nhint: run `{shlex.join(command)}`", file=sys.stderr)
        return 2
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}
    os.execve(Path(__file__).with_name("prsmed"), ["prsmed", *sys.argv[1:]], environment)


if __name__ == "__main__":
    sys.exit(main())
