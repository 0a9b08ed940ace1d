"""report.md, made from the lines of results.jsonl."""

import json
from pathlib import Path

from .results import latest

LLM_USE, SPEEDUP, PLAN_OFF, GAIN = 0.45, 1.3, 0.03, 0.02
QUESTIONS = 3


def gib(count):
    return "-" if count is None else f"{count / 2**30:.2f}"


def number(value, form):
    return "-" if value is None else format(value, form)


def percent(share):
    return "" if share is None else f"{100 * share:+.1f} %"


def table(head, rows):
    if not rows:
        return []
    escaped = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in escaped), ""]


class Report:
    def __init__(self, lines, expected=()):
        self.found = latest(lines)
        self.expected = [*expected, *(name for name in self.found if name not in expected)]
        self.ok = {name: line for name, line in self.found.items() if line["state"] == "ok"}
        self.targets = []

    def group(self, prefix):
        return {name: line for name, line in self.ok.items() if name.startswith(prefix)}

    def target(self, text, value, met, *lines):
        measured = all(line["where"] == "GPU" for line in lines)
        self.targets.append([text, value, ("met" if met else "MISSED") if measured else "not measured on a GPU"])

    # --- parts of the report

    def head(self):
        lines = ["# GPU measurements", ""]
        wheres = {line.get("where") for line in self.found.values()}
        if "fake CUDA runtime" in wheres:
            lines += ["**Dry run on the fake CUDA runtime.** It computes nothing: times, rates and ratios below mean "
                      "nothing. Only memory of tensors and reserved memory are meaningful.", ""]
        if "CPU" in wheres:
            lines += ["**Dry run at tiny sizes on the CPU.** The numbers mean nothing.", ""]
        machine = self.ok.get("machine")
        if machine:
            versions = ", ".join(f"{name} {version}" for name, version in machine.get("python", {}).items() if version)
            shown = machine.get("nvidia_smi") or machine.get("gpu") or "no GPU"
            lines += [f"{shown}; {machine['prsmed']}; {versions}; {machine['time'][:10]}", ""]
        return lines

    def steps(self):
        rows = []
        for name, line in [*self.group("step/").items(), *self.group("torch/").items()]:
            _, variant, *rest = name.split("/")
            who = "prsmed" if name.startswith("step/") else "PyTorch"
            if who == "prsmed":
                what = {"shipped": f"packed, {line['images']} images", "plain": "packed, custom kernels off",
                        "rows": "one question a row"}.get(variant, f"packed, {line['images']} images")
            else:
                what = f"{variant}, " + {"rows": "one question a row", "tokens": "same tokens as packed",
                                         "published": "as published"}[rest[0]]
            seconds, memory = line["median_seconds"], line.get("memory", line)
            device = memory.get("device_used")
            part = {"all": "model", "llm": "language model"}[rest[-1]]
            rows.append([who, what, part, f"{line['samples'] / seconds:.1f}", f"{line['tokens'] / seconds:.0f}",
                         f"{seconds * 1e3:.1f}", "" if line.get("utilisation") is None else f"{line['utilisation']:.1%}",
                         gib(memory.get("allocated_peak")), gib(memory.get("reserved_peak")), gib(device),
                         gib(line.get("driver_peak"))])
        head = ["program", "step", "part", "samples/s", "tokens/s", "ms", "of the measured rate", "tensors, GiB",
                "reserved", "device, from the process", "device, from the driver"]
        return ["## Steps with three questions about an image", "", *table(head, rows)] if rows else []

    def ratios(self):
        rows = []
        for part, what in (("all", "whole step"), ("llm", "language model alone")):
            ours = self.ok.get(f"step/shipped/{part}")
            for variant, title in (("rows", "the same samples"), ("tokens", "the same tokens")):
                theirs = {mode: self.ok.get(f"torch/{mode}/{variant}/{part}") for mode in ("eager", "compile")}
                theirs = {mode: line for mode, line in theirs.items() if line and line["where"] == (ours or {}).get("where")}
                if not ours or not theirs:
                    continue
                rate = lambda line: line["samples"] / line["median_seconds"]
                ratios = {mode: rate(ours) / rate(line) for mode, line in theirs.items()}
                cells = [f"{ratios[mode]:.2f}" if mode in ratios else "-" for mode in ("eager", "compile")]
                rows.append([what, title, *cells])
                if variant == "rows":
                    self.target(f"{what}: at least {SPEEDUP} times the samples a second of the best measured PyTorch",
                                f"{min(ratios.values()):.2f}", min(ratios.values()) >= SPEEDUP, ours, *theirs.values())
        llm = self.ok.get("step/shipped/llm")
        if llm and llm.get("utilisation") is not None:
            self.target(f"language model: at least {LLM_USE:.0%} of the measured rate of a matrix product",
                        f"{llm['utilisation']:.1%}", llm["utilisation"] >= LLM_USE, llm)
        head = ["part", "against PyTorch with", "eager", "compiled"]
        return ["## Samples a second, times those of PyTorch", "", *table(head, rows)] if rows else []

    def switches(self):
        rows = []
        for line in self.group("switch/").values():
            ratio, noise = line["time_ratio"], max(line["time_ratios"]) - min(line["time_ratios"])
            verdict = "gain" if ratio <= 1 - GAIN else "loss" if ratio >= 1 + GAIN else "no difference"
            if noise >= abs(1 - ratio) and verdict != "no difference":
                verdict += ", within the spread of the rounds"
            if line["is_off"]:
                verdict = "off: the program did not use it"
            if line["where"] != "GPU":
                verdict = "not measured on a GPU"
            rows.append([f"`{line['change']}`", f"{ratio:.3f}", ", ".join(f"{r:.3f}" for r in line["time_ratios"]),
                         f"{line['peak_ratio']:.3f}", verdict])
        head = ["switch", "time, ratio", "rounds", "tensors, ratio", f"gain or loss from {GAIN:.0%} on"]
        return ["## Switches", "", *table(head, rows)] if rows else []

    def gpus(self):
        rows = []
        for name, line in self.found.items():
            if not name.startswith("gpu/"):
                continue
            title = f"{name.split('/')[1]} GB"
            if line["state"] != "ok":
                rows.append([title, f"{line['state']}: {line.get('error', '')[:200]}", *[""] * 8])
                continue
            planned, memory = line["planned"], line["memory"]
            errors = {}
            for what, measured, expected in (("tensors", memory["allocated_peak"], planned["allocated_peak"]),
                                             ("device memory of the driver", line["driver_peak"], line["planned_device"])):
                if measured is not None and expected:
                    errors[what] = measured / expected - 1
                    self.target(f"{title}: {what} within {PLAN_OFF:.0%} of the plan", f"{errors[what]:+.1%}",
                                abs(errors[what]) <= PLAN_OFF, line)
            rate = line["samples"] / line["median_seconds"]
            rows.append([title, f"{line['median_seconds']:.3f}", number(planned.get("seconds"), ".3f"), f"{rate:.2f}",
                         gib(memory["allocated_peak"]), gib(planned["allocated_peak"]), gib(memory["reserved_peak"]),
                         gib(memory.get("device_used")), gib(line["driver_peak"]), gib(line["planned_device"])])
        head = ["limited to", "s per step", "planned", "samples/s", "tensors, GiB", "planned", "reserved",
                "device, from the process", "device, from the driver", "planned"]
        return ["## Presets on a GPU with limited memory", "", *table(head, rows)] if rows else []

    def generation(self):
        rows = []
        for line in self.group("generation/").values():
            planned = line.get("planned") or {}
            rows.append([line["who"], line["batch"], f"{line['seconds']:.2f}", number(planned.get("seconds"), ".2f"),
                         gib(line["allocated_peak"]), gib(planned.get("allocated_peak")), gib(line["device_peak"]),
                         gib(planned.get("device_peak"))])
        head = ["program", "batch", "s per batch", "planned", "tensors, GiB", "planned", "device", "planned"]
        if not rows:
            return []
        line = next(iter(self.group("generation/").values()))
        what = f"{line['size']}, random weights, {line['side']} pixels, {line['steps']} steps; mean of {line['batches']} batches"
        return ["## Generation", "", what, "", *table(head, rows)]

    def products(self):
        """Rates of matrix products, and the kernels of a step: of `prsmed`, and of PyTorch with the same tokens."""
        lines, found = [], self.ok.get("products")
        if found:
            kinds = list(dict.fromkeys(record["what"] for record in found["products"]))
            rates = {}
            for record in found["products"]:
                key = (record["way"], "x".join(map(str, record["weight"])), record["rows"])
                rates.setdefault(key, {})[record["what"]] = f"{record['tflops']:.0f}" if "tflops" in record else "refused"
            rows = [[*key, *(of.get(kind, "-") for kind in kinds)] for key, of in rates.items()]
            part = "" if found.get("is_complete", True) else " (not all: the time limit was reached)"
            lines += [f"## Matrix products, TFLOP/s{part}", "", *table(["pass", "weight", "tokens", *kinds], rows)]
        kernels = self.ok.get("step/shipped/all", {}).get("kernels") or []
        all_ms = sum(1e3 * kernel["seconds"] for kernel in kernels)
        rows = [[kernel["name"], kernel["calls"], f"{1e3 * kernel['seconds']:.3f}", f"{1e3 * kernel['seconds'] / all_ms:.1%}"]
                for kernel in kernels[:40] if kernel["seconds"] > 0]
        if rows:
            lines += [f"## Kernels of prsmed's step: {all_ms:.1f} ms", "", *table(["kernel", "calls", "ms", "share"], rows)]
        for name, line in self.group("torch/eager/tokens/").items():
            rows = [[kernel, calls, f"{ms:.3f}", f"{ms / line['kernels_ms']:.1%}"]
                    for kernel, calls, ms in line.get("kernels", [])[:25] if ms > 0]
            if rows:
                lines += [f"## Kernels of PyTorch's step `{name}`: {line['kernels_ms']:.1f} ms", "",
                          *table(["kernel", "calls", "ms", "share"], rows)]
        return lines

    def finetunes(self):
        rows = []
        for name, line in self.group("finetune/").items():
            for phase in line["measured"]:
                errors = phase.get("plan_errors", {})
                rows.append([name.split("/")[1], phase["name"], f"{phase['seconds']:.2f}", gib(phase["allocated_peak"]),
                             percent(errors.get("allocated")), gib(phase["reserved_peak"]), percent(errors.get("reserved")),
                             gib(phase.get("device_used")), percent(errors.get("device"))])
        head = ["trained", "phase", "s", "tensors, GiB", "plan", "reserved", "plan", "device", "plan"]
        what = "SDXL, random weights, 1024 pixels, bf16, one image a step; each with the error of its plan"
        return ["## Fine-tuning", "", what, "", *table(head, rows)] if rows else []

    def others(self):
        lines = []
        for line in self.group("smoke/").values():
            lines.append(f"- `{line['setting']}` on a tiny model: {'OFF' if line['is_off'] else 'works'}")
            lines += [f"  - {message}" for message in line["messages"][:20]]
        if calibration := self.ok.get("calibrate"):
            lines.append(f"- calibration: `{json.dumps(calibration['record'])[:4000]}`")
        for line in self.group("test/").values():
            lines += [f"- kernel: `{json.dumps(record)}`" for record in line["records"] if record.get("kind") == "kernel"]
        training = self.ok.get("training")
        if training:
            lines.append(f"- training on data, preset tiny: {training['median_seconds']:.4f} s per step, "
                         f"{number(training.get('median_wait_seconds'), '.4f')} s waiting for the loader")
        return ["## Checks", "", *lines, ""] if lines else []

    def states(self):
        rows = []
        for name in self.expected:
            line = self.found.get(name)
            state = "not run" if line is None else line["state"]
            rows.append([name, state, "" if line is None else line.get("error", "")])
        done = sum(row[1] == "ok" for row in rows)
        return [f"## Cases: {done} of {len(rows)} measured", "", *table(["case", "state", "reason"], rows)]

    def text(self):
        parts = [self.head(), self.steps(), self.ratios(), self.switches(), self.gpus(), self.products(), self.generation(), self.finetunes(),
                 self.others()]
        targets = ["## Targets", "", *table(["target", "value", "result"], self.targets)] if self.targets else []
        return "\n".join(line for part in [*parts, targets, self.states()] for line in part)


def write(folder, lines, expected=()):
    """Writes report.md into `folder`; returns its text."""
    text = Report(lines, expected).text()
    path = Path(folder) / "report.md"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n")
    unfinished.replace(path)
    return text
