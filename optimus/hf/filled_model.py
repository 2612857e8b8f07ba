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
from optimus.engine.stage_profile import StageInputs, profile_stages
from optimus.errors import UserError
from optimus.hf.families import find_family
from optimus.hf.inputs import IGNORED, MicrobatchInputs, step_arguments
from optimus.hf.load import load_model
from optimus.hf.loss import causal_lm_loss
from optimus.hf.split import split_model
from optimus.hf.weights import load_weights, save_weights_distributed
from optimus.ir.op import Communicator
from optimus.ir.plan import EncoderBlocks, Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.planner.user_modules import plan_modules

PROFILE_REPEATS = 3


class FilledModel:
    """A transformers model over all ranks of the default process group, as stages and encoder blocks.

    Every rank loads the weights of its own parts: `pp` pipeline stages times data-parallel replicas. Encoders
    are cut into `encoder_blocks` blocks (towers that cannot be cut are one) over `encoder_pp` stages. With
    `shard`, FSDP2 shards stages and blocks over their replicas. The plan is made at the first step from
    seconds that are measured then, unless one is given; freeze parameters and add adapters before.
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
        plan: Plan | None = None,
    ) -> None:
        self.folder, self.microbatches, self.order, self.plan = Path(folder), microbatches, order, plan
        self.device, self.encoder_pp = device, encoder_pp
        self.model = load_model(folder, dtype=dtype, attn_implementation=attn_implementation)
        self.split = split_model(
            self.model,
            stages=split_layers_evenly(self.model.config.get_text_config().num_hidden_layers, pp * chunks),
            blocks=_cut_evenly(self.model, encoder_blocks),
        )
        self._ranks = self._make_ranks(pp, chunks)
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

    def step(self, batches: Sequence[Mapping[str, Any]], *, num_items: int | None = None) -> float:
        """Runs forward and backward of a step and returns its loss, the mean over labels of all replicas.

        `batches` are a processor's outputs with labels, one per microbatch, on all ranks of a replica. To
        accumulate gradients over several steps, give `count_labels` of all of them as `num_items`.
        """
        inputs = self._inputs(batches)
        count = self.count_labels(batches) if num_items is None else num_items
        schedule = self._schedule or self._make_schedule(inputs)
        args, kwargs = step_arguments(inputs)
        losses: list[Tensor] = []
        weight = self.split.router_weight(count, len(inputs) * self._ranks.llm.dp)
        schedule.step(
            *args,
            **kwargs,
            losses=losses,
            num_items=count,
            return_outputs=False,
            loss_kwargs={} if weight is None else {"router_weight": weight},
        )
        total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        dist.all_reduce(total)
        return float(total) / count

    def count_labels(self, batches: Sequence[Mapping[str, Any]]) -> int:
        """Returns how many labels enter the loss over all replicas; all ranks call it."""
        labels = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        count = torch.tensor(labels, device=self.device)
        dist.all_reduce(count)
        return int(count) // self._ranks.llm.pp  # ranks that hold the same batches

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips gradients by one norm over all ranks and returns it."""
        assert self._schedule is not None, "no step has run"
        return self._schedule.clip_grad_norm_(max_norm)

    def save(self, into: str | Path) -> None:
        """Writes the model as the folder that it was loaded from; all ranks call it."""
        save_weights_distributed(self.model, self.parts, self.folder, into)

    # ------------------------------------------------------------------------ ranks

    def _make_ranks(self, pp: int, chunks: int) -> RankGrid:
        world = dist.get_world_size()
        if world % pp or pp % self.encoder_pp:
            raise UserError(
                field="pp",
                value=pp,
                problem=f"does not divide {world} ranks, or is no multiple of encoder_pp = {self.encoder_pp}",
                hint="choose numbers that divide",
            )
        layouts = {
            name: Layout(dp=world // stages, pp=stages)
            for name, stages in (
                (name, min(self.encoder_pp, len(b))) for name, b in self.split.encoders.items()
            )
        }
        return RankGrid(layouts={**layouts, LLM: Layout(dp=world // pp, pp=pp, chunks=chunks)})

    def _stage_of(self, name: str) -> int:
        return self._ranks.stage_of(name, self._ranks.class_of(dist.get_rank()))

    def _local_blocks(self, name: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        counts = split_layers_evenly(len(blocks), self._ranks.layouts[name].pp)
        first = sum(counts[: self._stage_of(name)])
        return list(blocks[first : first + counts[self._stage_of(name)]])

    def _replica_mesh(self, name: str) -> DeviceMesh:
        replicas = self._ranks.group_of(name, Communicator.DP, dist.get_rank()) or (dist.get_rank(),)
        group = dist.new_group(list(replicas), use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.device, mesh_dim_names=("replicas",))

    # ------------------------------------------------------------------------ the first step

    def _inputs(self, batches: Sequence[Mapping[str, Any]]) -> list[MicrobatchInputs]:
        if len(batches) != self.microbatches:
            raise UserError(
                field="batches",
                value=len(batches),
                problem=f"were given for {self.microbatches} microbatches",
                hint="give one processor output per microbatch",
            )
        return [self.split.inputs(batch) for batch in batches]

    def _make_schedule(self, inputs: Sequence[MicrobatchInputs]) -> FillSchedule:
        plan = self.plan or self._make_plan(inputs)
        self.plan = plan
        self._schedule = FillSchedule(
            self.stages,
            self.split.encoders,
            plan,
            loss_fn=causal_lm_loss,
            tied=self.split.tied(self.stages),
            shapes=self.split.shapes,
        )
        return self._schedule

    def _make_plan(self, inputs: Sequence[MicrobatchInputs]) -> Plan:
        """Measures every stage and block on a microbatch that has inputs for all encoders, and plans."""
        complete = (batch for batch in inputs if all(each is not None for each in batch.encoders.values()))
        batch = next(complete, inputs[0])
        with unshard_all(self.parts):
            profiles = profile_stages(
                self.stages,
                self.split.encoders,
                StageInputs(args=batch.args, kwargs=batch.kwargs),
                {name: [each] for name, each in batch.encoders.items()},
                pp=self._ranks.llm.pp,
                repeats=PROFILE_REPEATS,
            )
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
        )


def _cut_evenly(model: Any, blocks: int) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each block of the towers that can be cut."""
    counts = {}
    for name, tower in find_family(model.config).towers.items():
        if tower.cut is not None:
            depth = len(model.model._modules[tower.module].get_submodule(tower.cut.layers))
            counts[name] = split_layers_evenly(depth, min(blocks, depth))
    return counts
