"""Encoders in layouts of their own beside an LLM pipeline, filled by list scheduling: small jobs, TP 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus.job.layout import Layout
from optimus.program.op import Kind
from optimus.program.ranks import LLM
from optimus.schedule.list_fill import list_orders
from optimus.systems.balance import smallest_maximum_cut
from optimus.systems.colocated import Colocated, ColocatedEncoder, encoder_layout
from optimus.systems.filled import FilledPlan, finish_plan
from optimus.systems.inline import InlinePipeline
from optimus.systems.setting import Setting

STRATEGY = "list"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """How one encoder lies beside the LLM; `pieces` are its microbatches in one of the LLM's."""

    pp: int = 1
    pieces: int = 1
    recompute: str = "none"


def llm_pipeline(
    setting: Setting, *, chunks: int = 1, order_name: str = "1f1b", recompute: str = "none"
) -> InlinePipeline:
    """The LLM alone, cut so that no virtual stage is longer than it must be."""
    layout = setting.layout.with_(chunks=chunks)
    found = setting.microbatches(setting.microbatch_sequences)
    assert found is not None, "decide_setting looked"
    microbatches, sequences = found
    policy = ((LLM, recompute),)
    layers = setting.layers((setting.job.model.llm,), sequences, policy)
    sums = setting.sums(layers)
    weights = sums.layer_seconds(Kind.F) + sums.layer_seconds(Kind.B)
    return InlinePipeline(
        setting=setting,
        layers=layers,
        cut=smallest_maximum_cut(weights, layout.virtual_stages),
        order_name=order_name,
        microbatches=microbatches,
        layout=layout,
        sequences=sequences,
        policy=policy,
    )


def list_plan(setting: Setting, llm: InlinePipeline, beside: Mapping[str, Beside]) -> FilledPlan:
    """The best of a few list schedules, by replay."""
    encoders = []
    for encoder in setting.job.model.encoders:
        choice = beside[encoder.name]
        layout: Layout = encoder_layout(llm.layout, pp=choice.pp, tp=1)
        encoders.append(
            ColocatedEncoder(
                encoder=encoder,
                layout=layout,
                layers=setting.encoder_layers(
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
    colocated = Colocated(setting, llm, encoders)
    header = colocated.header(strategy=STRATEGY)
    fixed = colocated.fixed_bytes()
    plans = (
        finish_plan(made, orders, fixed, estimate_s=0.0) for made, orders in list_orders(header, llm.order)
    )
    best = min(plans, key=lambda filled: filled.step_s)
    claims = replace(best.plan.claims, estimate_s=best.step_s)
    return replace(best, plan=replace(best.plan, claims=claims))
