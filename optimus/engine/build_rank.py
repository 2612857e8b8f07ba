"""Builds one rank's chunks of every module from the plan, and the specs of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.p2p import BatchMessageSpecs, TensorSpec
from optimus.engine.process_groups import ProcessGroups
from optimus.errors import UserError
from optimus.ir.op import KernelName, OpKind
from optimus.ir.plan import Plan, Span
from optimus.ir.planfile import hash_plan
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Llm, Model
from optimus.job.own_layers import find_unsplittable, refuse_untrainable
from optimus.models.build import build_layers, count_layers, insert_collectives, named_parameters
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import ParamSplit
from optimus.models.deepstack import list_passed_rows
from optimus.models.kernels import KERNELS, KernelSet
from optimus.models.phase_order import Recompute
from optimus.models.segment import Segment, SequentialSegment
from optimus.verify.validator import check_plan


@dataclass(frozen=True, kw_only=True, eq=False)
class RankModel:
    """Chunks by module, parameters by their global names, and tied parameters of one rank.

    `copies` are tied head weights, whose embedding counts, on this rank or another. `splits` says how tensor
    parallelism shards parameters; `partial` are replicated ones: every rank of a group holds all of them and
    computes a part of their gradients.
    """

    chunks: Mapping[str, tuple[SegmentedChunk, ...]]
    parameters: Mapping[str, Tensor]
    splits: Mapping[str, ParamSplit]
    tied: tuple[Tensor, ...]
    copies: tuple[Tensor, ...]
    partial: tuple[Tensor, ...]
    specs: BatchMessageSpecs

    @property
    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]


def build_rank_model(
    model: Model,
    plan: Plan,
    groups: ProcessGroups,
    *,
    llm_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    kernels: KernelSet = KERNELS,
    fuse: bool = True,
) -> RankModel:
    """Builds the chunks that this rank runs. `llm_tokens` are those of one LLM microbatch.

    A layer runs as one segment if the program runs nothing between its segments, unless `fuse` is off or it
    is tensor- or context-parallel.
    """
    refuse_untrainable(model)
    reject_unsupported_plan(plan, axes=("ep",))
    _reject_unsupported_context(model, plan)
    segmented = _find_segmented_modules(plan, groups.rank) if fuse else set(plan.modules)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, "compute": kernels}
    options["deepstack"] = count_deepstack(model)
    options["encoders_train"] = any(e.train or e.projector.train for e in model.encoders)
    chunks: dict[str, tuple[SegmentedChunk, ...]] = {}
    parameters, splits = dict[str, Tensor](), dict[str, ParamSplit]()
    embeddings, heads, partial_grads = list[Tensor](), list[Tensor](), list[Tensor]()
    for module in model.modules:
        tp_group, cp_group = groups.tp_group(plan, module.name), groups.cp_group(plan, module.name)
        recompute = choose_recompute_mode(plan, module.name)
        fused = module.name not in segmented and recompute != "attention"
        has_collectives, module_chunks = max(tp_group.size, cp_group.size) > 1, list[SegmentedChunk]()
        for first, end in find_layer_ranges(plan, module, groups.rank):
            layers = build_layers(
                module, first=first, end=end, tp_group=tp_group, cp_group=cp_group, **options
            )
            group = partial(_group_segments, has_collectives=has_collectives, fused=fused)
            rows_in, rows_out = (list_passed_rows(module, at, options["deepstack"]) for at in (first, end))
            regather = plan.modules[module.name].regather
            how: dict[str, Any] = {"recompute": recompute, "regather": regather}
            grouped = list(map(group, layers))
            if module.name == LLM and first == 0 < end and plan.dealing_replicas > 1:
                grouped[0] = [layers[0][0].make_exchange(groups.deal_group(plan), "deal"), *grouped[0]]
            chunk = SegmentedChunk(grouped, **how, rows_in=rows_in, rows_out=rows_out)
            module_chunks.append(chunk)
            for name, parameter, split in named_parameters(module, layers, first=first):
                if parameters.setdefault(name, parameter) is not parameter:  # head of a tied embedding
                    parameters[f"{name} (head)"] = parameter
                if split is not None:
                    splits[name] = split
                elif tp_group.size > 1:
                    partial_grads.append(parameter)
            embedding, head = _tied_ends(module, layers, first, end)
            embeddings, heads = embeddings + embedding, heads + head
        chunks[module.name] = tuple(module_chunks)
    return RankModel(
        chunks=chunks,
        parameters=parameters,
        splits=splits,
        tied=(*embeddings, *heads),
        copies=tuple(heads),
        partial=tuple(partial_grads),
        specs=build_message_specs(model, plan, llm_tokens=llm_tokens, dtype=dtype),
    )


def _tied_ends(
    module: Encoder | Llm, layers: list[list[Segment]], first: int, end: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the weights of a tied embedding and of a tied head in a range that holds only one of them."""
    last = count_layers(module)
    if not isinstance(module, Llm) or not module.tied or (first, end) == (0, last) or first == end:
        return [], []
    embedding = [layers[0][0].weight] if first == 0 else []
    head = [layers[-1][0].weight] if end == last else []
    return embedding, head


def _group_segments(layer: list[Segment], *, has_collectives: bool, fused: bool) -> list[Segment]:
    """Returns the segments of a layer between which the program may run other work."""
    if has_collectives:
        return insert_collectives(layer)
    return [SequentialSegment(layer)] if fused else layer


def _find_segmented_modules(plan: Plan, rank: int) -> set[str]:
    """Returns the modules into whose layers a rank's program puts other work: they run by segment."""
    device = plan.ranks.class_of(rank)
    segmented: set[str] = set()
    # By op: the layer of its last line, and the number of lines up to that.
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
            segmented.add(name)
        count += 1
        seen[op] = layer, count
    return segmented


def find_layer_ranges(plan: Plan, module: Encoder | Llm, rank: int) -> list[tuple[int, int]]:
    """Returns the first and end layer of each chunk of a module on a rank."""
    planned = plan.modules[module.name]
    ends = list(accumulate(chunk.layers for chunk in planned.chunks))
    if ends[-1] != count_layers(module):
        raise UserError(
            field=f"plan.modules.{module.name}",
            problem=f"has {ends[-1]} layers, and the model has {count_layers(module)} with its two ends",
            hint="plan again for this model",
        )
    stage, pp = plan.ranks.stage_of(module.name, plan.ranks.class_of(rank)), planned.layout.pp
    virtual_stages = range(stage, len(ends), pp)
    return [(ends[virtual - 1] if virtual else 0, ends[virtual]) for virtual in virtual_stages]


def build_message_specs(
    model: Model, plan: Plan, *, llm_tokens: int, dtype: torch.dtype
) -> BatchMessageSpecs:
    """Returns the specs of messages between stages, and over the seam."""
    hidden, tp = model.llm.stack.hidden, plan.ranks.llm.tp
    llm_rows = llm_tokens // plan.ranks.llm.cp
    if llm_rows % tp:
        raise UserError(
            field=f"layout.{LLM}.tp",
            value=tp,
            problem=f"does not divide the {llm_rows} tokens of a microbatch"
            + (" on a context-parallel rank" if llm_rows < llm_tokens else ""),
            hint="use sequences of another length, or another tp",
        )

    def stage_inputs(module: Encoder | Llm, rows: int) -> list[tuple[TensorSpec, ...]]:
        planned, deepstack = plan.modules[module.name], count_deepstack(model)
        firsts = list(accumulate((chunk.layers for chunk in planned.chunks), initial=0))[:-1]
        state = TensorSpec(shape=(rows // planned.layout.tp, module.stack.hidden), dtype=dtype)
        return [(state,) * (1 + len(list_passed_rows(module, first, deepstack))) for first in firsts]

    inputs, rows, tokens_per_row = {LLM: stage_inputs(model.llm, llm_rows)}, {}, {}
    width = hidden * (1 + count_deepstack(model))
    for encoder in model.encoders:
        tp = plan.modules[encoder.name].layout.tp
        inputs[encoder.name] = stage_inputs(encoder, tp)
        rows[encoder.name] = (TensorSpec(shape=(1, width), dtype=dtype),)
        tokens_per_row[encoder.name] = tp, tp * encoder.projector.merge
    return BatchMessageSpecs(inputs=inputs, rows=rows, tokens_per_row=tokens_per_row)


def count_deepstack(model: Model) -> int:
    """Returns the LLM layers behind which rows of encoders are added."""
    return max((len(encoder.feeds) for encoder in model.encoders), default=1) - 1


def reject_unsupported_plan(plan: Plan, axes: Sequence[str] = ("cp", "ep")) -> None:
    """Raises if a plan asks for parallelism along axes that the engine does not run.

    Context parallelism runs in our own layers only.
    """
    for name, module in plan.modules.items():
        for axis in axes:
            if getattr(module.layout, axis) > 1:
                where = " with modules of one's own" if axis == "cp" else " yet"
                raise UserError(
                    field=f"plan.modules.{name}.layout.{axis}",
                    value=getattr(module.layout, axis),
                    problem=f"can be planned, but the engine does not run it{where}",
                    hint=f"plan with {name}={axis}1",
                )


def _reject_unsupported_context(model: Model, plan: Plan) -> None:
    """Raises if a plan with context parallelism asks for what our layers do not do with it."""
    if plan.ranks.llm.cp == 1:
        return
    unsplittable = find_unsplittable(model.llm)
    if unsplittable is not None:
        raise unsplittable
    moved = chain.from_iterable(chain.from_iterable(m.buckets) for m in plan.modules.values())
    if any(max(bucket.gathered_per, bucket.reduced_per) > Span.STEP for bucket in moved):
        raise UserError(
            field=f"plan.modules.{LLM}.buckets",
            problem="are gathered or reduced in every microbatch, which is not compared equal with cp",
            hint=f"plan with {LLM}=cp1, or another system than fsdp",
        )
    if choose_recompute_mode(plan, LLM) == "attention":
        raise UserError(
            field=f"plan.modules.{LLM}.recomputed",
            value=KernelName.ATTENTION,
            problem="can be planned, but the engine does not run it with context parallelism",
            hint=f"recompute {KernelName.CHEAP} or full layers, or plan with {LLM}=cp1",
        )


def check_plan_on_ranks(plan: Plan) -> None:
    """Raises unless the plan holds, is for this world size, and is the same on every rank."""
    reject_unsupported_plan(plan)
    world = dist.get_world_size()
    if plan.ranks.world != world:
        raise UserError(
            field="plan",
            value=plan.ranks.world,
            problem=f"ranks are planned, and there are {world}",
            hint="plan for as many ranks as run",
        )
    report = check_plan(plan)
    if not report.ok:
        first = report.violations[0]
        raise UserError(
            field=first.where, problem=f"breaks the rule `{first.rule}`: {first.problem}", hint="plan again"
        )
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, hash_plan(plan))
    if len(set(digests)) > 1:
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise UserError(
            field="plan",
            problem=f"is another on ranks {different} than on rank 0",
            hint="make it from the same times on every rank; profile_stages gives them to all",
        )


def choose_recompute_mode(plan: Plan, name: str) -> Recompute:
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
