"""Measures what the host spends on issuing work, on tensors so small that nothing else costs anything.

Everything is process CPU time, the minimum of many blocks of calls; what is measured and what it is compared
with take turns, so that a busy machine slows both. Microseconds of engine code are *above* bare torch calls.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from engine_cases import Case
from torch import Tensor
from torch import distributed as dist

from optimus.cost.assumptions import get_preset
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.compile import Action
from optimus.engine.config import TrainingConfig
from optimus.engine.p2p import Key, P2PMailbox, TensorSpec
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.watchdog import FlightRecorder
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.attention import Attention
from optimus.job.job import Job
from optimus.job.model import Mlp, Model, Stack
from optimus.job.workload import PackedSequence, Workload
from optimus.models.segment import Segment, State
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.colocation_candidate import ColocationCandidate
from optimus.planner.systems.llm_only import build_llm_pipeline

MEASUREMENTS, CALLS = 50, 20  # the minimum of so many blocks of so many calls
MICROBATCHES = 4  # of seven segments: blocks short enough to run undisturbed now and then on a busy machine
TINY = Stack(
    hidden=2,
    layers=1,
    attention=Attention(heads=1, kv_heads=1, head_dim=2),
    mlp=Mlp(width=1, gated=True),
    norm="rmsnorm",
)


def lowest_us(
    blocks: Mapping[str, Callable[[], None]],
    *,
    calls: int,
    enough: Callable[[Mapping[str, float]], bool] = lambda _: True,
) -> dict[str, float]:
    """Microseconds per call of every block, which makes `calls` of them; blocks in turn, in their order.

    Others on the machine only ever add to what is measured: where it is not yet `enough`, up to six times as
    many measurements are made.
    """
    found: dict[str, float] = dict.fromkeys(blocks, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for block in blocks.values():
            block()
        for number in range(1, 6 * MEASUREMENTS + 1):
            for name, block in blocks.items():
                began_s = time.process_time()
                block()
                found[name] = min(found[name], (time.process_time() - began_s) / calls * 1e6)
            if number % MEASUREMENTS == 0 and enough(found):
                break
    finally:
        gc.enable()
    return found


# ---------------------------------------------------------------------------- segments


class TinyRank:
    """One rank of one stage: embedding, one layer and head of width 2, one token, few microbatches."""

    def __init__(self, order: str) -> None:
        case = Case(name="tiny", ranks=1, pp=1, microbatches=MICROBATCHES, encoders=())
        self.order = order
        self.job: Job = replace(
            case.job,
            model=Model(name="tiny", encoders=(), llm=replace(case.job.model.llm, stack=TINY, vocab=2)),
            workload=Workload(
                sequence_tokens=1,
                sequences_per_step=MICROBATCHES,
                sequences=(PackedSequence(text=1, items=()),),
            ),
        )
        rank = RankTrainer(
            self.job,
            self.plan,
            TrainingConfig(),
            ProcessGroups(rank=0, members={}, groups={}),
            dtype=torch.float32,
            device=torch.device("cpu"),
            recorder=FlightRecorder(),
            bucket_type=ReplicatedBucket,
        )
        self.executor, self.batch, self.parameters = rank.executor, rank.batch(0), rank.model.trained
        self.segments: list[Segment] = list(rank.model.chunks[LLM][0]._segments)

    @cached_property
    def plan(self) -> Plan:
        context, _ = choose_smallest_context(self.job, get_preset("default"))
        return (
            ColocationCandidate(context, build_llm_pipeline(context, order_name=self.order), {})
            .best_shifted()
            .plan
        )

    def actions(self, kind: OpKind) -> list[Action]:
        """Of all microbatches, one after another."""
        return [action for action in self.executor.actions if action.kind == kind]

    def player(self, kind: OpKind) -> Callable[[], None]:
        """Plays these lines by the executor's own loop, with a ring that records them."""
        actions = self.actions(kind)
        return lambda: self._play(actions)

    def _play(self, actions: list[Action]) -> None:
        losses, outputs = self.executor._state.losses, self.executor._state.outputs
        self.executor._run(actions, self.batch)
        self.executor._state.losses = losses[-1:]
        self.executor._state.outputs = outputs

    # The same maths without an engine.

    def bare_forward(self) -> list[list[tuple[State, State]]]:
        """Every segment's forward under autograd: one graph for all segments of a microbatch."""
        made = []
        with torch.enable_grad():
            for microbatch in range(MICROBATCHES):
                state = self.batch.inputs(LLM, microbatch)
                context = self.batch.context(LLM, microbatch)
                states = []
                for segment in self.segments:
                    before, state = state, segment.forward(state, context)
                    states.append((before, state))
                made.append(states)
        return made

    def bare_parts(self) -> list[tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]:
        """Every segment's own graph, of all microbatches: roots, seeds, inputs and parameters."""
        made = []
        for microbatch in range(MICROBATCHES):
            state = self.batch.inputs(LLM, microbatch)
            context = self.batch.context(LLM, microbatch)
            for segment in self.segments:
                inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in state)
                with torch.enable_grad():
                    state = segment.forward(inputs, context)
                roots = [tensor for tensor in state if not tensor.is_leaf]
                seeds = [torch.ones_like(tensor) for tensor in roots]
                wanted = [tensor for tensor in inputs if tensor.requires_grad]
                made.append((roots, seeds, wanted, list(segment.trained)))
        return made


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """Microseconds per segment: of the engine with everything, and of bare torch."""

    played: Mapping[str, float]
    bare: Mapping[str, float]
    above: Mapping[str, float]


def _above(found: Mapping[str, float]) -> dict[str, float]:
    halves = found["I"] + found["W"]
    return {
        "F": found["F"] - found["bare F"],
        "B": found["B"] - found["bare parts"],
        "B above one graph of all segments": found["B"] - found["bare B"],
        "I and W": halves - found["bare parts"],
        "I and W above one graph of all segments": halves - found["bare B"],
    }


def segment_costs(enough: Callable[[Mapping[str, float]], bool]) -> SegmentCosts:
    """Subtracted are, of a forward, the segments' own maths under autograd; of a backward (B, or I and W
    together), autograd on every segment's own graph and the addition of gradients to parameters; in a second
    figure, autograd on one graph of all segments. The first is what torch takes for the same work, the
    second also counts against the engine that segments can be played one by one.
    """
    whole, halves = TinyRank("1f1b"), TinyRank("zero-bubble")
    for rank in (whole, halves):
        for bucket in rank.executor.buckets:
            bucket.begin_step()
        for parameter in rank.parameters:
            parameter.grad = torch.zeros_like(parameter)
    graphs: list[Any] = []
    parts: list[Any] = []
    blocks: dict[str, Callable[[], Any]] = {
        "F": whole.player(OpKind.FORWARD),
        "bare F": lambda: graphs.extend(whole.bare_forward()),
        "B": whole.player(OpKind.BACKWARD),
        "bare B": lambda: _bare_backward(whole.parameters, graphs),
        "make parts": lambda: parts.extend(whole.bare_parts()),
        "bare parts": lambda: _bare_parts(parts),
        "half F": halves.player(OpKind.FORWARD),
        "I": halves.player(OpKind.INPUT_GRAD),
        "W": halves.player(OpKind.WEIGHT_GRAD),
    }
    found = lowest_us(
        blocks,
        calls=MICROBATCHES * len(whole.segments),
        enough=lambda found: enough(_above(found)),
    )
    return SegmentCosts(
        played={name: found[name] for name in "FBIW"},
        bare={name: found[f"bare {name}"] for name in ("F", "B", "parts")},
        above=_above(found),
    )


def _bare_backward(parameters: list[Tensor], graphs: list[Any]) -> None:
    """One call of autograd for all segments of a microbatch, and gradients added to parameters."""
    while graphs:
        (loss,) = graphs.pop()[-1][1]
        _add(parameters, torch.autograd.grad(loss, parameters, torch.ones_like(loss)))


def _bare_parts(parts: list[Any]) -> None:
    """One call of autograd for every segment, and gradients added to parameters."""
    while parts:
        roots, seeds, wanted, parameters = parts.pop()
        if wanted or parameters:
            found = torch.autograd.grad(roots, [*wanted, *parameters], seeds, allow_unused=True)
            _add(parameters, found[len(wanted) :])


def _add(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad.add_(gradient)


# ---------------------------------------------------------------------------- communication


def communication_costs(group: dist.ProcessGroup) -> dict[str, float]:
    """Microseconds of a phase above the bare call of torch.distributed, with the loop and a ring.

    A send is the launch, above `isend`; a receive above `empty` and `irecv`; taking it above `wait`; a reduce
    above `all_reduce`. The group is one whose backend does nothing.
    """
    mail, device, ring = P2PMailbox(torch.device("cpu")), torch.device("cpu"), FlightRecorder()
    spec = TensorSpec(shape=(1, 1), dtype=torch.float32)
    sent, flat = torch.ones(1, 1), ReplicatedBucket([torch.ones(1, requires_grad=True)], group)
    keys: list[Key] = [("forward", LLM, 1, number) for number in range(CALLS)]
    posted: list[Any] = []

    def played(runs: list[Callable[[], Any]]) -> Callable[[], None]:
        actions = [Action(line=at, kind=OpKind.SEND_F, run=run) for at, run in enumerate(runs)]

        def block() -> None:
            for action in actions:
                ring.begin(action.line)
                action.run()
                ring.end(action.line)

        return block

    def repeated(call: Callable[[], Any]) -> Callable[[], None]:
        def block() -> None:
            for _ in range(CALLS):
                call()

        return block

    def post() -> None:
        tensor = torch.empty((1, 1), dtype=torch.float32, device=device)
        posted.append(dist.irecv(tensor, 1, group))

    def put() -> None:
        for key in keys:
            mail.put(key, (sent,))

    blocks: dict[str, Callable[[], None]] = {
        "put": put,
        "send": played([partial(mail.send, key, 1, group) for key in keys]),
        "bare send": repeated(lambda: dist.isend(sent, 1, group)),
        "receive": played([partial(mail.receive, key, (spec,), 1, group) for key in keys]),
        "bare receive": repeated(post),
        "take": played([partial(mail.take, key) for key in keys]),
        "bare take": repeated(lambda: posted.pop().wait()),
        "reduce": played([flat.reduce for _ in keys]),
        "bare reduce": repeated(
            lambda: dist.all_reduce(flat.reduced_grad, dist.ReduceOp.SUM, group, async_op=True)
        ),
    }
    found = lowest_us(blocks, calls=CALLS)
    return {name: found[name] - found[f"bare {name}"] for name in ("send", "receive", "take", "reduce")} | {
        f"bare {name}": found[f"bare {name}"] for name in ("send", "receive", "take", "reduce")
    }
