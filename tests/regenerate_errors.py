"""Writes tests/golden/errors.txt anew; read the difference before you commit it."""

from __future__ import annotations

import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from error_cases import document

    GOLDEN.write_text(document(), encoding="utf-8")
