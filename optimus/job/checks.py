"""Checks what single fields cannot show: that model, cluster, workload and layout fit each other."""

from __future__ import annotations

import re

from optimus.errors import nearest
from optimus.job import catalog
from optimus.job.check_layout import check_layouts, choices
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm, Model, Stack
from optimus.job.nodes import NO_FILE, Node

MAX_LAYERS = 10_000
MAX_WIDTH = 10_000_000
MAX_ENCODERS = 8
MAX_GPUS = 1_000_000
RESERVED = ("llm", "limits", "text")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def check_job(job: Job, root: Node = NO_FILE) -> None:
    """Raises the first thing that does not fit, with both numbers and the nearest valid choice.

    `root` is the job file, whose lines errors name.
    """
    check_model(job.model, root)
    _check_cluster(job, root)
    _check_workload(job, root)
    check_layouts(job, root)


def check_model(model: Model, root: Node) -> None:
    """Names, stacks and seams of a model."""
    if len(model.encoders) > MAX_ENCODERS:
        problem, hint = f"is more than {MAX_ENCODERS}", f"use at most {MAX_ENCODERS}"
        raise root.at("model.encoders").error(f"has {len(model.encoders)} encoders, which {problem}", hint)
    _check_stack(model.llm.stack, "model.llm.stack", root)
    names: list[str] = []
    for index, encoder in enumerate(model.encoders):
        field = f"model.encoders[{index}]"
        name = encoder.name
        if name in RESERVED:
            hint = "use for example vision, audio or video"
            raise root.at(f"{field}.name").error("has a meaning of its own in job files", hint, name)
        if not _NAME.fullmatch(name):
            hint = "use small letters, digits, - and _, beginning with a letter"
            raise root.at(f"{field}.name").error("cannot be the name of an encoder", hint, name)
        if name in names:
            problem = f"is also the name of model.encoders[{names.index(name)}]"
            raise root.at(f"{field}.name").error(problem, f"use for example {name}2", name)
        names.append(name)
        _check_stack(encoder.stack, f"{field}.stack", root)
        _check_seam(encoder, model.llm, field, root)


def _check_stack(stack: Stack, field: str, root: Node) -> None:
    attention, experts = stack.attention, stack.experts
    if stack.layers > MAX_LAYERS:
        raise root.at(f"{field}.layers").error(f"is more than {MAX_LAYERS}", "use fewer", stack.layers)
    for name, width in (("hidden", stack.hidden), ("mlp.width", stack.mlp.width)):
        if width > MAX_WIDTH:
            raise root.at(f"{field}.{name}").error(f"is more than {MAX_WIDTH:,}", "use less", width)
    if attention.heads % attention.kv_heads:
        problem = f"does not divide {field}.attention.heads = {attention.heads}"
        hint = f"use {choices(attention.heads, attention.kv_heads)}"
        raise root.at(f"{field}.attention.kv_heads").error(problem, hint, attention.kv_heads)
    for index, layer in enumerate(attention.full_layers):
        if layer >= stack.layers:
            problem = f"is not a layer: {field}.layers = {stack.layers}"
            hint = f"use 0 to {stack.layers - 1}"
            raise root.at(f"{field}.attention.full_layers[{index}]").error(problem, hint, layer)
    if experts and experts.active > experts.count:
        problem = f"is more than {field}.experts.count = {experts.count}"
        hint = f"use {experts.count} or less"
        raise root.at(f"{field}.experts.active").error(problem, hint, experts.active)
    if experts and experts.leading_dense_layers > stack.layers:
        problem, hint = f"is more than {field}.layers = {stack.layers}", f"use {stack.layers} or less"
        raise root.at(f"{field}.experts.leading_dense_layers").error(
            problem, hint, experts.leading_dense_layers
        )


def _check_seam(encoder: Encoder, llm: Llm, field: str, root: Node) -> None:
    widths, hidden = encoder.projector.widths, llm.stack.hidden
    if not widths or widths[-1] != hidden:
        ends = f"ends at {widths[-1]}" if widths else "is empty"
        problem = f"{ends}, but model.llm.stack.hidden = {hidden}"
        hint = f"use {[*widths[:-1], hidden]}"
        raise root.at(f"{field}.projector.widths").error(problem, hint)
    if not encoder.feeds:
        raise root.at(f"{field}.feeds").error("is empty", "use [0]: the LLM's first layer")
    for index, layer in enumerate(encoder.feeds):
        if layer >= llm.stack.layers:
            problem = f"is not a layer of the LLM: model.llm.stack.layers = {llm.stack.layers}"
            hint = f"use 0 to {llm.stack.layers - 1}"
            raise root.at(f"{field}.feeds[{index}]").error(problem, hint, layer)
        if layer in encoder.feeds[:index]:
            raise root.at(f"{field}.feeds[{index}]").error("is given twice", "keep one", layer)


def _check_cluster(job: Job, root: Node) -> None:
    cluster = job.cluster
    gpus, per_node = cluster.gpus, cluster.gpus_per_node
    if gpus > MAX_GPUS:
        raise root.at("cluster.gpus").error(f"is more than {MAX_GPUS:,}", f"use at most {MAX_GPUS:,}", gpus)
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        problem = f"is not a multiple of cluster.gpus_per_node = {per_node}"
        raise root.at("cluster.gpus").error(problem, f"use {below} or {below + per_node}", gpus)
    if cluster.gpu.curves not in catalog.curves():
        hint = nearest(cluster.gpu.curves, catalog.curves())
        raise root.at("cluster.gpu.curves").error("is not in the catalog of curves", hint, cluster.gpu.curves)
    if cluster.reserve_bytes >= cluster.gpu.memory_bytes:
        problem = f"is not less than cluster.gpu.memory_gb = {cluster.gpu.memory_bytes / 1e9:g}"
        value = f"{cluster.reserve_bytes / 1e9:g}"
        raise root.at("cluster.reserve_gb_per_gpu").error(problem, "use for example 4", value)


def _check_workload(job: Job, root: Node) -> None:
    workload, sizes = job.workload, job.layout.limits.microbatch_sequences
    if not sizes:
        raise root.at("layout.limits.microbatch_sequences").error("is empty", "use for example [1, 2]")
    for index, size in enumerate(sizes):
        if size > workload.sequences_per_step:
            problem = f"is more than workload.sequences_per_step = {workload.sequences_per_step}"
            field = f"layout.limits.microbatch_sequences[{index}]"
            raise root.at(field).error(problem, f"use {workload.sequences_per_step} or less", size)
