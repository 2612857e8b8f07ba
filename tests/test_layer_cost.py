"""Layers as kernels: the paper's own figures, Korthikanti's activation formulas, and invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paper_parts import layer_shape, strong_3072, unfused

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.cost.flops import count_attended_pairs
from optimus.cost.kernel import Kernel
from optimus.cost.layer_kernels import list_backward_kernels, list_forward_kernels, list_weight_grad_kernels
from optimus.cost.layer_shape import saved_activation_bytes
from optimus.cost.priced_layer import price_encoder_layers
from optimus.ir.op import Lane, OpKind
from optimus.job.attention import Attention
from optimus.job.layout import Layout
from optimus.job.model import Experts
from optimus.job.read import find_job
from optimus.job.workload import TokenLoad
from optimus.schedule.schedule_builder import ScheduleBuilder, build_kernel_graph
from optimus.schedule.simulator import simulate_schedule


def makespan_s(kernels: list[Kernel], *, slowdown: float = 0.0) -> float:
    builder = ScheduleBuilder(["m"], 1)
    builder.add(build_kernel_graph([(kernels, 0)], OpKind.FORWARD), device=0)
    return simulate_schedule(builder.build(), slowdown=slowdown).step_s


# ------------------------------------------------------------------------ the paper's figures


def test_vit_22b_layer_takes_what_the_paper_says() -> None:
    """Table 1's text: about 1.4 ms forward and 2.0 ms backward at TP 8, TP traffic included."""
    shape = layer_shape("vision", tokens=4096, span=2048)
    forward_ms = 1e3 * makespan_s(list_forward_kernels(shape))
    backward_ms = 1e3 * makespan_s(list_backward_kernels(shape, weights=True))
    assert forward_ms == pytest.approx(1.4, rel=0.15)
    assert backward_ms == pytest.approx(2.0, rel=0.15)


def test_mean_tp_bubble_of_gpt_175b_is_300_us() -> None:
    shape = layer_shape("llm", tokens=4096, span=2048)
    collectives = [
        k
        for k in (*list_forward_kernels(shape), *list_backward_kernels(shape, weights=True))
        if k.lane == Lane.TP
    ]
    mean_us = 1e6 * sum(k.duration_s for k in collectives) / len(collectives)
    assert len(collectives) == 8  # four per direction, as the paper counts them
    assert mean_us == pytest.approx(300, rel=0.15)


# ------------------------------------------------------------------------ activations


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("tokens", "span"), [(2048, 2048), (4096, 2048), (8192, 8192)])
def test_activation_bytes_equal_korthikanti(tp: int, tokens: int, span: int) -> None:
    """sbh(34 + 5as/h)/t with everything kept, 34 sbh/t with selective recomputation."""
    shape = layer_shape("llm", tokens=tokens, span=span, tp=tp, assumptions=unfused())
    h, a = shape.stack.hidden, shape.stack.attention.heads
    assert saved_activation_bytes(shape, "none") == tokens * h * (34 + 5 * a * span / h) / tp
    assert saved_activation_bytes(shape, "selective") == 34 * tokens * h / tp
    assert saved_activation_bytes(shape, "full") == 2 * tokens * h / tp


def test_fused_attention_keeps_no_scores() -> None:
    shape = layer_shape("llm", tokens=4096, span=2048)
    h, a = shape.stack.hidden, shape.stack.attention.heads
    statistics = 4 * a * 4096 / 8
    assert saved_activation_bytes(shape, "none") == 34 * 4096 * h / 8 + statistics
    assert saved_activation_bytes(shape, "selective") < saved_activation_bytes(shape, "none")


# ------------------------------------------------------------------------ communication


def collectives(kernels: list[Kernel]) -> list[str]:
    return [k.name for k in kernels if k.lane != Lane.COMPUTE]


def test_tp_collectives_of_every_direction() -> None:
    shape = layer_shape("llm", tokens=4096, span=2048, assumptions=get_preset("clean"))
    assert len(collectives(list_forward_kernels(shape))) == 4
    assert (
        len(collectives(list_backward_kernels(shape, weights=True))) == 6
    )  # 2 exposed, 2 under dgrad, 2 under wgrad
    assert len(collectives(list_backward_kernels(shape, weights=False))) == 4
    assert len(collectives(list_weight_grad_kernels(shape))) == 2
    alone = layer_shape("llm", tokens=4096, span=2048, tp=1)
    for kernels in (
        list_forward_kernels(alone),
        list_backward_kernels(alone, weights=True),
        list_weight_grad_kernels(alone),
    ):
        assert collectives(kernels) == []


def test_overlapped_backward_hides_what_exposed_shows() -> None:
    exposed = makespan_s(list_backward_kernels(layer_shape("llm", tokens=4096, span=2048), weights=True))
    shape = layer_shape("llm", tokens=4096, span=2048, assumptions=get_preset("clean"))
    hidden = makespan_s(list_backward_kernels(shape, weights=True))
    compute = sum(k.duration_s for k in list_backward_kernels(shape, weights=True) if k.lane == Lane.COMPUTE)
    assert compute < hidden < exposed


def test_a_share_of_tp_traffic_may_be_hidden_already() -> None:
    hidden = replace(get_preset("paper"), tp_overlapped_share=0.7)
    shown = layer_shape("llm", tokens=4096, span=2048)
    less = layer_shape("llm", tokens=4096, span=2048, assumptions=hidden)
    for a, b in zip(list_forward_kernels(shown), list_forward_kernels(less), strict=True):
        expected = 0.3 * a.duration_s if a.lane == Lane.TP else a.duration_s
        assert b.duration_s == pytest.approx(expected)


def test_context_parallelism_divides_compute_and_adds_an_exchange() -> None:
    shape = layer_shape("llm", tokens=8192, span=8192)
    divided = replace(shape, layout=shape.layout.with_(cp=2))
    names = [k.name for k in list_forward_kernels(divided)]
    assert names.count("context") == 1
    assert (
        next(k.lane for k in list_forward_kernels(divided) if k.name == "context") == Lane.DP
    )  # tp fills the node
    whole, half = (
        sum(k.duration_s for k in list_forward_kernels(s) if k.lane == Lane.COMPUTE) for s in (shape, divided)
    )
    assert half == pytest.approx(whole / 2, rel=0.1)


def with_experts(assumptions: Assumptions | None = None):  # type: ignore[no-untyped-def]
    shape = layer_shape("llm", tokens=4096, span=2048, assumptions=assumptions)
    experts = Experts(count=64, active=4, width=4096, shared_width=4096, leading_dense_layers=1)
    return replace(shape, stack=replace(shape.stack, experts=experts), layer=1)


def test_experts_are_dispatched_and_combined() -> None:
    shape = with_experts()
    spread = replace(shape, layout=shape.layout.with_(ep=8))
    names = [k.name for k in list_forward_kernels(spread)]
    assert names.count("dispatch") == names.count("combine") == 1
    wide = replace(shape, layout=shape.layout.with_(ep=32))
    lanes = {k.name: k.lane for k in list_forward_kernels(wide)}
    assert lanes["dispatch"] == Lane.DP  # it leaves the node
    dense = replace(spread, layer=0)  # a leading dense layer
    assert "dispatch" not in [k.name for k in list_forward_kernels(dense)]


def test_input_and_weight_gradients_do_the_work_of_a_whole_backward() -> None:
    for shape in (layer_shape("llm", tokens=4096, span=2048), with_experts()):
        work = [
            sum(k.duration_s for k in kernels if k.lane == Lane.COMPUTE)
            for kernels in (
                list_backward_kernels(shape, weights=True),
                list_backward_kernels(shape, weights=False),
                list_weight_grad_kernels(shape),
            )
        ]
        assert work[0] == pytest.approx(work[1] + work[2], rel=1e-2)


# ------------------------------------------------------------------------ windows, latents, context


def brute_pairs(tokens: int, window: int, *, causal: bool) -> int:
    """Pairs of one causal span in which a token sees the `window` tokens up to itself."""
    assert causal
    return sum(min(place + 1, window) for place in range(tokens))


@pytest.mark.parametrize(("tokens", "window"), [(64, 8), (100, 100), (512, 32), (96, 200)])
def test_causal_window_pairs_equal_a_count(tokens: int, window: int) -> None:
    attention = Attention(heads=1, kv_heads=1, head_dim=8, window_tokens=window)
    found = count_attended_pairs(attention, 0, TokenLoad(tokens=tokens, squares=float(tokens) ** 2))
    exact = brute_pairs(tokens, window, causal=True)
    assert found == pytest.approx(exact, abs=tokens)  # the diagonal counts half or whole


def test_windows_of_an_encoder_see_their_window_only() -> None:
    attention = Attention(heads=1, kv_heads=1, head_dim=8, causal=False, window_tokens=64, full_layers=(1,))
    load = TokenLoad(tokens=1024, squares=1024.0**2)
    assert count_attended_pairs(attention, 0, load) == 1024 * 64
    assert count_attended_pairs(attention, 1, load) == 1024**2


def test_latent_attention_gathers_latents() -> None:
    kimi = find_job("kimi-k2.5", "h100:512").model.llm.stack
    shape = replace(layer_shape("llm", tokens=4096, span=4096), stack=kimi)
    assert kimi.attention.latent is not None
    gathered = next(k for k in list_forward_kernels(shape) if k.name == "gather1")
    assert gathered.size_bytes == 4096 * kimi.attention.latent.width * 2
    assert kimi.attention.latent.width == 1536 + 512 + 64
    assert kimi.replicated_parameters(0) == kimi.hidden * kimi.attention.latent.width  # a dense layer
    assert kimi.replicated_parameters(1) == kimi.replicated_parameters(0) + kimi.hidden * 384


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_divides_every_layer_of_an_encoder(cp: int) -> None:
    shape = layer_shape("vision", tokens=4096, span=2048)
    encoder = strong_3072().model.encoders[0]
    whole, divided = (
        price_encoder_layers(encoder, shape.load, Layout(dp=4, cp=size, tp=8), shape.cost_model, "none")
        for size in (1, cp)
    )
    for a, b in zip(whole, divided, strict=True):
        assert b.output_bytes == pytest.approx(a.output_bytes / cp)
        assert b.activation_bytes == pytest.approx(a.activation_bytes / cp)
    names = [
        k.name for k in list_backward_kernels(replace(shape, layout=shape.layout.with_(cp=cp)), weights=True)
    ]
    assert "context" in names and "context.scatter" in names
