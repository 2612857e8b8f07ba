"""Tests the ordering rules of NCCL communicators that plans and engine rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.gpu_ranks import NOT_MEASURED, Worker
from benchmarks.gpu_streams import KernelSeries, RepeatedCollective, StreamTimer, gemm, sizes_of, timer_of
from benchmarks.ranks import new_subgroup
from optimus.cost.network import Collective

MESSAGE_BYTES = 2**18
TURNS = 5
PASS, FAIL = "pass", "fail"


@dataclass(frozen=True, kw_only=True)
class _RuleContext:
    """Tensors and communicators of one rank."""

    worker: Worker
    timer: StreamTimer
    series: KernelSeries
    first: RepeatedCollective
    same_group: RepeatedCollective  # on the communicator of `first`
    other_group: RepeatedCollective
    pair: dist.ProcessGroup
    message: torch.Tensor

    def compute(self) -> Any:
        """Enqueues compute and returns the event of its end."""
        self.series.run_for(self.compute_s)
        return self.timer.record()

    @property
    def compute_s(self) -> float:
        return sizes_of(self.worker).compute_s

    @property
    def partner(self) -> int:
        return self.worker.rank ^ 1


Margin = Callable[[], float | None]  # in seconds, called when the device is idle; None on senders


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """An ordering rule; it holds if its margin exceeds `min_share` of the compute time."""

    description: str
    run: Callable[[_RuleContext], Margin]
    min_share: float
    on_cpu: bool = False  # most rules concern enqueued work, which CPUs do not have


def communicator_order(worker: Worker) -> dict[str, Any]:
    """Tests every rule on every rank; a rule is broken if it is on one of them, in the median of its turns.

    A margin is how much later an op ended than the compute it must wait for, or how much earlier than the
    compute it must not wait for; that compute takes `compute_s`.
    """
    context = _rule_context(worker)
    checks = {name: _check(rule, context) for name, rule in RULES.items()}
    verdicts = {check["verdict"] for check in checks.values()}
    return {
        "verdict": FAIL if FAIL in verdicts else PASS if PASS in verdicts else NOT_MEASURED,
        "compute_s": context.compute_s,
        "checks": checks,
    }


def _rule_context(worker: Worker) -> _RuleContext:
    timer, dtype, ranks = timer_of(worker), sizes_of(worker).dtype, list(range(worker.world))
    group, another = new_subgroup([ranks]), new_subgroup([ranks])

    def all_gather(group: dist.ProcessGroup) -> RepeatedCollective:
        return RepeatedCollective(Collective.ALL_GATHER, MESSAGE_BYTES, worker, dtype=dtype, group=group)

    return _RuleContext(
        worker=worker,
        timer=timer,
        series=gemm(worker, timer),
        first=all_gather(group),
        same_group=all_gather(group),
        other_group=all_gather(another),
        pair=new_subgroup([[rank, rank + 1] for rank in range(0, worker.world, 2)]),
        message=torch.zeros(MESSAGE_BYTES // dtype.itemsize, dtype=dtype, device=worker.device),
    )


def _check(rule: _Rule, context: _RuleContext) -> dict[str, Any]:
    if not (context.worker.on_gpu or rule.on_cpu):
        return {"rule": rule.description, "verdict": NOT_MEASURED}
    margins = []
    for turn in range(TURNS + 1):
        context.worker.barrier()
        margin = rule.run(context)
        context.worker.synchronize()
        margin_s = margin()
        if turn and margin_s is not None:  # the first turn makes communicators
            margins.append(margin_s)
    own = median(margins) if margins else None
    measured = [margin_s for margin_s in context.worker.all_gather(own) if margin_s is not None]
    holds = min(measured) > rule.min_share * context.compute_s
    return {
        "rule": rule.description,
        "verdict": PASS if holds else FAIL,
        "margin_s": min(measured),
        "margin_most_s": max(measured),
    }


# ---------------------------------------------------------------------------- rules


def _after_earlier(context: _RuleContext) -> Margin:
    earlier = context.compute()
    over = context.timer.record_end(context.first.launch())
    return lambda: context.timer.elapsed_s(earlier, over)


def _not_after_later(context: _RuleContext) -> Margin:
    context.compute()
    over = context.timer.record_end(context.first.launch())
    later = context.compute()
    return lambda: context.timer.elapsed_s(over, later)


def _in_order(context: _RuleContext) -> Margin:
    """Posts the second op from a stream without work."""
    earlier = context.compute()
    work = context.first.launch()
    with context.timer.side_stream():
        over = context.timer.record_end(context.same_group.launch())
    work.wait()
    return lambda: context.timer.elapsed_s(earlier, over)


def _independent(context: _RuleContext) -> Margin:
    earlier = context.compute()
    work = context.first.launch()
    with context.timer.side_stream():
        over = context.timer.record_end(context.other_group.launch())
    work.wait()
    return lambda: context.timer.elapsed_s(over, earlier)


def _receive(context: _RuleContext, *, on_side_stream: bool) -> Margin:
    """Sends from even ranks at once; odd ranks receive, with compute on their stream."""
    if context.worker.rank % 2 == 0:
        dist.isend(context.message, context.partner, context.pair).wait()
        return lambda: None
    earlier = context.compute()
    if not on_side_stream:
        over = context.timer.record_end(dist.irecv(context.message, context.partner, context.pair))
        return lambda: context.timer.elapsed_s(earlier, over)
    with context.timer.side_stream():
        over = context.timer.record_end(dist.irecv(context.message, context.partner, context.pair))
    return lambda: context.timer.elapsed_s(over, earlier)


def _receive_on_side_stream(context: _RuleContext) -> Margin:
    return _receive(context, on_side_stream=True)


def _receive_behind_compute(context: _RuleContext) -> Margin:
    return _receive(context, on_side_stream=False)


WAITS, DOES_NOT_WAIT = -0.5, 0.5
RULES = {
    "after_earlier_compute": _Rule(
        description="a collective begins only behind compute enqueued before it was posted",
        run=_after_earlier,
        min_share=WAITS,
    ),
    "not_after_later_compute": _Rule(
        description="a collective does not wait for compute enqueued after it was posted",
        run=_not_after_later,
        min_share=DOES_NOT_WAIT,
        on_cpu=True,
    ),
    "one_communicator_in_order": _Rule(
        description="an op waits for the one before it on its communicator",
        run=_in_order,
        min_share=WAITS,
    ),
    "communicators_independent": _Rule(
        description="an op does not wait for an op that waits on another communicator",
        run=_independent,
        min_share=DOES_NOT_WAIT,
    ),
    "receive_on_side_stream": _Rule(
        description="a receive posted from a side stream does not wait for compute",
        run=_receive_on_side_stream,
        min_share=DOES_NOT_WAIT,
    ),
    "receive_on_main_stream": _Rule(
        description="a receive posted behind compute waits for it",
        run=_receive_behind_compute,
        min_share=WAITS,
    ),
}
