"""Makes files that try to run code, fill memory or take for ever: pickles, YAML, JSON, zips, safetensors."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[[random.Random, Path, bytes], bytes]  # chances, what a run of code touches, a good file


class Evil:
    """Runs a shell command where it is unpickled."""

    def __init__(self, command: str, how: int) -> None:
        self.command, self.how = command, how

    def __reduce__(self) -> tuple[Any, ...]:
        import os
        import subprocess

        code = f"__import__('os').system({self.command!r})"
        calls: tuple[tuple[Any, ...], ...] = (
            (os.system, (self.command,)),
            (exec, (code,)),
            (eval, (code,)),
            (subprocess.call, (["sh", "-c", self.command],)),
        )
        return calls[self.how]


def make_pickle(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """A pickle that runs code, of any protocol, alone or inside of what torch or numpy write."""
    evil = Evil(f"touch {canary}", rng.randrange(4))
    wrapped: Any = rng.choice([evil, {"weight_map": evil}, [evil], {"tensors": {"a": evil}, "sha256": evil}])
    content = pickle.dumps(wrapped, protocol=rng.randrange(6))
    way = rng.randrange(5)
    if way == 0:
        return content + good
    if way == 1:
        return f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    if way == 2:
        return _zip({"archive/data.pkl": content, "archive/data/0": b"0" * 16, "archive/version": b"3\n"})
    if way == 3:
        buffer = io.BytesIO()
        np.save(buffer, np.array([evil], dtype=object), allow_pickle=True)
        return buffer.getvalue() if rng.random() < 0.5 else _zip({"header.npy": buffer.getvalue()})
    return content


def _zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_yaml(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """Tags that construct objects, aliases that multiply, and depths."""
    command, first = f"touch {canary}", good.decode(errors="replace").partition("\n")[0]
    bomb = [f"  a0: &a0 [{', '.join(['x'] * 9)}]"]
    bomb += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    texts = [
        f"{first}\nname: !!python/object/apply:os.system ['{command}']\n",
        f"{first}\nmodel: !!python/object/new:subprocess.Popen [['sh', '-c', '{command}']]\n",
        f"!!python/object/apply:subprocess.check_output\nargs: [['sh', '-c', '{command}']]\n",
        f"{first}\nrun: !!python/module:os\nx: !!python/name:os.system\n",
        f"? !!python/object/apply:os.system ['{command}']\n: 1\n",
        f"{first}\nrun: !<tag:yaml.org,2002:python/object/apply:os.popen> ['{command}']",
        "\n".join([first, "run:", *bomb]),
        "\n".join(["x: &x", "  y: *x", first]),
        "a: " + "[" * 20_000,
        "a: " + "{b: " * 20_000,
        "- " * 50_000,
        "a: '" + "x" * 900_000,
        "x: " + "9" * 900_000,
        "<<: *nothing\n",
        "split_parts: {train: ['s_{0..99999}{0..99999}.tar']}\n",
        "split_parts: [train]\nexclude: {a: 1}\n",
        "split_parts: {train: {a: 1}}\n",
        "%YAML 9.9\n---\n- \x00\n",
    ]
    return rng.choice(texts).encode()


def make_json(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """Depth, numbers without end, keys twice, NaN, other encodings, and objects that name code."""
    command = json.dumps(f"touch {canary}")
    texts: list[bytes] = [
        b"[" * 200_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b'{"tensors": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema": ' + b"9" * 500_000 + b"}",
        b'{"a": 1, "a": 2, "weight_map": {"x": "y", "x": "z"}}',
        b'{"step": NaN, "files": Infinity, "weight_map": -Infinity}',
        f'{{"__reduce__": ["os.system", [{command}]], "py/reduce": [{{"py/type": "os.system"}}]}}'.encode(),
        f'{{"_target_": "os.system", "__class__": "os.system", "args": [{command}]}}'.encode(),
        b'{"weight_map": {"a": "../../../etc/passwd", "b": "/etc/passwd", "c": 5, "d": null, "e": ".."}}',
        b'{"weight_map": [["a"], 5, {"a": {}}]}',
        b"\xff\xfe" + '{"a": 1}'.encode("utf-16-le"),
        b"\x00" * 1000,
        b"",
        b"null",
        b'"' + b"\\ud800" * 1000 + b'"',
        b"{" + b",".join(b'"k%d": %d' % (n, n) for n in range(50_000)) + b"}",
    ]
    return rng.choice(texts)


def make_truncated(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """A good file with a stretch of it lost, doubled or replaced."""
    del canary
    first, count = rng.randrange(len(good)), rng.choice([1, 10, 100, 10_000])
    middle = rng.choice([b"", good[first : first + count] * 2, rng.randbytes(min(count, 50))])
    return good[:first] + middle + good[first + count :]


def make_safetensors(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """Headers with lengths, offsets, shapes and names that do not belong together."""
    del canary, good
    a = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers: list[Any] = [
        {"a": a, "b": {**a, "data_offsets": [4, 12]}},
        {"a": {**a, "shape": [-2, -1]}},
        {"a": {**a, "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {**a, "shape": [2**62, 4], "data_offsets": [0, 2**66]}},
        {"a": {**a, "shape": [1e400 if rng.random() < 0.5 else 1.5]}},
        {"a": {**a, "shape": "2"}},
        {"a": {**a, "shape": [True, True], "data_offsets": [0, 4]}},
        {"a": {**a, "data_offsets": [8, 0]}},
        {"a": {**a, "data_offsets": [0, 8, 16]}},
        {"a": {**a, "dtype": "O"}},
        {"a": {**a, "dtype": ["F32"]}},
        {"a": {**a, "shape": [0] * 100_000, "data_offsets": [0, 0]}},
        {"__metadata__": a, "a": None},
        {"a": [a]},
        [],
        {f"t{number}": {**a, "shape": [0], "data_offsets": [0, 0]} for number in range(2000)},
    ]
    texts = [json.dumps(header).encode() for header in headers]
    entry = json.dumps(a).encode()
    texts += [b'{"a": %s, "a": %s}' % (entry, entry), b'{"a": ' + b"[" * 100_000, b"{" * 300_000]
    text = rng.choice(texts)
    length = rng.choice([len(text)] * 6 + [2**63, 2**64 - 1, len(text) + 1, 0, 100_000_000])
    return struct.pack("<Q", length) + text + b"\0" * 16


def make_zip(rng: random.Random, canary: Path, good: bytes) -> bytes:
    """Archives that grow, name paths outside, or hold arrays larger than their bytes."""
    del canary, good
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": rng.choice(["<i8", "|u1", "|O"]), "fortran_order": False, "shape": (10**11,)}
    )
    huge = buffer.getvalue() + b"0" * 100
    zeros = b"\x93NUMPY\x01\x00" + b"\0" * 30_000_000
    header = io.BytesIO()
    np.save(header, np.frombuffer(b"[" * 100_000, np.uint8))
    names = ("header", "numbers", "members", "ends", "lengths.text", "archive/data/0")
    files = [
        {f"{name}.npy": huge for name in names},
        {"../../escaped.npy": b"x", "/tmp/escaped.npy": b"x"},
        {"header.npy": header.getvalue()},
        {"archive/data/0": huge},
        {f"{name}.npy": b"\x93NUMPY\x09\x00" for name in names},
        {f"n{number}": b"" for number in range(3000)},
    ]
    if rng.random() < 0.3:
        return _zip({"header.npy": zeros, "archive/data/0": zeros}, zipfile.ZIP_DEFLATED)
    content = _zip(rng.choice(files))
    return content if rng.random() < 0.7 else content[: rng.randrange(len(content))]


MAKERS: dict[str, Make] = {
    "pickle": make_pickle,
    "yaml": make_yaml,
    "json": make_json,
    "truncated": make_truncated,
    "safetensors": make_safetensors,
    "zip": make_zip,
}
