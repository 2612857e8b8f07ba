"""Declares the blocks of job and catalog files as they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from optimus.job.model import Encoder, Llm, Precision, Recompute
from optimus.job.typed import Amount, Count, NonNegative

Placement = Literal["stage0", "balanced", "three-phase", "separate-gpus", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file; blocks that refer to the catalog or to module names are read later."""

    format: Literal["optimus.job/1"]
    name: str | None = None
    source: str = ""
    model: object
    cluster: object
    workload: object = None
    layout: object = None
    today: TodayBlock | None = None
    run: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModuleSwitches:
    """Changes that a job makes to a module of its model."""

    train: bool | None = None
    train_projector: bool | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, kw_only=True)
class ModelBlock:
    """`model:` of a job file: one of `hf`, `use`, or `encoders` with `llm`."""

    hf: str | None = None
    use: str | None = None
    name: str | None = None
    encoders: tuple[Encoder, ...] | None = None
    llm: Llm | None = None
    modules: dict[str, ModuleSwitches] = field(default_factory=dict)
    precision: Precision | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """catalog/models: a whole model. `stated_...` is what its name or card says."""

    format: Literal["optimus.model/1"]
    name: str
    encoders: tuple[Encoder, ...]
    llm: Llm
    source: str
    stated_parameters_b: Amount
    stated_active_b: Amount | None = None  # of the LLM
    stated_source: str
    stated_note: str = ""
    stated_ratio: Amount | None = None  # where the arithmetic misses the stated count by more than 2 %


@dataclass(frozen=True, kw_only=True)
class ModuleFile:
    """catalog/modules: an encoder without its projector, or an LLM, to compose models from."""

    format: Literal["optimus.module/1"]
    name: str
    encoder: object = None
    llm: object = None
    stated_parameters_b: Amount | None = None
    stated_source: str = ""
    stated_note: str = ""
    stated_ratio: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class GpuBlock:
    """Vendor figures of a GPU in the units people use."""

    name: str | None = None
    peak_tflops: Amount
    memory_gb: Amount
    memory_tb_per_s: Amount
    curves: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkBlock:
    """A link per GPU and direction in the units people use."""

    gb_per_s_per_gpu: Amount
    latency_us: NonNegative
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterBlock:
    """`cluster:` of a job file, laid over a file of catalog/clusters."""

    name: str = "cluster"
    gpus: Count
    gpus_per_node: Count
    gpu: GpuBlock
    within_node: LinkBlock
    between_nodes: LinkBlock
    reserve_gb_per_gpu: NonNegative
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkloadBlock:
    """`workload:` of a job file without its `<encoder>_tokens` entries."""

    sequence_tokens: Count
    sequences_per_step: Count
    lengths: str | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """Measurements of the job as it runs today."""

    step_s: Amount | None = None
    peak_memory_gb: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class TodayBlock:
    """`today:` of a job file."""

    framework: str = ""
    layout: object = None
    measured: MeasuredBlock = field(default_factory=MeasuredBlock)
