"""Reads published training steps, each a job at the complete layout at which it was measured."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

from optimus.job.catalog_files import CATALOG, expand_catalog_modules
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import LayoutConstraints, PartialLayout, TokenDispatcher
from optimus.job.model import Encoder, Llm, Model, Recompute
from optimus.job.nodes import make_argument_node
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
