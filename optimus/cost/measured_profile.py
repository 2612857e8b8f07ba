"""Holds a measured profile, whose seconds replace those of the cost model's formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from optimus.errors import UserError, one_of
from optimus.ir.binding import flatten_and_hash_parts, omit_default_constants
from optimus.ir.op import KernelName, OpKind
from optimus.job.model import Encoder, Llm, Model, Stack
from optimus.job.typed import Amount, Count, NonNegative, Whole

# Classes of layers that the cost model tells apart; all layers of one class have one price.
LayerClass = Literal["embedding", "full", "full-experts", "window", "window-experts", "projector", "head"]
# Kernels that a segment may cover: the cost model's compute kernels, without what follows a dot.
KERNELS = (
    KernelName.NORM1,
    KernelName.LATENT,
    KernelName.QKV,
    KernelName.ATTENTION,
    KernelName.OUT,
    KernelName.NORM2,
    KernelName.UP,
    KernelName.DOWN,
    KernelName.ROUTER,
    KernelName.EXPERTS,
    KernelName.PATCHES,
    KernelName.PROJECTOR,
    KernelName.EMBEDDING,
    KernelName.HEAD,
)
MEASURED_KINDS = (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.BACKWARD)
ANALYTIC = "analytic, uncalibrated"
MAX_KERNELS_SHOWN = 4  # in one note


@dataclass(frozen=True, kw_only=True)
class MeasurementConditions:
    """Host, date and software of a measurement."""

    host: str
    date: str  # 2026-05-31
    torch: str
    threads: Count
    dtype: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SegmentMeasurement:
    """Measured seconds of a segment of one class of layer, for one kind of op at one size."""

    module: str
    layers: LayerClass
    segment: str
    kernels: tuple[str, ...]  # of the cost model, which the segment covers
    kind: OpKind  # F, I, W or B
    tokens: Count  # rows of one microbatch that a TP group works on
    tp: Count = 1
    median_s: NonNegative
    p25_s: NonNegative
    p75_s: NonNegative
    repetitions: Count


@dataclass(frozen=True, kw_only=True)
class MessageTime:
    """Measured seconds of one message size."""

    size_bytes: Whole
    median_s: NonNegative
    p25_s: NonNegative
    p75_s: NonNegative
    repetitions: Count


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """Measured latency and bandwidth of sends or all-reduces between processes, with the times per size."""

    operation: Literal["send", "all_reduce"]
    backend: str
    ranks: Count
    latency_s: NonNegative
    bandwidth_bytes_per_s: Amount  # of a send; of an all-reduce, of its whole tensor
    sizes: tuple[MessageTime, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _SegmentEstimate:
    """Seconds of a segment at one size; `beyond` if the size is outside of those measured."""

    kernels: tuple[str, ...]
    seconds: float
    beyond: bool


@dataclass(frozen=True, kw_only=True)
class ProfileGap:
    """Kernels and sizes of priced layers that a profile does not cover."""

    module: str
    tp: int
    tokens: float
    unmeasured: tuple[str, ...]  # `F qkv`: priced by the formula
    beyond: bool


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured profile; empty for purely analytic prices."""

    name: str = ""
    measured: MeasurementConditions | None = None
    modules: tuple[tuple[str, str], ...] = ()  # name and fingerprint of what was measured
    segments: tuple[SegmentMeasurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    issue_s: float | None = None  # host time to issue one kernel
    slowdown: float | None = None  # of compute under a collective: share of its time that it takes longer

    @property
    def source(self) -> str:
        """Name of the source in printed results."""
        return f"profile {self.name}" if self.segments else ANALYTIC

    @cached_property
    def _points(self) -> dict[tuple[str, str, OpKind, int], dict[str, list[SegmentMeasurement]]]:
        """Rows by module, class of layer, kind and tp; then by segment, smallest first."""
        points: dict[tuple[str, str, OpKind, int], dict[str, list[SegmentMeasurement]]] = {}
        for row in sorted(self.segments, key=lambda row: row.tokens):
            key = row.module, row.layers, row.kind, row.tp
            points.setdefault(key, {}).setdefault(row.segment, []).append(row)
        return points

    @cached_property
    def _widths(self) -> dict[str, set[int]]:
        widths: dict[str, set[int]] = {}
        for row in self.segments:
            widths.setdefault(row.module, set()).add(row.tp)
        return widths

    def estimates(
        self, module: str, layers: LayerClass, kind: OpKind, *, tokens: float, tp: int
    ) -> tuple[_SegmentEstimate, ...]:
        """Returns the segments' seconds. R takes as long as F; B is I plus W where it was not measured.

        At a tp that was not measured, the seconds of the nearest tp are scaled.
        """
        width = self.nearest_tp(module, tp)
        if width is None:
            return ()

        def rows(kind: OpKind) -> dict[str, list[SegmentMeasurement]]:
            return self._points.get((module, layers, kind, width), {})

        whole = rows(OpKind.FORWARD if kind == OpKind.RECOMPUTE else kind)
        estimates = [_at(points, tokens) for points in whole.values()]
        if kind == OpKind.BACKWARD:
            for segment in dict.fromkeys((*rows(OpKind.INPUT_GRAD), *rows(OpKind.WEIGHT_GRAD))):
                if segment not in whole:
                    halves = [
                        _at(rows(k)[segment], tokens)
                        for k in (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
                        if segment in rows(k)
                    ]
                    estimates.append(_sum(halves))
        if width == tp:
            return tuple(estimates)
        return tuple(
            replace(estimate, seconds=estimate.seconds * width / tp, beyond=True) for estimate in estimates
        )

    def nearest_tp(self, module: str, tp: int) -> int | None:
        """Returns the measured tp nearest to `tp`; None if nothing of the module was measured."""
        widths = self._widths.get(module, ())
        return min(widths, key=lambda width: (max(width / tp, tp / width), width), default=None)

    def sizes(self, module: str, tp: int | None) -> tuple[int, int] | None:
        """Returns the fewest and the most tokens that were measured."""
        tokens = [row.tokens for row in self.segments if (row.module, row.tp) == (module, tp)]
        return (min(tokens), max(tokens)) if tokens else None

    def check_model(self, model: Model) -> None:
        """Refuses a profile that was measured with another model."""
        fingerprints = {module.name: hash_module_shape(module) for module in model.modules}
        known = [name for name, _ in self.modules if name in fingerprints]
        if self.segments and not known:
            raise UserError(
                field="--profile",
                value=self.name,
                problem=f"measures {one_of(name for name, _ in self.modules) or 'nothing'}, "
                f"and the modules of {model.name} are {one_of(fingerprints)}",
                hint="measure this job: optimus profile JOB -o PROFILE",
            )
        for name, measured in self.modules:
            if name in fingerprints and fingerprints[name] != measured:
                raise UserError(
                    field="--profile",
                    value=self.name,
                    problem=f"was measured with another {name} than that of {model.name}",
                    hint="measure this job: optimus profile JOB -o PROFILE",
                )

    def bound(self) -> list[list[Any]]:
        """Returns the values that a plan is bound to: the medians, not how or where they were measured."""
        rows = (
            [r.module, r.layers, r.segment, list(r.kernels), r.kind.word, r.tokens, r.tp, r.median_s]
            for r in self.segments
        )
        return sorted(rows)

    def notes(self, profile_gaps: Iterable[ProfileGap]) -> list[str]:
        """Returns warnings about kernels priced by the formula, and sizes outside of those measured."""
        grouped: dict[tuple[str, int], list[ProfileGap]] = {}
        for gap in sorted(profile_gaps, key=lambda gap: (gap.module, gap.tp, gap.tokens)):
            grouped.setdefault((gap.module, gap.tp), []).append(gap)
        warnings = []
        for (module, tp), group in grouped.items():
            width = self.nearest_tp(module, tp)
            where, sizes = f"{module} at tp {tp}", self.sizes(module, width)
            missing = sorted({name for gap in group for name in gap.unmeasured})
            if sizes is None:
                warnings.append(f"{module} was not measured: priced by the formula")
                continue
            if width != tp:
                warnings.append(f"{where} was measured at tp {width} only: extrapolated in proportion")
            if missing:
                more = (
                    f" and {len(missing) - MAX_KERNELS_SHOWN} more"
                    if len(missing) > MAX_KERNELS_SHOWN
                    else ""
                )
                warnings.append(
                    f"{where}: {', '.join(missing[:MAX_KERNELS_SHOWN])}{more} priced by the formula"
                )
            if far := [gap.tokens for gap in group if not sizes[0] <= gap.tokens <= sizes[1]]:
                warnings.append(
                    f"{where} is asked for {_range(far)} tokens, measured at {_range(sizes)}: "
                    "extrapolated in proportion"
                )
        return warnings


def classify_layer(stack: Stack, layer: int) -> LayerClass:
    """Returns the class of a layer; the cost model prices all layers of a class alike."""
    windowed, experts = stack.attention.window_of(layer) is not None, stack.has_experts(layer)
    if experts:
        return "window-experts" if windowed else "full-experts"
    return "window" if windowed else "full"


def first_layer_of_each_class(stack: Stack) -> dict[LayerClass, int]:
    """Returns the first layer of every class, which a profiler has to measure."""
    first_layers: dict[LayerClass, int] = {}
    for layer in range(stack.layers):
        first_layers.setdefault(classify_layer(stack, layer), layer)
    return first_layers


def hash_module_shape(module: Encoder | Llm) -> str:
    """Hashes the shapes of a module's layers, without their number and without what is trained."""
    fields = omit_default_constants(module)
    for name in ("name", "train", "recompute", "source", "feeds"):
        fields.pop(name, None)
    fields["stack"].pop("layers")
    fields["stack"]["attention"].pop("full_layers")
    fields.get("projector", {}).pop("train", None)
    if fields["stack"]["experts"]:
        fields["stack"]["experts"].pop("leading_dense_layers")
    _, hashes = flatten_and_hash_parts({"module": fields})
    return hashes["module"][:16]


def _at(points: list[SegmentMeasurement], tokens: float) -> _SegmentEstimate:
    """Interpolates linearly between sizes; outside, scales the nearest size in proportion."""
    first, last = points[0], points[-1]
    if not first.tokens <= tokens <= last.tokens:
        nearest = first if tokens < first.tokens else last
        seconds, beyond = nearest.median_s * tokens / nearest.tokens, True
    else:
        high = next(place for place, point in enumerate(points) if point.tokens >= tokens)
        a, b = points[max(high - 1, 0)], points[high]
        share = (tokens - a.tokens) / (b.tokens - a.tokens) if b.tokens > a.tokens else 1.0
        seconds, beyond = a.median_s + share * (b.median_s - a.median_s), False
    return _SegmentEstimate(kernels=first.kernels, seconds=seconds, beyond=beyond)


def _sum(parts: list[_SegmentEstimate]) -> _SegmentEstimate:
    return _SegmentEstimate(
        kernels=parts[0].kernels,
        seconds=sum(part.seconds for part in parts),
        beyond=any(part.beyond for part in parts),
    )


def _range(values: Iterable[float]) -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low:,.0f}" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f}"
