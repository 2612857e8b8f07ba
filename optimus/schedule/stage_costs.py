"""Computes seconds and bytes of every stage for any cut of the layers, without walking the layers again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.memory import transient_bytes
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Floats, OpKind
from optimus.job.model import Precision
from optimus.schedule.pipeline_schedule import (
    DpGroup,
    ParameterTraffic,
    split_parameters_by_dp_group,
)
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS, ChunkPricer

Cut = tuple[int, ...]  # virtual stage v runs layers[cut[v]:cut[v + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes that a rank of every stage holds, and that every chunk saves per microbatch (LLM, encoders)."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    working: Floats
    saved: Floats  # [chunk, stage, (LLM, encoders)]
    recomputed: Floats  # the same shape: held from I to W besides
    logits: Floats  # [chunk, stage]


class LayerPrefixSums:
    """Prefix sums of costs over one list of layers."""

    def __init__(
        self,
        layers: Sequence[PricedLayer],
        chunks: ChunkPricer,
        cost_model: ClusterCostModel,
        precision: Precision,
        llm: str,
    ) -> None:
        self._layers, self._cost_model = layers, cost_model
        distinct = {id(layer): layer for layer in layers}
        numbers = {key: number for number, key in enumerate(distinct)}
        number_of = [numbers[id(layer)] for layer in layers]
        launch_s = cost_model.assumptions.launch_s  # a layer takes as long as its kernels, or the host

        def running(value: Callable[[PricedLayer], float]) -> Floats:
            values = np.array([value(layer) for layer in distinct.values()], np.float64)
            return np.concatenate([[0.0], np.cumsum(values[number_of])])

        def seconds_of(kind: OpKind) -> Floats:
            return running(lambda x: max(chunks.seconds_of(x, kind), launch_s * len(x.kernels[kind])))

        self._seconds = {kind: seconds_of(kind) for kind in CHUNK_OP_KINDS}

        def held(layer: PricedLayer) -> float:
            return layer.parameters + layer.expert_parameters

        self._parameters = running(lambda x: held(x) * precision.parameter_bytes)
        self._gradients = running(lambda x: held(x) * precision.gradient_bytes * x.trained)
        self._optimizer = running(lambda x: x.shard_parameters * precision.optimizer_bytes * x.trained)
        self._updated = running(lambda x: x.shard_parameters * x.trained)
        saved_by_llm = running(lambda x: x.activation_bytes * (x.module == llm))
        saved_by_encoders = running(lambda x: x.activation_bytes) - saved_by_llm
        self._saved = np.stack([saved_by_llm, saved_by_encoders], axis=1)
        self._logits = running(lambda x: x.logits_bytes)
        self._saved_by_module = {
            module: (
                running(lambda x, m=module: x.activation_bytes * (x.module == m)),  # type: ignore[misc]
                running(lambda x, m=module: float(x.module == m)),  # type: ignore[misc]
                transient_bytes(layer for layer in distinct.values() if layer.module == module),
            )
            for module in dict.fromkeys(layer.module for layer in distinct.values())
            if module != llm
        }
        self._traffic: dict[tuple[float, ...], ParameterTraffic] = {}
        self._working: dict[tuple[int, int], float] = {}
        recomputed_by_llm = running(lambda x: x.held_for_weight_grad_bytes * (x.module == llm))
        self._recomputed = np.stack(
            [recomputed_by_llm, running(lambda x: x.held_for_weight_grad_bytes * (x.module != llm))], axis=1
        )
        self._groups: dict[DpGroup, tuple[Floats, Floats]] = {}  # bytes to gather, bytes to reduce
        groups = (split_parameters_by_dp_group(layer) for layer in distinct.values())
        for group in dict.fromkeys(group for split in groups for group, _ in split):
            moved = running(lambda x, group=group: x.trained * _parameters_in(group, x))  # type: ignore[misc]
            self._groups[group] = moved * precision.parameter_bytes, moved * precision.gradient_bytes

    def layer_seconds(self, kind: OpKind) -> Floats:
        """Returns the seconds of every layer by itself."""
        return np.diff(self._seconds[kind])

    def seconds(self, kind: OpKind, cut: Cut) -> Floats:
        """Returns the seconds of one op of every virtual stage."""
        return np.diff(self._seconds[kind][list(cut)])

    def send_s(self, cut: Cut, *, across_nodes: bool) -> Floats:
        """Returns the seconds of every virtual stage's sends."""
        outputs = [self._layers[end - 1].output_bytes if end > begin else 0.0 for begin, end in _runs(cut)]
        return np.array([self._cost_model.send_s(size, across_nodes=across_nodes) for size in outputs])

    def traffic(self, cut: Cut) -> list[ParameterTraffic]:
        """Returns the data-parallel traffic of every virtual stage."""
        ends = list(cut)
        columns = [np.diff(sums[ends]) for both in self._groups.values() for sums in both]
        rows = np.round([*columns, np.diff(self._updated[ends])]).T.tolist()
        return [self._traffic_of(tuple(row)) for row in rows]

    def _traffic_of(self, row: tuple[float, ...]) -> ParameterTraffic:
        """Returns the traffic of one virtual stage; equal ones are priced once."""
        if row not in self._traffic:
            sizes = {group: (row[2 * at], row[2 * at + 1]) for at, group in enumerate(self._groups)}
            self._traffic[row] = ParameterTraffic.from_bytes(sizes, row[-1], self._cost_model)
        return self._traffic[row]

    def stage_bytes(self, cut: Cut, stages: int) -> StageBytes:
        ends = list(cut)

        def by_stage(sums: Floats) -> Floats:
            totals: Floats = np.diff(sums[ends]).reshape(-1, stages).sum(axis=0)
            return totals

        working = [self._working_bytes(run) for run in _runs(cut)]
        return StageBytes(
            parameters=by_stage(self._parameters),
            gradients=by_stage(self._gradients),
            optimizer=by_stage(self._optimizer),
            working=np.array(working).reshape(-1, stages).max(axis=0),
            saved=np.diff(self._saved[ends], axis=0).reshape(-1, stages, 2),
            recomputed=np.diff(self._recomputed[ends], axis=0).reshape(-1, stages, 2),
            logits=np.diff(self._logits[ends]).reshape(-1, stages),
        )

    def encoder_bytes(self, cut: Cut, stages: int) -> dict[str, tuple[Floats, Floats]]:
        """Returns by encoder what every stage saves of a microbatch, and what one op there needs beside."""
        by_encoder = {}
        for name, (running, count, transient) in self._saved_by_module.items():
            saved, layers = (
                np.diff(sums[list(cut)]).reshape(-1, stages).sum(axis=0) for sums in (running, count)
            )
            by_encoder[name] = saved, transient * (layers > 0)
        return by_encoder

    def _working_bytes(self, run: tuple[int, int]) -> float:
        if run not in self._working:
            self._working[run] = transient_bytes(self._layers[slice(*run)])
        return self._working[run]


def _parameters_in(group: DpGroup, layer: PricedLayer) -> float:
    return sum(count for shared_by, count in split_parameters_by_dp_group(layer) if shared_by == group)


def _runs(cut: Cut) -> list[tuple[int, int]]:
    return list(pairwise(cut))
