"""Random small jobs of every kind: encoders trained or frozen, experts, context ranks, no images at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import get_args

from optimus.cost.assumptions import PRESETS, get_preset
from optimus.ir.ranks import LLM
from optimus.job.attention import Attention
from optimus.job.catalog_files import list_catalog_names
from optimus.job.checks import check_job
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutConstraints, PartialLayout, SearchLimits
from optimus.job.model import Encoder, Experts, Llm, Mlp, Model, Projector, Recompute, Stack
from optimus.job.read import load_cluster
from optimus.job.workload import PackedSequence, Workload
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import choose_smallest_context

MAX_GPUS = 64
MOST_WORK = 60  # layers times microbatches times programs that play them, of most jobs
NAMES = ("vision", "audio")


def random_job(rng: Random) -> Job:
    """A small job that states its LLM's layout; few are larger."""
    while True:
        job = _any_job(rng)
        layout, batch = job.layout.of(LLM).stated(), job.workload.sequences_per_step
        microbatches = batch / layout["dp"] / job.layout.limits.microbatch_sequences[0]
        layers = 2 + sum(module.stack.layers for module in job.model.modules)
        work = layers * microbatches * layout["cp"] * (layout["tp"] if job.model.encoders else 1)
        if work <= MOST_WORK or rng.random() < 0.01:
            check_job(job)
            return job


def random_setting(rng: Random, job: Job) -> PlanningContext:
    """A job under one of the sets of assumptions."""
    return choose_smallest_context(job, get_preset(rng.choice(sorted(PRESETS))))[0]


def _any_job(rng: Random) -> Job:
    heads = rng.choice((2, 4, 8))
    layout = _random_layout(rng, heads)
    experts = Experts(count=8, active=2, width=64) if rng.random() < 0.15 else None
    if experts is not None:
        ranks = layout.dp * layout.cp * layout.tp
        layout = layout.with_(ep=rng.choice([ep for ep in (1, 2, 4, 8) if ranks % ep == 0]))
    least = max(2, layout.pp)
    layers = rng.randint(least, 12) if rng.random() < 0.2 else least + rng.randint(0, 1)
    llm = Llm(
        stack=_random_stack(rng, layers, heads, experts),
        vocab=rng.choice((1000, 32000)),
        tied=rng.random() < 0.3,
        train=rng.random() < 0.9,
        recompute=rng.choice(get_args(Recompute)),
    )
    encoders = tuple(
        _random_encoder(rng, name, llm) for name in NAMES[: rng.choice((0, 1, 1, 1, 1, 2, 2, 2))]
    )
    size = rng.choice((1, 1, 2))
    microbatches = rng.randint(1, 4) if rng.random() < 0.6 else layout.pp * rng.randint(1, 2)
    stated = {axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "ep", "tp")}
    return Job(
        name="random",
        model=Model(name="random", encoders=encoders, llm=llm),
        cluster=replace(_cluster(rng.choice(list_catalog_names("clusters"))), gpus=layout.gpus),
        workload=_random_workload(rng, encoders, layout.dp * microbatches * size),
        layout=LayoutConstraints(
            modules={LLM: PartialLayout(**stated)}, limits=SearchLimits(microbatch_sequences=(size,))
        ),
    )


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(f"{name}:8")


def _random_layout(rng: Random, heads: int) -> Layout:
    while True:
        layout = Layout(
            dp=rng.choice((1, 1, 2, 3, 4)),
            pp=rng.choice((1, 1, 2, 2, 2, 3, 4, 4, 6, 8)),
            cp=rng.choice((1, 1, 1, 2)),
            tp=rng.choice([tp for tp in (1, 2, 4, 8) if tp <= heads]),
        )
        if layout.gpus <= 8 or (layout.gpus <= MAX_GPUS and layout.gpus % 8 == 0):
            return layout


def _random_stack(rng: Random, layers: int, heads: int, experts: Experts | None = None) -> Stack:
    return Stack(
        hidden=64 * heads,
        layers=layers,
        attention=Attention(
            heads=heads,
            kv_heads=rng.choice([kv for kv in (1, 2, 4, 8) if heads % kv == 0]),
            head_dim=64,
            qk_norm=rng.random() < 0.3,
        ),
        mlp=Mlp(width=256 * heads, gated=rng.random() < 0.5),
        experts=experts,
    )


def _random_encoder(rng: Random, name: str, llm: Llm) -> Encoder:
    """Trained, frozen with a trained projector, or wholly frozen."""
    train, projector = rng.choice(((True, True), (True, True), (False, True), (False, False)))
    return Encoder(
        name=name,
        stack=_random_stack(rng, rng.choice((1, 1, 1, 2, 2, 3, 6)), rng.choice((2, 4, 8))),
        projector=Projector(widths=(llm.stack.hidden,), merge=rng.choice((1, 4)), train=projector),
        feeds=rng.choice(((0,), (0,), (0, 1))),
        train=train,
        recompute=rng.choice(get_args(Recompute)),
    )


def _random_workload(rng: Random, encoders: Sequence[Encoder], batch: int) -> Workload:
    """Sequences with many, few or no images."""
    tokens = rng.choice((256, 1024, 4096))
    sequences = []
    for _ in range(rng.randint(1, 3)):
        counts = {encoder.name: rng.choice((0, 1, 3)) for encoder in encoders}
        items = tuple((name, (tokens // 8,) * count) for name, count in counts.items())
        text = tokens - sum(sum(lengths) for _, lengths in items)
        sequences.append(PackedSequence(text=text, items=items))
    return Workload(sequence_tokens=tokens, sequences_per_step=batch, sequences=tuple(sequences))
