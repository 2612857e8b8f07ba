"""Encoders in layouts of their own beside an LLM pipeline, filled by list scheduling: small jobs, TP 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus.ir.op import OpKind
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, finish_plan
from optimus.planner.systems.colocated import Colocated, ColocatedEncoder, encoder_layout
from optimus.planner.systems.layer_partition import smallest_maximum_cut
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.schedule.list_fill import list_orders

STRATEGY = "list"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """How one encoder lies beside the LLM; `pieces` are its microbatches in one of the LLM's."""

    pp: int = 1
    pieces: int = 1
    recompute: str = "none"


def llm_pipeline(
    context: PlanningContext, *, chunks: int = 1, order_name: str = "1f1b", recompute: str = "none"
) -> InlinePipeline:
    """The LLM alone, cut so that no virtual stage is longer than it must be."""
    layout = context.layout.with_(chunks=chunks)
    found = context.microbatches(context.microbatch_sequences)
    assert found is not None, "decide_setting looked"
    microbatches, sequences = found
    policy = ((LLM, recompute),)
    layers = context.layers((context.job.model.llm,), sequences, policy)
    sums = context.sums(layers)
    weights = sums.layer_seconds(OpKind.FORWARD) + sums.layer_seconds(OpKind.BACKWARD)
    return InlinePipeline(
        context=context,
        layers=layers,
        cut=smallest_maximum_cut(weights, layout.virtual_stages),
        order_name=order_name,
        microbatches=microbatches,
        layout=layout,
        sequences=sequences,
        policy=policy,
    )


def list_plan(context: PlanningContext, llm: InlinePipeline, beside: Mapping[str, Beside]) -> FilledPlan:
    """The best of a few list schedules, by replay."""
    encoders = []
    for encoder in context.job.model.encoders:
        choice = beside[encoder.name]
        layout: Layout = encoder_layout(llm.layout, pp=choice.pp, tp=1)
        encoders.append(
            ColocatedEncoder(
                encoder=encoder,
                layout=layout,
                layers=context.encoder_layers(
                    encoder,
                    layout,
                    llm.sequences / choice.pieces,
                    choice.recompute,
                ),
                pieces=choice.pieces,
                pipelines=(0,) * (llm.microbatches * choice.pieces),
                recompute=choice.recompute,
            )
        )
    colocated = Colocated(context, llm, encoders)
    header = colocated.header(strategy=STRATEGY)
    fixed = colocated.fixed_bytes()
    plans = (
        finish_plan(made, orders, fixed, estimate_s=0.0) for made, orders in list_orders(header, llm.order)
    )
    best = min(plans, key=lambda filled: filled.step_s)
    claims = replace(best.plan.claims, estimate_s=best.step_s)
    return replace(best, plan=replace(best.plan, claims=claims))
