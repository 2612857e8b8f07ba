"""The golden document of error messages: exact, complete and readable."""

from __future__ import annotations

import pickle
import re

import pytest
from error_cases import SECTIONS, Case, document
from regenerate_errors import GOLDEN

from optimus.errors import DoesNotFit, UserError, nearest

CASES = [case for cases in SECTIONS.values() for case in cases]


def test_messages_are_as_in_the_golden_file() -> None:
    assert document() == GOLDEN.read_text(encoding="utf-8"), (
        "run python tests/regenerate_errors.py and read it"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_message_has_two_lines_in_the_house_form(case: Case) -> None:
    error, hint = case.message().split("\n")
    assert error.startswith("error: ") and hint.startswith("hint: ")
    assert not re.search(r"<class|Traceback|None\b|/tmp/", error + hint)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 40


def test_errors_survive_pickling() -> None:
    error = UserError(field="a.b", value=3, problem="is odd", hint="use 2", file="job.yaml", line=7)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.file, again.line, again.value) == ("job.yaml", 7, 3)
    no = DoesNotFit("nothing fits", "use more GPUs")
    assert str(pickle.loads(pickle.dumps(no))) == str(no)


def test_nearest_proposes_and_lists() -> None:
    many = [f"layers.{number}" for number in range(100)]
    assert nearest("layer.99", many).startswith("did you mean layers.99? known: layers.0, layers.1, ")
    assert nearest("layer.99", many).endswith(" and 95 more")
    assert nearest("worklod", ["workload", "layout"]) == "did you mean workload? known: layout or workload"
    assert nearest("zzz", ["a", "b"]) == "use a or b"
    assert nearest("optimus.job/2", ["optimus.job/1"]) == "use optimus.job/1"
