"""Extension points of Optimus: the protocols that a class of one's own implements, in one file.

| protocol          | implement it to                               | register it in                        |
|-------------------|-----------------------------------------------|---------------------------------------|
| `System`          | simulate and compare another way to run a job | `optimus/planner/systems/registry.py` |
| `SystemCandidate` | describe one configuration of such a system   | returned by `System.candidates`       |
| `Chunk`           | run layers of another kind in the executor    | passed to `Executor`                  |
| `ParamBucket`     | shard or reduce parameters in another way     | `bucket_type` of `Executor`           |
| `Batch`           | feed the executor from another data pipeline  | passed to `Executor.step`             |
| `Recorder`        | observe which line of the program runs        | `recorder` of `Executor`              |
| `Dataset`         | train on data other than synthetic samples    | `dataset` of `RankTrainer`            |
| `MetricsWriter`   | send the metrics of a run to another tracker  | `optimus/integrations/`               |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optimus.cost.memory import RankMemory
    from optimus.engine.batch_plan import SampleSizes
    from optimus.ir.op import Floats, OpKind, Schedule
    from optimus.job.job import Job
    from optimus.models.phase_order import ChunkPhase
    from optimus.models.sample import ItemKeys, Sample
    from optimus.models.segment import Gradients, NeedsGrad, State
    from optimus.planner.batch_assignment import BatchAssignment
    from optimus.planner.context import PlanningContext
    from optimus.planner.filled_plan import SearchResult
    from optimus.planner.systems.base import SimulatedSystem
    from optimus.planner.systems.llm_only import LlmPipelines
    from optimus.schedule.simulator import Timeline


class SystemCandidate(Protocol):
    """One configuration of a system: layouts, layer partition, microbatch size, recomputation."""

    @property
    def context(self) -> PlanningContext:
        """The job, its cost model and the LLM's layout."""

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of one rank of every device of the schedule."""

    @property
    def fits(self) -> bool:
        """True if every rank stays within a GPU's memory."""

    @property
    def estimate_s(self) -> float:
        """A fast estimate of the step time, by which candidates are ranked before any is simulated."""

    @property
    def device_gpus(self) -> Floats | None:
        """GPUs that each device of the schedule represents; None if all represent equally many."""

    @property
    def llm_pipeline(self) -> SystemCandidate | None:
        """The pipeline of the LLM alone, which may be faster than the floor; None if there is none."""

    def simulated(self) -> tuple[Schedule, Timeline]:
        """Returns one training step, kernel by kernel, and when its kernels run.

        A device stands for all that do the same.
        """

    def search_result(self) -> SearchResult | None:
        """Returns the plan that the configuration is saved and run as; None if no plan describes it."""

    def batch_assignment(self) -> BatchAssignment:
        """Returns how the sequences of a batch are assigned to replicas, microbatches and encoder bins."""

    def describe(self) -> str:
        """Returns the configuration in one line."""


class System(Protocol):
    """A named way to run a job; `planner.systems.base.BaseSystem` has defaults for all but `candidates`."""

    @property
    def name(self) -> str:
        """The name on the command line and in JSON."""

    @property
    def allowed_as(self) -> str | None:
        """The word in the job's `layout.limits.allow` that permits the system; None if always permitted."""

    @property
    def makes_plan(self) -> bool:
        """True if its candidates have a `search_result`, with a plan that can be saved and run."""

    @property
    def needs_llm_pipeline(self) -> bool:
        """True if no step is shorter than the LLM's pipeline alone at the same layout."""

    @property
    def searches_layouts(self) -> bool:
        """True if the system is simulated at every promising layout of the LLM, not only the first."""

    @property
    def takes_sharded(self) -> bool:
        """True if the system is also simulated at the LLM's fully sharded layouts, as at a layout more."""

    @property
    def contains(self) -> Sequence[str]:
        """The systems whose plans are its own too, where they are faster than its candidates."""

    @property
    def simulate_within(self) -> float:
        """Most that a candidate's step is, times its estimate; inf if only a simulation can tell."""

    def applies_to(self, job: Job) -> bool:
        """Returns whether the job states what the system needs."""

    def keeps_layout(self, job: Job) -> bool:
        """Returns whether the system can have the layout of the LLM that the job states."""

    def looking_below(self, step_s: float, *, again: bool = False) -> System:
        """Returns the system with a search that soon gives up what is not faster than a known step.

        `again`: the system itself was searched at another layout.
        """

    def first_step_s(self, pipelines: LlmPipelines) -> float:
        """Returns a step soon found at a layout, by which layouts are ordered; 0 if there is none."""

    def candidates(self, pipelines: LlmPipelines) -> Iterable[SystemCandidate]:
        """Returns configurations at one layout of the LLM; raises DoesNotFit if there is none."""

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates the best candidate; raises DoesNotFit if none fits."""


# ---------------------------------------------------------------------------- engine


class Chunk(Protocol):
    """One virtual stage of a module on one rank; `models.chunk.SegmentedChunk` runs layers cut into segments.

    The executor asks for the phases of an op once, and runs them where the program says, with phases of other
    chunks between them. No phase runs inside the forward or backward of another chunk.
    """

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Layers as the plan counts them: an embedding, a projector and a head are layers too."""

    def trainable_parameters(self, first_layer: int, end_layer: int) -> list[Tensor]:
        """Returns the parameters of these layers that get gradients."""

    def phases(self, kind: OpKind, microbatch: int) -> Sequence[ChunkPhase]:
        """Returns the ordered phases of an op (F, B, I or W) of one microbatch."""

    def begin_forward(
        self, microbatch: int, state: State, needs_grad: NeedsGrad | None, context: Any
    ) -> None:
        """Sets the inputs of a forward; `needs_grad` is None if no backward follows."""

    def output(self, microbatch: int) -> State:
        """Returns the detached outputs of a forward."""

    def begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        """Sets the gradients of `output`; of the loss, if it is a loss."""

    def input_gradients(self, microbatch: int) -> Gradients:
        """Returns the gradients, one per input, that a backward (B or I) has computed."""


class MovedBucket(Protocol):
    """Parameters whose values and gradients move together; lines of the program launch and wait for both."""

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    @property
    def is_sharded(self) -> bool:
        """True if `gather` waits for other replicas."""

    def gather(self) -> None:
        """Launches the all-gather of parameters that an optimizer has updated."""

    def wait_gathered(self) -> None: ...

    def free_parameters(self) -> None:
        """Frees parameters that are not gathered for the whole step."""

    def begin_gradients(self) -> None:
        """Starts the gradients of a microbatch at zero, if they are reduced in each."""

    def reduce(self) -> None:
        """Launches the sum of gradients over replicas."""

    def wait_reduced(self) -> None: ...


class ParamBucket(MovedBucket, Protocol):
    """Trained parameters that move together.

    `engine.buckets.ReplicatedBucket` replicates them, `engine.sharded_bucket.ShardedBucket` shards them
    (ZeRO-1 to 3), `engine.fsdp_ddp.FsdpBucket` leaves them to FSDP2.
    """

    @property
    def reduced_grad(self) -> Tensor:
        """The flat gradients that this rank holds after `wait_reduced`."""

    @property
    def shard_offset(self) -> int:
        """The place of `reduced_grad` among the flat gradients of all parameters."""

    def local_grad(self, parameter: Tensor) -> Tensor:
        """Returns this rank's part of the reduced gradient of one of the parameters, to be changed in place.

        A bucket that shards its parameters together must hold this one alone.
        """

    def begin_step(self) -> None:
        """Starts the gradients of a step at zero."""

    def end_step(self) -> None:
        """Completes `grad` of all parameters, after gradients are reduced and tied ones are summed."""


class Batch(Protocol):
    """The data of one step for one rank."""

    def inputs(self, module: str, microbatch: int) -> State:
        """Returns the inputs of a module's first stage."""

    def context(self, module: str, microbatch: int) -> Any:
        """Returns what every chunk of a module reads besides its state: positions, masks, labels."""


class Recorder(Protocol):
    """An observer of the executor; `engine.watchdog.FlightRecorder` keeps the last ops."""

    def begin(self, line: int) -> None:
        """Called before a line of the program runs."""

    def end(self, line: int) -> None:
        """Called after a line of the program has run."""


class Dataset(Protocol):
    """Samples by number, the same on every rank; those below 0 are held out from training, for evaluation.

    `engine.synthetic_data.SyntheticDataset` draws them, `hf.chat_dataset.ChatDataset` reads them from files.
    `engine.packed_data.PackedDataset` packs those of another, and `engine.prefetched_data.PrefetchedDataset`
    loads them in worker processes.
    """

    def sizes(self, number: int) -> SampleSizes:
        """Returns the encoder tokens of a sample's items, without loading the sample."""

    def labels(self, number: int) -> int:
        """Returns how many labels of a sample enter the loss."""

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        """Loads a sample; of items that are not in `items`, inputs may be left out."""


class MetricsWriter(Protocol):
    """A tracker of a run's metrics, on rank 0; `integrations.tensorboard` and `integrations.wandb` have one.

    Their function `open_writer(run_dir, run_id, settings)` returns it. Whatever it raises is a warning, and
    training goes on without it.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of a step, without those that are not finite or not known."""

    def close(self) -> None:
        """Called after the last step."""
