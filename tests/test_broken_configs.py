"""A broken number of a config.json gives a job, or an error that names a field and proposes a fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs.supported_models import DATA, list_configs
from optimus.errors import UserError
from optimus.job.hf_config import REFUSED
from optimus.job.read import find_job

FORMS = json.loads((DATA / "released_forms.json").read_text())


def numbers(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of numbers and lists."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif isinstance(value, int | float | list) and not isinstance(value, bool):
            yield (*path, key)


BROKEN: tuple[object, ...] = (0, -1, 1e-9, "x", None, [], [3])


def is_job_or_named_error(path: Path, config: dict[str, Any], spot: tuple[str, ...], value: object) -> bool:
    """Breaks one number of a configuration; tells whether it makes a job or an error that names a field."""
    config = json.loads(json.dumps(config))
    block = config
    for key in spot[:-1]:
        block = block[key]
    block[spot[-1]] = value
    path.write_text(json.dumps(config))
    try:
        counts = [module.parameters() for module in find_job(path, on="h100:64").model.modules]
    except UserError as error:
        named = spot[-1] in f"{error.field} {error}" or error.field.startswith("model.")
        return bool(error.hint) and named
    return all(0 < count < 1e16 for count in counts)


def test_a_broken_number_gives_a_job_or_an_error_that_names_a_field(tmp_path: Path) -> None:
    """Every third number of the released forms is broken, with one of the values in turn."""
    spots = [(name, spot) for name in FORMS for spot in numbers(FORMS[name])]
    for place, (name, spot) in enumerate(spots[::3]):
        value = BROKEN[place % len(BROKEN)]
        assert is_job_or_named_error(tmp_path / "config.json", FORMS[name], spot, value), (name, spot, value)


@pytest.mark.heavy
@pytest.mark.parametrize("value", BROKEN)
def test_every_broken_number_gives_a_job_or_an_error_that_names_a_field(
    tmp_path: Path, value: object
) -> None:
    """Every number of every form is broken, with each of the values."""
    pytest.importorskip("transformers")
    failures = [
        (name, form, spot)
        for name, form, config in list_configs()
        if config["model_type"] not in REFUSED
        for spot in numbers(config)
        if not is_job_or_named_error(tmp_path / "config.json", config, spot, value)
    ]
    assert not failures
