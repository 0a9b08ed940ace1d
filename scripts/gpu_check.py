"""All measurements and tests that need a GPU, for `scripts/gpu-check`. They run in sections with a time limit each; a
section that fails or is skipped does not stop the others.

    gpu_check.py [--out OUT] [--only NAME,NAME] [--seconds N]
    gpu_check.py --dry      runs every section at tiny sizes on the CPU to test the scripts; measures nothing

PRSMED names the binary (default: target/gpu/prsmed from scripts/gpu-pack, else target/release, else target/debug). Test
binaries `training-*` and `plan-*` are in the same folder. This script builds nothing. PYTHON (here: the running one)
needs PyTorch, transformers and peft.

Writes to OUT: gpu-check.json (all results), gpu-check.md (for benches/RESULTS.md), gpu-check.log, and recorded/ (for
tests/plan/recorded).
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generation_check import ROOT, Driver, find_binary, measured, records

LLM_USE, SPEEDUP, PLAN_OFF = 0.45, 1.3, 0.03
GPU_SIZES = (8, 12, 16, 24, 40, 80)
TEXT = ["--text-tokens", "192", "--answer-tokens", "168"]
# the full model at published sizes; PyTorch's step fits 80 GB
FULL = dict(preset="full", sets=["train.micro_batch=4", "train.accumulation=1", "data.questions_per_image=1",
                                 "train.precision=bf16", "train.checkpointing=none",
                                 "train.checkpoint_encoder=none", "train.graph=off", "train.fused_kernels=off"],
                                 steps=6, warmup=3)
DRY = dict(preset="tiny", sets=["model.image_size=64", "train.micro_batch=2", "train.graph=off",
                                "train.fused_kernels=off"], steps=1, warmup=1)


class Failed(Exception):
    """A section failed; the text gives the reason, `out` is its output until then."""

    def __init__(self, text, out=""):
        super().__init__(text)
        self.out = out


class Missing(Exception):
    """This machine lacks something that a section needs."""


class Check:
    def __init__(self, options, out):
        self.dry, self.out = options.dry, out
        self.binary, self.environment = find_binary()
        self.case = DRY if self.dry else FULL
        self.end = time.monotonic() + options.seconds
        self.section_end = self.end
        self.log = (out / "gpu-check.log").open("w")
        self.driver = Driver()
        if self.dry:
            self.driver.has_gpu = False
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.found, self.targets, self.states = {}, [], {}

    # --- running things
    # -------------------------------------------------------------------------------------------------

    def left(self):
        return min(self.end, self.section_end) - time.monotonic()

    def run(self, command, may_fail=False, driver=False):
        """Runs `command` and logs it; returns exit code, stdout, stderr and, with `driver`, the peak of device memory.
        """
        left = self.left()
        if left < 2:
            raise Failed("no time left")
        command = ["timeout", "--kill-after=5", f"{left:.0f}", *map(str, command)]
        watch = self.driver if driver else Driver.none()
        start = time.monotonic()
        code, out, err, peak = measured(watch, command, self.environment)
        self.log.write(f"$ {' '.join(command[3:])}\n{out}{err}[exit code {code}, {time.monotonic() - start:.1f} s]\n\n")
        self.log.flush()
        if code == 124 or code == -9 or code == 137:
            raise Failed(f"out of time: {' '.join(command[3:6])} ...", out)
        if code == 3 and not may_fail:
            raise Missing(err.strip().splitlines()[-1] if err.strip() else "exit code 3")
        if code != 0 and not may_fail:
            raise Failed(f"exit code {code}: {' '.join(err.split())[-300:]}", out)
        return code, out, err, peak

    def prsmed(self, *words, may_fail=False, driver=False):
        code, out, err, peak = self.run([self.binary, "--json", "--quiet", *words], may_fail, driver)
        return code, (records(out) or [{}])[-1], err, peak

    def bench(self, *words, sets=(), case=None, **how):
        case = case or self.case
        settings = [word for pair in [*case["sets"], *sets] for word in ("--set", pair)]
        count = ["--steps", case["steps"], "--warmup", case["warmup"]]
        text = [] if self.dry else TEXT
        device = ["--device", "cpu" if self.dry else "cuda"]
        return self.prsmed("bench", "--preset", case["preset"], *device, *settings, *count, *text, *words, **how)

    def target(self, text, value, met):
        state = "dry" if self.dry else "met" if met else "MISSED"
        self.targets.append({"target": text, "value": value, "state": state})

    # --- sections
    # -------------------------------------------------------------------------------------------------------

    def machine(self):
        machine = platform.processor() or platform.machine()
        if self.driver.has_gpu:
            query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
            machine = subprocess.check_output(query, text=True).strip()
        code = "import torch; print(torch.__version__)"
        torch = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        version = self.run([self.binary, "--version"])[1].strip()
        return {"machine": machine, "torch": torch, "prsmed": version, "date": str(datetime.date.today())}

    def switch(self, setting, rounds=2):
        """Compares a step with and without a setting, alternately; a faster setting is used in later sections."""
        rounds = 1 if self.dry else rounds
        _, record, _, _ = self.bench("--compare", setting, "--rounds", rounds, sets=self.found.get("kept", []))
        notes = [note for measured in record["with"] for note in measured.get("notes", [])]
        if record["time_ratio"] < 1 and not any(": off" in note for note in notes):
            self.found.setdefault("kept", []).append(setting)
        return {key: record[key] for key in ("change", "time_ratio", "peak_ratio", "time_ratios")} | {"notes": notes}

    def kernels(self):
        found = {"step": self.switch("train.fused_kernels=on"), "each": []}
        with contextlib.suppress(Missing):
            for test in self.test_binaries():
                out = self.run([test, "kernels", *self.test_words()], may_fail=True)[1]
                found["each"] += [record for record in records(out) if record.get("kind") == "kernel"]
        return found

    def step(self):
        kept = self.found.get("kept", [])
        _, whole, _, peak = self.bench("--measure-peak", "--parts", sets=kept, driver=True)
        _, llm, _, _ = self.bench("--measure-peak", "--part", "llm", sets=kept)
        use = llm["utilisation"]
        self.target(f"language model: at least {LLM_USE:.0%} of the measured matrix product rate", f"{use:.1%}",
                    use >= LLM_USE)
        whole["driver_peak"] = peak
        for record in (whole, llm):
            record.pop("config", None)
        return {"switches": kept, "all": whole, "llm": llm}

    def torch(self):
        ours = self.found.get("step")
        words = ["--batch", "4", *TEXT]
        if self.dry:
            words = ("--size tiny --device cpu --precision fp32 --batch 2 --steps 1 --warmup 1 "
                     "--text-tokens 50 --answer-tokens 17").split()
        rows, missing = [], []
        for mode in ("eager", "compile"):
            # compiling the whole model for a CPU takes minutes
            parts = "llm" if self.dry and mode == "compile" else "llm,all"
            command = [sys.executable, ROOT / "scripts/baseline/step_7b.py", "--mode", mode, "--parts", parts, *words]
            try:
                out = self.run(command)[1]
            except Failed as error:
                missing.append(f"{mode}: {error}")
                out = error.out
            rows += [record for record in records(out) if record.get("kind") == "torch"]
        for part in ("all", "llm"):
            best = min((row["median_seconds"] for row in rows if row["part"] == part), default=None)
            if best and ours:
                ratio = best / ours[part]["median_seconds"]
                what = "step" if part == "all" else "language model"
                self.target(f"{what}: at least {SPEEDUP}x the best PyTorch variant", f"{ratio:.2f}x", ratio >= SPEEDUP)
        if not rows:
            raise Failed("; ".join(missing))
        return {"rows": rows, "missing": missing}

    def gpus(self):
        """Runs each preset while a second process occupies memory, to simulate a smaller GPU."""
        rows = []
        try:
            with ballast(self) as hold:
                for size in GPU_SIZES[:2] if self.dry else GPU_SIZES:
                    rows.append(self.small_gpu(size, hold))
        finally:
            self.found["gpus"] = rows
        bad = [row for row in rows if row.get("failed")]
        if bad:
            raise Failed("; ".join(f"{row['gpu']}: {row['failed']}" for row in bad))
        return rows

    def small_gpu(self, size, hold):
        row = {"gpu": f"{size} GB", "preset": f"gpu-{size}gb"}
        preset = "tiny" if self.dry else row["preset"]
        gpu = ["--gpu", "cpu" if self.dry else f"{size}gb"]
        code, plan, err, _ = self.prsmed("plan", "--preset", preset, *gpu, may_fail=True)
        if code == 2:
            return {**row, "failed": f"no such preset: {err.strip()[-200:]}"}
        row["budget"] = plan["budget"]["bytes"]
        row["left_free"] = hold(row["budget"])
        if row["left_free"] is not None and row["left_free"] < row["budget"] - (256 << 20):
            return {**row, "skipped": "this GPU is smaller"}
        sets = [] if self.dry else ["train.accumulation=2"]
        case = {"preset": preset, "sets": sets, "steps": 2, "warmup": 1 if self.dry else 2}
        code, record, err, peak = self.bench(case=case, may_fail=True, driver=True)
        if code != 0:
            reason = "out of memory" if "memory" in err and "fit" not in err else "failed"
            self.target(f"{size} GB: no out-of-memory", reason, False)
            return {**row, "failed": f"{reason}: {' '.join(err.split())[-300:]}"}
        planned = record["planned"]["device_peak"] - sum(t["bytes"]


for t in record["planned"]["terms"] if t["name"] == "display and other processes")
        row |= {"planned_device": planned, "driver_peak": peak, "seconds": record["median_seconds"]}
        row |= {"tensors": record["memory"]["allocated_peak"], "planned_tensors": record["planned"]["allocated_peak"]}
        off = peak / planned - 1
        self.target(f"{size} GB: driver's peak within {PLAN_OFF:.0%} of the plan", f"{off:+.1%}", abs(off) <= PLAN_OFF)
        self.target(f"{size} GB: no out-of-memory", "ran", True)
        return row

    def test_binaries(self):
        folder = Path(self.binary).parent
        programs = [path for name in ("unit", "training", "plan") for path in sorted(folder.glob(f"{name}-*"))]
        found = [path for path in programs if path.is_file() and os.access(path, os.X_OK) and not path.suffix]
        if not found:
            raise Missing(f"no test binaries in {folder}: scripts/gpu-pack collects them")
        return found

    def test_words(self):
        return ["--ignored", "--list"] if self.dry else ["--ignored", "--nocapture", "--test-threads", "1"]

    def tests(self):
        found, bad = [], []
        for test in self.test_binaries():
            words = ["cuda"] if test.name.startswith("plan") else []
            code, out, err, _ = self.run([test, *words, *self.test_words()], may_fail=True)
            results = [line for line in out.splitlines() if line.startswith("test ") or line.startswith("test result")
                       or line.endswith(": test")]
            found.append({"binary": test.name, "code": code, "results": results,
                          "phases": [r for r in records(out) if r.get("kind") == "phase"]})
            if code != 0:
                bad.append(f"{test.name}: {' '.join((out + err).split())[-300:]}")
        self.found["tests"] = found
        if bad:
            raise Failed("; ".join(bad))
        return found

    def recordings(self):
        script = ROOT / "scripts/record_allocator.py"
        if self.dry:
            self.run([sys.executable, "-m", "py_compile", script])
            return "only compiled: it needs a GPU"
        return self.run([sys.executable, script, self.out / "recorded"])[1].splitlines()

    def generation(self):
        # the generated images are not kept
        with tempfile.TemporaryDirectory() as folder:
            words = ["--dry"] if self.dry else ["--batches", "2"]
            try:
                out = self.run([sys.executable, ROOT / "scripts/generation_check.py", *words, folder])[1]
            finally:
                for name in ("generation.md", "generation.jsonl"):
                    if (Path(folder) / name).exists():
                        shutil.copy(Path(folder) / name, self.out)
        return out.splitlines()

    # --- all of them
    # ----------------------------------------------------------------------------------------------------

    def all(self, only):
        sections = [  # name, seconds, what
            ("machine", 30, self.machine),
            ("graph", 80, lambda: self.switch("train.graph=on")),
            ("kernels", 100, self.kernels),
            ("step", 90, self.step),
            ("torch", 200, self.torch),
            ("gpus", 180, self.gpus),
            ("tests", 150, self.tests),
            ("recordings", 60, self.recordings),
            ("generation", 200, self.generation),
        ]
        unknown = set(only) - {name for name, _, _ in sections}
        if unknown:
            raise SystemExit(f"no such section: {', '.join(sorted(unknown))}")
        for name, seconds, work in sections:
            if only and name not in only and name != "machine":
                continue
            start = time.monotonic()
            self.section_end = start + seconds
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                if self.end - start < 10:
                    raise Failed("no time left")
                self.found[name] = work()
                state = "done"
            except Missing as missing:
                state = f"skipped: {missing}"
            except Failed as error:
                state = f"FAILED: {error}"
            except (KeyError, ValueError, OSError, subprocess.SubprocessError, IndexError, TypeError) as error:
                state = f"FAILED: {type(error).__name__}: {error}"
            self.states[name] = {"state": state, "seconds": round(time.monotonic() - start, 1)}
            self.write()

    def write(self):
        everything = {"dry": self.dry, "sections": self.states, "targets": self.targets, **self.found}
        (self.out / "gpu-check.json").write_text(json.dumps(everything, indent=1) + "\n")
        (self.out / "gpu-check.md").write_text("\n".join(report(self)) + "\n")


def gib(count):
    return "-" if count is None else f"{count / 2**30:.2f}"


def report(check):
    """Markdown for benches/RESULTS.md with a summary."""
    found, lines = check.found, []
    if "machine" in found:
        machine = found["machine"]
        dry = " (dry: tiny sizes on the CPU, the numbers mean nothing)" if check.dry else ""
        lines += [f"{machine['machine']}; torch {machine['torch']}; {machine['prsmed']}; {machine['date']}{dry}", ""]
    rows = []
    if "step" in found:
        for part in ("all", "llm"):
            record = found["step"][part]
            rows.append(["prsmed " + " ".join(found["step"]["switches"]), part, record["median_seconds"],
                         record["tokens"],
                         f"{record['utilisation']:.1%}", record["memory"]["allocated_peak"]])
    for row in found.get("torch", {}).get("rows", []):
        rows.append([f"PyTorch {row['mode']}", row["part"], row["median_seconds"], row["tokens"], "",
                     row["allocated_peak"]])
    if rows:
        lines += ["| step | part | s | tokens/s | of the measured rate | tensors, GiB |", "|---|---|---|---|---|---|"]
        lines += [f"| {who} | {part} | {s:.3f} | {tokens / s:.0f} | {use} | {gib(peak)} |"
                  for who, part, s, tokens, use, peak in rows]
        lines.append("")
    switches = [found["graph"]] if "graph" in found else []
    switches += [found["kernels"]["step"]] if "kernels" in found else []
    if switches:
        lines += ["| switch | time of a step | peak of tensors |", "|---|---|---|"]
        lines += [f"| `{row['change']}` | x {row['time_ratio']:.3f} | x {row['peak_ratio']:.3f} |" for row in switches]
        lines.append("")
    for kernel in found.get("kernels", {}).get("each", []):
        lines.append(f"- kernel {json.dumps(kernel)}")
    if found.get("gpus"):
        lines += ["| simulated GPU | s per step | driver, GiB | planned | tensors | planned |",
                  "|---|---|---|---|---|---|"]
        for row in found["gpus"]:
            if why := row.get("failed") or row.get("skipped"):
                lines.append(f"| {row['gpu']} | {why.replace('|', '/')} | | | | |")
                continue
            cells = [gib(row[key]) for key in ("driver_peak", "planned_device", "tensors", "planned_tensors")]
            lines.append(f"| {row['gpu']} | {row['seconds']:.3f} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["| target | found | |", "|---|---|---|"]
    lines += [f"| {row['target']} | {row['value']} | {row['state']} |" for row in check.targets]
    lines += ["", "| section | state | s |", "|---|---|---|"]
    lines += [f"| {name} | {row['state'].replace('|', '/')} | {row['seconds']} |" for name, row in check.states.items()]
    return lines


HOLD = """
import sys
try:
    import torch
    has_gpu = torch.cuda.is_available() and sys.argv[1] != "dry"
except ImportError:
    has_gpu = False
BLOCK = 128 << 20
blocks = []
for line in sys.stdin:
    wanted, left = int(line), None
    if has_gpu:
        free = lambda: torch.cuda.mem_get_info()[0]
        while blocks and free() < wanted:
            blocks.pop()
            torch.cuda.empty_cache()
        while free() >= wanted + BLOCK:
            blocks.append(torch.empty(BLOCK, dtype=torch.uint8, device="cuda"))
        left = free()
    print("none" if left is None else left, flush=True)
"""


@contextlib.contextmanager
def ballast(check):
    """A process that occupies GPU memory; `hold(free)` leaves `free` bytes and returns how many are really free."""
    command = [sys.executable, "-c", HOLD, "dry" if check.dry else "gpu"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=check.log, text=True,
                               env=check.environment)

    def hold(free):
        process.stdin.write(f"{free}\n")
        process.stdin.flush()
        answer = process.stdout.readline().strip()
        if not answer:
            raise Failed("the process that occupies memory ended")
        return None if answer == "none" else int(answer)

    try:
        yield hold
    finally:
        process.kill()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to test the script")
    parser.add_argument("--out", type=Path, help="output folder [default: target/gpu-check]")
    parser.add_argument("--only", default="", help="only these sections, separated by commas")
    parser.add_argument("--seconds", type=float, default=530, help="time limit of all sections together")
    options = parser.parse_args()
    out = options.out or ROOT / "target/gpu-check" / ("dry" if options.dry else "")
    out.mkdir(parents=True, exist_ok=True)
    check = Check(options, out.resolve())
    if not options.dry and not check.driver.has_gpu:
        raise SystemExit("nvidia-smi shows no GPU: `--dry` runs the same path on the CPU")
    check.all([name for name in options.only.split(",") if name])
    print("\n".join(report(check)))
    wrong = [row for row in check.states.values() if row["state"].startswith("FAILED")] + [t


for t in check.targets if t["state"] == "MISSED"]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
