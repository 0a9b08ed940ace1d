"""All measurements and tests that need a GPU. See `scripts/gpu-check --help`."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import report
from .ballast import BallastError
from .cases import CALLS, START, Failed, Machine, Skipped, Stop
from .process import ROOT
from .results import Results, latest, read

EPILOG = """Every measurement appends one line to OUT/results.jsonl at once. A run that was killed keeps its finished lines. A
run with the same OUT skips what is done and tries failed cases again. report.md is made from the lines at any time. At the end
OUT contains at most four files: results.jsonl, report.md, gpu-check.log and recorded.tar.xz.

PRSMED names the program; test programs `unit-*`, `training-*` and `plan-*` are in the same folder. This script builds
nothing: scripts/gpu-bundle makes a folder with everything for another machine."""


def arguments():
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0], epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output folder [default: target/gpu-check]")
    parser.add_argument("--call", choices=("1", "2", "rest", "all"),
                        help="which list of cases [default: 1; all with --dry]")
    parser.add_argument("--only", default="", help="only these cases or groups, separated by commas: step,torch/eager")
    parser.add_argument("--seconds", type=float, help="time limit of the run [default: that of the call "
                        f"({', '.join(f'{name}: {seconds - START}' for name, seconds in CALLS.items())}); none with --dry]")
    parser.add_argument("--again", action="store_true", help="measure cases again that are done")
    parser.add_argument("--dry", action="store_true", help="all cases without a GPU: on the fake CUDA runtime of "
                        "tests/fake_cuda if it was built, else on the CPU at tiny sizes; times mean nothing")
    parser.add_argument("--tiny", action="store_true", help="with --dry: tiny sizes also on the fake CUDA runtime")
    parser.add_argument("--list", action="store_true", help="print the names and time limits of the cases")
    parser.add_argument("--report", type=Path, nargs="+", metavar="OUT",
                        help="make report.md in the first of these folders from the lines of all, and measure nothing")
    return parser.parse_args()


def is_asked(name, options):
    """True if `--only` names the case or a group of it: `torch` or `torch/eager` for `torch/eager/rows/all`."""
    return not options.only or any(f"{name}/".startswith(f"{prefix}/") for prefix in options.only.split(",") if prefix)


def wanted_names(case, options, machine):
    names = [name for name in case.names if is_asked(name, options)]
    return names if options.again else [name for name in names if not machine.is_done(name)]


def measure(case, names, machine, results, end):
    """Runs a case. Results that are still missing afterwards become lines with the reason."""
    start = time.monotonic()
    # a dry run may share a small machine with other work
    machine.deadline = min(start + case.seconds * (5 if machine.dry else 1), end)
    num_lines = len(results.lines)
    state, reason = "failed", "the case ended without a result"
    try:
        if case.group != "gpus":
            machine.release()
        case.work(names)
    except Skipped as error:
        state, reason = "skipped", str(error)
    except Stop as error:
        for name in names:
            results.add(name, "failed", error=str(error), where=machine.where)
        raise
    except (Failed, BallastError) as error:
        reason = str(error)
    except (KeyError, ValueError, OSError, IndexError, TypeError, AttributeError, subprocess.SubprocessError) as error:
        reason = f"{type(error).__name__}: {error}"
    written = {line["case"] for line in results.lines[num_lines:]}
    for name in names:
        if name not in written:
            results.add(name, state, error=reason, where=machine.where)
    return time.monotonic() - start


def run(options, out):
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out)
    seconds = options.seconds or CALLS.get(options.call or "1", 24 * 3600 + START) - START
    end = time.monotonic() + (seconds if not options.dry else 24 * 3600)
    with (out / "gpu-check.log").open("a") as log:
        machine = Machine(results, log, options.dry, options.tiny)
        if not options.dry and not machine.driver.has_gpu:
            raise SystemExit("neither NVML nor nvidia-smi shows a GPU: `--dry` runs the same cases without one")
        others = {line.get("where") for line in results.lines} - {machine.where}
        if others:
            kinds = ", ".join(map(str, others))
            raise SystemExit(f"{out} has results of another kind ({kinds}): name another folder in --out")
        gpus = {line["gpu_name"] for line in results.lines if line.get("gpu_name")} - {machine.gpu_name}
        if gpus:
            raise SystemExit(f"{out} has results of {', '.join(sorted(gpus))}, and this is {machine.gpu_name}: name another "
                             "folder in --out")
        call = options.call or ("all" if options.dry else "1")
        calls = machine.calls()
        cases = [case for name, cases in calls.items() if call in (name, "all") for case in cases]
        selected = [name for case in cases for name in case.names]
        try:
            for case in cases:
                names = wanted_names(case, options, machine)
                if not names:
                    continue
                left = end - time.monotonic()
                # a case that cannot end in time would only take the time of shorter ones
                if left < min(15, case.seconds / 3):
                    print(f"{', '.join(names)}: not run, {left:.0f} s are left", file=sys.stderr, flush=True)
                    continue
                print(f"{', '.join(names)} ...", file=sys.stderr, flush=True)
                seconds = measure(case, names, machine, results, end)
                states = [f"{name}: {results.latest()[name]['state']}" for name in names]
                print(f"  {', '.join(states)} ({seconds:.1f} s)", file=sys.stderr, flush=True)
                report.write(out, results.lines, selected)
        except Stop as error:
            print(f"stopped: {error}", file=sys.stderr, flush=True)
        finally:
            machine.release()
            machine.closing.close()
    print(report.write(out, results.lines, selected))
    found = results.latest()
    asked = [name for name in selected if is_asked(name, options)]
    bad = [name for name in asked if name not in found or found[name]["state"] == "failed"]
    if bad:
        print(f"failed or not run: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def main():
    options = arguments()
    if options.tiny and not options.dry:
        raise SystemExit("--tiny needs --dry")
    if options.report:
        lines = [line for folder in options.report for line in read(folder / "results.jsonl")]
        if not latest(lines):
            raise SystemExit(f"no results in {', '.join(str(folder) for folder in options.report)}")
        print(report.write(options.report[0], lines))
        return 0
    if options.list:
        for call, cases in Machine(None, None, False, False).calls().items():
            for case in cases:
                print(f"call {call:4}  {case.seconds:4.0f} s  {', '.join(case.names)}")
            print(f"call {call:4}  {sum(case.seconds for case in cases):4.0f} s  in all\n")
        return 0
    name = "gpu-check-dry" if options.dry else "gpu-check"
    return run(options, (options.out or ROOT / "target" / name).resolve())


if __name__ == "__main__":
    sys.exit(main())
