"""Computes every rank's coordinates in every module's layout, on integers alone.

Ranks count tp fastest, then cp, dp and pp: `rank = ((stage * dp + replica) * cp + context) * tp + t`.
An encoder uses the same ranks. Its pipelines lie inside one LLM pipeline: pipeline (a, context, b)
has its stages on LLM stages `a * pp_enc ...` and its TP ranks on `b * tp_enc ...` of the LLM's TP group.

The LLM takes encoder outputs on its *entry stage*: the first, unless encoder layers come before the LLM's in
one pipeline.

Ranks that run the same program form a *device class*: one LLM stage, one context rank, and one block
of TP ranks that no encoder's TP group divides further. All replicas are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from optimus.ir.op import Communicator
from optimus.job.layout import Layout

LLM = "llm"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoordinates:
    """Coordinates of a rank in a module's layout."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Ranks of a job; `layouts` holds the LLM's and every encoder's, over the same GPUs."""

    layouts: Mapping[str, Layout]
    entry_stage: int = 0  # of the LLM
    exit_stages: Mapping[str, int] = field(default_factory=dict)  # of encoders that end before their last

    def __post_init__(self) -> None:
        for name, layout in self.layouts.items():
            llm = self.llm
            assert layout.gpus == llm.gpus, f"{name} uses {layout.gpus} GPUs, the LLM {llm.gpus}"
            assert llm.pp % layout.pp == 0 and llm.tp % layout.tp == 0, f"{name} {layout} in llm {llm}"
            assert name == LLM or layout.cp == layout.ep == 1, f"{name} {layout}"

    @property
    def llm(self) -> Layout:
        return self.layouts[LLM]

    @property
    def world(self) -> int:
        return self.llm.gpus

    # ------------------------------------------------------------------------ device classes

    @cached_property
    def block(self) -> int:
        """TP ranks of the LLM that run one program."""
        return gcd(*(layout.tp for layout in self.layouts.values()))

    @cached_property
    def positions(self) -> int:
        return self.llm.tp // self.block

    @property
    def num_classes(self) -> int:
        return self.llm.pp * self.llm.cp * self.positions

    def class_at(self, stage: int, context: int, position: int) -> int:
        return (stage * self.llm.cp + context) * self.positions + position

    def coordinates(self, device: int) -> tuple[int, int, int]:
        """Returns LLM stage, context rank and TP block of a device class."""
        rest, position = divmod(device, self.positions)
        stage, context = divmod(rest, self.llm.cp)
        return stage, context, position

    def class_name(self, device: int) -> str:
        """Returns `stage 3`, with context rank and TP block if a stage has several classes."""
        stage, context, position = self.coordinates(device)
        name = f"stage {stage}"
        name += f" cp {context}" if self.llm.cp > 1 else ""
        return name + (f" tp block {position}" if self.positions > 1 else "")

    def class_of(self, rank: int) -> int:
        place = self.place(LLM, rank)
        return self.class_at(place.pp, place.cp, place.tp // self.block)

    # ------------------------------------------------------------------------ modules on classes

    def stage_of(self, module: str, device: int) -> int:
        """Returns the stage of `module` that a device class holds."""
        return self.coordinates(device)[0] % self.layouts[module].pp

    def num_pipelines(self, module: str) -> int:
        """Returns the number of a module's pipelines inside one LLM pipeline (1 for the LLM)."""
        layout, llm = self.layouts[module], self.llm
        return 1 if module == LLM else (llm.pp // layout.pp) * llm.cp * (llm.tp // layout.tp)

    def pipeline_of(self, module: str, device: int) -> int:
        """Returns the pipeline of a module that a device class belongs to."""
        if module == LLM:
            return 0
        layout, llm = self.layouts[module], self.llm
        stage, context, position = self.coordinates(device)
        across = llm.tp // layout.tp
        return ((stage // layout.pp) * llm.cp + context) * across + position * self.block // layout.tp

    def next_stage(self, module: str, device: int, step: int = 1) -> int:
        """Returns the class of the next (or, with step -1, previous) stage of the same pipeline.

        The last stage is followed by the first, as chunks need.
        """
        stage, context, position = self.coordinates(device)
        size = self.layouts[module].pp
        first = stage - stage % size
        return self.class_at(first + (stage % size + step) % size, context, position)

    def entry_of(self, device: int) -> int:
        """Returns the class on the entry stage that exchanges seam rows with an encoder's last stage."""
        _, context, position = self.coordinates(device)
        return self.class_at(self.entry_stage, context, position)

    def exit_stage(self, encoder: str) -> int:
        """Returns the stage of an encoder that holds its last layers."""
        return self.exit_stages.get(encoder, self.layouts[encoder].pp - 1)

    def exit_classes(self, encoder: str, device: int) -> tuple[int, ...]:
        """Returns the classes on which an encoder's pipelines end that feed a class of the entry stage."""
        _, context, position = self.coordinates(device)
        stages = range(self.exit_stage(encoder), self.llm.pp, self.layouts[encoder].pp)
        return tuple(self.class_at(stage, context, position) for stage in stages)

    def group_classes(self, module: str, communicator: Communicator, device: int) -> tuple[int, ...]:
        """Returns the classes whose ranks share the module's collectives with a class's ranks."""
        stage, context, position = self.coordinates(device)
        if communicator in (Communicator.EP, Communicator.DP) and self.layouts[module].ep > 1:
            return self._expert_classes(stage)
        if communicator in (Communicator.EP, Communicator.DEAL):
            return (device,)  # ranks of other replicas run the same program
        layout, positions = self.layouts[module], range(self.positions)
        stages, contexts = [stage], [context]
        span = layout.tp // self.block
        inside = [other for other in positions if other // span == position // span]
        if communicator == Communicator.CP:
            contexts, inside = list(range(self.llm.cp)) if module == LLM else [context], [position]
        elif communicator == Communicator.PP:
            first = stage - stage % layout.pp
            stages, inside = list(range(first, first + layout.pp)), [position]
        elif communicator == Communicator.DP:
            contexts = list(range(self.llm.cp))
            inside = [other for other in positions if other % span == position % span]
            if module != LLM:
                stages = list(range(stage % layout.pp, self.llm.pp, layout.pp))
        return tuple(self.class_at(s, c, b) for s in stages for c in contexts for b in inside)

    def _expert_classes(self, stage: int) -> tuple[int, ...]:
        """Returns all classes of a stage, over whose ranks experts are distributed."""
        contexts, positions = range(self.llm.cp), range(self.positions)
        return tuple(self.class_at(stage, c, b) for c in contexts for b in positions)

    # ------------------------------------------------------------------------ single ranks

    def place(self, module: str, rank: int) -> RankCoordinates:
        """Returns a rank's coordinates in a module's layout."""
        llm, layout = self.llm, self.layouts[module]
        rest, t = divmod(rank, llm.tp)
        rest, context = divmod(rest, llm.cp)
        stage, replica = divmod(rest, llm.dp)
        if module == LLM:
            return RankCoordinates(dp=replica, pp=stage, cp=context, tp=t)
        pipeline = ((stage // layout.pp) * llm.cp + context) * (llm.tp // layout.tp) + t // layout.tp
        dp = replica * self.num_pipelines(module) + pipeline
        return RankCoordinates(dp=dp, pp=stage % layout.pp, cp=0, tp=t % layout.tp)

    def rank_of(self, stage: int, replica: int, context: int, t: int) -> int:
        """Returns the rank at LLM coordinates."""
        llm = self.llm
        return ((stage * llm.dp + replica) * llm.cp + context) * llm.tp + t

    def member(self, device: int, like: int) -> int:
        """Returns the rank of a class with the replica and the position in its block of rank `like`."""
        stage, context, position = self.coordinates(device)
        place = self.place(LLM, like)
        return self.rank_of(stage, place.dp, context, position * self.block + place.tp % self.block)

    def group_of(self, module: str, communicator: Communicator, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's group in order; DP groups are those of dense parameters."""
        llm, layout, place = self.llm, self.layouts[module], self.place(LLM, rank)
        if communicator == Communicator.EP:
            return tuple(range(rank - rank % layout.ep, rank - rank % layout.ep + layout.ep))
        stages, replicas = range(place.pp, place.pp + 1), range(place.dp, place.dp + 1)
        contexts, inside = range(place.cp, place.cp + 1), range(place.tp, place.tp + 1)
        if communicator == Communicator.TP:
            first = place.tp - place.tp % layout.tp
            inside = range(first, first + layout.tp)
        elif communicator == Communicator.PP:
            first = place.pp - place.pp % layout.pp
            stages = range(first, first + layout.pp)
        elif communicator == Communicator.CP and module == LLM:
            contexts = range(llm.cp)
        elif communicator == Communicator.DP:
            replicas, contexts = range(llm.dp), range(llm.cp)
            stages = range(place.pp % layout.pp, llm.pp, layout.pp)
            inside = range(place.tp % layout.tp, llm.tp, layout.tp)
        return tuple(
            self.rank_of(s, r, c, t) for s in stages for r in replicas for c in contexts for t in inside
        )
