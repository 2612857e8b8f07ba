"""Measures `optimus data index` and its tables, on synthetic data sets.

`python tests/index_figures.py 20000` indexes as many samples with one worker, `python tests/index_figures.py
files 1000000` with 4,000 files and a worker per core; `python tests/index_figures.py tables 1000000` finds as
many lines, and packs as many lengths.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from chat_data import chat, write_data_set, write_folder

from optimus.data.index_lengths import LengthsTable
from optimus.data.jsonl_file import scan_jsonl
from optimus.data.packing import pack_documents
from optimus.data.token_counts import SampleLengths


def measure_command(samples: int, *options: str, images: int = 12) -> str:
    with tempfile.TemporaryDirectory() as name:
        data = write_data_set(Path(name), samples, images)
        model = write_folder(Path(name) / "model", "qwen2_5_vl")
        command = [sys.executable, "-m", "optimus", "data", "index", str(data), "--model", str(model)]
        begin_s = time.monotonic()
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - begin_s
        index_mb = (Path(name) / "train.index.npz").stat().st_size / 1e6
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        f"{wall_s:.0f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU, peak {used.ru_maxrss / 1024:.0f} MB"
        f" in the largest process, index of {index_mb:.0f} MB"
    )


def measure_files(samples: int) -> str:
    return measure_command(samples, "--sequence-tokens", "8192", images=4000)


def measure_tables(samples: int) -> str:
    begin_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "data.jsonl"
        with path.open("w") as file:
            file.writelines(f"{chat('<image>what', images=['a.png'])}\n" for _ in range(samples))
        written_s = time.monotonic()
        assert len(scan_jsonl(path)) == samples
    scanned_s = time.monotonic()
    generator, table = np.random.default_rng(0), LengthsTable(["vision"])
    for text, image in generator.integers(4, 1000, (samples, 2)).tolist():
        table.append(SampleLengths(text=text, items={"vision": (image,)}))
    filled_s = time.monotonic()
    packed = table.join(pack_documents(map(int, table.tokens()), 8192))
    packed_s = time.monotonic()
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = sum(int(tokens.sum()) for tokens in table.totals().values())
    return (
        f"lines found in {scanned_s - written_s:.2f} s, table filled in {filled_s - scanned_s:.1f} s,"
        f" packed in {packed_s - filled_s:.1f} s, {tokens / len(packed) / 8192:.1%} full,"
        f" {(peak_kb - begin_kb) / 1024:.0f} MB beside libraries"
    )


if __name__ == "__main__":
    count, kind = int(sys.argv[-1]), sys.argv[1]
    measures = {"tables": measure_tables, "files": measure_files}
    measured = measures[kind](count) if kind in measures else measure_command(count, "--workers", "1")
    sys.stdout.write(f"{count:,} samples: {measured}\n")
