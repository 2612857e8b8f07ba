"""Expands an op of a layer into ordered phases: compute, collective launch, wait.

A plan's templates list the same phases under the same names. A tensor-parallel layer, whose backward gathers
the inputs of column-parallel products again, has the phases below; `<` launches a collective, `>` waits for
it, and the lines between the two are its slot, into which the program may put phases of other chunks.

    forward                       backward                      backward in two halves
    |- norm1                      |- residual_add               input gradient (I)
    |- < gather1                  |- < down.gather              |- residual_add
    |- > gather1                  |- > down.gather              |- < down.gather
    |- qkv                        |- down                       |- > down.gather
    |- attention                  |- < up.gather                |- down
    |- out                        |- up.dgrad                   |- up.dgrad
    |- < scatter1                 |- < up.scatter               |- < up.scatter
    |- > scatter1                 |- > up.gather                |- > up.scatter
    |- norm2                      |- up.wgrad                   |- norm2
    |- < gather2                  |- > up.scatter               |- < out.gather
    |- > gather2                  |- norm2                      |- > out.gather
    |- up                         |- < out.gather               |- out
    |- down                       |- > out.gather               |- attention
    |- < scatter2                 |- out                        |- qkv.dgrad
    |- > scatter2                 |- attention                  |- < qkv.scatter
    |- residual_add               |- < qkv.gather               |- > qkv.scatter
                                  |- qkv.dgrad                  |- norm1
                                  |- < qkv.scatter              weight gradient (W)
                                  |- > qkv.gather               |- residual_add
                                  |- qkv.wgrad                  |- < up.gather
                                  |- > qkv.scatter              |- down
                                  |- norm1                      |- > up.gather
                                                                |- up
                                                                |- norm2
                                                                |- < qkv.gather
                                                                |- out
                                                                |- attention
                                                                |- > qkv.gather
                                                                |- qkv
                                                                |- norm1

`norm2` includes the residual add before it. Without tensor parallelism there are no collectives, and each of
qkv (with norm1), attention, out, up (with norm2) and down is one phase.

With context parallelism, keys and values are gathered before the attention and again before its backward,
behind which their gradients are scattered; a product that is tensor-parallel gathers its input meanwhile:

    forward                       backward
    |- qkv                        |- < context
    |- < context                  |- > context
    |- > context                  |- attention
    |- attention                  |- < context.scatter
                                  |- < qkv.gather
                                  |- > context.scatter
                                  |- qkv.dgrad
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from optimus.errors import UserError
from optimus.ir.op import COLLECTIVE_PHASES, KernelName, OpKind
from optimus.ir.plan import Phase, Template
from optimus.models.context_parallel import ContextGather
from optimus.models.segment import Segment
from optimus.models.tensor_parallel import AllGather, TpCollective

Recompute = Literal["none", "cheap", "attention", "full"]
ALL_LAYERS = -1
CHEAP, ATTENTION = (KernelName.CHEAP,), (KernelName.ATTENTION,)  # kernels that plans recompute
# The last reduce-scatter of a recomputed layer: plans count it, and no gradient needs it.
SKIPPED_IN_RECOMPUTE = KernelName.SCATTER2
PhaseAction = Literal[
    "forward", "recompute", "recompute_freed", "backward", "input_grad", "weight_grad",
    "launch", "wait", "launch_backward", "wait_backward", "launch_regather", "wait_regather",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """Action of a chunk on the segment at an index, and the kernels of the plan that it runs."""

    action: PhaseAction
    kind: OpKind
    index: int
    kernels: tuple[str, ...]


class LayerPhases:
    """Phases of one layer; its first segment has the index `first` in the chunk."""

    def __init__(
        self, segments: Sequence[Segment], first: int, recompute: Recompute, *, regather: bool
    ) -> None:
        self._segments = dict(enumerate(segments, first))
        self._recompute, self._regather = recompute, regather
        self._is_end = any(segment.is_end for segment in segments)
        # No gradient reads the sum at the end of a tensor-parallel layer: it is not recomputed.
        skipped = 2 if segments and segments[-1].saves_nothing else 0
        self._recompute_end = first + len(segments) - skipped

    def phases(self, kind: OpKind) -> Iterator[PhaseSpec]:
        """Yields the phases of an op of this kind: F, B, I or W."""
        if kind == OpKind.FORWARD:
            yield from self._run(self._segments, "forward", kind)
        elif kind == OpKind.WEIGHT_GRAD:
            yield from self._weight_grads()
        else:
            if self._recompute == "cheap" and any(s.has_recomputable for s in self._segments.values()):
                yield PhaseSpec("recompute_freed", OpKind.RECOMPUTE, min(self._segments), CHEAP)
            yield from self._run(filter(self.is_recomputed, self._segments), "recompute", OpKind.RECOMPUTE)
            yield from self._backward(kind)

    def is_recomputed(self, index: int) -> bool:
        """Tells whether a segment runs a second time before its backward."""
        is_attention = self._segments[index].kernels == ATTENTION
        if self._recompute == "full":
            return not self._is_end and index < self._recompute_end
        return self._recompute == "attention" and is_attention

    def frees_gathered(self, index: int) -> bool:
        """Tells whether the output of a collective is freed after the product that reads it."""
        if self._regather_phases(index) is None:
            return False
        return self._regather or not self._segments[index + 1].trainable

    def _run(self, indices: Iterable[int], action: PhaseAction, kind: OpKind) -> Iterator[PhaseSpec]:
        for index in indices:
            segment = self._segments[index]
            if isinstance(segment, TpCollective):
                yield from _launch_and_wait(index, "launch", "wait", segment.forward_name)
            else:
                yield PhaseSpec(action, kind, index, segment.kernels)

    def _backward(self, kind: OpKind) -> Iterator[PhaseSpec]:
        """Yields from the last segment to the first; an all-gather goes with the product that reads it.

        The product before a gather of keys and values waits for their gradients.
        """
        for index, segment in reversed(self._segments.items()):
            before, after = self._segments.get(index - 1), self._segments.get(index + 1)
            waits = self._backward_collective(index + 1)[1:] if isinstance(after, ContextGather) else ()
            if isinstance(before, ContextGather):
                yield from self._regather_phases(index - 1) or ()
            if isinstance(segment, ContextGather):
                yield from self._backward_collective(index)[:1]
            elif isinstance(before, AllGather):
                yield from self._column_parallel_backward(kind, index, waits)
            elif not isinstance(segment, TpCollective):
                action: PhaseAction = "backward" if kind == OpKind.BACKWARD else "input_grad"
                yield from (*waits, PhaseSpec(action, kind, index, segment.kernels))
            elif not (isinstance(segment, AllGather) or (segment.in_wgrad and kind == OpKind.INPUT_GRAD)):
                yield from self._backward_collective(index)

    def _column_parallel_backward(
        self, kind: OpKind, index: int, waits: tuple[PhaseSpec, ...]
    ) -> Iterator[PhaseSpec]:
        """Gathers the inputs under the input gradient, scatters that under the weight gradient.

        `waits` complete the gradient of its output.
        """
        kernels = self._segments[index].kernels
        input_grad = PhaseSpec(
            "input_grad", OpKind.INPUT_GRAD, index, tuple(f"{name}.dgrad" for name in kernels)
        )
        weight_grad = PhaseSpec(
            "weight_grad", OpKind.WEIGHT_GRAD, index, tuple(f"{name}.wgrad" for name in kernels)
        )
        launch, wait = self._backward_collective(index - 1)
        regather = self._regather_phases(index - 1)
        if kind == OpKind.INPUT_GRAD:
            yield from (*waits, input_grad, launch, wait)
        elif regather is None or not self._regather:
            yield from (*waits, input_grad, launch, wait, weight_grad)
        else:
            launch_regather, wait_regather = regather
            yield from (launch_regather, *waits, input_grad, launch, wait_regather, weight_grad, wait)

    def _weight_grads(self) -> Iterator[PhaseSpec]:
        """Gathers under the weight gradient of the product before the next reduce-scatter."""
        regather: tuple[PhaseSpec, PhaseSpec] | None = None
        for index, segment in reversed(self._segments.items()):
            if isinstance(segment, TpCollective):
                if segment.in_wgrad:
                    yield from self._backward_collective(index)
                elif not isinstance(segment, AllGather | ContextGather):
                    regather = self._regather_phases(self._collective_before(index))
                    yield from () if regather is None else regather[:1]
                continue
            if regather is not None and regather[0].index == index - 1:
                yield regather[1]
            yield PhaseSpec("weight_grad", OpKind.WEIGHT_GRAD, index, segment.kernels)

    def _backward_collective(self, index: int) -> tuple[PhaseSpec, PhaseSpec]:
        collective = self._segments[index]
        assert isinstance(collective, TpCollective)
        return _launch_and_wait(index, "launch_backward", "wait_backward", collective.backward_name)

    def _regather_phases(self, index: int) -> tuple[PhaseSpec, PhaseSpec] | None:
        """Returns launch and wait of the second gather for a weight gradient, if there is one."""
        collective = self._segments.get(index)
        if not isinstance(collective, TpCollective) or collective.regather_name is None:
            return None
        return _launch_and_wait(index, "launch_regather", "wait_regather", collective.regather_name)

    def _collective_before(self, index: int) -> int:
        before = (
            at
            for at, segment in self._segments.items()
            if at < index and isinstance(segment, TpCollective) and not isinstance(segment, ContextGather)
        )
        return max(before, default=-1)


def _launch_and_wait(
    index: int, launch: PhaseAction, wait: PhaseAction, name: str
) -> tuple[PhaseSpec, PhaseSpec]:
    return PhaseSpec(launch, OpKind.LAUNCH, index, (name,)), PhaseSpec(wait, OpKind.WAIT, index, (name,))


# ---------------------------------------------------------------------------- phases at lines of a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPhase:
    """One phase of an op, ready to run."""

    kind: OpKind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: int  # in the chunk, as the plan numbers them; ALL_LAYERS for an opaque chunk
    kernels: tuple[str, ...]  # those of the plan that it runs; empty: all of the layer
    run: Callable[[], None]
    waits_for: str = ""  # axis of the group whose other ranks it waits for: tp, cp, deal


def place_phases(op: str, template: Template, phases: Sequence[ChunkPhase]) -> list[list[ChunkPhase]]:
    """Assigns the phases of a chunk to lines of an op; returns a list of phases per line."""
    forward = all(phase.kind in (OpKind.FORWARD, *COLLECTIVE_PHASES) for phase in phases)
    covered: list[list[int]] = [[] for _ in phases]
    phase_at: dict[int, int] = {}  # by line of the template
    for place, planned in enumerate(template):
        number = _find_phase(template, place, phases, phase_at)
        if number is not None:
            phase_at[place] = number
            covered[number].append(place)
        elif planned.name == SKIPPED_IN_RECOMPUTE and not forward:
            continue
        elif planned.kind in COLLECTIVE_PHASES or planned.duration_s > 0:
            raise UserError(
                field=f"{op} layer {planned.layer} {planned.name}",
                problem="is in the plan, and the chunk that was given has nothing for it",
                hint="give the modules that the plan was made for, or plan again for these",
            )
    placed: list[list[ChunkPhase]] = [[] for _ in template]
    at = 0
    for phase, places in zip(phases, covered, strict=True):
        line = (places[-1] if forward else places[0]) if places else at
        if line < at:
            raise UserError(
                field=f"{op} layer {phase.layer} {'+'.join(phase.kernels)}",
                problem="comes before a phase that the chunk runs first",
                hint="give the modules that the plan was made for, or plan again for these",
            )
        at = line
        placed[at].append(phase)
    return placed


def _find_phase(
    template: Template, place: int, phases: Sequence[ChunkPhase], phase_at: Mapping[int, int]
) -> int | None:
    """Returns the number of the phase that covers a line; a wait is looked up by its launch."""
    planned = template[place]
    if planned.kind == OpKind.WAIT and planned.after[0] in phase_at:
        launch = phase_at[planned.after[0]]
        if phases[launch].kind != OpKind.LAUNCH:
            return launch  # an opaque chunk
        name = phases[launch].kernels
        rest = range(launch + 1, len(phases))
        return next(at for at in rest if phases[at].kind == OpKind.WAIT and phases[at].kernels == name)
    numbered = list(enumerate(phases))
    if planned.kind in COLLECTIVE_PHASES:  # an opaque chunk may have some of them; one name may come twice
        taken = set(phase_at.values())
        numbered.sort(key=lambda pair: (pair[1].kind not in COLLECTIVE_PHASES, pair[0] in taken))
    return next((at for at, phase in numbered if _covers(phase, planned)), None)


def _covers(phase: ChunkPhase, planned: Phase) -> bool:
    if phase.layer == ALL_LAYERS:
        is_other = phase.kind in COLLECTIVE_PHASES
        return not is_other or (phase.kind == planned.kind and planned.name in phase.kernels)
    if phase.layer != planned.layer or (phase.kind == OpKind.RECOMPUTE) != (planned.kind == OpKind.RECOMPUTE):
        return False
    if planned.kind in COLLECTIVE_PHASES or phase.kind in COLLECTIVE_PHASES:
        return phase.kind == planned.kind and planned.name in phase.kernels
    names = planned.name, planned.name.split(".")[0]
    return not phase.kernels or any(name in phase.kernels for name in names)
