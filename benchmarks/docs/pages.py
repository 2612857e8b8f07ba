"""Writes computed tables into pages of the documentation, between their markers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS, GOLDEN = ROOT / "docs", ROOT / "tests" / "golden"
END = "<!-- end -->"

Figures = dict[str, Any]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table whose first column is left-aligned and whose others are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill_tables(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with every table between its markers `<!-- name -->` and `<!-- end -->`."""
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        assert begin in page, f"no place for {name}"
        before, rest = page.split(begin, 1)
        page = before + begin + table + "\n" + END + rest.split(END, 1)[1]
    return page


def read_figures(path: Path) -> Figures:
    """Returns stored figures by the key of their case."""
    figures: Figures = json.loads(path.read_text()) if path.exists() else {}
    return figures


def store_figures(path: Path, figures: Figures) -> None:
    """Writes figures by the key of their case."""
    path.write_text(json.dumps(figures, indent=1) + "\n")


def compute_named(
    path: Path, cases: Mapping[str, Callable[[], Figures]], prefixes: Sequence[str] = ()
) -> None:
    """Computes the cases whose keys start with a prefix, by default all, and reports progress.

    Each is stored as soon as it is computed, with those stored before, in the order of the cases.
    """
    named = [key for key in cases if not prefixes or key.startswith(tuple(prefixes))]
    for place, key in enumerate(named):
        begin = time.process_time()
        stored = {**read_figures(path), key: cases[key]()}
        store_figures(path, {each: stored[each] for each in cases if each in stored})
        seconds = time.process_time() - begin
        sys.stderr.write(f"{place + 1} of {len(named)}: {key}, {seconds:.0f} s of CPU\n")


def rounded(value: float) -> float:
    """Rounds to a millionth, the precision of stored figures."""
    return round(value, 6)
