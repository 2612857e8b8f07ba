"""Defines configuration and results of a training run, which the launching process loads without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optimus.engine.checkpoint_folder import CheckpointConfig
from optimus.engine.input_digest import digest_index, digest_weights
from optimus.engine.optimizer_config import OptimizerConfig
from optimus.ir.files import write_file_atomically
from optimus.job.data_source import DataSource

METRICS = "metrics.jsonl"
PLAN = "plan.json"
TRACKERS = ("tensorboard", "wandb")  # each a module of optimus/integrations
WAITING_SHARE = 0.01
ON_NAN = ("stop", "skip", "rewind")
ON_SPIKE = ("ignore", "skip", "stop", "rewind")
DTYPES = ("bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    """States what a run does about a step that the optimizer leaves out.

    A step is a spike if its gradient norm exceeds the median of the last ones `spike_factor` times.
    """

    on_nan: str = "stop"
    on_spike: str = "ignore"
    spike_factor: float = 10.0
    max_skipped: int = 10  # in a row, before the run stops

    def settings(self) -> dict[str, object]:
        return {f"run.{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of training: the `run:` section of a job file, and options of the command line."""

    steps: int = 20
    first_step: int = 0  # of a run that goes on from another's weights: its data begin there
    seed: int = 0
    data_seed: int | None = None  # of the order of data and of synthetic samples; that of the run if None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    policy: RunPolicy = field(default_factory=RunPolicy)
    eval_every: int = 0  # steps between evaluations; 0: none
    eval_batches: int = 0  # held out from training for them
    left_out: tuple[int, ...] = ()  # numbers of batches that no step trains on: later ones take their place
    dtype: str | None = None  # of compute: bfloat16 on GPUs, else float32. Masters have at least float32
    op_timeout_s: float = 8.0  # of one op (or two usual steps, if longer), before the rank is ended
    run_dir: Path | None = None  # for metrics and, on errors, the last ops
    count_memory: bool = False  # in the last step: the bytes of all tensors, compared with the plan's
    log: tuple[str, ...] = ()  # trackers besides the metrics file
    step_flops: float | None = None  # of the model, for MFU
    model_dir: Path | None = None  # a model folder whose weights are trained; they are random otherwise
    data: DataSource | None = None  # samples are synthetic otherwise
    save_dir: Path | None = None  # a folder for the trained weights, under the names of `model_dir`
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: bool = False  # from the newest checkpoint in `run_dir`, if there is one

    def settings(self) -> dict[str, object]:
        """Returns what must be the same on all ranks, by its name in a job file or on the command line."""
        return {
            "--steps": self.steps,
            "--first-step": self.first_step,
            "run.seed": self.seed,
            "run.data_seed": self.seed_of_data,
            **self.optimizer.settings(),
            **self.policy.settings(),
            "run.eval.every": self.eval_every,
            "run.eval.batches": self.eval_batches,
            "left-out batches": self.left_out,
            "run.dtype": self.dtype,
            "data (its index)": None if self.data is None else digest_index(self.data.index),
            "weights": None if self.model_dir is None else digest_weights(self.model_dir),
            "--memory": self.count_memory,
            "--resume": self.resume,
            **{f"run.checkpoint.{name}": value for name, value in asdict(self.checkpoint).items()},
        }

    @property
    def seed_of_data(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def end_step(self) -> int:
        """The number of the step behind the last."""
        return self.first_step + self.steps


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of the metrics file."""

    step: int
    loss: float
    gradient_norm: float  # before clipping
    lr: float  # of modules without a rate of their own
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float = 0.0
    mfu: float | None = None  # of the GPUs' peak; None on CPUs
    bubble_share: float | None = None  # of a step, in lines that wait for other ranks: mean; None on GPUs
    peak_memory_gb: float = 0.0  # of the fullest rank: what torch allocated on a GPU, or the process on a CPU
    carried: int = 0  # samples that an earlier step had no room for
    data_wait_s: float = 0.0  # for samples to be loaded, of the rank that waited longest
    skipped_samples: int = 0  # whose files turned out broken: they trained nothing
    skipped_steps: int = 0  # 1 if the optimizer left this step out
    eval_loss: float | None = None  # of held-out batches after this step, where they were evaluated
    checkpoint_s: float = 0.0  # after the step, until the state was copied and training could go on


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank, planned and counted. A component's peak may be at another line than the total's.

    `working` are tensors that are freed within the line that allocated them. Neither side has what torch does
    not allocate (communicators, the allocator's reserve), nor the batch.
    """

    rank: int
    planned: Mapping[str, int]  # by component
    counted: Mapping[str, int]
    planned_peak: int
    counted_peak: int
    lines_over: int  # lines that hold more than planned
    most_over: int  # bytes, of the line that exceeds the plan most
    peak_line: int  # the first that holds most
    dtype: str  # of compute; plans count bfloat16

    @property
    def error(self) -> float:
        """The planned peak over the counted one, minus 1."""
        return self.planned_peak / self.counted_peak - 1


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The result of a run."""

    steps: int
    final_loss: float | None
    step_s_median: float | None
    rank: int
    device: str
    memory: MemoryUse | None = None  # of the rank that held most, if it was counted
    skipped_samples: int = 0  # whose files turned out broken
    skipped_steps: int = 0  # that the optimizer left out
    eval_loss: float | None = None  # of the last evaluation
    waiting_steps: int = 0  # that waited for data, for more than WAITING_SHARE of their time
    skipped: tuple[str, ...] = ()  # the first of them: line, reason and file
    stopped_by: int = 0  # the signal that ended the run before its last step
    checkpoint: str = ""  # the last that is complete
    goodput: float | None = None  # useful steps over wall clock, of all starts together

    def save(self, path: Path) -> None:
        """Writes the summary for the process that started this one."""
        write_file_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> TrainingSummary:
        fields = json.loads(path.read_text())
        memory = fields.pop("memory")
        fields["skipped"] = tuple(fields["skipped"])
        return cls(**fields, memory=None if memory is None else MemoryUse(**memory))
