"""Reads published training steps of LLMs, each a job at the complete layout at which it was measured."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from optimus.job.attention import Attention
from optimus.job.catalog_files import CATALOG
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import LayoutConstraints, PartialLayout
from optimus.job.model import Llm, Mlp, Model, Recompute, Stack
from optimus.job.nodes import make_argument_node
from optimus.job.read import load_cluster
from optimus.job.typed import Amount, Count, Share, read_typed
from optimus.job.workload import PackedSequence, Workload

SOURCE = "steps.csv"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One published step, and all that is stated of it."""

    id: str
    source: str
    split: Literal["fit", "held-out"]
    system: Literal["pipeline", "fsdp"]
    gpu: str
    gpus: Count
    model: str
    hidden: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    mlp_width: Count
    gated: bool
    vocab: Count
    tp: Count
    pp: Count
    cp: Count
    dp: Count
    chunks: Count
    microbatch_sequences: Count
    sequences_per_step: Count
    sequence_tokens: Count
    recompute: Recompute
    tp_overlapped: Share
    memory_tb_per_s: Amount | None  # of a GPU that is not the usual one
    fused_attention: bool
    step_s: Amount
    peak_gib: Amount | None  # that torch has allocated, on the fullest GPU

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that it belongs to."""
        return (self.split, self.gpu, self.system, self.source, self.model)

    @property
    def layout(self) -> str:
        """The layout, without axes of size 1 but dp."""
        sizes = {axis: getattr(self, axis) for axis in ("dp", "pp", "tp", "cp", "chunks")}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis == "dp")

    @property
    def job(self) -> Job:
        """The job, whose `today` is the recipe; without the step, on which it would be calibrated."""
        attention = Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        mlp = Mlp(width=self.mlp_width, gated=self.gated)
        stack = Stack(hidden=self.hidden, layers=self.layers, attention=attention, mlp=mlp)
        cluster = load_cluster(f"{self.gpu}:{self.gpus}")
        if self.memory_tb_per_s is not None:
            rate = self.memory_tb_per_s * 1e12
            cluster = replace(cluster, gpu=replace(cluster.gpu, memory_bandwidth_bytes_per_s=rate))
        axes = {axis: getattr(self, axis) for axis in ("dp", "pp", "cp", "tp")}
        is_sharded = self.system == "fsdp"
        return Job(
            name=self.id,
            model=Model(name=self.model, encoders=(), llm=Llm(stack=stack, vocab=self.vocab)),
            cluster=cluster,
            workload=Workload(
                sequence_tokens=self.sequence_tokens,
                sequences_per_step=self.sequences_per_step,
                sequences=(PackedSequence(text=self.sequence_tokens),),
            ),
            layout=LayoutConstraints(modules={"llm": PartialLayout(**axes)}),
            today=CurrentRun(
                framework=self.source,
                llm=PartialLayout(**axes, chunks=self.chunks),
                placement="fsdp" if is_sharded else "stage0",
                microbatch_sequences=self.microbatch_sequences,
                reshard_after_forward=True if is_sharded else None,
                recompute={"llm": self.recompute},
                tp_overlapped=self.tp_overlapped,
            ),
        )


@cache
def load_measured_runs() -> tuple[MeasuredRun, ...]:
    """Returns all published steps of the catalog."""
    with (CATALOG / "measured" / SOURCE).open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return tuple(_read_row(row) for row in rows)


def _read_row(row: dict[str, str]) -> MeasuredRun:
    """Reads the cells of one row by the types of the fields."""
    cells: dict[str, Any] = {name: _parse(cell) for name, cell in row.items()}
    return read_typed(MeasuredRun, make_argument_node(SOURCE, cells))


def _parse(cell: str) -> str | float | bool | None:
    if cell in ("", "yes", "no"):
        return {"": None, "yes": True, "no": False}[cell]
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(number) if number.is_integer() and "." not in cell else number
