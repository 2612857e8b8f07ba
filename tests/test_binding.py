"""A plan is bound to its job: what differs is named, and where numbers come from does not matter."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from plan_by_hand import PARTS, two_pipelines

from optimus.errors import UserError
from optimus.ir.binding import (
    ABSENT,
    BindingMismatch,
    find_binding_mismatches,
    flatten_and_hash_parts,
    require_plan_of_job,
)


def test_binding_is_flat_and_without_sources() -> None:
    long = list(range(200))
    bound_to, hashes = flatten_and_hash_parts(
        {"model": {"llm": {"stack": {"layers": 96}, "source": "a"}, "a": (1, 2), "b": long}}
    )
    assert list(bound_to["model"]) == ["llm.stack.layers", "a", "b"]
    assert bound_to["model"]["llm.stack.layers"] == 96 and bound_to["model"]["a"] == [1, 2]
    assert re.fullmatch("sha256:[0-9a-f]{64}", bound_to["model"]["b"])
    text = json.dumps(bound_to["model"], sort_keys=True, separators=(",", ":"))
    assert hashes["model"] == hashlib.sha256(text.encode()).hexdigest()
    assert (
        flatten_and_hash_parts({"model": {"b": long, "a": [1, 2], "llm": {"stack": {"layers": 96}}}})[1]
        == hashes
    )


def test_a_mismatch_is_named() -> None:
    plan = two_pipelines()
    assert find_binding_mismatches(plan, PARTS) == []
    require_plan_of_job(plan, PARTS)
    other = {
        "model": {"llm": {"stack": {"layers": 6, "width": 512}}, "encoders": [{"name": "vit"}]},
        "cluster": {"gpus": 8, "gpu": {"name": "H100"}, "rails": 4},
    }
    assert find_binding_mismatches(plan, other) == [
        BindingMismatch(part="model", field="llm.stack.layers", planned=4, given=6),
        BindingMismatch(part="cluster", field="rails", planned=ABSENT, given=4),
    ]
    with pytest.raises(UserError) as caught:
        require_plan_of_job(plan, other)
    assert caught.value.field == "model.llm.stack.layers"
    assert caught.value.problem == "is 6, and the plan was made for 4, and 1 more field differs"
    assert len(find_binding_mismatches(plan, {})) == 5
    exact = {**PARTS, "cluster": {"gpus": 8.0, "gpu": {"name": "H100"}}}
    assert [found.field for found in find_binding_mismatches(plan, exact)] == ["gpus"]
