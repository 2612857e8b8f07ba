"""Defines layouts: the parallelism of one module, complete or as far as the user states it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, get_args

from optimus.errors import UserError, one_of
from optimus.job.typed import INT32, Count, NumberRange

# Systems of `optimus.planner.systems.registry` that a job file may name, there `allowed_as` these words.
BaselineSystem = Literal["three-phase", "balanced", "fsdp", "separate-gpus"]
AllowedSystem = Literal["fill", BaselineSystem]  # of the search; `fill` is any that schedules into bubbles
CurrentPlacement = Literal["stage0", BaselineSystem]  # of encoders in the job as it runs today
TokenDispatcher = Literal["alltoall", "flex"]  # Megatron's words; flex: DeepEP, HybridEP
CurrentSchedule = Literal["1f1b", "interleaved", "zero-bubble"]
Axis = Annotated[int, NumberRange(least=1, most=INT32)]
AXES = ("dp", "pp", "cp", "ep", "tp", "chunks")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of dp x pp x cp x tp ranks; experts are spread over `ep` of a stage's dp x cp x tp ranks."""

    dp: Axis = 1
    pp: Axis = 1
    cp: Axis = 1
    ep: Axis = 1
    tp: Axis = 1
    chunks: Axis = 1

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that hold the same dense parameters: their gradients are reduced together."""
        return self.dp * self.cp

    @property
    def expert_replica_ranks(self) -> int:
        return self.dp * self.cp * self.tp // self.ep

    def with_(self, **changes: int) -> Layout:
        return replace(self, **changes)

    def __str__(self) -> str:
        shown = [f"{axis}{getattr(self, axis)}" for axis in AXES if axis in ("dp", "pp", "tp")]
        extra = [f"{axis}{getattr(self, axis)}" for axis in ("cp", "ep", "chunks") if getattr(self, axis) > 1]
        return " ".join(shown + extra)


@dataclass(frozen=True, kw_only=True)
class PartialLayout:
    """A layout as far as the user states it; axes that are None are searched."""

    dp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    tp: Count | None = None
    chunks: Count | None = None

    def stated(self) -> dict[str, int]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def parse_layout(text: str, *, field: str) -> tuple[str, PartialLayout]:
    """Parses `llm=pp8,tp4` into a module and what is stated of its layout."""
    module, equals, stated = text.partition("=")
    axes: dict[str, int] = {}
    if not equals:
        module, stated = "", text
    for part in stated.split(","):
        match = re.fullmatch(r"([a-z]+)([1-9][0-9]{0,5})", part.strip())
        if not module or match is None or match[1] not in AXES or match[1] in axes:
            raise UserError(
                field=field,
                value=text,
                problem="is not a layout" + (f": what is {part.strip()}?" if module and part.strip() else ""),
                hint=f"write MODULE=AXIS,AXIS such as llm=pp8,tp4; axes: {one_of(AXES)}",
            )
        axes[match[1]] = int(match[2])
    return module, PartialLayout(**axes)


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of the layout search."""

    microbatch_sequences: tuple[Count, ...] = (1, 2)
    max_pp: Count | None = None
    split_images: bool = True  # over the TP ranks of an LLM stage that hold replicas of an encoder
    deal_items: bool = True  # over replicas, so that none waits for the one with the largest images
    allow: tuple[AllowedSystem, ...] = get_args(AllowedSystem)


@dataclass(frozen=True, kw_only=True)
class LayoutConstraints:
    """Stated layouts by module name, and limits of the search."""

    modules: dict[str, PartialLayout] = field(default_factory=dict)
    limits: SearchLimits = field(default_factory=SearchLimits)

    def of(self, module: str) -> PartialLayout:
        return self.modules.get(module, PartialLayout())


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
