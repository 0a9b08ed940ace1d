"""Measures time and memory of image generation: `prsmed augment generate` with random weights against its plan and
against diffusers. `scripts/gpu-check` runs the same cases. Needs only Python's standard library; without diffusers the
table says that it was not measured.

    python3 scripts/generation_check.py OUT            SDXL, 1024 pixels, 30 steps, bf16, on a GPU
    python3 scripts/generation_check.py --dry OUT      tests the script at tiny sizes on the CPU; measures nothing

PRSMED names the binary (default: target/gpu/prsmed, else target/release/prsmed, else target/debug/prsmed). Writes
OUT/generation.jsonl and OUT/generation.md, a table for benches/RESULTS.md.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_check.process import ROOT, Driver, find_binary, run

# the first of four batches includes the search for kernels, for both programs
BATCHES = 4
FULL = dict(size="sdxl", preset="augment", side=1024, steps=30, precision="bf16", sizes=(1, 4))
DRY = dict(size="tiny", preset="tiny", side=64, steps=2, precision="fp32", sizes=(1, 2))


def numbers_of(plan):
    peaks = {key: plan[key] for key in ("allocated_peak", "reserved_peak", "device_peak")}
    return {**peaks, "seconds": (plan["time"] or {}).get("seconds")}


def failure(ran):
    return f"NOT MEASURED: {ran.err.strip().splitlines()[-1]}" if ran.code == 3 and ran.err.strip() else ran.error()


def make_phantoms(folder, num_images, binary, environment):
    """Synthetic images as sources; at least three of four are train images."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [binary, "--quiet", "data", "phantom", folder, "--count", 2 * num_images, "--image-size", 128]
    ran = run(command, environment, 120)
    if ran.code != 0:
        raise OSError(f"`data phantom`: {ran.error()}")


def run_prsmed(case, batch, out, binary, environment, driver, batches, seconds=None):
    """Generates `batches` batches from the phantoms in `out`; returns a row of the table."""
    folder = out / f"made-{batch}"
    shutil.rmtree(folder, ignore_errors=True)
    sets = {
        "batch": batch, "image_size": case["side"], "steps": case["steps"], "strength": 1,
        "precision": case["precision"], "decode": "sliced",
        "per_image": 1,
    }
    settings = ["--preset", case["preset"]]
    settings += [word for key, value in {"model": f"random:{case['size']}", **sets}.items()
                 for word in ("--set", f"augment.{key}={value}")]
    ran = run([binary, "--json", "plan", "--task", "augment", "--gpu", "auto", *settings], environment, seconds)
    plans = [record for record in ran.records if record.get("kind") == "plan"]
    row = {"who": "prsmed", "batch": batch}
    if ran.code not in (0, 1) or not plans:
        return {**row, "failed": f"`plan`: {ran.error()}"}
    plan = plans[0]
    row["planned"] = numbers_of(plan)
    if not plan["fits"]:
        return {**row, "failed": "does not fit, according to its plan"}
    command = [binary, "--json", "augment", "generate", "--data-root", out / "phantoms", "--out", folder, *settings]
    ran = run([*command, "--limit", batches * batch, "--no-filter"], environment, seconds, driver)
    results = [record for record in ran.records if record.get("kind") == "result"]
    if ran.code != 0 or not results:
        return {**row, "failed": failure(ran)}
    summary, memory = results[0]["summary"], results[0]["memory"]
    if (summary["made_now"], summary["batch"]) != (batches * batch, batch):
        made = f"made {summary['made_now']} images in batches of {summary['batch']}"
        return {**row, "failed": f"{made}: out of memory, or too few phantoms"}
    # the job's own plan, which knows the number of prompts
    row["planned"] = numbers_of(memory["planned"])
    return {**row, "seconds": batch / summary["images_per_s"], "images_per_s": summary["images_per_s"],
            "allocated_peak": memory["measured"], "device_peak": ran.memory_peak}


def run_diffusers(case, batch, driver, batches, environment=None, seconds=None):
    command = [sys.executable, ROOT / "scripts/baseline/sdxl_diffusers.py", "--size", case["size"], "--precision",
               case["precision"]]
    for key, value in {"side": case["side"], "steps": case["steps"], "batch": batch, "batches": batches}.items():
        command += [f"--{key}", value]
    ran = run(command, environment, seconds, driver)
    row = {"who": "diffusers", "batch": batch}
    if ran.code != 0 or not ran.records:
        return {**row, "failed": failure(ran)}
    return {**row, **ran.records[-1], "device_peak": ran.memory_peak}


def gib(count):
    return "-" if count is None else f"{count / 2**30:.2f}"


def table(rows, case, driver, batches):
    """A Markdown table for benches/RESULTS.md."""
    machine = platform.processor() or platform.machine()
    if driver.has_gpu:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        machine = subprocess.check_output(query, text=True).strip()
    versions = next((row["versions"] for row in rows if "versions" in row), None)
    shown = "diffusers not measured"
    if versions:
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    what = f"random:{case['size']}, {case['side']} pixels, {case['steps']} steps, guidance, {case['precision']}"
    seen = "driver" if driver.has_gpu else "resident (no GPU)"
    lines = [
        f"{what}, sliced decoding; mean of {batches} batches, the first included. {machine}; {shown}; "
        f"{datetime.date.today()}. GiB:",
        "",
        f"| who | batch | s per batch | planned s | tensors | planned | {seen} | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        planned = row.get("planned", {})
        if "failed" in row:
            reason = row["failed"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {row['who']} | {row['batch']} | {reason} | | | | | {gib(planned.get('device_peak'))} |")
            continue
        predicted = planned.get("seconds")
        numbers = [f"{row['seconds']:.2f}", "-" if predicted is None else f"{predicted:.2f}",
                   gib(row["allocated_peak"]), gib(planned.get("allocated_peak"))]
        numbers += [gib(row["device_peak"]), gib(planned.get("device_peak"))]
        lines.append(f"| {row['who']} | {row['batch']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to test the script")
    parser.add_argument("--batches", type=int, default=BATCHES, help="number of batches of each size")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out = args.out.resolve()
    case = DRY if args.dry else FULL
    if args.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    driver = Driver()
    if args.dry:
        driver.has_gpu = False
    elif not driver.has_gpu:
        raise SystemExit("nvidia-smi shows no GPU: `--dry` runs the same path on the CPU")
    binary, environment = find_binary()
    args.out.mkdir(parents=True, exist_ok=True)
    num_images = args.batches * max(case["sizes"])
    make_phantoms(args.out / "phantoms", num_images, binary, environment)
    rows = []
    with (args.out / "generation.jsonl").open("w") as lines:
        for batch in case["sizes"]:
            for row in (run_prsmed(case, batch, args.out, binary, environment, driver, args.batches),
                        run_diffusers(case, batch, driver, args.batches)):
                rows.append(row)
                print(json.dumps(row), file=lines, flush=True)
    text = table(rows, case, driver, args.batches)
    (args.out / "generation.md").write_text(text + "\n")
    print(text)
    broken = [row for row in rows if "failed" in row and not row["failed"].startswith("NOT MEASURED")]
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
