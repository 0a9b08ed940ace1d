"""The file of results: one JSON line for each measurement, written at once."""

import datetime
import json
import os
from pathlib import Path


class Results:
    """`results.jsonl` of an output folder. A later line of a case replaces an earlier one."""

    def __init__(self, folder):
        self.path = Path(folder) / "results.jsonl"
        self.lines = read(self.path)
        # a killed run may leave half a line
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a") as file:
                file.write("\n")

    def add(self, case, state, **more):
        """Appends a line and waits until it is on the disk. `state`: ok, failed or skipped."""
        line = {"case": case, "state": state, "time": datetime.datetime.now().isoformat(timespec="seconds"), **more}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def latest(self):
        return latest(self.lines)

    def is_done(self, case):
        """True if the case was measured or cannot be measured here. Failed cases are tried again."""
        line = self.latest().get(case)
        return line is not None and line["state"] != "failed"


def read(path):
    """The complete lines of a file; a line that a killed run left half written is ignored."""
    found = []
    if Path(path).exists():
        for line in Path(path).read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "case" in record and "state" in record:
                found.append(record)
    return found


def latest(lines):
    """The last line of each case, in the order of their first lines. A failure does not replace a result."""
    found = {}
    for line in lines:
        before = found.get(line["case"])
        if before is None or before["state"] != "ok" or line["state"] == "ok":
            found[line["case"]] = line
    return found
