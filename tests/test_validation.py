"""The figures in docs/validation.md are the ones the code computes today."""

from __future__ import annotations

import pytest

from benchmarks.docs.validation_tables import PAGE, fill


@pytest.mark.ci
def test_the_page_shows_what_is_computed() -> None:
    page = PAGE.read_text()
    assert fill(page) == page, "run python -m benchmarks.docs.validation_tables and read what changed"
