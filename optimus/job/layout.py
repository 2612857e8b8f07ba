"""Defines layouts: the parallelism of one module, complete or as far as the user states it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from optimus.errors import UserError, one_of
from optimus.job.typed import INT32, Count, Range

Way = Literal["fill", "three-phase", "balanced", "fsdp", "separate-gpus"]
Axis = Annotated[int, Range(least=1, most=INT32)]
AXES = ("dp", "pp", "cp", "ep", "tp", "chunks")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """dp x pp x cp x tp ranks; experts are spread over `ep` of the dp x cp x tp ranks of a stage."""

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
        """Ranks that hold the same dense parameters: their gradients are reduced together."""
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
class LayoutChoice:
    """A layout as far as the user states it; None is left open."""

    dp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    tp: Count | None = None
    chunks: Count | None = None

    def stated(self) -> dict[str, int]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def parse_layout(text: str, *, field: str) -> tuple[str, LayoutChoice]:
    """`llm=pp8,tp4`: a module and what is stated of its layout."""
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
    return module, LayoutChoice(**axes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the layout search."""

    microbatch_sequences: tuple[Count, ...] = (1, 2)
    max_pp: Count | None = None
    allow: tuple[Way, ...] = ("fill", "three-phase", "balanced", "fsdp", "separate-gpus")


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Stated layouts by module name, and limits."""

    modules: dict[str, LayoutChoice] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def of(self, module: str) -> LayoutChoice:
        return self.modules.get(module, LayoutChoice())
