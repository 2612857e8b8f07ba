"""Runs torch's FSDP2 over paced layers: the layers, seconds and bytes of our plan of fsdp.

FSDP2 overlaps through streams, which CPUs do not have: there every collective blocks. Two collectives given
to `fully_shard` by its own methods put the overlap back where a GPU has it. An all-gather is launched and
waited for when its parameters are needed; FSDP2 prefetches the next layers as ours does. A reduce-scatter
takes its time beside compute; as on a GPU, compute waits for the one before, whose buffer it takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from benchmarks.paced_backend import PacedNetwork, PacedWork
from benchmarks.paced_clock import Draws
from benchmarks.paced_plan import drawn_s
from benchmarks.paced_torch import SpendInBackward
from benchmarks.paced_tp_job import DP_LINK, WIDTH
from optimus.ir.op import OpKind
from optimus.ir.plan import Bucket, Plan, Span

GATHERED, REDUCED = torch.bfloat16, torch.float32
PREFETCH = 2  # layers, as plans of fsdp; all, where parameters are kept gathered for the step
BATCH_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ShardedLayer:
    """A bucket of a plan of fsdp: its parameters, and the lines of its forward and of its backward."""

    module: str
    bucket: Bucket
    places: Mapping[OpKind, tuple[int, ...]]

    @property
    def numel(self) -> int:
        size: int = GATHERED.itemsize
        return self.bucket.gather_bytes // size

    @property
    def is_resharded(self) -> bool:
        """True if parameters are gathered again for the backward."""
        return self.bucket.gathered_per == Span.OP

    def drawn_s(self, plan: Plan, draws: Draws, kind: OpKind, microbatch: int) -> float:
        """Returns the seconds of the same lines of our plan."""
        seconds = partial(drawn_s, plan, draws, module=self.module, virtual=0, microbatch=microbatch)
        return sum(seconds(kind=kind, place=place) for place in self.places[kind])


def keeps_gathered(layers: Sequence[ShardedLayer]) -> bool:
    """Returns whether parameters stay gathered from the first forward to the last backward (ZeRO-2)."""
    return not any(layer.is_resharded for layer in layers)


def count_prefetched(layers: Sequence[ShardedLayer]) -> int:
    """Returns how many layers are gathered ahead."""
    return len(layers) if keeps_gathered(layers) else PREFETCH


def list_layers(plan: Plan) -> list[ShardedLayer]:
    """Returns the layers of a plan of fsdp in model order."""
    layers = []
    for name, module in plan.modules.items():
        assert module.layout.pp == module.layout.chunks == module.layout.tp == 1, "a plan of fsdp without tp"
        for bucket in module.buckets[0]:
            places = {
                kind: tuple(
                    place
                    for place, phase in enumerate(plan.template_of(name, kind, 0, 0))
                    if bucket.first_layer <= phase.layer < bucket.end_layer
                )
                for kind in (OpKind.FORWARD, OpKind.BACKWARD)
            }
            layers.append(ShardedLayer(module=name, bucket=bucket, places=places))
    return layers


# ---------------------------------------------------------------------------- on every rank


class StreamedAllGather(AllGather):
    """Launches an all-gather; FSDP2 waits for what it returns when it needs the parameters."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


class StreamedReduceScatter(ReduceScatter):
    """Launches a reduce-scatter beside compute; gradients are there after `wait`.

    Where it `accumulates`, FSDP2 adds the values to gradients behind the launch: then they are there at once,
    and only their time passes beside compute.
    """

    def __init__(self) -> None:
        self.accumulates = False
        self._last: PacedWork | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.wait()
        self._last = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=True)
        if self.accumulates:
            self._last.end_s()
        return None

    def wait(self) -> None:
        """Advances the rank's clock to the end of the last one."""
        if self._last is not None:
            self._last.wait()
            self._last = None


class PacedLayer(nn.Module):
    """A layer with parameters of a given number that computes something tiny and takes a given time."""

    def __init__(self, numel: int, spend: Callable[[OpKind, int], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, numel, dtype=REDUCED))
        self._spend = spend

    def forward(self, rows: Tensor, microbatch: int) -> Tensor:
        rows = SpendInBackward.apply(rows, partial(self._spend, OpKind.BACKWARD, microbatch))
        output = torch.tanh(rows * self.weight.sum() / self.weight.numel())
        self._spend(OpKind.FORWARD, microbatch)
        return output


class PacedFsdp:
    """One rank of a model under `fully_shard`, layer by layer."""

    def __init__(self, plan: Plan, draws: Draws, network: PacedNetwork) -> None:
        self._clock, self._microbatches, self._is_free = network.clock, plan.microbatches, False
        layers = list_layers(plan)
        self._keeps_gathered, prefetch = keeps_gathered(layers), count_prefetched(layers)
        group = dist.new_group(backend="paced", pg_options=DP_LINK)
        mesh = DeviceMesh.from_group(group, "cpu")
        shard = partial(
            fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=GATHERED, reduce_dtype=REDUCED)
        )
        self._reduce_scatter = StreamedReduceScatter()
        self.layers = nn.ModuleList(
            shard(
                PacedLayer(layer.numel, partial(self._spend, partial(layer.drawn_s, plan, draws))),
                reshard_after_forward=layer.is_resharded,
            )
            for layer in layers
        )
        self._model: Any = shard(_Sequence(self.layers))
        modules: list[Any] = list(self.layers)
        for at, module in enumerate(modules):
            module.set_custom_all_gather(StreamedAllGather())
            module.set_custom_reduce_scatter(self._reduce_scatter)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            module.set_modules_to_forward_prefetch(modules[at + 1 : at + 1 + prefetch])
            module.set_modules_to_backward_prefetch(modules[max(0, at - prefetch) : at][::-1])

    def _spend(self, seconds: Callable[[OpKind, int], float], kind: OpKind, microbatch: int) -> None:
        if not self._is_free:
            self._clock.compute(seconds(kind, microbatch))

    def prepare(self) -> None:
        """Runs a step in which only transfers take time."""
        self._is_free = True
        self.step()
        self._is_free = False

    def step(self) -> None:
        self._model.zero_grad()
        for microbatch in range(self._microbatches):
            self._reduce_scatter.accumulates = microbatch > 0
            if self._keeps_gathered:
                self._model.set_reshard_after_backward(microbatch == self._microbatches - 1)
            rows = torch.ones(BATCH_ROWS, WIDTH, dtype=GATHERED, requires_grad=True)
            self._model(rows, microbatch).sum().backward()
        self._reduce_scatter.wait()


class _Sequence(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: Tensor, microbatch: int) -> Tensor:
        for layer in self.layers:
            rows = layer(rows, microbatch)
        return rows


# ---------------------------------------------------------------------------- replay


class FsdpReplay:
    """Replays FSDP2's rules: one link for all collectives, prefetch, one reduce-scatter in flight."""

    def __init__(self, plan: Plan, draws: Draws) -> None:
        self._plan, self._draws, self._layers = plan, draws, list_layers(plan)
        self._now_s = self._link_s = self._reduced_s = 0.0
        self._gathered_s: dict[int, float] = {}  # by layer whose parameters are gathered or on their way

    def step_s(self) -> float:
        """Returns the seconds of a step."""
        count, ahead = len(self._layers), 1 + count_prefetched(self._layers)
        for microbatch in range(self._plan.microbatches):
            for at, layer in enumerate(self._layers):
                self._compute(at, range(at, min(at + ahead, count)), OpKind.FORWARD, microbatch)
                if layer.is_resharded:
                    del self._gathered_s[at]
            for at in reversed(range(count)):
                self._compute(at, range(at, max(at - ahead, -1), -1), OpKind.BACKWARD, microbatch)
                if not keeps_gathered(self._layers):
                    del self._gathered_s[at]
                self._now_s = max(self._now_s, self._reduced_s)
                self._reduced_s = self._launch(at, REDUCED)
        return max(self._now_s, self._reduced_s)

    def _compute(self, at: int, gathered: range, kind: OpKind, microbatch: int) -> None:
        for layer in gathered:
            if layer not in self._gathered_s:
                self._gathered_s[layer] = self._launch(layer, GATHERED)
            if layer == at:
                self._now_s = max(self._now_s, self._gathered_s[at])
        self._now_s += self._layers[at].drawn_s(self._plan, self._draws, kind, microbatch)

    def _launch(self, at: int, dtype: torch.dtype) -> float:
        ranks = self._plan.ranks.world
        padded = -(-self._layers[at].numel // ranks) * ranks
        seconds = DP_LINK.collective_s([torch.empty(padded, dtype=dtype)], ranks=ranks)
        self._link_s = max(self._link_s, self._now_s) + seconds
        return self._link_s
