"""Reads traces of PyTorch's profiler, and finds when the compute of a GPU is idle and why."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from optimus.errors import UserError
from optimus.ir.op import Floats, Ints
from optimus.schedule.bubbles import CAUSES, BubbleSeconds, average_bubbles

HINT = "give a trace of torch.profiler with ProfilerActivity.CUDA, as .json or .json.gz"
STEP = re.compile(r"ProfilerStep#(\d+)$")
IS_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|\bep::(inter|intra)node|(deep|hybrid)_?ep|userbuffers"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    re.IGNORECASE,
)
ENDS_OF_STEP = 0.01  # of a step's compute: idle time before it is warm-up, and in the last one cool-down
SAME_TIME_S = 1e-6  # ends within it are one
NO_NAME = "unnamed"  # groups in traces that do not say of which group a collective is


class Purpose(IntEnum):
    """Use of a kernel of a GPU: compute, a copy, or the communication of an axis."""

    COMPUTE = 0
    COPY = 1  # from or to the host
    GATHER = 2  # of parameters
    REDUCE = 3  # of gradients
    PP = 4
    TP = 5  # inside a layer: cp and ep too
    UNKNOWN = 6  # a collective of a group of which nobody says what it is for


CAUSE_OF = {
    Purpose.COPY: "host",
    Purpose.GATHER: "dp_all_gather",
    Purpose.REDUCE: "dp_reduce_scatter",
    Purpose.TP: "tp",
    Purpose.UNKNOWN: "unknown",
}
GROUPS = {
    "dp": {"data", "dp", "fsdp", "efsdp", "shard", "replicate", "ddp", "optimizer", "embedding", "loss"},
    "pp": {"pipeline", "pp", "deal"},
    "tp": {"tensor", "tp", "context", "cp", "expert", "ep", "etp", "sequence", "sp"},
}
SEND = re.compile(r"send|recv", re.IGNORECASE)
EXCHANGE = re.compile(r"all_?to_?all|ep::|(deep|hybrid)_?ep|userbuffers", re.IGNORECASE)
SYNCHRONIZES = re.compile(r"Synchronize|cudaMemcpy$")  # calls in which the host waits for the GPU
GATHERING = re.compile(r"all_?gather|broadcast", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTrace:
    """Kernels of one GPU as columns, in the order in which they begin; seconds."""

    name: str  # the rank or GPU, or the file
    device: str  # its kind
    begin_s: Floats
    end_s: Floats
    launched_s: Floats  # nan: not in the trace
    synchronized_s: Floats  # rows of begin and end: the host waited for the GPU
    purpose: Ints
    steps: tuple[tuple[float, float], ...]  # begin and end on the GPU
    groups: frozenset[str]  # process groups of its collectives
    unknown_groups: tuple[str, ...]  # those of which nothing says what they are for


@dataclass(frozen=True, kw_only=True)
class StepIdle:
    """Seconds of a GPU's step: busy, and idle by cause; they add up to it."""

    step_s: float
    busy_s: float
    bubbles: BubbleSeconds
    host_s: float  # no kernel was launched that could have run, or data were copied from or to the host
    launch_s: float  # between kernels that were launched in time
    unknown_s: float  # waits for collectives of unknown purpose

    @property
    def idle_s(self) -> float:
        return self.step_s - self.busy_s

    @property
    def fillable_s(self) -> float:
        """Idle seconds in which other kernels could run: those in which the GPU waits for others."""
        return self.bubbles.total + self.unknown_s


def read_traces(path: Path, groups: Mapping[str, str] | None = None) -> list[DeviceTrace]:
    """Reads the kernels of every GPU in a file; `groups` says which process groups are dp, pp or tp."""
    root = _load(path)
    head: Mapping[str, Any] = root if isinstance(root, dict) else {}
    events = head.get("traceEvents") if head else root
    if not isinstance(events, list):
        raise _error(path, "has no traceEvents")
    by_gpu: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_gpu.setdefault(event.get("pid"), []).append(event)
    if not by_gpu:
        raise _error(path, "has no kernels of a GPU")
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in (event.get("args") or {})
    }
    annotations = (event for event in events if event.get("cat") == "user_annotation")
    synchronized = [
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        for event in events
        if event.get("cat") == "cuda_runtime" and SYNCHRONIZES.search(str(event.get("name")))
    ]
    marks = np.sort([float(event["ts"]) for event in annotations if STEP.match(str(event.get("name")))])
    properties = {each.get("id"): str(each.get("name")) for each in head.get("deviceProperties") or ()}
    info = head.get("distributedInfo") or {}
    purposes = _Purposes(info, groups or {})
    rank = info.get("rank") if len(by_gpu) == 1 else None
    return [
        _read_gpu(
            sorted(kernels, key=lambda event: float(event["ts"])),
            name=f"GPU {pid}" if len(by_gpu) > 1 else path.name if rank is None else f"rank {rank}",
            device=properties.get(pid) or next(iter(properties.values()), "GPU"),
            launches=launches,
            synchronized=np.array(synchronized).reshape(-1, 2),
            marks=marks,
            purposes=purposes,
        )
        for pid, kernels in by_gpu.items()
    ]


def _read_gpu(
    kernels: Sequence[Mapping[str, Any]],
    *,
    name: str,
    device: str,
    launches: Mapping[Any, float],
    synchronized: Floats,
    marks: Floats,
    purposes: _Purposes,
) -> DeviceTrace:
    origin = float(kernels[0]["ts"])
    purpose = np.array([purposes.of(event) for event in kernels])
    begin_s = np.array([float(event["ts"]) - origin for event in kernels]) / 1e6
    end_s = begin_s + np.array([float(event.get("dur", 0.0)) for event in kernels]) / 1e6
    correlations = [(event.get("args") or {}).get("correlation") for event in kernels]
    launched_s = (np.array([launches.get(each, np.nan) for each in correlations]) - origin) / 1e6
    return DeviceTrace(
        name=name,
        device=device,
        begin_s=begin_s,
        end_s=end_s,
        launched_s=launched_s,
        synchronized_s=(synchronized - origin) / 1e6,
        purpose=purpose,
        steps=tuple(_find_steps(begin_s, end_s, launched_s, (marks - origin) / 1e6)),
        groups=frozenset(purposes.seen),
        unknown_groups=tuple(sorted(purposes.unknown)),
    )


def _load(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError, zlib.error):
        raise _error(path, "is not JSON") from None


def _error(path: Path, problem: str, hint: str = HINT) -> UserError:
    return UserError(field="FILE", value=str(path), problem=problem, hint=hint)


class _Purposes:
    """Finds what kernels are for, and collects the groups of which it is unknown."""

    def __init__(self, info: Mapping[str, Any], groups: Mapping[str, str]) -> None:
        self._groups = groups
        self._is_alone = len(info.get("pg_config") or ()) == 1  # then it reduces gradients
        self.unknown: set[str] = set()
        self.seen: set[str] = set()

    def of(self, event: Mapping[str, Any]) -> Purpose:
        name, args = str(event.get("name")), event.get("args") or {}
        if event["cat"] != "kernel":
            if "PtoP" in name:  # of symmetric memory, as asynchronous tensor parallelism has it
                return Purpose.TP
            return Purpose.COPY if re.search("HtoD|DtoH", name) else Purpose.COMPUTE
        kind = str(args.get("Collective name") or name)
        if "Collective name" not in args and not IS_COMMUNICATION.search(name):
            return Purpose.COMPUTE
        names = [
            str(args[key]) for key in ("Process Group Description", "Process Group Name") if args.get(key)
        ]
        group = names[0] if names else NO_NAME
        self.seen |= {group, *names}
        stated = next((self._groups[name] for name in (group, *names) if name in self._groups), None)
        match stated or self._axis_of(group, kind, is_named="Collective name" in args):
            case "pp":
                return Purpose.PP
            case "tp":
                return Purpose.TP
            case "dp":
                return Purpose.GATHER if GATHERING.search(kind) else Purpose.REDUCE
        self.unknown.add(group)
        return Purpose.UNKNOWN

    def _axis_of(self, group: str, kind: str, *, is_named: bool) -> str | None:
        words = set(re.split("[^a-z]+", group.lower()))
        axes = [axis for axis, known in GROUPS.items() if words & known]
        if axes:
            return axes[0]  # a group of data and tensor parallelism reduces
        if EXCHANGE.search(kind):
            return "tp"
        if SEND.search(kind) and is_named:  # as a kernel of NCCL it may be an all-to-all
            return "pp"
        return "dp" if self._is_alone else None


def _find_steps(
    begin_s: Floats, end_s: Floats, launched_s: Floats, marks: Floats
) -> Iterator[tuple[float, float]]:
    """Yields the steps on the GPU: from the first kernel launched in one to the first of the next."""
    step = np.searchsorted(marks, launched_s, side="right")  # 0: before the first; nan: after the last
    step = np.where(np.isnan(launched_s), 0, step)
    if not step.any():
        yield float(begin_s[0]), float(end_s.max())
        return
    firsts = [float(begin_s[step == number].min()) for number in np.unique(step) if number]
    last = float(end_s[step == step.max()].max())
    yield from zip(firsts, [*firsts[1:], last], strict=True)


def account_idle(trace: DeviceTrace) -> list[StepIdle]:
    """Accounts for every second of every step."""
    return [_account_step(trace, begin_s, end_s) for begin_s, end_s in trace.steps]


def _account_step(trace: DeviceTrace, first_s: float, last_s: float) -> StepIdle:
    """Charges every idle interval of a step to what the kernel after it waited for.

    That is the last communication or copy to end in the interval, from its launch on; before it, the host.
    If the next kernel was launched only later, it waited for the host alone, unless the host itself waited
    for the GPU. What is left lies between launches, or is the pipeline's in traces without launches.
    """
    inside = (trace.end_s > first_s) & (trace.begin_s < last_s)
    computes = inside & (trace.purpose == Purpose.COMPUTE)
    moves = np.flatnonzero(inside & (trace.purpose != Purpose.COMPUTE))
    moves = moves[np.argsort(trace.end_s[moves], kind="stable")]
    move_ends = trace.end_s[moves]
    begins, ends = np.maximum(trace.begin_s[computes], first_s), np.minimum(trace.end_s[computes], last_s)
    reached = np.maximum.accumulate(np.append(first_s, ends))
    idle_from, idle_to = reached, np.append(begins, last_s)
    after = np.flatnonzero((trace.purpose == Purpose.COMPUTE) & (trace.begin_s >= last_s))
    launched = np.append(trace.launched_s[computes], trace.launched_s[after[:1]] if len(after) else np.nan)
    gaps = np.maximum(idle_to - idle_from, 0.0)
    busy_before = idle_from - first_s - np.append(0.0, np.cumsum(gaps)[:-1])
    busy_s = last_s - first_s - float(gaps.sum())
    sums = dict.fromkeys((*CAUSES, "host", "launch", "unknown"), 0.0)
    for place in np.flatnonzero(gaps > 0):
        begin_s, end_s = float(idle_from[place]), float(idle_to[place])
        where = float(busy_before[place]) / busy_s if busy_s else 0.0
        at = int(np.searchsorted(move_ends, end_s + SAME_TIME_S, side="right")) - 1
        move, moved_s = (moves[at], min(float(move_ends[at]), end_s)) if at >= 0 else (-1, begin_s)
        late_s = float(launched[place])
        if moved_s > begin_s and (not late_s > moved_s or _is_synchronized(trace, moved_s)):
            waits_s = min(max(begin_s, np.nan_to_num(trace.launched_s[move], nan=begin_s)), moved_s)
            sums["host"] += waits_s - begin_s  # until the communication was launched
            if not late_s > moved_s:
                moved_s = end_s  # the kernel was there, and began when it could
            purpose = Purpose(int(trace.purpose[move]))
            cause = _pipeline_cause(where) if purpose == Purpose.PP else CAUSE_OF[purpose]
            sums[cause] += moved_s - waits_s
            begin_s = moved_s
        if late_s > begin_s:
            sums["host"] += end_s - begin_s
        else:
            sums[_pipeline_cause(where) if np.isnan(late_s) else "launch"] += end_s - begin_s
    host_s, launch_s, unknown_s = (sums.pop(name) for name in ("host", "launch", "unknown"))
    return StepIdle(
        step_s=last_s - first_s,
        busy_s=busy_s,
        bubbles=BubbleSeconds(**sums),
        host_s=host_s,
        launch_s=launch_s,
        unknown_s=unknown_s,
    )


def _is_synchronized(trace: DeviceTrace, at_s: float) -> bool:
    """True if the host waited for the GPU then, so that it launched the next kernel late for a reason."""
    begins, ends = trace.synchronized_s.T
    return bool(((begins <= at_s) & (ends >= at_s)).any())


def _pipeline_cause(where: float) -> str:
    if where <= ENDS_OF_STEP:
        return "pp_warmup"
    return "pp_cooldown" if where >= 1.0 - ENDS_OF_STEP else "pp_other"


def average_steps(steps: list[StepIdle]) -> StepIdle:
    """Returns the mean step."""
    return StepIdle(
        step_s=fmean(step.step_s for step in steps),
        busy_s=fmean(step.busy_s for step in steps),
        bubbles=average_bubbles(tuple(step.bubbles for step in steps)),
        host_s=fmean(step.host_s for step in steps),
        launch_s=fmean(step.launch_s for step in steps),
        unknown_s=fmean(step.unknown_s for step in steps),
    )


def describe_step(step: StepIdle) -> dict[str, Any]:
    """Returns a step for JSON."""
    return {
        "step_s": step.step_s,
        "busy_s": step.busy_s,
        "bubbles_s": asdict(step.bubbles),
        "host_s": step.host_s,
        "launch_s": step.launch_s,
        "unknown_s": step.unknown_s,
        "fillable_s": step.fillable_s,
    }
