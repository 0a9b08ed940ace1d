"""Names of the tests that need CUDA, by test program: those marked `#[ignore = "needs CUDA"]` in the sources. A folder of
scripts/gpu-bundle has no sources; its manifest lists them."""

import json
import re

from .process import ROOT

SOURCES = {"unit": ("src/**/*.rs",), "training": ("tests/training.rs", "tests/training/*.rs"), "plan": ("tests/plan/**/*.rs",)}
MARKED = re.compile(r'#\[ignore = "needs CUDA"\]\s*(?:#\[[^\]]*\]\s*)*fn (\w+)')


def names(kind):
    manifest = ROOT / "manifest.json"
    if manifest.exists():
        return json.loads(manifest.read_text())["cuda_tests"][kind]
    files = sorted(path for pattern in SOURCES[kind] for path in ROOT.glob(pattern))
    return sorted(name for path in files for name in MARKED.findall(path.read_text()))


def of_listing(listing, kind):
    """Full names of these tests in the output of `--ignored --list`. Raises `LookupError` if it has others of them."""
    listed = [line.removesuffix(": test") for line in listing.splitlines() if line.endswith(": test")]
    wanted = names(kind)
    chosen = [test for test in listed if test.rpartition("::")[2] in wanted]
    found = sorted(test.rpartition("::")[2] for test in chosen)
    if found != wanted:
        raise LookupError(f"the program has the CUDA tests {found}, the sources have {wanted}")
    return chosen
