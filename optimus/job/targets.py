"""Restricts a job to the systems and layouts that a trainer can run, or refuses its model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimus.errors import UserError, nearest
from optimus.job.bridge_models import find_bridge_model
from optimus.job.job import Job
from optimus.job.layout import AllowedSystem
from optimus.job.model import Model
from optimus.job.own_layers import find_unsplittable, refuse_untrainable


@dataclass(frozen=True, kw_only=True)
class Target:
    """Lists what a trainer can run besides the LLM's pipeline with encoders in its first stage."""

    name: str
    allow: tuple[AllowedSystem, ...]
    without: tuple[str, ...] = ()  # axes of a layout along which it does not parallelize
    split_images: bool = False  # over TP ranks with replicas of an encoder, which is then not tensor-parallel
    deal_items: bool = False  # over replicas


TARGETS = {
    "engine": Target(
        name="the engine of Optimus",
        allow=("fill", "balanced", "three-phase", "fsdp"),
        without=("ep",),
        split_images=True,
        deal_items=True,
    ),
    "megatron": Target(name="Megatron-LM", allow=("fsdp",)),
    "bridge": Target(name="Megatron Bridge", allow=("fsdp",)),
    "torchtitan": Target(name="torchtitan", allow=("fsdp",)),
}


def restrict_to_target(job: Job, target: str) -> Job:
    """Returns the job with the limits of a trainer; refuses a model or a stated layout that it cannot run."""
    if target not in TARGETS:
        raise UserError(
            field="--for", value=target, problem="is not a trainer", hint=nearest(target, TARGETS)
        )
    if target == "engine":
        refuse_untrainable(job.model)
    trainer, stated = TARGETS[target], job.layout.of("llm")
    without = _list_missing_axes(target, job.model)
    for axis in without:
        size = getattr(stated, axis)
        if size not in (None, 1):
            raise UserError(
                field=f"layout.llm.{axis}",
                value=size,
                problem=f"is stated, and {trainer.name} does not run it",
                hint=f"leave it out, or plan without --for {target}",
            )
    single = replace(stated, **dict.fromkeys(without, 1))
    allowed = tuple(word for word in job.layout.limits.allow if word in trainer.allow)
    split_images = trainer.split_images and job.layout.limits.split_images
    deal_items = trainer.deal_items and job.layout.limits.deal_items
    limits = replace(job.layout.limits, allow=allowed, split_images=split_images, deal_items=deal_items)
    modules = {**job.layout.modules, "llm": single} if without else job.layout.modules
    return replace(job, layout=replace(job.layout, modules=modules, limits=limits))


def _list_missing_axes(target: str, model: Model) -> tuple[str, ...]:
    """Returns the axes along which the trainer, or its code of this model, does not parallelize."""
    known = find_bridge_model(model) if target == "bridge" else None
    without_cp = known is not None and not known.family.context_parallel
    without_cp |= target == "engine" and find_unsplittable(model.llm) is not None
    return (*TARGETS[target].without, "cp") if without_cp else TARGETS[target].without
