"""From the JSON document of a plan to a `Plan` in which every number names something that there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimus.ir.binding import hash_of
from optimus.ir.plan import ALL, REGIONS, WHOLE_STAGE, Bucket, Claims, Plan, PlannedChunk, PlannedModule
from optimus.ir.plan_lines import known_heads, opening, read_program, refuse_out_of_range
from optimus.ir.plan_rows import (
    ALIVE,
    BUCKET,
    CHUNK,
    PHASE,
    read_bucket,
    read_chunk,
    read_memory,
    read_template,
)
from optimus.ir.ranks import LLM
from optimus.ir.typed_json import INT32, Json
from optimus.job.check_layout import choices
from optimus.job.layout import AXES, Layout

LEGEND = {
    "modules": "places in the tables: chunks by virtual stage (chunk * pp + stage), buckets by stage",
    "chunk": CHUNK,
    "bucket": BUCKET,
    "memory": ["fixed components, by name ...", *ALIVE],
    "phase": PHASE,
    "line": ["module.verb", "chunk", "microbatch", "place"],
}
MAX_GPUS, MAX_MODULES = 10_000_000, 100  # beyond them a number is a mistake, and would cost minutes
TEXTS = ("name", "tool", "strategy", "order")
FIELDS = (
    *("schema", *TEXTS, "seed", "microbatches", "requires", "single_connection", "slowdown", "launch_s"),
    *("finish_s", "capacity_bytes", "claims", "hashes", "bound_to", "notes", "legend", "modules"),
    *("chunks", "buckets", "memory", "templates", "programs"),
)
MODULE = (
    *("layout", "recompute", "pieces", "bin_tokens", "seam_bytes", "seam_s"),
    *("chunks", "buckets", "pipelines"),
)


def read_document(root: Json) -> Plan:
    """The plan of a document in the current format."""
    given = root.object(FIELDS)
    if given["legend"].value != LEGEND:
        raise given["legend"].error("is not the legend of this format", "plan again: it is never edited")
    templates = {name: read_template(entry) for name, entry in given["templates"].entries().items()}
    chunks = [read_chunk(row, templates) for row in given["chunks"].items()]
    buckets = [read_bucket(row) for row in given["buckets"].items()]
    microbatches = given["microbatches"].whole(1, INT32)
    layouts = _layouts(given["modules"])
    modules = {
        name: _module(entry, layouts, microbatches, chunks, buckets)
        for name, entry in given["modules"].entries().items()
    }
    llm = layouts[LLM]
    finish_s = tuple(finish.number() for finish in given["finish_s"].items())
    if len(finish_s) not in (0, llm.pp):
        problem = f"has {len(finish_s)} numbers, and modules.llm.layout.pp = {llm.pp}"
        raise given["finish_s"].error(problem, "give one for every stage of the LLM")
    hashes, bound_to = _binding(given["hashes"], given["bound_to"])
    plan = Plan(
        **{name: given[name].word() for name in TEXTS},
        seed=given["seed"].whole(),
        microbatches=microbatches,
        modules=modules,
        templates=templates,
        slowdown=given["slowdown"].number(),
        launch_s=given["launch_s"].number(),
        capacity_bytes=given["capacity_bytes"].whole(),
        memory=(),
        claims=_claims(given["claims"]),
        programs=(),
        bound_to=bound_to,
        hashes=hashes,
        notes={name: note.plain() for name, note in given["notes"].entries().items()},
        requires=tuple(feature.word() for feature in given["requires"].items()),
        single_connection=given["single_connection"].flag(),
        finish_s=finish_s,
    )
    return _with_classes(plan, given["memory"], given["programs"])


# ---------------------------------------------------------------------------- modules


def _layouts(given: Json) -> dict[str, Layout]:
    """The layout of every module, as `Ranks` takes them: over the same GPUs, inside the LLM's."""
    entries = given.entries()
    if list(entries)[-1:] != [LLM]:
        raise given.error(f"does not end with {LLM}", "give every encoder, then the LLM")
    if len(entries) > MAX_MODULES:
        raise given.error(f"has {len(entries):,} modules", f"use {MAX_MODULES} or fewer")
    layouts = {}
    for name, entry in entries.items():
        if not re.fullmatch(r"\S+", name) or not name.isprintable() or name == ALL:
            raise entry.error("is not the name of a module", f"use a word without spaces, not {ALL}")
        axes = entry.object(MODULE)["layout"].object(AXES)
        layouts[name] = Layout(**{axis: value.whole(1, INT32) for axis, value in axes.items()})
    for name, entry in entries.items():
        _check_layout(entry.object(MODULE)["layout"], layouts[name], None if name == LLM else layouts[LLM])
    return layouts


def _check_layout(given: Json, layout: Layout, llm: Layout | None) -> None:
    """`llm` is given for an encoder."""
    axes = given.entries()
    if layout.gpus > MAX_GPUS:
        raise given.error(f"has {layout.gpus:,} GPUs", f"use {MAX_GPUS:,} or fewer")
    if llm is None:
        if layout.dp * layout.cp * layout.tp % layout.ep:
            problem = f"does not divide dp x cp x tp = {layout.dp * layout.cp * layout.tp} of a stage"
            raise axes["ep"].error(problem, f"use {choices(layout.dp * layout.cp * layout.tp, layout.ep)}")
        return
    for axis in ("cp", "ep", "chunks"):
        if getattr(layout, axis) != 1:
            raise axes[axis].error("is not 1, and this is an encoder", "use 1")
    for axis, outer in (("pp", llm.pp), ("tp", llm.tp)):
        if outer % getattr(layout, axis):
            problem = f"does not divide modules.{LLM}.layout.{axis} = {outer}"
            raise axes[axis].error(problem, f"use {choices(outer, getattr(layout, axis))}")
    if layout.gpus != llm.gpus:
        problem, dp = (
            f"makes {layout.gpus} GPUs, and the LLM has {llm.gpus}",
            llm.gpus // (layout.pp * layout.tp),
        )
        raise axes["dp"].error(problem, f"use {dp}")


def _module(
    given: Json,
    layouts: Mapping[str, Layout],
    microbatches: int,
    chunks: list[PlannedChunk],
    buckets: list[Bucket],
) -> PlannedModule:
    name, entries = str(given.name), given.object(MODULE)
    layout, llm = layouts[name], layouts[LLM]
    entries["chunks"].items(layout.virtual_stages, "chunks")
    stages = entries["buckets"].items(layout.pp, "stages")
    own = [[buckets[place] for place in stage.wholes(len(buckets) - 1)] for stage in stages]
    for stage, of_stage in zip(stages, own, strict=True):
        if any(bucket.chunk >= layout.chunks for bucket in of_stage):
            problem = f"has a bucket of a chunk that there is not: {name} has {layout.chunks}"
            raise stage.error(
                problem, f"use chunks from {WHOLE_STAGE} (the whole stage) to {layout.chunks - 1}"
            )
    pieces, pipelines = entries["pieces"].whole(1, INT32), entries["pipelines"]
    if name == LLM and pieces > 1:
        raise entries["pieces"].error("is more than 1, and this is the LLM", "use 1")
    inside = 0 if name == LLM else layout.dp // llm.dp
    pipelines.items(0 if name == LLM else microbatches * pieces, "microbatches")
    return PlannedModule(
        layout=layout,
        chunks=tuple(chunks[place] for place in entries["chunks"].wholes(len(chunks) - 1)),
        buckets=tuple(map(tuple, own)),
        recompute=entries["recompute"].word(),
        pieces=pieces,
        pipelines=pipelines.wholes(inside - 1),
        bin_tokens=entries["bin_tokens"].whole(),
        seam_bytes=entries["seam_bytes"].whole(),
        seam_s=entries["seam_s"].number(),
    )


# ---------------------------------------------------------------------------- the rest


def _claims(given: Json) -> Claims:
    claims = given.object(("step_s", "estimate_s", "encoder_s"))
    regions = claims["encoder_s"].entries()
    for region in regions:
        Json(region, region, claims["encoder_s"]).one_of(dict(zip(REGIONS, REGIONS, strict=True)), "region")
    return Claims(
        step_s=claims["step_s"].number(),
        estimate_s=claims["estimate_s"].number(),
        encoder_s={region: time_s.number() for region, time_s in regions.items()},
    )


def _binding(hashes: Json, bound_to: Json) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Hashes that are those of the fields beside them."""
    given, fields = hashes.object(bound_to.entries()), {}
    for part, entry in bound_to.entries().items():
        fields[part] = {name: value.plain() for name, value in entry.entries().items()}
        if given[part].word() != hash_of(fields[part]):
            problem = f"is not the hash of bound_to.{part}"
            raise given[part].error(problem, "plan again: what a plan is bound to is never edited")
    return {part: entry.word() for part, entry in given.items()}, fields


def _with_classes(plan: Plan, memory: Json, programs: Json) -> Plan:
    """What is there once per device class; their number follows from the layouts."""
    classes = plan.ranks.num_classes
    given = programs.items(classes, "device classes")
    heads = known_heads(plan.names)
    for device, program in enumerate(given):
        first = program.value[0] if isinstance(program.value, list) and program.value else None
        if first != opening(plan, device):
            raise program.error("does not open with its device class", f'open with "{opening(plan, device)}"')
    read = tuple(read_program(program, heads) for program in given)
    if plan.microbatches > max(1, sum(map(len, read))):
        raise programs.error(f"has fewer lines than microbatches = {plan.microbatches:,}", "plan again")
    plan = replace(plan, memory=read_memory(memory, classes), programs=read)
    refuse_out_of_range(plan, programs)
    return plan
