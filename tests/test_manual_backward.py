"""Hand-written backwards against those of autograd for the same segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from optimus.job.attention import Attention
from optimus.job.model import Mlp, Stack
from optimus.models.attention import Rotary, build_sequence_rotary_table
from optimus.models.collectives import NO_TP, TpGroup
from optimus.models.dropout import Dropout, make_dropout_keys
from optimus.models.kernels import KERNELS
from optimus.models.layer_ops import ResidualAdd
from optimus.models.segment import (
    ManualBackwardSegment,
    Segment,
    SequentialSegment,
    State,
    WeightGradStore,
)
from optimus.models.tensor_parallel import TpCollective
from optimus.models.transformer_layer import (
    LinearSegment,
    MlpUpSegment,
    QkvSegment,
    build_attention_out,
    build_mlp_down,
)

ROWS, WIDTH, HEADS, HEAD_DIM = 6, 8, 4, 4
WHERE = {"dtype": torch.float64}
STACK = Stack(
    hidden=WIDTH,
    layers=1,
    attention=Attention(heads=HEADS, kv_heads=2, head_dim=HEAD_DIM),
    mlp=Mlp(width=12),
    norm="rmsnorm",
)
PLAIN = replace(
    STACK,
    attention=replace(STACK.attention, bias=True, qk_norm=True),
    mlp=Mlp(width=12, gated=False, bias=True),
    norm="layernorm",
)
STACKS = {"rmsnorm, gated": STACK, "layernorm, biases, head norms": PLAIN}


@dataclass
class Context:
    dropout_keys: Tensor | None
    rotary: Rotary | None


CONTEXTS = {
    "plain": Context(dropout_keys=None, rotary=None),
    "turned, dropped": Context(
        dropout_keys=make_dropout_keys(torch.arange(ROWS), seed=0, step=0, sample=0),
        rotary=build_sequence_rotary_table(torch.arange(ROWS), HEAD_DIM, 10_000.0, torch.float64),
    ),
}


def segments(stack: Stack, *, parts: bool) -> Iterator[tuple[str, Segment]]:
    """Yields the segments of a layer, or with `parts` those of a rank of two under tensor parallelism."""
    stack = replace(stack, dropout_rate=0.25)
    tp_group = TpGroup(rank=0, size=2 if parts else 1)
    projections: list[LinearSegment] = [
        QkvSegment(stack, KERNELS, tp_group, joins_kv=False, **WHERE),
        build_attention_out(stack, KERNELS, "out", tp_group, **WHERE),
        MlpUpSegment(stack, KERNELS, tp_group, **WHERE),
        build_mlp_down(stack, KERNELS, "down", tp_group, **WHERE),
    ]
    for projection in projections:
        for parameter in projection.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for part in projection.parallel_segments() if parts else [projection]:
            if not isinstance(part, TpCollective):
                yield "-".join(part.kernels), part


def state_of(segment: Segment, name: str) -> State:
    """Returns a state that a segment reads: the residual stream and, unless it begins with a norm, rows."""
    x = torch.randn(ROWS, WIDTH, **WHERE)
    if name.startswith("norm"):
        return (x,)
    if name in ("qkv", "up", "residual_add"):
        return x, torch.randn(ROWS, WIDTH, **WHERE)
    return x, torch.randn(ROWS, next(segment.parameters()).shape[1], **WHERE)


CASES = [
    pytest.param(stack, context, parts, id=f"{stack}; {context}; {'parts' if parts else 'whole'}")
    for stack, context, parts in product(STACKS, CONTEXTS, (False, True))
]


@pytest.mark.parametrize(("stack", "context", "parts"), CASES)
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("track_recomputable", [False, True], ids=["saved", "freed"])
def test_a_manual_backward_gives_the_gradients_of_autograd(
    stack: str, context: str, parts: bool, split: bool, track_recomputable: bool
) -> None:
    torch.manual_seed(0)
    for name, segment in segments(STACKS[stack], parts=parts):
        state = state_of(segment, name)
        expected = _by_autograd(segment, state, CONTEXTS[context], (True,) * len(state))
        found = _manual(
            segment,
            state,
            CONTEXTS[context],
            (True,) * len(state),
            split=split,
            track_recomputable=track_recomputable,
        )
        _compare(name, expected, found)


@pytest.mark.parametrize("frozen", ["inputs", "parameters"])
@pytest.mark.parametrize("stack", STACKS)
def test_no_gradient_is_computed_that_is_not_needed(stack: str, frozen: str) -> None:
    torch.manual_seed(0)
    for name, segment in segments(STACKS[stack], parts=True):
        segment.requires_grad_(frozen != "parameters")
        if frozen == "inputs" and not segment.trainable:
            continue
        state = state_of(segment, name)
        needs = (frozen == "parameters",) * len(state)
        expected = _by_autograd(segment, state, CONTEXTS["plain"], needs)
        found = _manual(segment, state, CONTEXTS["plain"], needs, split=False, track_recomputable=False)
        _compare(name, expected, found)


def test_a_frozen_segment_saves_nothing() -> None:
    for name, segment in segments(STACK, parts=True):
        segment.requires_grad_(False)
        state = state_of(segment, name)
        found, saved = segment.run_forward(state, (False,) * len(state), CONTEXTS["plain"], WeightGradStore())
        assert saved is None and not any(tensor.requires_grad for tensor in found)


def test_no_op_of_a_layer_builds_a_graph() -> None:
    for name, segment in segments(STACK, parts=True):
        assert isinstance(segment, ManualBackwardSegment), name
        state = state_of(segment, name)
        found, _ = segment.run_forward(state, (True,) * len(state), CONTEXTS["plain"], WeightGradStore())
        assert all(tensor.grad_fn is None and tensor.requires_grad for tensor in found), name


def test_a_segment_that_was_moved_computes_with_its_new_parameters() -> None:
    for stack in STACKS.values():
        moved = MlpUpSegment(stack, KERNELS, NO_TP, dtype=torch.float64, device="meta").to_empty(device="cpu")
        x = torch.randn(ROWS, WIDTH, **WHERE)
        _, saved = moved.run_forward((x,), (True,), CONTEXTS["plain"], WeightGradStore())
        assert saved is not None
        found = {id(each) for op in moved.segments for each in op.parameters()}
        assert found == {id(each) for each in moved.parameters()}


def test_a_sequence_runs_its_segments_in_order_and_frees_what_they_save() -> None:
    torch.manual_seed(0)
    sequence = SequentialSegment(ops := _norm_and_up())
    state, context = (torch.randn(ROWS, WIDTH, **WHERE),), CONTEXTS["plain"]
    expected = _by_autograd(sequence, state, context, (True,))
    _compare(
        "sequence",
        expected,
        _manual(sequence, state, context, (True,), split=False, track_recomputable=False),
    )

    made, saved = sequence.run_forward(state, (True,), context, WeightGradStore())
    assert saved is not None and len(saved.values) == len(ops)
    sequence.run_backward(saved, tuple(map(_seed, made)), split=False)
    assert not saved.values


def test_a_sequence_runs_no_backward_before_the_first_segment_that_trains() -> None:
    torch.manual_seed(0)
    norm, up = _norm_and_up()
    norm.requires_grad_(False)
    sequence, state, context = (
        SequentialSegment((norm, up)),
        (torch.randn(ROWS, WIDTH, **WHERE),),
        CONTEXTS["plain"],
    )
    made, saved = sequence.run_forward(state, (False,), context, WeightGradStore())
    assert saved is not None and saved.values[0] is None and saved.values[1] is not None
    assert sequence.run_backward(saved, (None, _seed(made[1])), split=False) == (None,)
    assert all(parameter.grad is None for parameter in norm.parameters())

    frozen = SequentialSegment(_norm_and_up()).requires_grad_(False)
    assert frozen.run_forward(state, (False,), context, WeightGradStore())[1] is None


def _norm_and_up() -> list[Segment]:
    return [segment for name, segment in segments(STACK, parts=True) if name in ("norm2", "up")]


def test_a_bias_that_adds_up_in_float32_gets_sums_in_float32() -> None:
    bias = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))
    bias.grad_dtype = torch.float32
    bias.grad = torch.zeros(WIDTH)
    join = ResidualAdd(bias, Dropout("join", 0.0))
    gradient = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    join.backward((None, None), (gradient,), (True, True), WeightGradStore())
    assert torch.equal(bias.grad, gradient.sum(0, dtype=torch.float32))


def test_dropout_in_a_graph_keeps_keys_and_drops_gradients_as_it_drops_rows() -> None:
    keys, dropout, kept = (
        make_dropout_keys(torch.arange(ROWS), seed=0, step=0, sample=0),
        Dropout("site", 0.1),
        [],
    )

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = dropout(rows, keys)
    assert kept == [keys]
    found.backward(seed := torch.randn_like(found))
    assert rows.grad is not None and torch.equal(rows.grad, dropout(seed, keys))


Outcome = tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]  # state, its gradients, of parameters


def _by_autograd(segment: Segment, state: State, context: Context, needs: tuple[bool, ...]) -> Outcome:
    given = [tensor.clone().requires_grad_(need) for tensor, need in zip(state, needs, strict=True)]
    made = segment.forward(tuple(given), context)
    seeds = [_seed(tensor) for tensor in made]
    roots = [(tensor, seed) for tensor, seed in zip(made, seeds, strict=True) if tensor.requires_grad]
    asked = [tensor for tensor in (*given, *segment.parameters()) if tensor.requires_grad]
    found = iter(
        torch.autograd.grad(
            [root for root, _ in roots], asked, [seed for _, seed in roots], allow_unused=True
        )
    )
    gradients = [next(found) if tensor.requires_grad else None for tensor in given]
    return (
        list(made),
        gradients,
        [next(found) if each.requires_grad else None for each in segment.parameters()],
    )


def _manual(
    segment: Segment,
    state: State,
    context: Context,
    needs: tuple[bool, ...],
    *,
    split: bool,
    track_recomputable: bool,
) -> Outcome:
    for parameter in segment.parameters():
        parameter.grad = None
    weight_grads = WeightGradStore(track_recomputable=track_recomputable)
    made, saved = segment.run_forward(state, needs, context, weight_grads)
    assert saved is not None
    kept = [tensor.detach().clone() for tensor in made]
    if track_recomputable:
        weight_grads.free()
        weight_grads.recompute()
    weight_grads.immediate = not split
    seeds = tuple(_seed(tensor) if tensor.requires_grad else None for tensor in made)
    gradients = segment.run_backward(saved, seeds, split=split)
    for work in weight_grads:
        work()
    return kept, list(gradients), [parameter.grad for parameter in segment.parameters()]


def _seed(tensor: Tensor) -> Tensor:
    return torch.linspace(-1, 2, tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)


def _compare(name: str, expected: Outcome, found: Outcome) -> None:
    for what, left, right in zip(("state", "gradients", "parameters"), expected, found, strict=True):
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            if one is None or other is None:
                assert one is other or not _any(one if other is None else other), (name, what, place)
            else:
                torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13, msg=f"{name} {what} {place}")


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())
