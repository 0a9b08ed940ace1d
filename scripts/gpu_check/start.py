"""Start of `run` in a folder of scripts/gpu-bundle: checks this machine, unpacks the programs and the missing Python
packages, and starts gpu-check. Needs only Python's standard library.

    bash run [--seconds 470] [--out OUT] [--call 1|2|rest|all] [--again] ...    the options of gpu-check
    bash run --dry [--tiny]                                              the same cases without a GPU
    bash run --report OUT

--seconds counts from the start of `run`. PYTHON names the Python that has PyTorch (default: python3).

Copy results.jsonl of a call into this folder before the next call: cases that are done do not run again. Compiled kernels
and the reading of `calibrate` are in a folder beside this one, so that a new copy of this folder does not remove them.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[2]
# these versions were tried together
TOGETHER = ("transformers", "tokenizers", "huggingface-hub", "accelerate", "safetensors", "peft", "diffusers")


def installed_torch():
    """Version of PyTorch, its CUDA version and its folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{sys.executable} has no PyTorch: name a Python that has it in PYTHON")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    value = lambda name: (re.search(rf"^{name}\b[^=]*= '([^']+)'", text, re.M) or [None, None])[1]
    return value("__version__"), value("cuda"), folder


def check_torch(manifest):
    version, cuda, folder = installed_torch()
    wanted = manifest["torch"], manifest["cuda"]
    found = (version or "").split("+")[0], cuda
    if found != wanted and "GPU_CHECK_ANY_TORCH" not in os.environ:
        raise SystemExit(f"the programs were built for torch {wanted[0]} with CUDA {wanted[1]}, but {sys.executable} has torch "
                         f"{found[0]} with CUDA {found[1]}. Install torch=={wanted[0]}, or set GPU_CHECK_ANY_TORCH=1 to try")
    return folder / "lib"


def unpack(work):
    """The programs, once for each version of the archive."""
    archive = BUNDLE / "programs.tar.xz"
    stamp, state = work / "unpacked", f"{archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if not stamp.exists() or stamp.read_text() != state:
        shutil.rmtree(work / "programs", ignore_errors=True)
        with tarfile.open(archive) as file:
            file.extractall(work, filter="data") if hasattr(tarfile, "data_filter") else file.extractall(work)
        stamp.write_text(state)
    return work / "programs"


def fits(wheel):
    """True if a wheel is for this Python: its tag is py3, this version, or an older stable ABI."""
    _, _, *rest = wheel.stem.split("-")
    python, abi = rest[-3], rest[-2]
    minor = sys.version_info.minor
    return "py3" in python.split(".") or python == f"cp3{minor}" or (abi == "abi3" and int(python[3:]) <= minor)


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpack_packages(site):
    """Unpacks the wheels of packages that this Python lacks. If one of TOGETHER has another version, all of them."""
    wheels = {}
    for path in sorted((BUNDLE / "wheels").glob("*.whl")):
        name, version = path.name.split("-")[:2]
        wheels[normal(name)] = (version, path)
    differ = [name for name in TOGETHER if name in wheels and installed(name) not in (None, wheels[name][0])]
    chosen = [name for name, (_, path) in wheels.items()
              if (installed(name) is None or (differ and name in TOGETHER)) and fits(path)]
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for name in chosen:
        with zipfile.ZipFile(wheels[name][1]) as file:
            file.extractall(site)
    no_fit = [name for name, (_, path) in wheels.items() if installed(name) is None and not fits(path)]
    if no_fit:
        print(f"no wheel for this Python: {', '.join(no_fit)}", file=sys.stderr)
    return chosen


def main():
    start = time.monotonic()
    words = sys.argv[1:]
    if "-h" in words or "--help" in words:
        print(__doc__)
        return 0
    options = dict(zip(words, [*words[1:], ""]))
    is_dry, is_report = "--dry" in words, "--report" in words
    environment = os.environ | {"PYTHONPATH": f"{BUNDLE / 'scripts'}"}
    environment["PYTHONUNBUFFERED"] = "1"
    # nothing here may wait for a network
    environment["HF_HUB_OFFLINE"] = "1"
    if is_report:
        # needs no programs
        return subprocess.run([sys.executable, "-m", "gpu_check", *words], env=environment).returncode
    manifest = json.loads((BUNDLE / "manifest.json").read_text())
    library = check_torch(manifest)
    if not is_dry:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SystemExit(f"no NVIDIA driver: {error}. `--dry` runs the same cases without a GPU") from error
    work = BUNDLE / "work"
    work.mkdir(exist_ok=True)
    programs = unpack(work)
    chosen = unpack_packages(work / "site")
    print(f"prsmed of commit {manifest['commit']}; packages from the folder: {', '.join(chosen) or 'none'}", file=sys.stderr)
    # cuDNN opens its parts by their bare names: those of this torch come first
    wheels = sorted(map(str, (library.parent.parent / "nvidia").glob("*/lib")))
    environment |= {
        "PRSMED": str(programs / "prsmed"), "PRSMED_FAKE_CUDA": str(programs / "fake_cuda"),
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(library), *wheels, os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": ":".join(filter(None, [str(BUNDLE / "scripts"), str(work / "site"), os.environ.get("PYTHONPATH")])),
    }
    environment["PRSMED_CACHE"] = f"{BUNDLE}-cache{'-dry' if is_dry else ''}"
    out = Path(options.get("--out", BUNDLE / ("out-dry" if is_dry else "out"))).resolve()
    if "--out" in words:
        words[words.index("--out") + 1] = str(out)
    else:
        words += ["--out", str(out)]
    earlier = BUNDLE / "results.jsonl"
    if earlier.exists() and not (out / "results.jsonl").exists():
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(earlier, out)
    seconds = float(options.get("--seconds", {"1": 470, "2": 200}.get(options.get("--call", "1"), 86400)))
    seconds -= time.monotonic() - start
    if "--seconds" in words:
        words[words.index("--seconds") + 1] = f"{seconds:.0f}"
    else:
        words += ["--seconds", f"{seconds:.0f}"]
    os.execve(sys.executable, [sys.executable, "-m", "gpu_check", *words], environment)


if __name__ == "__main__":
    sys.exit(main())
