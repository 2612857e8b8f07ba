"""Reads arrays of numbers from an .npz file: nothing pickled, nothing larger than the file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENDING = ".npy"


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Returns arrays that `np.savez` wrote, all or those of `names`; raises ValueError for other files."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(ENDING): entry for entry in archive.infolist()}
            wanted = entries if names is None else names
            return {name: _read_array(archive, entries[name]) for name in wanted}
    except (ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (zipfile.BadZipFile, MemoryError) as error:
        raise ValueError(f"{path} is not whole: {error}") from None


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    import numpy as np
    from numpy.lib import format as npy

    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    with archive.open(entry) as stream:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError(f"{entry.filename} is of another format")
        shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
        content = stream.read()
    if is_fortran or dtype.hasobject or len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{entry.filename} has not the bytes of its shape")
    array: NDArray[np.generic] = np.frombuffer(content, dtype).reshape(shape)
    return array
