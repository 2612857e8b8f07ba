"""Reads measured training steps, published or a user's own, each a job at the layout that it ran at."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from optimus.errors import UserError, nearest
from optimus.job.catalog_files import CATALOG, expand_catalog_modules
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import (
    CurrentPlacement,
    CurrentSchedule,
    LayoutConstraints,
    PartialLayout,
    TokenDispatcher,
)
from optimus.job.model import Encoder, Llm, Model, Recompute
from optimus.job.nodes import make_argument_node, read_text
from optimus.job.read import load_cluster
from optimus.job.typed import Amount, Count, Share, Whole, read_typed
from optimus.job.workload import PackedSequence, Workload
from optimus.job.yaml_parser import load_yaml

MEASURED = CATALOG / "measured"
R = TypeVar("R", bound="Recipe")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete layout at which somebody trains a model."""

    id: str
    source: str
    system: Literal["pipeline", "fsdp"]
    gpu: str
    gpus: Count
    model: str  # of models.yaml
    frozen: str | None  # modules that are not trained, with spaces between them
    tp: Count
    pp: Count
    cp: Count
    ep: Count
    dp: Count
    chunks: Count
    microbatch_sequences: Count
    sequences_per_step: Count
    sequence_tokens: Count
    images: Whole  # of a sequence
    image_tokens: Whole  # of an image, in the LLM
    recompute: Recompute
    reshard: bool | None  # parameters after each op, of fully sharded runs
    tp_overlapped: Share
    ep_overlapped: Share
    token_dispatcher: TokenDispatcher
    memory_tb_per_s: Amount | None  # of a GPU that is not the usual one

    @property
    def kind(self) -> str:
        """The kind of its model: dense, moe, or vlm where it has encoders."""
        model = load_measured_models()[self.model]
        if model.encoders:
            return "vlm"
        return "moe" if model.llm.stack.experts else "dense"

    @property
    def layout(self) -> str:
        """The layout, without axes of size 1 but dp."""
        sizes = {axis: getattr(self, axis) for axis in ("dp", "pp", "tp", "cp", "ep", "chunks")}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis == "dp")

    @property
    def job(self) -> Job:
        """The job, whose `today` is the recipe; without the step, on which it would be calibrated."""
        block = load_measured_models()[self.model]
        cluster = load_cluster(f"{self.gpu}:{self.gpus}")
        if self.memory_tb_per_s is not None:
            rate = self.memory_tb_per_s * 1e12
            cluster = replace(cluster, gpu=replace(cluster.gpu, memory_bandwidth_bytes_per_s=rate))
        axes = {axis: getattr(self, axis) for axis in ("dp", "pp", "cp", "ep", "tp")}
        frozen = (self.frozen or "").split()
        encoders = tuple(replace(each, train=each.name not in frozen) for each in block.encoders)
        images = (self.image_tokens,) * self.images
        sequence = PackedSequence(
            text=self.sequence_tokens - sum(images),
            items=tuple((encoder.name, images) for encoder in encoders),
        )
        return Job(
            name=self.id,
            model=Model(
                name=self.model, encoders=encoders, llm=replace(block.llm, train="llm" not in frozen)
            ),
            cluster=cluster,
            workload=Workload(
                sequence_tokens=self.sequence_tokens,
                sequences_per_step=self.sequences_per_step,
                sequences=(sequence,),
            ),
            layout=LayoutConstraints(modules={"llm": PartialLayout(**axes)}),
            today=CurrentRun(
                framework=self.source,
                llm=PartialLayout(**axes, chunks=self.chunks),
                placement="fsdp" if self.system == "fsdp" else "stage0",
                microbatch_sequences=self.microbatch_sequences,
                reshard_after_forward=self.reshard,
                recompute={"llm": self.recompute},
                tp_overlapped=self.tp_overlapped,
                ep_overlapped=self.ep_overlapped,
                token_dispatcher=self.token_dispatcher,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Recipe):
    """One published step, and all that is stated of it."""

    split: Literal["fit", "held-out", "untuned"]  # untuned: run for correctness, not for speed
    preset: str  # of the cost model, for the stack
    gather_copies: bool | None
    fused_attention: bool
    step_s: Amount
    peak_gib: Amount | None  # that torch has allocated, on the fullest GPU

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that it belongs to."""
        return (self.split, self.kind, self.gpu, self.system, self.preset, self.source, self.model)


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """Entry of models.yaml."""

    encoders: tuple[Encoder, ...] = ()
    llm: Llm


@cache
def load_measured_models() -> dict[str, MeasuredModel]:
    """Returns the models of published steps and recipes by name."""
    entries = load_yaml(MEASURED / "models.yaml").entries()
    return {
        name: read_typed(MeasuredModel, expand_catalog_modules(make_argument_node(name, entry.value)))
        for name, entry in entries.items()
    }


@cache
def load_measured_runs() -> tuple[MeasuredRun, ...]:
    """Returns all published steps of the catalog."""
    return tuple(_read_rows("steps.csv", MeasuredRun))


@cache
def load_recipes() -> tuple[Recipe, ...]:
    """Returns recipes of models with encoders that people start from, whose steps are not published."""
    return tuple(_read_rows("recipes.csv", Recipe))


@dataclass(frozen=True, kw_only=True)
class OwnStep:
    """A step that a user has measured of a job, and the recipe that it ran with.

    An axis that is left out is the job's, or 1; what else is left out is the job's, or chosen as for other
    systems.
    """

    name: str | None = None
    placement: CurrentPlacement = "stage0"  # of the encoders
    gpus: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    chunks: Count | None = None
    microbatch_sequences: Count | None = None
    sequences_per_step: Count | None = None
    schedule: CurrentSchedule | None = None
    reshard_after_forward: bool | None = None
    recompute: Recompute | None = None  # of all modules
    tp_overlapped: Share | None = None
    ep_overlapped: Share | None = None
    token_dispatcher: TokenDispatcher | None = None
    step_s: Amount

    def job_at(self, base: Job) -> Job:
        """Returns the job at this recipe; without the step, on which it would be calibrated."""
        stated = base.layout.of("llm").stated()
        axes = {axis: getattr(self, axis) or stated.get(axis, 1) for axis in ("pp", "cp", "ep", "tp")}
        chunks = self.chunks or stated.get("chunks", 1)
        batch = self.sequences_per_step or base.workload.sequences_per_step
        again = {} if self.recompute is None else {m.name: self.recompute for m in base.model.modules}
        return replace(
            base,
            cluster=replace(base.cluster, gpus=self.gpus or base.cluster.gpus),
            workload=replace(base.workload, sequences_per_step=batch),
            layout=replace(base.layout, modules={"llm": PartialLayout(**axes)}),
            today=CurrentRun(
                llm=PartialLayout(**axes, chunks=chunks),
                placement=self.placement,
                microbatch_sequences=self.microbatch_sequences,
                schedule=self.schedule,
                reshard_after_forward=self.reshard_after_forward,
                recompute=again,
                tp_overlapped=self.tp_overlapped,
                ep_overlapped=self.ep_overlapped,
                token_dispatcher=self.token_dispatcher,
            ),
        )

    @property
    def label(self) -> str:
        """Its name, or else what tells it from other steps."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "tp", "cp", "ep", "chunks")}
        layout = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size is not None)
        return self.name or " ".join(filter(None, (self.placement, layout)))


def load_own_steps(path: Path, base: Job) -> list[tuple[OwnStep, Job]]:
    """Returns the steps of a user's file, and the job at each: a row has fields of `OwnStep` as columns."""
    known = {field.name for field in fields(OwnStep)}
    rows = csv.reader(read_text(path).splitlines())
    table = [(number, row) for number, row in enumerate(rows, 1) if any(row) and not row[0].startswith("#")]
    if len(table) < 2:
        hint = "write a line of column names, step_s among them, then a line for every step"
        raise UserError(field=str(path), problem="has no measured step", hint=hint)
    (_, header), *steps = table
    for column in header:
        if column not in known:
            problem, hint = "is no column of measured steps", nearest(column, known)
            raise UserError(field=column, problem=problem, hint=hint, file=str(path), line=table[0][0])
    read = []
    for number, row in steps:
        try:
            read.append(_read_own_step(header, row, base))
        except UserError as error:
            error.file, error.line = str(path), number
            raise
    return read


def _read_own_step(header: list[str], row: list[str], base: Job) -> tuple[OwnStep, Job]:
    """Reads a row of a user's file."""
    if len(row) != len(header):
        problem = f"has {len(row)} cells, the line of names {len(header)}"
        raise UserError(field="row", problem=problem, hint="leave cells empty, not out")
    cells = {name: _parse(cell.strip()) for name, cell in zip(header, row, strict=True) if cell.strip()}
    step = read_typed(OwnStep, make_argument_node("row", cells))
    job = step.job_at(base)
    axes = job.layout.of("llm").stated()
    replica = axes["pp"] * axes["cp"] * axes["tp"]
    if job.cluster.gpus % replica or job.workload.sequences_per_step < job.cluster.gpus // replica:
        counts = f"{job.cluster.gpus} GPUs into replicas for {job.workload.sequences_per_step} sequences"
        raise UserError(
            field="row",
            problem=f"has {replica} GPUs a replica, which do not divide {counts}",
            hint="state gpus, pp, tp, cp and sequences_per_step as they ran",
        )
    return step, job


def _read_rows(name: str, kind: type[R]) -> Iterator[R]:
    """Yields the rows of a file, whose cells are read by the types of the fields."""
    with (MEASURED / name).open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            cells: dict[str, Any] = {field: _parse(cell) for field, cell in row.items()}
            yield read_typed(kind, make_argument_node(name, cells))


def _parse(cell: str) -> str | float | bool | None:
    if cell in ("", "yes", "no"):
        return {"": None, "yes": True, "no": False}[cell]
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(number) if number.is_integer() and "." not in cell else number
