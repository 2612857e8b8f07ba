"""What a report shows, as plain data: figures and where they come from, without a word of markup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimus.ir.op import Floats, Schedule
from optimus.render.boxes import Row
from optimus.schedule.simulate import Timeline
from optimus.sensitivity.tornado import Tornado


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The table at the top, in the words of `optimus plan`; None where the plan file does not say."""

    job: str
    gpus: int
    strategy: str
    chosen: tuple[tuple[str, ...], ...]  # module, layout, and more, a row per module
    step_s: float
    estimate_s: float
    floor_s: float | None
    bound_s: float | None
    bound: str
    hidden_strict: float | None
    hidden_placed: float | None
    mfu: float | None
    peak_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A system's step; `parts` are seconds of the mean GPU that sum to it, or empty where not known."""

    name: str
    step_s: float
    parts: Mapping[str, float]
    own: bool = False  # the plan that is reported
    fits: bool | None = None  # None: not known
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the step goes, fastest system first."""

    bars: tuple[Bar, ...]
    floor_s: float | None
    missing: Mapping[str, str]  # systems that cannot run the job, with the reason

    @property
    def own(self) -> Bar:
        return next(bar for bar in self.bars if bar.own)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A replay to be drawn: the LLM alone, or the plan."""

    label: str
    schedule: Schedule
    timeline: Timeline
    slack_s: Floats  # by op
    rows: tuple[Row, ...]  # of `devices`, for the picture without a script
    devices: tuple[int, ...]  # those that are drawn


@dataclass(frozen=True, kw_only=True)
class WorstRank:
    """Memory of the device class that needs most, by component and over the step."""

    name: str
    components: Mapping[str, int]
    capacity_bytes: int
    fixed_bytes: int  # of the components that are there all the time
    times_s: Floats  # a step function: `alive` holds from its time on
    alive: Mapping[str, Floats]  # bytes of what comes and goes
    step_s: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, kw_only=True)
class Point:
    """Something that was tried; without a step it was not scheduled, without bytes it was not counted."""

    name: str
    step_s: float | None
    peak_bytes: float | None
    reason: str  # against it; or that it was chosen, or is another system
    sort: str  # chosen, layout, system or rejected


@dataclass(frozen=True, kw_only=True)
class Tries:
    """All that was tried."""

    points: tuple[Point, ...]
    considered: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """What stands at the foot of the page."""

    version: str
    tool: str  # that made the plan
    digest: str
    cost_model: str
    preset: str
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """Everything a report shows."""

    summary: Summary
    where: Where
    scenes: tuple[Scene, ...]  # before and after; only the plan where the LLM alone cannot be played
    memory: WorstRank
    sure: Tornado
    tries: Tries | None
    source: Source
