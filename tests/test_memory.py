"""Bytes on a rank: the paper's formula, the order of ops, and what frozen modules do not hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paper_parts import PAPER_JOBS, strong_3072

from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.memory import model_state_memory
from optimus.ir.op import OpKind
from optimus.job.layout import Layout
from optimus.job.model import Precision
from optimus.job.read import find_job
from optimus.planner.context import PlanningContext
from optimus.schedule.op_times import OrderColumns, find_peak_activations
from optimus.schedule.pipeline_orders import (
    PipelineOp,
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
)
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS


def setting_of(name: str) -> PlanningContext:
    job = find_job(name)
    stated = job.layout.of("llm").stated()
    cost_model = ClusterCostModel(cluster=job.cluster, assumptions=get_preset("paper"))
    return PlanningContext(job=job, cost_model=cost_model, layout=Layout(**stated), microbatch_sequences=2)


@pytest.mark.parametrize("name", PAPER_JOBS)
def test_states_equal_the_papers_formula(name: str) -> None:
    """k (DP_enc P_enc + DP_llm P_llm) / n with k = 6: transformer layers, evenly divided."""
    context = setting_of(name)
    job, llm_layout = context.job, context.layout
    n = job.cluster.gpus
    encoder_layout = Layout(dp=n // 4, pp=1, tp=4)
    held = expected = 0.0
    for encoder in job.model.encoders:
        layers = context.encoder_layers(encoder, encoder_layout, 2, "full")[1:-1]
        memory = model_state_memory(layers, job.model.precision)
        held += memory.parameters + memory.gradients
        expected += 6 * encoder_layout.dp * encoder.stack.parameters() / n
    llm = context.llm_layers(llm_layout, 2, "full")[1:-1]
    per_stage = model_state_memory(llm, job.model.precision)
    held += (per_stage.parameters + per_stage.gradients) / llm_layout.pp
    expected += 6 * llm_layout.dp * job.model.llm.stack.parameters() / n
    assert held == pytest.approx(expected, rel=1e-12)


def test_optimizer_states_are_divided_over_replicas() -> None:
    context = setting_of("paper/strong-3072")
    layers = context.llm_layers(context.layout, 2, "full")
    memory = model_state_memory(layers, Precision())
    assert memory.optimizer == pytest.approx(memory.parameters / 2 * 12 / 48)


def peak_of(order: PipelineOrder, *, saved: float = 0.0, recomputed: float = 0.0) -> list[float]:
    """Returns the peak of every stage if each chunk saves and recomputes so many bytes."""
    columns = OrderColumns.of(order)
    shape = columns.chunks, columns.stages, 1
    peaks = find_peak_activations(columns, np.full(shape, saved), np.full(shape, recomputed))
    return [float(peak) for peak in peaks[:, 0]]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_1f1b_holds_p_minus_r_microbatches(stages: int) -> None:
    order = build_1f1b_order(stages=stages, microbatches=3 * stages)
    assert peak_of(order, saved=1.0) == [float(stages - r) for r in range(stages)]


def test_interleaving_holds_the_warm_up_and_one_more() -> None:
    stages, chunks = 4, 3
    order = build_interleaved_1f1b_order(stages=stages, chunks=chunks, microbatches=16)
    held = peak_of(order, saved=1.0)
    assert held == [2 * (stages - 1 - r) + (chunks - 1) * stages + 1 for r in range(stages)]


def test_zero_bubble_keeps_activations_until_their_weight_gradient() -> None:
    order = build_zero_bubble_order(stages=4, chunks=1, microbatches=8)
    held = peak_of(order, saved=1.0)
    assert held == [4.0, 4.0, 4.0, 4.0]  # ZB-H1: 1F1B's peak, on every stage


def test_components_stand_for_the_moment_of_the_peak() -> None:
    ops = [PipelineOp(kind, chunk, 0) for chunk in (0, 1) for kind in (OpKind.FORWARD, OpKind.BACKWARD)]
    saved = np.array([[(3.0, 0.0)], [(0.0, 2.0)]])
    assert find_peak_activations(OrderColumns.of((tuple(ops),)), saved).tolist() == [[3.0, 0.0, 0.0]]


def test_logits_are_held_from_forward_to_input_gradient() -> None:
    kind_of = dict(zip("FBIW", CHUNK_OP_KINDS, strict=True))
    for kinds, most in (("FBFB", 1.0), ("FFBFBB", 2.0), ("FIFIWW", 1.0), ("FFIWIW", 2.0)):
        ops = tuple(PipelineOp(kind_of[letter], 0, 0) for letter in kinds)
        columns = OrderColumns.of((ops,))
        peaks = find_peak_activations(columns, np.zeros((1, 1, 1)), logits=np.ones((1, 1)))
        assert peaks.tolist() == [[0.0, most]], kinds


def test_an_input_gradient_holds_logits_and_their_gradient() -> None:
    kind_of = dict(zip("FBIW", CHUNK_OP_KINDS, strict=True))
    for kinds, most in (("FIWFIW", 9.0), ("FIFIWW", 12.0), ("FBFB", 7.0)):
        columns = OrderColumns.of((tuple(PipelineOp(kind_of[letter], 0, 0) for letter in kinds),))
        saved, recomputed, logits = np.full((1, 1, 1), 1.0), np.full((1, 1, 1), 2.0), np.full((1, 1), 6.0)
        assert find_peak_activations(columns, saved, recomputed, logits).sum() == most, kinds


def test_a_frozen_encoder_keeps_nothing_and_sends_no_gradients() -> None:
    job = strong_3072()
    encoder = replace(job.model.encoders[0], train=False)
    context = setting_of("paper/strong-3072")
    layers = context.encoder_layers(encoder, Layout(dp=384, tp=8), 2, "none")
    middle = layers[1:-1]
    assert all(layer.activation_bytes == 0 for layer in middle)
    assert all(
        not layer.kernels[kind]
        for layer in middle
        for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
    )
    memory = model_state_memory(middle, Precision())
    assert memory.gradients == memory.optimizer == 0 < memory.parameters
    projector = layers[-1]
    assert projector.trained and projector.kernels[OpKind.WEIGHT_GRAD]  # the adapter still learns


def test_what_a_split_backward_makes_again_waits_for_its_weight_gradient() -> None:
    """Zero-bubble, stage r runs W r backwards late: r + 1 recomputed microbatches at its peak of I."""
    order = build_zero_bubble_order(stages=4, chunks=1, microbatches=8)
    assert peak_of(order, recomputed=1.0) == [1.0, 2.0, 3.0, 4.0]
    whole = build_1f1b_order(stages=4, microbatches=8)
    assert peak_of(whole, recomputed=1.0) == [0.0] * 4
