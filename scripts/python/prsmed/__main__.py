"""Starts the compiled `prsmed` program with the libtorch of the installed `torch` package.

The launcher finds `torch` without importing it, checks its version, and replaces itself with the program.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

# The libraries of torch that the program is linked with. It opens those of CUDA itself, if there is an NVIDIA driver.
LIBRARIES = ["libtorch_cpu.so", "libc10.so"]


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
        raise Unusable(f"torch {version} has no {', '.join(missing)} in {folder}; {wanted}", "--force-reinstall")
    if missing := missing_of_cuda(folder):
        reason = f"torch {version} needs {' and '.join(missing)}, also on the CPU, but they are not installed"
        raise Unusable(reason, "--force-reinstall")
    return folder


def missing_of_cuda(folder):
    """The libraries of CUDA that libtorch_cpu.so is linked with in builds for CUDA, if they cannot be found."""
    try:
        cuda = re.search(r"^cuda\b[^=]*= '(\d+)", (folder.parent / "version.py").read_text(), re.MULTILINE)
    except OSError:
        return []
    names = [f"lib{name}.so.{cuda[1]}" for name in ("cudart", "cupti")] if cuda else []
    return [name for name in names if not is_found(name, folder)]


def is_found(name, folder):
    """Whether a library is in a wheel beside torch, or where the dynamic linker searches."""
    if any((folder.parents[1] / "nvidia").glob(f"*/lib/{name}")):
        return True
    import ctypes  # takes a hundredth of a second, and is seldom needed

    try:
        return bool(ctypes.CDLL(name))
    except OSError:
        return False


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
