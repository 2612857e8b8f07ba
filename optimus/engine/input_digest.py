"""Hashes what a run reads from files, so that ranks on several hosts can compare their copies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from optimus.job.array_file import read_arrays

TAIL_BYTES = 4096  # of a file of weights: with its header, they tell weights of two trainings apart
MISSING = "missing"


def digest_index(index: Path) -> str:
    """Hashes the index of a data set: the samples, the processor, and which samples can be used."""
    digest = hashlib.sha256()
    try:
        for name, values in sorted(read_arrays(index).items()):
            digest.update(name.encode() + values.tobytes())
    except ValueError:
        return MISSING
    return digest.hexdigest()


def digest_weights(folder: Path) -> str:
    """Hashes the configuration of a model folder, and names, sizes and ends of its files of weights."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(TAIL_BYTES))
                file.seek(max(0, size - TAIL_BYTES))
                digest.update(file.read())
    except OSError:
        return MISSING
    return digest.hexdigest()
