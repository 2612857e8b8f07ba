"""One rank's part of a model: its chunks of every module, built from the plan's cut, and what travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from optimus.engine.compile import MessageSpecs
from optimus.engine.p2p import TensorSpec
from optimus.engine.process_groups import ProcessGroups
from optimus.errors import UserError
from optimus.ir.op import KernelName, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Llm, Model
from optimus.models.build import build_layers, layer_count, named_parameters, tensor_parallel_layer
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import ParamSplit
from optimus.models.kernels import KERNELS, NUMERICS, Kernels, Numerics
from optimus.models.phase_order import Recompute
from optimus.models.segment import Segment, SequentialSegment


@dataclass(frozen=True, kw_only=True, eq=False)
class RankModel:
    """Chunks by module, parameters by their global names, and tied parameters that are here.

    `copies` are those of them that are the other end of one that counts, on this rank or another. `splits`
    says how tensor parallelism divides parameters; `partial` are those it does not: every rank of a group
    holds all of them, and makes a part of their gradients.
    """

    chunks: Mapping[str, tuple[SegmentedChunk, ...]]
    parameters: Mapping[str, Tensor]
    splits: Mapping[str, ParamSplit]
    tied: tuple[Tensor, ...]
    copies: tuple[Tensor, ...]
    partial: tuple[Tensor, ...]
    specs: MessageSpecs

    @property
    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]


def build_rank(
    model: Model,
    plan: Plan,
    groups: ProcessGroups,
    *,
    llm_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    numerics: Mapping[str, Numerics] = MappingProxyType({}),
    kernels: Kernels = KERNELS,
    fuse: bool = True,
) -> RankModel:
    """Only what this rank runs is built. `llm_tokens` are those of one LLM microbatch.

    Layers into which nothing is scheduled run as one piece, unless `fuse` is off or they are divided.
    """
    reject_unsupported(plan)
    cut = modules_run_by_segment(plan, groups.rank) if fuse else set(plan.modules)
    encoders_train = any(encoder.train or encoder.projector.train for encoder in model.encoders)
    chunks: dict[str, tuple[SegmentedChunk, ...]] = {}
    found = _Found()
    for module in model.modules:
        tp_group, recompute = groups.tp_group(plan, module.name), recompute_mode(plan, module.name)
        whole = module.name not in cut and recompute != "attention"
        regathers, mine = plan.modules[module.name].regather, []
        for first, end in layer_ranges(plan, module, groups.rank):
            layers = build_layers(
                module,
                dtype=dtype,
                device=device,
                seed=seed,
                first=first,
                end=end,
                numerics=numerics.get(module.name, NUMERICS),
                compute=kernels,
                tp_group=tp_group,
                encoders_train=encoders_train,
            )
            parts = [_played(layer, tensor_parallel=tp_group.size > 1, whole=whole) for layer in layers]
            mine.append(SegmentedChunk(parts, recompute=recompute, regather=regathers))
            found.add(module, layers, first, end, tensor_parallel=tp_group.size > 1)
        chunks[module.name] = tuple(mine)
    specs = message_specs(model, plan, llm_tokens=llm_tokens, dtype=dtype)
    return found.rank_model(chunks, specs)


class _Found:
    """Parameters of a rank, as its chunks are built."""

    def __init__(self) -> None:
        self._parameters: dict[str, Tensor] = {}
        self._splits: dict[str, ParamSplit] = {}
        self._tied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._partial: list[Tensor] = []

    def add(
        self,
        module: Encoder | Llm,
        layers: list[list[Segment]],
        first: int,
        end: int,
        *,
        tensor_parallel: bool,
    ) -> None:
        """Those of some layers of a module, of which tensor parallelism may divide some."""
        for name, parameter, split in named_parameters(module, layers, first=first):
            known = self._parameters.setdefault(name, parameter)
            if known is not parameter:  # the other end of a tied parameter
                self._parameters[f"{name} (head)"] = parameter
            if split is not None:
                self._splits[name] = split
            elif tensor_parallel:
                self._partial.append(parameter)
        if isinstance(module, Llm) and module.tied and (first, end) != (0, layer_count(module)):
            self._tied += [layers[0][0].weight] if first == 0 else []
            self._copies += [layers[-1][0].weight] if end == layer_count(module) else []

    def rank_model(self, chunks: Mapping[str, tuple[SegmentedChunk, ...]], specs: MessageSpecs) -> RankModel:
        return RankModel(
            chunks=chunks,
            parameters=self._parameters,
            splits=self._splits,
            tied=(*self._tied, *self._copies),
            copies=tuple(self._copies),
            partial=tuple(self._partial),
            specs=specs,
        )


def _played(layer: list[Segment], *, tensor_parallel: bool, whole: bool) -> list[Segment]:
    """Segments of a layer between which the program may put something."""
    return tensor_parallel_layer(layer) if tensor_parallel else [SequentialSegment(layer)] if whole else layer


def modules_run_by_segment(plan: Plan, rank: int) -> set[str]:
    """Modules into whose layers the program of a rank puts other work: these run segment by segment."""
    device = plan.ranks.class_of(rank)
    found: set[str] = set()
    # Of an op: the layer that it was last seen in, and when.
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    count = 0
    for module, kind, chunk, microbatch, place in plan.programs[device].rows.tolist():
        if kind > OpKind.WEIGHT_GRAD:
            continue
        name = plan.names[module]
        stage = plan.ranks.stage_of(name, device)
        layer = plan.template_of(name, OpKind(kind), stage, chunk)[place].layer
        op = module, kind, chunk, microbatch
        before = seen.get(op)
        if before is not None and before[0] == layer and before[1] != count:
            found.add(name)
        count += 1
        seen[op] = layer, count
    return found


def layer_ranges(plan: Plan, module: Encoder | Llm, rank: int) -> list[tuple[int, int]]:
    """Layers of a module on a rank, chunk by chunk."""
    planned = plan.modules[module.name]
    ends = list(accumulate(chunk.layers for chunk in planned.chunks))
    if ends[-1] != layer_count(module):
        raise UserError(
            field=f"plan.modules.{module.name}",
            problem=f"has {ends[-1]} layers, and the model has {layer_count(module)} with its two ends",
            hint="plan again for this model",
        )
    stage, pp = plan.ranks.stage_of(module.name, plan.ranks.class_of(rank)), planned.layout.pp
    mine = range(stage, len(ends), pp)
    return [(ends[virtual - 1] if virtual else 0, ends[virtual]) for virtual in mine]


def message_specs(model: Model, plan: Plan, *, llm_tokens: int, dtype: torch.dtype) -> MessageSpecs:
    """Rows that travel between stages, and over the seam."""
    hidden, tp = model.llm.stack.hidden, plan.ranks.llm.tp
    if llm_tokens % tp:
        raise UserError(
            field=f"layout.{LLM}.tp",
            value=tp,
            problem=f"does not divide the {llm_tokens} tokens of a microbatch",
            hint="use sequences of another length, or another tp",
        )

    def everywhere(module: str, rows: int, width: int) -> list[tuple[TensorSpec, ...]]:
        own = rows // plan.modules[module].layout.tp
        return [(TensorSpec(shape=(own, width), dtype=dtype),)] * len(plan.modules[module].chunks)

    inputs = {LLM: everywhere(LLM, llm_tokens, hidden)}
    rows = {}
    for encoder in model.encoders:
        tokens = plan.modules[encoder.name].bin_tokens
        inputs[encoder.name] = everywhere(encoder.name, tokens, encoder.stack.hidden)
        merged = (tokens // encoder.projector.merge // plan.modules[encoder.name].layout.tp, hidden)
        rows[encoder.name] = (TensorSpec(shape=merged, dtype=dtype),)
    return MessageSpecs(inputs=inputs, rows=rows)


def reject_unsupported(plan: Plan) -> None:
    """Names what a plan asks for and the engine does not run yet."""
    for name, module in plan.modules.items():
        for axis in ("cp", "ep"):
            if getattr(module.layout, axis) > 1:
                raise UserError(
                    field=f"plan.modules.{name}.layout.{axis}",
                    value=getattr(module.layout, axis),
                    problem="can be planned, but the engine does not run it yet",
                    hint=f"plan with {name}={axis}1",
                )


def recompute_mode(plan: Plan, name: str) -> Recompute:
    """Returns how a module's chunks recompute the kernels that the plan names."""
    module = plan.modules[name]
    if module.recompute == "full":
        return "full"
    modes: dict[tuple[str, ...], Recompute] = {
        (): "none",
        (KernelName.CHEAP,): "cheap",
        (KernelName.ATTENTION,): "attention",
    }
    if module.recomputed not in modes:
        raise UserError(
            field=f"plan.modules.{name}.recomputed",
            value=", ".join(module.recomputed),
            problem="can be planned, but the engine does not run it",
            hint=f"recompute {KernelName.CHEAP}, {KernelName.ATTENTION}, or full layers",
        )
    return modes[module.recomputed]
