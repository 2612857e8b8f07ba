"""Encoder layouts beside one LLM layout: all that divide it, and why some are not taken."""

from __future__ import annotations

from collections.abc import Iterator

from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.rejected import RejectedLayout
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus


def common_encoder_layouts(context: PlanningContext, llm: Layout) -> Iterator[Layout | RejectedLayout]:
    """Layouts for all encoders alike: PP_enc divides PP_llm, TP_enc divides TP_llm, over all GPUs."""
    encoders = context.job.model.encoders
    for layout in _all_layouts(llm):
        reasons = [encoder_layout_error(context, encoder, layout) for encoder in encoders]
        found = next((reason for reason in reasons if reason), None)
        yield RejectedLayout(layout=layout, reason=found, module=context.encoder_names) if found else layout


def valid_encoder_layouts(context: PlanningContext, encoder: Encoder, llm: Layout) -> Iterator[Layout]:
    """Layouts that one encoder may have beside the LLM."""
    return (layout for layout in _all_layouts(llm) if encoder_layout_error(context, encoder, layout) is None)


def _all_layouts(llm: Layout) -> Iterator[Layout]:
    for pp in _divisors(llm.pp):
        for tp in _divisors(llm.tp):
            yield encoder_layout_on_llm_gpus(llm, pp=pp, tp=tp)


def encoder_layout_error(context: PlanningContext, encoder: Encoder, layout: Layout) -> str | None:
    """The reason why an encoder cannot be divided so, or is not to be.

    Heads need not be a multiple of tp: they are padded, and priced so, for every system.
    """
    stack, stated = encoder.stack, context.job.layout.of(encoder.name).stated()
    if stack.attention.heads < layout.tp:
        return f"divisibility: {encoder.name} has {stack.attention.heads} heads, tp is {layout.tp}"
    if stack.layers < layout.pp:
        return f"divisibility: {encoder.name} has {stack.layers} layers, pp is {layout.pp}"
    for axis, size in stated.items():
        if axis in ("dp", "pp", "tp") and getattr(layout, axis) != size:
            return f"stated: the job asks for {encoder.name} {axis}{size}"
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
