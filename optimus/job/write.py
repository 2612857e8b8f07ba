"""Writes the commented job file of `optimus init`, with every default."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from optimus.job.catalog_files import resolve_catalog_name
from optimus.job.job import Job
from optimus.job.nodes import is_dir
from optimus.job.read import make_job
from optimus.job.workload import DEFAULT_SOURCE, assume_percentiles

HEAD = """\
# A job for Optimus: what to train, on what, with which data, and what is already decided.
# What is stated is kept; a layout that is left out is searched. Lines with "assumed" are
# guesses: correct them.
format: optimus.job/1
name: {name}
model:
  {origin}
  modules:                               # recompute: auto | none | selective | full
{modules}{constants}  precision: {{compute: bf16, gradients: fp32, optimizer: adamw-fp32}}
cluster:
  use: {cluster}
  gpus: {gpus}
  # gpus_per_node, reserve_gb_per_gpu, gpu, within_node, between_nodes: override the catalog, for example
  # between_nodes: {{gb_per_s_per_gpu: 46, source: "nccl-tests"}}
workload:
{source}
  sequence_tokens: {sequence_tokens}                  # packed
  sequences_per_step: {sequences_per_step}
  # lengths: ./lengths.jsonl             # better: {row} per packed sequence
{tokens}"""

TAIL = """\
layout:                                  # for example llm: {tp: 8, pp: 4}, vision: {tp: 1}
  llm: {}
  limits: {microbatch_sequences: [1, 2]} # also max_pp: 8
# today:                                 # how the job runs now: becomes the system "today" in every table
#   framework: megatron-core
#   layout: {llm: {pp: 1, tp: 8}, vision: stage0}
#   microbatch_sequences: 1              # also schedule, recompute, tp_overlapped, reshard_after_forward
#   measured: {step_s: 10, peak_memory_gb: 70}
# run: {steps: 20000}                    # data, optimizer, paths: never part of a plan's hash
"""


def format_job_yaml(model: str | Path, on: str, *, folder: Path | None = None) -> str:
    """Returns the job file of a catalog model or config.json on `h100:512`, to be saved in `folder`."""
    job = make_job(model=model, on=on)
    return _head(job, _origin(model, folder or Path()), on.partition(":")[0]) + TAIL


def _origin(model: str | Path, folder: Path) -> str:
    if name := resolve_catalog_name("models", str(model)):
        return f"use: {name}"
    path = Path(model) / "config.json" if is_dir(Path(model)) else Path(model)
    shown = str(path) if path.is_absolute() else os.path.relpath(path, folder)
    return f"hf: {_quoted(shown)}"


def _head(job: Job, origin: str, cluster: str) -> str:
    workload, encoders = job.workload, job.model.encoders
    modules = "".join(
        f"    {module.name}: {{train: true, recompute: auto}}\n" for module in job.model.modules
    )
    tokens = ""
    for encoder in encoders:
        count, tokens_per_item = len(encoders), encoder.tokens_per_item
        percentiles = assume_percentiles(count, workload.sequence_tokens, tokens_per_item)
        numbers = ", ".join(
            f"{name}: {getattr(percentiles, name):.0f}" for name in ("p50", "p95", "max", "item")
        )
        tokens += f"  {encoder.name}_tokens: {{{numbers}, text_only_share: 0}}\n"
    row = json.dumps({"text": 4710, **{encoder.name: [1024] for encoder in encoders}})
    return HEAD.format(
        name=_quoted(job.name),
        origin=origin,
        modules=modules,
        constants=_constant_lines(job),
        cluster=cluster,
        gpus=job.cluster.gpus,
        source=textwrap.fill(DEFAULT_SOURCE, 106, initial_indent="  # ", subsequent_indent="  # "),
        sequence_tokens=workload.sequence_tokens,
        sequences_per_step=workload.sequences_per_step,
        row=row,
        tokens=tokens,
    )


def _constant_lines(job: Job) -> str:
    """Returns comments with the constants of a config.json, which the job reads with it."""
    lines = []
    for module in job.model.modules:
        if stated := ", ".join(_constants(module)):
            lines += textwrap.wrap(
                f"{module.name}: {stated}", 104, initial_indent="  #   ", subsequent_indent="  #     "
            )
    return "\n".join([f"  # constants of {job.model.family}, read with it:", *lines, ""]) if lines else ""


def _constants(value: Any, field: str = "") -> Iterator[str]:
    """Yields the constants of a module that differ from their defaults: `stack.norm_eps 1e-05`."""
    for each in fields(value):
        item, name = getattr(value, each.name), f"{field}{each.name}"
        if is_dataclass(item) and (is_dataclass(each.default) or not each.metadata.get("constant")):
            yield from _constants(item, f"{name}.")
        elif each.metadata.get("constant") and item != each.default:
            yield f"{name} {json.dumps(item, default=_stated)}"


def _stated(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults."""
    items = ((each, getattr(value, each.name)) for each in fields(value))
    return {each.name: item for each, item in items if item != each.default}


def _quoted(text: str) -> str:
    """Returns the text plain where that is safe, else in double quotes (JSON's are YAML's)."""
    plain = all(letter.isalnum() or letter in "./_-" for letter in text) and text[:1].isalpha()
    return text if plain and text.isascii() else json.dumps(text, ensure_ascii=False)
