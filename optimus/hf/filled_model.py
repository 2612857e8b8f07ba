"""Runs a model folder of transformers as a filled pipeline, in as few lines as plain torch needs.

model = FilledModel(folder, pp=2, microbatches=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batches in loader:  # the processor's outputs of one step, one per microbatch
    loss = model.step(batches)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
model.save("out")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.fsdp_ddp import unshard_all
from optimus.engine.process_groups import make_replica_mesh
from optimus.engine.stage_profile import ProfiledStages, StageInputs, profile_stages
from optimus.engine.stage_segments import DealtRows
from optimus.engine.user_errors import report_errors_once, say
from optimus.errors import UserError, one_of
from optimus.hf.dealt_inputs import ItemDealer
from optimus.hf.families import find_family
from optimus.hf.inputs import (
    IGNORED,
    MicrobatchInputs,
    check_labels,
    digest_batches,
    make_target,
    step_arguments,
)
from optimus.hf.load import load_model
from optimus.hf.loss import causal_lm_loss
from optimus.hf.split import split_model
from optimus.hf.weights import load_weights, save_weights_distributed
from optimus.ir.op import Communicator
from optimus.ir.plan import EncoderBlocks, Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.models.collectives import all_gather_single
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.planner.user_modules import plan_modules

PROFILE_REPEATS = 3
ORDERS = ("", "1f1b", "interleaved", "zero-bubble")


class FilledModel:
    """A transformers model over all ranks of the default process group, as stages and encoder blocks.

    Every rank loads the weights of its own parts: `pp` pipeline stages times data-parallel replicas. Encoders
    are cut into `encoder_blocks` blocks (towers that cannot be cut are one) over `encoder_pp` stages. With
    `shard`, FSDP2 shards stages and blocks over their replicas. Images of `dealing_replicas` replicas are
    encoded where there is least to do; every replica passes its own all the same. The plan is made at the
    first step from seconds that are measured then, unless one is given; freeze parameters and add adapters
    before.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        pp: int,
        microbatches: int,
        chunks: int = 1,
        order: str = "",
        encoder_blocks: int = 4,
        encoder_pp: int = 1,
        dtype: torch.dtype | None = None,
        attn_implementation: str = "sdpa",
        device: str = "cpu",
        shard: bool = False,
        dealing_replicas: int = 1,
        plan: Plan | None = None,
    ) -> None:
        report_errors_once()
        self.folder, self.microbatches, self.order, self.plan = Path(folder), microbatches, order, plan
        self.device, self.encoder_pp, self.dealing_replicas = device, encoder_pp, dealing_replicas
        _check_counts(
            microbatches=microbatches,
            pp=pp,
            chunks=chunks,
            encoder_pp=encoder_pp,
            dealing_replicas=dealing_replicas,
            order=order,
        )
        self.model = load_model(folder, dtype=dtype, attn_implementation=attn_implementation)
        layers = self.model.config.get_text_config().num_hidden_layers
        if pp * chunks > layers:
            raise UserError(
                field="pp * chunks",
                value=pp * chunks,
                problem=f"stages are more than the LLM's {layers} layers",
                hint=f"use at most {layers}",
            )
        self.split = split_model(
            self.model,
            stages=split_layers_evenly(layers, pp * chunks),
            blocks=_cut_evenly(self.model, encoder_blocks),
        )
        self._ranks = self._make_ranks(pp, chunks)
        self._check_plan()
        self.stages: list[nn.Module] = list(self.split.stages[self._stage_of(LLM) :: pp])
        local = {name: self._local_blocks(name, blocks) for name, blocks in self.split.encoders.items()}
        self.parts = [*self.stages, *chain.from_iterable(local.values())]
        if shard:
            for name, parts in {**local, LLM: self.stages}.items():
                mesh = self._replica_mesh(name)
                for part in parts:
                    fully_shard(part, mesh=mesh)
        load_weights(self.model, self.parts, folder, cast=dtype is not None, device=device)
        self._schedule: FillSchedule | None = None
        self._dealer: ItemDealer | None = None
        self._trained: set[int] = set()  # parameters for which the schedule was made

    @property
    def config(self) -> Any:
        """The configuration of transformers."""
        return self.model.config

    @property
    def replica(self) -> int:
        """The data-parallel replica of this rank: ranks of one replica pass the same batches."""
        return self._ranks.place(LLM, dist.get_rank()).dp

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank that train, each once."""
        parameters = {id(p): p for part in self.parts for p in part.parameters() if p.requires_grad}
        yield from parameters.values()

    def prepare(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Measures stages and blocks on one of these microbatches, and plans; trains nothing.

        The first `step` does this with its own microbatches. Call it before with others if none of those has
        inputs for every encoder.
        """
        self._schedule = self._make_schedule(self._inputs(batches))
        self._trained = {id(parameter) for parameter in self.parameters()}

    def step(
        self, batches: Sequence[Mapping[str, Any]], *, num_items: int | None = None, accumulate: int = 1
    ) -> float:
        """Runs forward and backward of a step and returns its loss, the mean over labels of all replicas.

        `batches` are a processor's outputs with labels, one per microbatch, on all ranks of a replica. To
        accumulate gradients over several steps, give their number as `accumulate` and `count_labels` of all
        of them as `num_items`: then each returns its share of the loss.
        """
        inputs = self._inputs(batches)
        count = self.count_labels(batches)
        if num_items not in (None, count) and accumulate == 1 and self.split.router:
            raise UserError(
                field="accumulate",
                value=1,
                problem="does not say over how many steps the router loss of the batch is a mean",
                hint="give the number of steps whose labels num_items counts",
            )
        count = count if num_items is None else num_items
        if count < 1:
            raise UserError(
                field="batches: labels", problem=f"are all {IGNORED}", hint="give labels to train on"
            )
        if self._schedule is None:
            self.prepare(batches)
        schedule = self._schedule
        assert schedule is not None
        if {id(parameter) for parameter in self.parameters()} != self._trained:
            raise UserError(
                field="parameters",
                problem="were frozen, thawed or added after the plan was made",
                hint="do so before the first step, or call prepare again",
            )
        args, kwargs = step_arguments(inputs)
        deal: Sequence[Mapping[str, DealtRows]] = ()
        if self._dealer is not None:
            encoders, ways = self._dealer.deal(inputs)
            kwargs |= encoders
            deal = ways if schedule.is_first else ()
        losses: list[Tensor] = []
        weight = self.split.router_weight(count, len(inputs) * self._ranks.llm.dp * accumulate)
        schedule.step(
            *args,
            **kwargs,
            losses=losses,
            num_items=count,
            return_outputs=False,
            deal=deal,
            loss_kwargs={} if weight is None else {"router_weight": weight},
        )
        total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        dist.all_reduce(total)
        return float(total) / count

    def count_labels(self, batches: Sequence[Mapping[str, Any]]) -> int:
        """Returns how many labels enter the loss over all replicas; all ranks call it.

        Raises if ranks of one replica have different batches.
        """
        check_labels(batches)
        targets = [make_target(self.model, batch) for batch in batches]
        labels = sum(int((target[:, 1:] != IGNORED).sum()) for target in targets if target is not None)
        facts = torch.tensor([self.replica, labels, digest_batches(batches)], device=self.device)
        of_ranks = torch.empty(dist.get_world_size() * len(facts), dtype=facts.dtype, device=self.device)
        all_gather_single(of_ranks, facts)
        of_replicas: dict[int, tuple[int, int]] = {}
        for replica, count, digest in of_ranks.view(-1, len(facts)).tolist():
            if of_replicas.setdefault(replica, (count, digest)) != (count, digest):
                raise UserError(
                    field="batches",
                    problem=f"differ between the ranks of replica {replica}",
                    hint="shard data by model.replica, not by rank: stages of a pipeline share their batches",
                )
        return sum(count for count, _ in of_replicas.values())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips gradients by one norm over all ranks and returns it."""
        if self._schedule is None:
            raise UserError(
                field="clip_grad_norm_", problem="comes before the first step", hint="call step first"
            )
        return self._schedule.clip_grad_norm_(max_norm)

    def save(self, into: str | Path) -> None:
        """Writes the model as the folder that it was loaded from; all ranks call it."""
        if any(".lora_" in name for part in self.parts for name, _ in part.named_parameters()):
            raise UserError(
                field="save",
                problem="would write a model that has adapters",
                hint="call optimus.hf.lora.save_lora(model.parts, config, folder)",
            )
        save_weights_distributed(self.model, self.parts, self.folder, into)

    # ------------------------------------------------------------------------ ranks

    def _make_ranks(self, pp: int, chunks: int) -> RankGrid:
        world = dist.get_world_size()
        for field, value, whole in (("pp", pp, world), ("encoder_pp", self.encoder_pp, pp)):
            if whole % value:
                fits = one_of(n for n in range(1, whole + 1) if whole % n == 0)
                what = f"{world} ranks" if field == "pp" else f"pp = {pp}"
                raise UserError(
                    field=field, value=value, problem=f"does not divide {what}", hint=f"use {fits}"
                )
        layouts = {
            name: Layout(dp=world // stages, pp=stages)
            for name, stages in (
                (name, min(self.encoder_pp, len(b))) for name, b in self.split.encoders.items()
            )
        }
        return RankGrid(layouts={**layouts, LLM: Layout(dp=world // pp, pp=pp, chunks=chunks)})

    def _check_plan(self) -> None:
        """Raises if a given plan has other options."""
        if self.plan is None:
            return
        if self.plan.ranks.layouts != self._ranks.layouts:
            raise UserError(
                field="plan",
                problem=f"is for {_describe(self.plan.ranks)}, and this model has {_describe(self._ranks)}",
                hint="give pp, chunks and encoder_pp of the plan, or leave the plan out",
            )
        if self.plan.dealing_replicas != self.dealing_replicas:
            raise UserError(
                field="dealing_replicas",
                value=self.dealing_replicas,
                problem=f"is {self.plan.dealing_replicas} in the plan that was given",
                hint=f"use {self.plan.dealing_replicas}, or leave the plan out",
            )

    def _stage_of(self, name: str) -> int:
        return self._ranks.stage_of(name, self._ranks.class_of(dist.get_rank()))

    def _local_blocks(self, name: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        counts = split_layers_evenly(len(blocks), self._ranks.layouts[name].pp)
        first = sum(counts[: self._stage_of(name)])
        return list(blocks[first : first + counts[self._stage_of(name)]])

    def _replica_mesh(self, name: str) -> DeviceMesh:
        replicas = self._ranks.group_of(name, Communicator.DP, dist.get_rank()) or (dist.get_rank(),)
        return make_replica_mesh(replicas, self.device)

    # ------------------------------------------------------------------------ the first step

    def _inputs(self, batches: Sequence[Mapping[str, Any]]) -> list[MicrobatchInputs]:
        if isinstance(batches, Mapping) or len(batches) != self.microbatches:
            raise UserError(
                field="batches",
                value="one mapping" if isinstance(batches, Mapping) else len(batches),
                problem=f"were given for {self.microbatches} microbatches",
                hint="give a list with one processor output per microbatch",
            )
        inputs = []
        for number, batch in enumerate(batches):
            try:
                inputs.append(self.split.inputs(batch))
            except UserError as error:
                error.field = f"batches[{number}]: {error.field}"
                raise
        return inputs

    def _make_schedule(self, inputs: Sequence[MicrobatchInputs]) -> FillSchedule:
        profiles = self._profile(inputs)
        self.plan = self.plan or self._make_plan(profiles)
        say(
            f"plans {self.plan.order}, {_describe(self.plan.ranks)}, {self.plan.microbatches} microbatches: "
            f"{self.plan.claims.step_s:.3g} s a step without communication and optimizer"
        )
        self._dealer = (
            ItemDealer(self.split, self.plan, self.device) if self.plan.dealing_replicas > 1 else None
        )
        return FillSchedule(
            self.stages,
            self.split.encoders,
            self.plan,
            loss_fn=causal_lm_loss,
            tied=self.split.tied(self.stages),
            shapes=self.split.shapes,
            profiles=profiles,
        )

    def _profile(self, inputs: Sequence[MicrobatchInputs]) -> ProfiledStages:
        """Measures every stage and block on a microbatch that has inputs for all encoders."""
        complete = [all(each is not None for each in batch.encoders.values()) for batch in inputs]
        number = [complete.index(True) if any(complete) else -1]
        dist.broadcast_object_list(number, 0)  # the first replica's data is run
        if number[0] < 0:
            raise UserError(
                field="batches",
                problem="have no microbatch with inputs for every encoder, and there is no plan yet",
                hint="call model.prepare(batches) with some that have, before the first step",
            )
        batch = inputs[number[0]]
        blocks = ", ".join(f"{len(b)} blocks of {name}" for name, b in self.split.encoders.items())
        say(f"measures {len(self.split.stages)} stages and {blocks} on microbatch {number[0]}")
        with unshard_all(self.parts):
            return profile_stages(
                self.stages,
                self.split.encoders,
                StageInputs(args=batch.args, kwargs=batch.kwargs),
                {name: [each] for name, each in batch.encoders.items()},
                pp=self._ranks.llm.pp,
                repeats=PROFILE_REPEATS,
            )

    def _make_plan(self, profiles: ProfiledStages) -> Plan:
        return plan_modules(
            stages=profiles.stage_seconds,
            encoders={
                name: EncoderBlocks(blocks=profiles.block_seconds(name), pp=self._ranks.layouts[name].pp)
                for name in self.split.encoders
            },
            microbatches=self.microbatches,
            ranks=self._ranks.world,
            pp=self._ranks.llm.pp,
            order=self.order,
            dealing_replicas=self.dealing_replicas,
        )


def _describe(ranks: RankGrid) -> str:
    each = (f"{name} dp {at.dp} pp {at.pp} chunks {at.chunks}" for name, at in ranks.layouts.items())
    return ", ".join(each)


def _cut_evenly(model: Any, blocks: int) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each block of the towers that can be cut."""
    counts = {}
    for name, tower in find_family(model.config).towers.items():
        if tower.cut is not None:
            depth = len(model.model._modules[tower.module].get_submodule(tower.cut.layers))
            counts[name] = split_layers_evenly(depth, min(blocks, depth))
    return counts


def _check_counts(*, order: str, **counts: Any) -> None:
    for field, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise UserError(
                field=field, value=count, problem="is not a positive number", hint="use 1 or more"
            )
    if order not in ORDERS:
        raise UserError(field="order", value=order, problem="is not known", hint=f"use {one_of(ORDERS[1:])}")
