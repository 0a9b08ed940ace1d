"""Names of the tests that need CUDA, by test program: those marked `#[ignore = "needs CUDA"]` in the sources. A folder of
scripts/gpu-bundle has no sources; its manifest lists them."""

import json
import re

from .process import ROOT

SOURCES = {"unit": ("src/tensor/**/*.rs",), "training": ("tests/training.rs", "tests/training/*.rs"), "plan": ("tests/plan/**/*.rs",)}
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


EQUAL = r"assertion `left == right` failed"
# Tests that end at a comparison of values on the fake CUDA runtime, where kernels compute nothing and memory has zeros:
# source file and message of the comparison.
ON_FAKE = {
    "a_completed_copy_has_the_values_of_its_source": ("src/tensor/async_copy.rs", EQUAL),
    "one_rank_of_nccl_keeps_its_values": ("src/tensor/collective.rs", EQUAL),
    "grouped_attention_on_a_gpu_equals_its_definition": ("src/tensor/functions.rs", "relative error NaN"),
    "segments_on_a_gpu_equal_one_call_with_a_mask": ("src/tensor/functions.rs", "relative error NaN"),
    "a_failed_capture_leaves_the_gpu_usable": ("src/tensor/graph.rs", EQUAL),
    "a_replay_repeats_the_work_with_new_random_numbers": ("src/tensor/graph.rs", "each step draws its own numbers"),
    "memory_of_failed_captures_and_dropped_graphs_is_freed": ("src/tensor/graph.rs", EQUAL),
    "a_gpu_computes_with_the_values_of_the_host": ("src/tensor/host_weights.rs", EQUAL),
    "kernels_agree_with_libtorch_on_a_gpu": ("src/tensor/kernels_tests.rs", "has elements that are not finite"),
    "a_gpu_trains_like_the_cpu": ("tests/training.rs", r"losses \[0\.0, 0\.0"),
    "captured_passes_train_alike_on_a_gpu": ("tests/training/graphs.rs", "differs by NaN"),
    # there is no cuDNN: libtorch's own convolutions take more memory
    "memory_of_generation_on_cuda_is_as_planned": ("tests/plan/gpu.rs", '"preset":"generation","sets":"model=random:sd'),
}


def end_on_fake(code, text):
    """Source file and message at which a test panicked, in one line; a signal has the negative code."""
    found = re.search(r"panicked at ([^:]+):\d+:\d+:\n(.*(?:\n.*){0,14})", text)
    return f"{found[1]}: {' / '.join(found[2].splitlines())}"[:2000] if found else f"exit code {code}: {text[-300:]}"


def is_right_on_fake(test, end):
    """True if the test passed, or ended where `ON_FAKE` expects it."""
    if test not in ON_FAKE:
        return end == "passed"
    file, message = ON_FAKE[test]
    return end.startswith(f"{file}: ") and re.search(message, end) is not None
