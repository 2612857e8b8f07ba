"""Segmented models against the same as one graph, and what must not depend on bins, ranges or devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import sqrt
from typing import Any, get_args

import pytest
import torch
from one_process import OneProcess, whole
from tiny_models import ENCODERS, GRIDS, LLMS, random_samples, tiny_model
from torch import Tensor

from optimus.errors import UserError
from optimus.job.model import Encoder, Experts, LatentAttention, Llm, Model
from optimus.models.arrangement import arrange
from optimus.models.attention import attend_by_spans
from optimus.models.build import build_layers, layer_count, named_parameters
from optimus.models.check_sample import check_sample
from optimus.models.chunk import SegmentedChunk
from optimus.models.context import bin_targets, encoder_inputs, llm_inputs
from optimus.models.dropout import Dropout, row_keys
from optimus.models.layer_parts import Gated, gated
from optimus.models.norms import Norm
from optimus.models.numerics import NUMERICS, Numerics
from optimus.models.sample import Item, Placed, Sample, loss_scale, placed_items
from optimus.models.segment import Deferred, Segment
from optimus.models.steps import Recompute
from optimus.program.op import Kind

DTYPE = torch.float64
Layers = Sequence[Sequence[Segment]]
State = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def close(first: Tensor, second: Tensor, error: float = 1e-13) -> bool:
    """Against the second tensor's scale."""
    first, second = first.detach(), second.detach()
    assert first.shape == second.shape
    scale = max(float(second.abs().max()), 1e-300) if second.numel() else 1.0
    return float((first - second).abs().max() if second.numel() else 0.0) <= error * scale


# ------------------------------------------------------------------------ modules with something to run on

NAMES = [*LLMS, *ENCODERS, "frozen trunk", "frozen projector", "frozen llm"]


def build(name: str, **where: Any) -> tuple[Encoder | Llm, Layers]:
    numerics = NUMERICS
    module: Encoder | Llm
    if name in LLMS:
        module, numerics = LLMS[name]
    elif name == "frozen llm":
        module = replace(LLMS["llama"][0], train=False)
    elif name == "frozen trunk":
        module = replace(ENCODERS["windows"], train=False)
    elif name == "frozen projector":
        windows = ENCODERS["windows"]
        module = replace(windows, projector=replace(windows.projector, train=False))
    else:
        module = ENCODERS[name]
    return module, build_layers(module, dtype=DTYPE, numerics=numerics, **where)


def images(encoder: Encoder, count: int = 3) -> list[Placed]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, grid in enumerate(GRIDS[encoder.name][:count]):
        size = (int(torch.tensor(grid).prod()), encoder.patch_inputs)
        inputs = torch.randn(size, generator=generator, dtype=DTYPE)
        found.append((7 + number // 2, number % 2, Item(offset=0, grid=grid, inputs=inputs)))
    return found


def inputs_of(module: Encoder | Llm, name: str) -> tuple[State, tuple[bool, ...], Any]:
    """State, needs and context of one microbatch."""
    if isinstance(module, Encoder):
        inputs, encoder_context = encoder_inputs(module, images(module), 80, seed=1, step=2, dtype=DTYPE)
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
    ids, context = llm_inputs(
        module,
        samples,
        targets,
        1 / 64,
        seed=1,
        step=2,
        dtype=DTYPE,
        numerics=LLMS[key][1],
        encoders=model.encoders,
    )
    return (ids, *rows), (False, True, True), context


def play(chunk: SegmentedChunk, kind: Kind, microbatch: int = 0) -> None:
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
        chunk.begin(0, state, needs, context)
        play(chunk, Kind.F)
        (output,) = chunk.output(0)
        chunk.begin_backward(0, (gradient_like(output),))
        play(chunk, Kind.I if split else Kind.B)
        found = chunk.input_gradients(0)
        play(chunk, Kind.W)
    gradients = {n: p.grad for n, p in named_parameters(module, layers) if p.grad is not None}

    module, layers = build(name)
    leaves = tuple(tensor.clone().requires_grad_(need) for tensor, need in zip(state, needs, strict=True))
    (expected,) = whole(layers, leaves, context)
    expected.backward(gradient_like(expected))
    assert close(output, expected.detach())
    parameters = dict(named_parameters(module, layers))
    assert set(gradients) == {n for n, p in parameters.items() if p.grad is not None}
    assert set(gradients) == {n for n, p in parameters.items() if p.requires_grad}
    assert not any(gradient.requires_grad for gradient in gradients.values())  # or graphs would stay alive
    for parameter, gradient in gradients.items():
        reached = parameters[parameter].grad
        assert reached is not None and close(gradient, 2 * reached), parameter
    for leaf, gradient in zip(leaves, found, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or close(gradient, leaf.grad)


def cheap_of(chunk: SegmentedChunk) -> list[Tensor]:
    """What a chunk has noted to be cheap in the forward of microbatch 0."""
    saved = [each for each in chunk._frames[0].saved if each is not None]
    return [tensor for each in saved for tensor, _, _ in each.deferred.cheap]


def test_what_is_cheap_is_emptied_behind_a_forward_and_filled_before_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both norms and the non-linearity of a layer; the numbers are the same bit by bit."""
    module, layers = build("llama")
    state, needs, context = inputs_of(module, "llama")
    chunk, plain = SegmentedChunk(layers, recompute="cheap"), SegmentedChunk(layers)
    for each in (chunk, plain):
        each.begin(0, state, needs, context)
        play(each, Kind.F)
    assert not cheap_of(plain)
    made = cheap_of(chunk)
    assert len(made) == 3 * module.stack.layers
    assert not any(tensor.untyped_storage().nbytes() for tensor in made)
    monkeypatch.setattr(Deferred, "empty", lambda self: None)
    kept = SegmentedChunk(layers, recompute="cheap")
    kept.begin(0, state, needs, context)
    play(kept, Kind.F)
    for place in range(len(chunk._segments)):
        chunk._fill(0, place)
    assert all(torch.equal(again, first) for again, first in zip(made, cheap_of(kept), strict=True))


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
    assert torch.autograd.gradcheck(Gated.apply, (rows,))
    gate, up = rows.chunk(2, -1)
    assert torch.equal(gated(rows), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", ["frozen trunk", "frozen llm"])
def test_frozen_parts_build_no_graph(name: str) -> None:
    module, layers = build(name)
    (first, *rest), _, context = inputs_of(module, name)
    state: State = (first, *rest)
    for layer in layers if name == "frozen llm" else layers[:-1]:
        for segment in layer:
            state, saved = segment.run(state, (False,) * len(state), context, Deferred())
            assert saved is None and not any(tensor.requires_grad for tensor in state)
    if name == "frozen trunk":
        state, saved = layers[-1][0].run(state, (False,), context, Deferred())
        assert saved is not None and state[0].requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_nothing_reads_values_or_sizes_from_a_device(name: str) -> None:
    """On the meta device there are no values to read."""
    module, layers = build(name, device="meta")
    state, needs, context = inputs_of(module, name)
    chunk = SegmentedChunk(layers)
    chunk.begin(
        0, tuple(tensor.to("meta") for tensor in state), needs, context.map(lambda tensor: tensor.to("meta"))
    )
    play(chunk, Kind.F)
    (output,) = chunk.output(0)
    chunk.begin_backward(0, (torch.empty_like(output),))
    play(chunk, Kind.I)
    chunk.input_gradients(0)
    play(chunk, Kind.W)
    assert output.is_meta


# ------------------------------------------------------------------------ bins


def in_bins(
    model: Model, oracle: OneProcess, samples: list[Sample], bins: list[list[int]], capacity: int
) -> Any:
    """Loss and gradients with items of all samples dealt to bins, and all samples in one microbatch."""
    starts = [sum(sample.length for sample in samples[:place]) for place in range(len(samples))]
    n = sum(sample.length for sample in samples)
    first_rows = {sample.number: start for sample, start in zip(samples, starts, strict=True)}
    rows, targets = [], []
    for encoder in model.encoders:
        items = [placed for sample in samples for placed in placed_items(sample, encoder.name)]
        outputs, places = [], []
        for members in bins:
            mine = [items[member] for member in members if member < len(items)]
            inputs, in_bin = encoder_inputs(encoder, mine, capacity, seed=oracle.seed, step=4, dtype=DTYPE)
            outputs.append(whole(oracle.layers[encoder.name], (inputs,), in_bin)[0])
            places.append(bin_targets(encoder, mine, capacity, first_rows, n))
        rows.append(torch.cat(outputs))
        targets.append(torch.cat(places))
    ids, context = llm_inputs(
        model.llm,
        samples,
        targets,
        loss_scale(samples),
        seed=oracle.seed,
        step=4,
        dtype=DTYPE,
        numerics=oracle.numerics["llm"],
        encoders=model.encoders,
    )
    parameters = oracle.parameters()
    (loss,) = whole(oracle.layers["llm"], (ids, *rows), context)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize(
    ("llm", "encoders"),
    [("qwen", ("windows", "sound")), ("gpt", ("learned", "windowed sound"))],
)
def test_bins_padding_and_microbatches_change_nothing(llm: str, encoders: tuple[str, ...]) -> None:
    model = tiny_model(llm, encoders)
    oracle = OneProcess(model, seed=3, numerics={"llm": LLMS[llm][1]})
    samples = random_samples(model, 5, seed=2, documents=llm == "qwen")
    assert any(sum(map(len, sample.items.values())) > 1 for sample in samples)
    loss, expected = oracle.loss_and_gradients(samples, step=4)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    orders: list[list[list[int]]] = [[list(range(12))], [[8, 5, 2], [], [11, 10, 9, 7, 6], [4, 3, 1, 0]]]
    for bins in orders:
        found_loss, found = in_bins(model, oracle, samples, bins, 260)
        assert found_loss == pytest.approx(loss, rel=1e-13)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).abs().max()) <= 1e-13 * scale, name


@pytest.mark.parametrize("name", ENCODERS)
def test_an_item_has_the_same_rows_in_every_bin(name: str) -> None:
    encoder = ENCODERS[name]
    layers = build_layers(encoder, dtype=DTYPE)
    items = images(encoder)

    def rows(members: list[Placed], capacity: int) -> Tensor:
        inputs, context = encoder_inputs(encoder, members, capacity, seed=1, step=2, dtype=DTYPE)
        return whole(layers, (inputs,), context)[0].detach()

    before, alone = items[2][2].tokens, items[0][2].tokens
    merge = encoder.projector.merge
    first = rows([items[0]], alone)
    second = rows([items[2], items[0], items[1]], 100)[before // merge :][: alone // merge]
    assert close(second, first)
    if encoder.stack.dropout:
        other = rows([(items[0][0] + 1, *items[0][1:])], alone)
        assert not close(other, first, 1e-3)


def test_dropout_masks_are_equal_bit_by_bit_in_every_bin() -> None:
    encoder = ENCODERS["learned"]
    items = images(encoder)
    _, one = encoder_inputs(encoder, [items[1]], 24, seed=1, step=2)
    _, two = encoder_inputs(encoder, [items[0], items[1]], 64, seed=1, step=2)
    assert one.keys is not None and two.keys is not None
    drop = Dropout("somewhere", 0.1)
    assert torch.equal(drop.kept(one.keys, 16), drop.kept(two.keys[16:40], 16))
    sample, number, item = items[1]
    _, other = encoder_inputs(encoder, [(sample, number + 1, item)], 24, seed=1, step=2)
    assert other.keys is not None and not (other.keys == one.keys).any()


def test_dropout_drops_its_share_and_masks_are_independent() -> None:
    rows, width, share = 2_000, 256, 0.1
    masks = [
        Dropout(site, share).kept(
            row_keys(torch.arange(rows), seed=seed, step=step, sample=sample, item=item), width
        )
        for seed, step, sample, item, site in [
            (0, 0, 0, -1, "here"),
            (1, 0, 0, -1, "here"),
            (0, 1, 0, -1, "here"),
            (0, 0, 1, -1, "here"),
            (0, 0, 0, 0, "here"),
            (0, 0, 0, -1, "there"),
        ]
    ]
    deviation = sqrt(share * (1 - share) / (rows * width))
    for number, mask in enumerate(masks):
        dropped = (~mask).double()
        assert abs(float(dropped.mean()) - share) < 4 * deviation
        for axis, size in ((0, rows), (1, width)):
            assert float((dropped.mean(axis) - share).abs().max()) < 5 * sqrt(share * (1 - share) / size)
        for other in masks[:number]:
            both = float((~mask & ~other).double().mean())
            assert abs(both - share**2) < 5 * share / sqrt(rows * width)
        assert abs(float((dropped[1:] * dropped[:-1]).mean()) - share**2) < 5 * share / sqrt(rows * width)


# ------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("grid", [(4, 4), (6, 10), (2, 2), (8, 2), (3, 4, 6)])
def test_windows_and_merge_groups_stand_together_and_the_llm_gets_raster_order(grid: tuple[int, ...]) -> None:
    encoder = ENCODERS["windows"]
    found = arrange(encoder, grid)
    frames, height, width = grid if len(grid) == 3 else (1, *grid)
    tokens = frames * height * width
    assert sorted(found.order.tolist()) == list(range(tokens))
    assert sum(found.window_spans) == sum(found.spans) == tokens
    place = [(i // (height * width), i // width % height, i % width) for i in found.order.tolist()]
    assert [(y, x) for _, y, x in place] == [tuple(pair) for pair in found.coordinates.tolist()]
    windows: set[tuple[int, int, int]] = set()
    start = 0
    for span in found.window_spans:
        inside = {(t, y // 4, x // 4) for t, y, x in place[start : start + span]}
        assert len(inside) == 1 and not inside & windows
        windows |= inside
        start += span
    for group, token in enumerate(found.output_tokens.tolist()):
        inside = {(t, y // 2, x // 2) for t, y, x in place[4 * group : 4 * group + 4]}
        t, rest = divmod(token, height * width // 4)
        assert inside == {(t, *divmod(rest, width // 2))}


@pytest.mark.parametrize("spans", [(12,), (3, 3, 3, 3), (5, 2, 5), (1, 4, 4, 1, 2), (12, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_sees_its_span_only(spans: tuple[int, ...], causal: bool) -> None:
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


def test_the_loss_falls_along_its_gradient() -> None:
    """A central difference along a random direction of all parameters."""
    model = tiny_model("qwen")
    oracle = OneProcess(model, numerics={"llm": LLMS["qwen"][1]})
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
    numerics = LLMS[name][1] if name in LLMS else Numerics()
    layers = build_layers(module, dtype=torch.bfloat16, numerics=numerics)
    state, _, context = inputs_of(module, name)
    (expected,) = whole(exact, state, context)
    rotary = tuple(table.bfloat16() for table in context.rotary)
    state = tuple(t.bfloat16() if t.is_floating_point() else t for t in state)
    (found,) = whole(layers, state, replace(context, rotary=rotary))
    assert found.dtype == (torch.bfloat16 if name == "windows" else torch.float32)
    assert close(found.double(), expected, 2e-2)


# ------------------------------------------------------------------------ names, values, refusals


@pytest.mark.parametrize("name", [*LLMS, *ENCODERS])
def test_any_range_of_layers_has_the_parameters_of_the_whole(name: str) -> None:
    module, layers = build(name)
    parameters = dict(named_parameters(module, layers))
    assert sum(parameter.numel() for parameter in parameters.values()) == module.parameters()
    count = layer_count(module)
    for first, end in [(0, 1), (1, count), (2, 3), (count - 1, count), (1, 1)]:
        part = build_layers(module, dtype=DTYPE, first=first, end=end)
        assert len(part) == end - first
        for parameter, value in named_parameters(module, part, first=first):
            assert torch.equal(value, parameters[parameter]), parameter
    drawn = [p.flatten()[0].item() for n, p in parameters.items() if not n.endswith("norm.weight")]
    assert len(set(drawn)) == len(drawn)
    other = dict(named_parameters(module, build_layers(module, dtype=DTYPE, seed=1)))
    assert not torch.equal(
        other[f"{module.name}.layers.0.qkv.weight"], parameters[f"{module.name}.layers.0.qkv.weight"]
    )


def test_names_are_those_of_checkpoints() -> None:
    module, layers = build("windows")
    names = [name for name, _ in named_parameters(module, layers)]
    assert names[:2] == ["vision.patches.weight", "vision.patches.bias"]
    assert "vision.layers.1.qkv.weight" in names and "vision.layers.2.up.norm.weight" in names
    assert names[-1] == "vision.projector.linears.1.bias"


def test_a_tied_head_shares_the_table_or_has_an_equal_one() -> None:
    llm = LLMS["gpt"][0]
    layers = build_layers(llm, dtype=DTYPE)
    assert layers[0][0].weight is layers[-1][0].weight
    count = layer_count(llm)
    last = build_layers(llm, dtype=DTYPE, first=count - 1)
    assert torch.equal(last[0][0].weight, layers[0][0].weight)
    assert "llm.embedding.weight" in dict(named_parameters(llm, last, first=count - 1))


def test_what_the_engine_does_not_run_is_named() -> None:
    llm, encoder = LLMS["llama"][0], ENCODERS["windows"]
    latent = LatentAttention(
        query_rank=4, key_value_rank=4, nope_head_dim=4, rope_head_dim=4, value_head_dim=4
    )
    attention = llm.stack.attention
    cases: list[tuple[Encoder | Llm, str]] = [
        (
            replace(llm, stack=replace(llm.stack, experts=Experts(count=2, active=1, width=4))),
            "llm.stack.experts",
        ),
        (replace(llm, stack=replace(llm.stack, attention=replace(attention, latent=latent))), "latent"),
        (
            replace(llm, stack=replace(llm.stack, attention=replace(attention, window_tokens=4))),
            "window_tokens",
        ),
        (replace(encoder, feeds=(0, 1)), "model.vision.feeds"),
    ]
    for module, field in cases:
        with pytest.raises(UserError, match="the engine does not run it yet") as error:
            build_layers(module, dtype=DTYPE)
        assert field in error.value.field


def test_items_that_do_not_fit_their_encoder_are_refused() -> None:
    windows, learned, sound = ENCODERS["windows"], ENCODERS["learned"], ENCODERS["sound"]

    def refused(encoder: Encoder, grid: tuple[int, ...], tokens: int, match: str) -> None:
        item = Item(offset=0, grid=grid, inputs=torch.zeros(tokens, encoder.patch_inputs))
        with pytest.raises(UserError, match=match):
            encoder_inputs(encoder, [(0, 0, item)], 400, seed=0, step=0)

    refused(windows, (3, 4), 12, "multiples of 2")
    refused(windows, (4,), 4, "multiples of 2")
    refused(windows, (4, 4), 15, "shape")
    refused(learned, (2, 12), 24, "larger than 10 x 10")
    refused(replace(learned, positions=128), (10, 8), 80, "larger than 8 x 16")
    refused(sound, (5,), 5, "multiple of 2")
    merged = replace(windows, projector=replace(windows.projector, merge=2))
    refused(merged, (4, 4), 16, "use 1")
    attention = replace(windows.stack.attention, window_tokens=9)
    refused(replace(windows, stack=replace(windows.stack, attention=attention)), (4, 4), 16, "use 16")


@pytest.mark.parametrize(
    ("positions", "sides"), [(100, (10, 10)), (101, (10, 10)), (128, (8, 16)), (2048, (32, 64))]
)
def test_every_place_of_an_image_has_a_learned_position_of_its_own(
    positions: int, sides: tuple[int, int]
) -> None:
    """Also where they make no square, as those of the paper's encoders."""
    learned = ENCODERS["learned"]
    encoder = replace(learned, positions=positions)
    tokens = sides[0] * sides[1]
    item = Item(offset=0, grid=sides, inputs=torch.zeros(tokens, encoder.patch_inputs))
    _, context = encoder_inputs(encoder, [(0, 0, item)], tokens, seed=0, step=0)
    assert context.positions is not None
    assert sorted(context.positions.tolist()) == list(range(tokens))


def test_a_sample_longer_than_the_learned_positions_is_refused() -> None:
    model = tiny_model("gpt")
    with pytest.raises(UserError, match="use 65 or more"):
        llm_inputs(model.llm, random_samples(model, 1, length=65), [], 1.0, seed=0, step=0)


def test_samples_that_do_not_fit_the_model_are_refused() -> None:
    model = tiny_model()
    sample = random_samples(model, 2)[1]
    check_sample(model, sample)
    image = Item(offset=30, grid=(4, 4), inputs=torch.zeros(16, 6))

    def refused(match: str, **fields: Any) -> None:
        with pytest.raises(UserError, match=match):
            check_sample(model, replace(sample, **fields))

    refused("29 is outside the vocabulary", tokens=sample.tokens + 29 - sample.tokens.max())
    refused("-1 is outside", tokens=sample.tokens - 1 - sample.tokens.min())
    refused("shape", labels=sample.labels[1:])
    refused("add up", documents=(20, 21))
    refused("inside one document", items={"vision": (replace(image, offset=37),)})
    refused("inside one document", items={"vision": (image,)}, documents=(32, 8))
    refused("two items", items={"vision": (image, replace(image, offset=33))})
    refused("did you mean vision", items={"visoin": (image,)})
