"""Phases of a chunk at the lines of a plan's op: by kernel, by layer, or all in one piece."""

from __future__ import annotations

import pytest

from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Phase as PlannedPhase
from optimus.ir.plan import Template
from optimus.models.phase_order import ALL_LAYERS, ChunkPhase, place_phases

FORWARD = ["norm1", "qkv", "attention", "out", "norm2", "up", "down"]
BACKWARD = (
    "down.dgrad down.wgrad up.dgrad up.wgrad norm2 out.dgrad out.wgrad attention qkv.dgrad qkv.wgrad norm1"
)


def template(kind: OpKind, names: list[str], *, layers: int = 1, duration_s: float = 1.0) -> Template:
    order = range(layers) if kind == OpKind.FORWARD else reversed(range(layers))
    return tuple(
        PlannedPhase(name=name, kind=kind, layer=layer, duration_s=duration_s)
        for layer in order
        for name in names
    )


def phase(kind: OpKind, layer: int, *kernels: str) -> ChunkPhase:
    return ChunkPhase(kind=kind, layer=layer, kernels=kernels, run=lambda: None)


def segments(kind: OpKind, *, layers: int = 1) -> list[ChunkPhase]:
    """Five of a layer, in the order of the op."""
    kernels = [("norm1", "latent", "qkv"), ("attention",), ("out",), ("norm2", "up"), ("down",)]
    found = [phase(kind, layer, *own) for layer in range(layers) for own in kernels]
    return found if kind == OpKind.FORWARD else found[::-1]


def lines(placed: list[list[ChunkPhase]]) -> list[list[str]]:
    return [["+".join(phase.kernels) for phase in phases] for phases in placed]


def test_a_forward_runs_at_the_last_line_of_its_kernels() -> None:
    placed = place_phases("llm.F chunk 0", template(OpKind.FORWARD, FORWARD), segments(OpKind.FORWARD))
    assert lines(placed) == [[], ["norm1+latent+qkv"], ["attention"], ["out"], [], ["norm2+up"], ["down"]]


def test_a_backward_runs_at_the_first() -> None:
    placed = place_phases(
        "llm.B chunk 0", template(OpKind.BACKWARD, BACKWARD.split()), segments(OpKind.BACKWARD)
    )
    assert [at for at, phases in enumerate(placed) if phases] == [0, 2, 5, 7, 8]
    assert lines(placed)[2] == ["norm2+up"]


def test_layers_are_told_apart() -> None:
    placed = place_phases(
        "llm.F chunk 0", template(OpKind.FORWARD, FORWARD, layers=3), segments(OpKind.FORWARD, layers=3)
    )
    assert [phases[0].layer for phases in placed if phases] == [0] * 5 + [1] * 5 + [2] * 5


@pytest.mark.parametrize(
    ("kind", "line"),
    [(OpKind.FORWARD, 6), (OpKind.BACKWARD, 0), (OpKind.INPUT_GRAD, 0), (OpKind.WEIGHT_GRAD, 0)],
)
def test_a_chunk_of_one_piece_runs_at_the_end_of_a_forward_and_the_begin_of_a_backward(
    kind: OpKind, line: int
) -> None:
    placed = place_phases("llm.x chunk 0", template(kind, FORWARD), [phase(kind, ALL_LAYERS)])
    assert [at for at, phases in enumerate(placed) if phases] == [line]


def test_a_layer_in_one_piece_takes_all_its_kernels() -> None:
    placed = place_phases(
        "llm.F chunk 0",
        template(OpKind.FORWARD, FORWARD, layers=2),
        [phase(OpKind.FORWARD, 0), phase(OpKind.FORWARD, 1)],
    )
    assert [at for at, phases in enumerate(placed) if phases] == [6, 13]


def test_a_phase_that_no_line_stands_for_follows_the_one_before_it() -> None:
    given = [
        phase(OpKind.FORWARD, 0, "norm1"),
        phase(OpKind.FORWARD, 0, "free"),
        phase(OpKind.FORWARD, 0, "up"),
    ]
    placed = place_phases("llm.F chunk 0", template(OpKind.FORWARD, ["norm1", "up"]), given)
    assert lines(placed) == [["norm1", "free"], ["up"]]


def test_what_is_made_again_is_not_taken_for_the_backward() -> None:
    planned = (
        *(PlannedPhase(name=name, kind=OpKind.RECOMPUTE, layer=0, duration_s=1.0) for name in FORWARD),
        *template(OpKind.BACKWARD, BACKWARD.split()),
    )
    again = [phase(OpKind.RECOMPUTE, 0, *own.kernels) for own in segments(OpKind.FORWARD)]
    placed = place_phases("llm.B chunk 0", planned, [*again, *segments(OpKind.BACKWARD)])
    kinds = [phases[0].kind for phases in placed if phases]
    assert kinds == [OpKind.RECOMPUTE] * 5 + [OpKind.BACKWARD] * 5
    assert all(phase.kind == OpKind.RECOMPUTE for phases in placed[:7] for phase in phases)


def test_a_kernel_that_the_chunk_does_not_have_is_named() -> None:
    given = segments(OpKind.FORWARD)[:-1]
    with pytest.raises(UserError) as error:
        place_phases("vision.F chunk 2", template(OpKind.FORWARD, FORWARD), given)
    assert error.value.field == "vision.F chunk 2 layer 0 down"
    assert "nothing for it" in error.value.problem


def test_a_kernel_that_takes_no_time_may_be_missing() -> None:
    planned = (*template(OpKind.FORWARD, FORWARD[:-1]), *template(OpKind.FORWARD, ["down"], duration_s=0.0))
    place_phases("llm.F chunk 0", planned, segments(OpKind.FORWARD)[:-1])


def test_a_collective_without_a_phase_is_named() -> None:
    launch = PlannedPhase(name="gather1", kind=OpKind.LAUNCH, layer=0)
    with pytest.raises(UserError) as error:
        place_phases("llm.F chunk 0", (launch, *template(OpKind.FORWARD, FORWARD)), segments(OpKind.FORWARD))
    assert error.value.field == "llm.F chunk 0 layer 0 gather1"


def test_segments_in_another_order_than_the_plan_are_named() -> None:
    given = segments(OpKind.FORWARD)[::-1]
    with pytest.raises(UserError) as error:
        place_phases("llm.F chunk 1", template(OpKind.FORWARD, FORWARD), given)
    assert error.value.field == "llm.F chunk 1 layer 0 norm2+up"
    assert "before" in error.value.problem
