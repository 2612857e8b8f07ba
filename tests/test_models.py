"""Segmented chunks against one autograd graph, and the kernels and orders they consist of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from one_process import OneProcess, parameters_by_name, whole
from tiny_models import DTYPE, ENCODERS, LLMS, build, close, images, random_samples, tiny_model
from torch import Tensor

from optimus.engine.torch_private import FakeTensorMode
from optimus.ir.op import OpKind
from optimus.job.model import Encoder, Llm
from optimus.models import attention
from optimus.models.attention import Spans, attend_by_spans, attend_varlen
from optimus.models.build import build_layers
from optimus.models.chunk import SegmentedChunk
from optimus.models.kernels import Norm
from optimus.models.layer_ops import SwiGlu, swiglu
from optimus.models.microbatch_inputs import build_encoder_inputs, build_llm_inputs
from optimus.models.phase_order import Recompute
from optimus.models.sample import compute_encoder_token_order
from optimus.models.segment import WeightGradStore

State = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------ modules with something to run on

NAMES = [*LLMS, *ENCODERS, "frozen trunk", "frozen projector", "frozen llm"]


def inputs_of(module: Encoder | Llm, name: str) -> tuple[State, tuple[bool, ...], Any]:
    """Returns state, which of it needs gradients, and context of one microbatch."""
    if isinstance(module, Encoder):
        inputs, encoder_context = build_encoder_inputs(
            module, images(module), 80, seed=1, step=2, dtype=DTYPE
        )
        return (inputs,), (False,), encoder_context
    key = name if name in LLMS else "llama"
    model = tiny_model(key)
    samples = random_samples(model, 3, documents=True)
    n = sum(sample.length for sample in samples)
    generator = torch.Generator().manual_seed(6)
    rows = tuple(
        torch.randn(count, module.stack.hidden, generator=generator, dtype=DTYPE) for count in (6, 4)
    )
    targets = [torch.tensor([3, 4, 5, n, 50, n]), torch.tensor([n, 60, 61, 8])]
    ids, context = build_llm_inputs(
        module,
        samples,
        targets,
        1 / 64,
        seed=1,
        step=2,
        dtype=DTYPE,
        encoders=model.encoders,
    )
    return (ids, *rows), (False, True, True), context


def run(chunk: SegmentedChunk, kind: OpKind, microbatch: int = 0) -> None:
    for phase in chunk.phases(kind, microbatch):
        phase.run()


def gradient_like(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


@pytest.mark.parametrize(("split", "recompute"), [*product([False, True], get_args(Recompute))])
@pytest.mark.parametrize("name", NAMES)
def test_a_segmented_chunk_has_the_gradients_of_one_graph(
    name: str, split: bool, recompute: Recompute
) -> None:
    module, layers = build(name)
    state, needs, context = inputs_of(module, name)
    chunk = SegmentedChunk(layers, recompute=recompute)
    for _ in range(2):  # the second adds to the first
        chunk.begin_forward(0, state, needs, context)
        run(chunk, OpKind.FORWARD)
        (output,) = chunk.output(0)
        chunk.begin_backward(0, (gradient_like(output),))
        run(chunk, OpKind.INPUT_GRAD if split else OpKind.BACKWARD)
        found = chunk.input_gradients(0)
        run(chunk, OpKind.WEIGHT_GRAD)
    gradients = {n: p.grad for n, p in parameters_by_name(module, layers).items() if p.grad is not None}

    module, layers = build(name)
    leaves = tuple(tensor.clone().requires_grad_(need) for tensor, need in zip(state, needs, strict=True))
    (expected,) = whole(layers, leaves, context)
    expected.backward(gradient_like(expected))
    assert close(output, expected.detach())
    parameters = parameters_by_name(module, layers)
    assert set(gradients) == {n for n, p in parameters.items() if p.grad is not None}
    assert set(gradients) == {n for n, p in parameters.items() if p.requires_grad}
    assert not any(gradient.requires_grad for gradient in gradients.values())  # or graphs would stay alive
    for parameter, gradient in gradients.items():
        reached = parameters[parameter].grad
        assert reached is not None and close(gradient, 2 * reached), parameter
    for leaf, gradient in zip(leaves, found, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or close(gradient, leaf.grad)


def recomputable_of(chunk: SegmentedChunk) -> list[Tensor]:
    """Returns the activations that a chunk marked as recomputable in the forward of microbatch 0."""
    saved = [each for each in chunk._frames[0].saved if each is not None]
    return [tensor for each in saved for tensor, _, _ in each.weight_grads.recomputable]


def test_cheap_activations_are_freed_after_a_forward_and_recomputed_before_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both norms and the activation of every layer, recomputed bit for bit."""
    module, layers = build("llama")
    state, needs, context = inputs_of(module, "llama")
    chunk, plain = SegmentedChunk(layers, recompute="cheap"), SegmentedChunk(layers)
    for each in (chunk, plain):
        each.begin_forward(0, state, needs, context)
        run(each, OpKind.FORWARD)
    assert not recomputable_of(plain)
    made = recomputable_of(chunk)
    assert len(made) == 3 * module.stack.layers
    assert not any(tensor.untyped_storage().nbytes() for tensor in made)
    monkeypatch.setattr(WeightGradStore, "free", lambda self: None)
    kept = SegmentedChunk(layers, recompute="cheap")
    kept.begin_forward(0, state, needs, context)
    run(kept, OpKind.FORWARD)
    for place in range(len(chunk._segments)):
        chunk._recompute_freed(0, place)
    assert all(torch.equal(again, first) for again, first in zip(made, recomputable_of(kept), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_norm_has_the_gradients_of_its_formula(dtype: torch.dtype) -> None:
    norm = Norm("rmsnorm", 8, 1e-6, dtype=dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    rows = torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
    expected = torch.nn.functional.rms_norm(rows, (8,), norm.weight, 1e-6)
    seeds = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [rows, norm.weight], seeds)
    found = torch.autograd.grad(norm(rows), [rows, norm.weight], seeds)
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    assert torch.allclose(norm(rows), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * 5)


def test_a_gate_has_the_gradient_of_its_formula() -> None:
    rows = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SwiGlu.apply, (rows,))
    gate, up = rows.chunk(2, -1)
    assert torch.equal(swiglu(rows), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", ["frozen trunk", "frozen llm"])
def test_frozen_parts_build_no_graph(name: str) -> None:
    module, layers = build(name)
    (first, *rest), _, context = inputs_of(module, name)
    state: State = (first, *rest)
    for layer in layers if name == "frozen llm" else layers[:-1]:
        for segment in layer:
            state, saved = segment.run_forward(state, (False,) * len(state), context, WeightGradStore())
            assert saved is None and not any(tensor.requires_grad for tensor in state)
    if name == "frozen trunk":
        state, saved = layers[-1][0].run_forward(state, (False,), context, WeightGradStore())
        assert saved is not None and state[0].requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_nothing_reads_values_or_sizes_from_a_device(name: str) -> None:
    """On the meta device there are no values to read."""
    module, layers = build(name, device="meta")
    state, needs, context = inputs_of(module, name)
    chunk = SegmentedChunk(layers)
    chunk.begin_forward(
        0, tuple(tensor.to("meta") for tensor in state), needs, context.map(lambda tensor: tensor.to("meta"))
    )
    run(chunk, OpKind.FORWARD)
    (output,) = chunk.output(0)
    chunk.begin_backward(0, (torch.empty_like(output),))
    run(chunk, OpKind.INPUT_GRAD)
    chunk.input_gradients(0)
    run(chunk, OpKind.WEIGHT_GRAD)
    assert output.is_meta


# ------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("grid", [(4, 4), (6, 10), (2, 2), (8, 2), (3, 4, 6)])
def test_windows_and_merge_groups_stand_together_and_the_llm_gets_raster_order(grid: tuple[int, ...]) -> None:
    encoder = ENCODERS["windows"]
    order = compute_encoder_token_order(encoder, grid)
    frames, height, width = grid if len(grid) == 3 else (1, *grid)
    tokens = frames * height * width
    assert sorted(order.raster_index.tolist()) == list(range(tokens))
    assert sum(order.window_spans) == sum(order.spans) == tokens
    place = [(i // (height * width), i // width % height, i % width) for i in order.raster_index.tolist()]
    assert [(y, x) for _, y, x in place] == [tuple(pair) for pair in order.coordinates.tolist()]
    windows: set[tuple[int, int, int]] = set()
    start = 0
    for span in order.window_spans:
        inside = {(t, y // 4, x // 4) for t, y, x in place[start : start + span]}
        assert len(inside) == 1 and not inside & windows
        windows |= inside
        start += span
    for group, token in enumerate(order.output_index.tolist()):
        inside = {(t, y // 2, x // 2) for t, y, x in place[4 * group : 4 * group + 4]}
        t, rest = divmod(token, height * width // 4)
        assert inside == {(t, *divmod(rest, width // 2))}


@pytest.mark.parametrize("spans", [(12,), (3, 3, 3, 3), (5, 2, 5), (1, 4, 4, 1, 2), (12, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_sees_its_span_only(
    spans: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(12, heads, 4, generator=generator, dtype=DTYPE) for heads in (4, 2, 2)
    )
    span_of = torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))
    allowed = span_of[:, None] == span_of[None, :]
    if causal:
        allowed &= torch.ones(12, 12, dtype=torch.bool).tril()
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(2, 1)) / 2.0
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(2, 1))
    assert close(attend_by_spans(queries, keys, values, spans, causal), expected)
    monkeypatch.setattr(attention, "varlen_attn", attend_as_documented)
    assert close(attend_varlen(queries, keys, values, Spans.of(spans), causal), expected)


def attend_as_documented(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    key_begins: Tensor,
    longest: int,
    longest_key: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Stands for `torch.nn.attention.varlen.varlen_attn`, which runs on GPUs only."""
    assert begins.dtype == key_begins.dtype == torch.int32 and begins.tolist() == key_begins.tolist()
    assert begins[0] == 0 and begins[-1] == len(queries)
    assert longest == longest_key == int(begins.diff().max()) and int(begins.diff().min()) > 0
    assert enable_gqa == (queries.shape[1] != keys.shape[1])
    causal = {(-1, 0): True, (-1, -1): False}[window_size]
    runs = [slice(begin, end) for begin, end in pairwise(begins.tolist())]
    return torch.cat(
        [
            attend_by_spans(queries[run], keys[run], values[run], (run.stop - run.start,), causal)
            for run in runs
        ]
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_gpus_has_its_shapes(causal: bool) -> None:
    """Torch's own op is dispatched for a GPU, forward; on fake tensors of a CPU, backward too."""
    spans = (5, 2, 5)
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            queries, keys, values = rows = [
                torch.empty(12, heads, 72, dtype=torch.bfloat16, device=device, requires_grad=device == "cpu")
                for heads in (4, 2, 2)
            ]
            own = Spans(spans)
            own.offsets = torch.empty(4, dtype=torch.int32, device=device)
            attended = attend_varlen(queries, keys, values, own, causal)
            assert attended.shape == (12, 4, 72) and attended.dtype == torch.bfloat16
            assert attended.device.type == device
            if device == "cpu":
                grads = torch.autograd.grad(attended.sum(), rows)
                assert [grad.shape for grad in grads] == [each.shape for each in rows]


def test_the_loss_falls_along_its_gradient() -> None:
    """A central difference along a random direction of all parameters."""
    model = tiny_model("qwen")
    oracle = OneProcess(model)
    samples = random_samples(model, 2, first=1)
    _, gradients = oracle.loss_and_gradients(samples)
    generator = torch.Generator().manual_seed(1)
    parameters = oracle.parameters()
    direction = {n: torch.randn(p.shape, generator=generator, dtype=DTYPE) for n, p in parameters.items()}
    slope = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    size, losses = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=sign * size)
        losses.append(oracle.loss_and_gradients(samples)[0])
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen", "windows"])
def test_bf16_comes_near_float64(name: str) -> None:
    module, exact = build(name)
    layers = build_layers(module, dtype=torch.bfloat16)
    state, _, context = inputs_of(module, name)
    (expected,) = whole(exact, state, context)
    rotary = tuple(table.bfloat16() for table in context.rotary)
    state = tuple(t.bfloat16() if t.is_floating_point() else t for t in state)
    (found,) = whole(layers, state, replace(context, rotary=rotary))
    assert found.dtype == (torch.bfloat16 if name == "windows" else torch.float32)
    assert close(found.double(), expected, 2e-2)
