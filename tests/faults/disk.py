"""Traces of `layer.c`, and a model of the files that a crash or a power loss leaves after each call.

The model is that of POSIX, with the usual freedoms of file systems:

* The data of a file are on disk after fsync or fdatasync of the file. Before, they may be lost in several ways.
* A name in a folder (a new, renamed or deleted file or folder) is on disk after fsync of the folder. Before, it may be
  there or not.
* A rename is atomic: a name never refers to half of the old and half of the new file. A rename into another folder is
  on disk when either folder was synced.
"""

import hashlib
import os
import shutil
import struct
from dataclasses import dataclass, field

HEAD = struct.Struct("<QqqIIIc???")
# Smallest unit that a disk writes.
SECTOR = 512

# What each kind of accident leaves: the names (`now`, or those `synced`), and the data that were not synced (`now`,
# `lost`: as at the last sync, `zeros`: zeros of the same size, `end`: zeros up to the last sector, which is complete).
ACCIDENTS = {
    "crash": ("now", "now"),
    "power loss": ("synced", "lost"),
    "power loss, names kept": ("now", "lost"),
    "power loss, names kept, zeros": ("now", "zeros"),
    "power loss, names kept, end": ("now", "end"),
    "power loss, data kept": ("synced", "now"),
}


@dataclass
class Call:
    """A traced system call. A write of several buffers has one call for each."""

    number: int
    result: int
    offset: int
    kind: str
    injected: bool
    violation: bool
    is_new: bool
    path: str
    other: str
    data: bytes

    def __str__(self):
        names = {"o": "open", "w": "write", "t": "truncate", "r": "rename to", "l": "link", "s": "symlink", "u": "unlink",
                 "d": "rmdir", "m": "mkdir", "f": "fsync", "x": "chmod or similar", "?": "unsupported call on"}
        other = f" from {self.other}" if self.other else ""
        return f"{names[self.kind]} {self.path}{other}"


def read_trace(path):
    """All calls of a trace. The last record is incomplete after a kill."""
    calls = []
    if not os.path.exists(path):
        return calls
    with open(path, "rb") as file:
        content = file.read()
    at = 0
    while at + HEAD.size <= len(content):
        number, result, offset, *sizes, kind, injected, violation, is_new = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        texts = [os.fsdecode(part) for part in parts[:2]]
        calls.append(Call(number, result, offset, kind.decode(), injected, violation, is_new, *texts, parts[2]))
    return calls


class Content(bytes):
    """Bytes of a file that keep their hash."""

    def sum(self):
        if "known" not in self.__dict__:
            self.known = hashlib.sha256(self).digest()
        return self.known


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: Content = Content()
    # Ranges of the data that were written since the last sync.
    written: list = field(default_factory=list)
    # Results of `content`.
    contents: dict = field(default_factory=dict)

    def write(self, offset, data):
        self.contents = {}
        if len(self.data) < offset:
            self.written.append((len(self.data), offset))
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self.written.append((offset, offset + len(data)))

    def truncate(self, size):
        self.contents = {}
        self.written.append((size, size))
        if size <= len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def sync(self):
        self.synced, self.written = self.content("now"), []
        self.contents = {}

    def content(self, how):
        if not self.written:
            how = "now"
        if how not in self.contents:
            self.contents[how] = self.synced if how == "lost" else Content(self.data if how == "now" else self.zeroed(how))
        return self.contents[how]

    def zeroed(self, how):
        """The data with zeros in place of what was not synced."""
        data = bytearray(self.data)
        end = min(max(end for _, end in self.written), len(data))
        # rounded down to a sector, the last one of which may be shorter
        kept = (end - 1) // SECTOR * SECTOR if how == "end" and end > 0 else end
        for start, end in self.written:
            end = min(end, len(data), kept)
            data[start:end] = bytes(max(0, end - start))
        return data


@dataclass
class Link:
    target: str


@dataclass(eq=False)
class Folder:
    now: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)


class Disk:
    """The folder `root`, to which traced calls are applied."""

    def __init__(self, root, tree):
        self.root = root
        self.top = Folder()
        self.moves = []
        for path, content in sorted(tree.items()):
            parent, name = self.parent(os.path.join(root, path))
            if content is None:
                node = Folder()
            elif isinstance(content, str):
                node = Link(content)
            else:
                node = File(bytearray(content), Content(content))
            parent.now[name] = parent.synced[name] = node

    def parent(self, path):
        """Folder and name of a path; the folder is `None` if it does not exist."""
        *folders, name = os.path.relpath(path, self.root).split("/")
        node = self.top
        for part in folders:
            node = node.now.get(part) if isinstance(node, Folder) else None
        return node, name

    def find(self, path):
        if path == self.root:
            return self.top
        parent, name = self.parent(path)
        return parent.now.get(name) if parent else None

    def apply(self, call):
        if call.result < 0 or call.path.endswith(" (deleted)") or call.kind == "x":
            return
        node = self.find(call.path)
        match call.kind:
            case "w":
                node.write(call.offset, call.data)
            case "t":
                node.truncate(call.offset)
            case "f":
                self.sync(node)
            case "o":
                parent, name = self.parent(call.path)
                if node is None:
                    parent.now[name] = File()
                elif call.offset & os.O_TRUNC:
                    node.truncate(0)
            case "m" | "s" | "l":
                parent, name = self.parent(call.path)
                new = {"m": Folder, "s": lambda: Link(call.other), "l": lambda: self.find(call.other)}
                parent.now[name] = new[call.kind]()
            case "u" | "d":
                parent, name = self.parent(call.path)
                del parent.now[name]
            case "r":
                (source, old), (target, new) = self.parent(call.other), self.parent(call.path)
                target.now[new] = source.now.pop(old)
                if source is not target:
                    self.moves.append((source, old, target, new))
            case _:
                raise NotImplementedError(f"the model does not know this call: {call}")

    def sync(self, node):
        if isinstance(node, File):
            node.sync()
            return
        node.synced = dict(node.now)
        for source, old, target, new in [move for move in self.moves if node in (move[0], move[2])]:
            if old not in source.now:
                source.synced.pop(old, None)
            if new in target.now:
                target.synced[new] = target.now[new]
        self.moves = [move for move in self.moves if node not in (move[0], move[2])]

    def tree(self, names, data):
        """Path and content of everything: bytes of a file, text of a link, `None` of a folder."""
        found, left = {}, [("", self.top)]
        while left:
            below, folder = left.pop()
            for name, node in getattr(folder, names).items():
                path = below + name
                if isinstance(node, Folder):
                    found[path] = None
                    left.append((path + "/", node))
                else:
                    found[path] = node.target if isinstance(node, Link) else node.content(data)
        return found


def read_tree(root):
    """The tree of a real folder, as `Disk.tree`."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            inside = os.path.relpath(path, root)
            if os.path.islink(path):
                found[inside] = os.readlink(path)
            elif os.path.isdir(path):
                found[inside] = None
            else:
                with open(path, "rb") as file:
                    found[inside] = Content(file.read())
    return found


def write_tree(root, tree):
    """Replaces a real folder by a tree."""
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for path, content in sorted(tree.items()):
        path = os.path.join(root, path)
        if content is None:
            os.mkdir(path)
        elif isinstance(content, str):
            os.symlink(content, path)
        else:
            with open(path, "wb") as file:
                file.write(content)


def digest(tree):
    """Hash of a tree."""
    sum = hashlib.sha256()
    for path, content in sorted(tree.items()):
        kind = b"d" if content is None else b"l" if isinstance(content, str) else b"f"
        if content is not None:
            content = Content(content.encode()) if isinstance(content, str) else content
            content = content.sum() if isinstance(content, Content) else Content(content).sum()
        sum.update(kind + os.fsencode(path) + b"\0" + (content or b""))
    return sum.hexdigest()
