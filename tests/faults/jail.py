"""Commands on hostile folders and files: nothing outside of the output folder may be changed.

A command of [`jobs`] runs once and its trace gives the names that it writes. Then it runs again with a symbolic link in
place of each of these names, and with `..` and absolute paths in place of each text of the files that it reads.
"""

import csv
import io
import json
import os
import re
from dataclasses import dataclass, field

from disk import digest, read_tree, write_tree
from scenarios import Failed, Get, Train, check_run, hub_of, require, serve

TEMPORARY = re.compile(r"prsmed-tmp-|/\.tmp\w{6}$")
CANARIES = {"file": b"canary", "folder": None, "folder/checksums.json": b'{"files": {}}', "folder/thesis.txt": b"thesis",
            "train_masks": None, "train_images": None}
# Most texts of one file that are replaced, spread evenly.
MOST_TEXTS = 24


@dataclass
class Job:
    """A command, the box before it, and the paths in the box that the user names: links there are the user's own."""

    name: str
    command: list
    before: dict = field(default_factory=lambda: {"out": None})
    own: tuple = ("out", "cache")
    # Files that the command reads, whose texts are replaced.
    texts: tuple = ()
    environment: dict = field(default_factory=dict)


def below(name, tree):
    """A tree as the folder `name`."""
    return {name: None} | {f"{name}/{path}": content for path, content in tree.items()}


def jobs(program):
    """All commands that write files."""
    train, box, inputs = Train(program), program.box, program.work / "inputs"
    start = train.prepare()
    data, more = inputs / "data", inputs / "more"
    if not more.exists():
        program.plain("data", "phantom", more, "--count", 24, "--image-size", 64, "--seed", 5)
    write_tree(box, start)
    program.plain(*train.command)
    trained = {path: content for path, content in read_tree(box / "out").items() if not path.startswith("last.prev")}
    run, pairs = below("run", trained), inputs / "pairs"
    image = min(path for path in data.rglob("*.png") if "train_images" in str(path))
    sets = ["--set", "augment.image_size=64", "--set", "augment.steps=2"]
    generate = ["augment", "generate", "--preset", "tiny", "--limit", 2, "--per-image", 1, *sets, "--out"]
    # filter models need more images
    root = ["--data-root", more]
    if not pairs.exists():
        program.plain(*generate, pairs, *root)
    pairs = below("pairs", read_tree(pairs))
    tiny = [part for part in train.command if part != str(data)]
    settings = [part for part in tiny[tiny.index("--set"):] if "max_steps" not in str(part)]
    settings = [part for i, part in enumerate(settings) if settings[i : i + 2] != ["--set", "--set"]]
    settings = settings[:-1] if settings[-1] == "--set" else settings
    with_data = {"out": None} | below("data", read_tree(data))
    tables = tuple(path for path in with_data if path.endswith(".csv"))[:1]
    of_run = ("model.json", "base.json", "data.json", "trainer.json", "checksums.json", "config.toml",
              "base/config.json", "lora_adapter/adapter_config.json")
    texts_of = lambda name: tuple(f"{name}/{path}" for path in of_run)  # noqa: E731
    profile = ["--profile-memory", "every=1"]
    segmenter = ["augment", "filter", "--preset", "tiny", "--no-plan", *settings, "--folds", 2, "--steps", 1]
    return [
        Job("train", [*train.command, *profile, "--cache-vision", "disk", "--set", "model.train_base=false"],
            own=("out", "cache", "cache/prsmed", "cache/prsmed/vision")),
        Job("train --resume", [*train.again, "--set", "train.max_steps=7"], below("out", trained),
            texts=(*texts_of("out/last"), "out/metrics.jsonl", "out/config.toml")),
        Job("eval", ["eval", box / "run", *root, "--split", "train", "--limit", 1, "--max-new-tokens", 1], run, ("run",),
            texts_of("run/best")),
        Job("predict", ["predict", box / "run", "--image", image, "--question", "Where?", "--max-new-tokens", 1,
                        "--mask-out", box / "out/mask.png", "--overlay-out", box / "out/overlay.png"], {"out": None} | run),
        Job("merge", ["merge", box / "run", box / "out/merged"], {"out": None} | run, ("out",), texts_of("run/best")),
        Job("plan", ["plan", "--preset", "tiny", "--timeline", box / "out/timeline.json"]),
        Job("phantom", ["data", "phantom", box / "out", "--count", 4, "--image-size", 64]),
        Job("prepare", ["data", "prepare", "--images", image.parent, "--masks", image.parent.parent / "train_masks",
                        "--modality", "skin", "--out", box / "out"]),
        Job("generate", [*generate, box / "out", "--data-root", box / "data"], with_data, ("out", "data"), tables),
        Job("generate again", [*generate, box / "pairs", *root], pairs, ("pairs",),
            ("pairs/manifest.jsonl", "pairs/augment.json")),
        Job("filter", [*segmenter, *root, "--extra", box / "pairs"], pairs, ("pairs",),
            ("pairs/manifest.jsonl", "pairs/augment.json")),
        Job("ablation", ["augment", "ablation", "--preset", "tiny", "--no-plan", *settings, "--steps", 1, "--seeds", 1,
                         *root, "--extra", box / "pairs", "--out", box / "out", "--limit-test", 1],
            {"out": None} | pairs),
        Job("hub get", ["hub", "get", "hub:owner/name"], {"hf": None, "hf/hub": None}, ("hf", "hf/hub"),
            environment=serve(hub_of(Get.files, Get.commit))),
    ]


def replaced(name, content, hostile):
    """The content of a file with one text replaced, for each of its texts: pairs of a description and the content."""
    if name.endswith((".json", ".jsonl")):
        first, *rest = content.split(b"\n") if name.endswith(".jsonl") else [content]
        value = json.loads(first)
        for where in list(texts(value)):
            yield "/".join(map(str, where)), b"\n".join([json.dumps(changed(value, where, hostile)).encode(), *rest])
    elif name.endswith(".csv"):
        rows = list(csv.reader(io.StringIO(content.decode())))
        for column, title in enumerate(rows[0]):
            out = io.StringIO()
            head, first, *rest = rows
            csv.writer(out).writerows([head, [*first[:column], hostile, *first[column + 1 :]], *rest])
            yield title, out.getvalue().encode()
    else:
        for match in re.finditer(rb'"([^"\n]*)"', content):
            yield match[1].decode(), content[: match.start(1)] + hostile.encode() + content[match.end(1) :]


def texts(value, where=()):
    """Where a JSON value has texts: the keys to each of them. A key itself is marked by a final `None`."""
    if isinstance(value, str):
        yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(key, str):
            yield (*where, key, None)
        yield from texts(inner, (*where, key))


def changed(value, where, text):
    """A copy of a JSON value with another text at `where`."""
    if not where:
        return text
    key, *rest = where
    if rest == [None]:
        return {text if name == key else name: inner for name, inner in value.items()}
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], rest, text)
    return copy


class Jail:
    """The runs of one command."""

    def __init__(self, job, program, every):
        self.job, self.program, self.every, self.failures, self.num_runs = job, program, every, [], 0
        self.outside = program.work / "outside"
        (program.work / "kept").mkdir(exist_ok=True)

    def run(self):
        result = self.attempt("undisturbed", self.job.before)
        if result is None or result.returncode > 1:
            reason = self.failures or result.stderr
            raise RuntimeError(f"{self.job.name}: the undisturbed run failed: {reason}")
        names = sorted({name for call in self.calls for name in self.written(call)})[:: self.every]
        for name in names:
            for kind in ("file", "folder", "new"):
                tree = {path: content for path, content in self.job.before.items() if not (path + "/").startswith(name + "/")}
                for parent in [name[:at] for at, char in enumerate(name) if char == "/"]:
                    tree.setdefault(parent, None)
                self.attempt(f"{name} is a link to {kind}", tree | {name: str(self.outside / kind)}, self.job.environment)
        num_links = self.num_runs - 1
        for name, tree in list(self.hostile())[:: self.every]:
            self.attempt(name, tree)
        if self.job.name == "hub get":
            self.hostile_hub()
        print(f"jail: {self.job.name}: {len(names)} names, {num_links} runs with links, "
              f"{self.num_runs - 1 - num_links} with hostile texts, {len(self.failures)} failures", flush=True)
        return not self.failures

    def written(self, call):
        """The names of a call in the box that are not temporary and that the user did not name."""
        if call.result < 0 or call.kind in "uf":
            return
        for path in filter(None, (call.path, call.other if call.kind == "r" else "")):
            inside = os.path.relpath(path, self.program.box)
            if not inside.startswith("..") and not TEMPORARY.search(path) and inside not in (".", *self.job.own):
                # the process id and the time are others in the next run
                if "tfevents" not in inside:
                    yield inside

    def hostile(self):
        """Boxes with one text of one file replaced."""
        for name in self.job.texts:
            if name not in self.job.before:
                continue
            for text in ("../../outside/new", str(self.outside / "folder"), "..", "../outside/train_masks/x.png"):
                all_texts = list(replaced(name, self.job.before[name], text))
                for where, content in all_texts[:: max(1, len(all_texts) // MOST_TEXTS)]:
                    yield f"{name}: {where} = {text}", self.job.before | {name: content}

    def hostile_hub(self):
        """Names, commits and hashes that leave the cache."""
        for text in ("../../../outside/new", str(self.outside / "new"), "..", "a/../../../../../outside/new"):
            answers = [{"files": {text: b"x"}}, {"commit": text}, {"etag": text}, {"header_commit": text}]
            for answer in answers:
                handler = hub_of(answer.get("files", Get.files), answer.get("commit", Get.commit), answer)
                self.attempt(f"the hub answers {answer}", self.job.before, serve(handler))
            self.attempt(f"revision {text}", self.job.before, None, ["hub", "get", f"hub:owner/name@{text}"])

    def attempt(self, what, tree, environment=None, command=None):
        box, outside = self.program.box, self.outside
        write_tree(outside, CANARIES)
        write_tree(box, tree)
        self.num_runs += 1
        before = digest(read_tree(outside))
        try:
            result, self.calls = self.program.run(command or self.job.command, environment or self.job.environment)
            check_run(result, self.calls)
            require(digest(read_tree(outside)) == before, "files outside of the box were changed")
            return result
        except Failed as failure:
            kept = self.program.work / "kept" / f"jail-{self.job.name.replace(' ', '-')}-{self.num_runs}"
            write_tree(kept, tree)
            self.failures.append(f"{self.job.name}: {what}: {failure}; files: {kept}")
            print(f"  FAILED {self.failures[-1]}", flush=True)
        return None
