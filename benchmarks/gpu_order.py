"""The rules of NCCL that plans and engine are built on, tried out: what a communicator waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.communicators import group_among
from benchmarks.gpu_ranks import NOT_MEASURED, Place
from benchmarks.gpu_streams import Series, Traffic, Watch, gemm, scale_of, watch_of
from optimus.cost.network import Collective

MESSAGE_BYTES = 2**18
TURNS = 5
PASS, FAIL = "pass", "fail"


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """Tensors and communicators of one rank."""

    place: Place
    watch: Watch
    series: Series
    first: Traffic
    again: Traffic  # on the communicator of `first`
    other: Traffic  # on another
    pair: dist.ProcessGroup
    message: torch.Tensor

    def compute(self) -> Any:
        """Enqueues it; when it is over."""
        self.series.run_for(self.compute_s)
        return self.watch.mark()

    @property
    def compute_s(self) -> float:
        return scale_of(self.place).compute_s

    @property
    def partner(self) -> int:
        return self.place.rank ^ 1


Margin = Callable[[], float | None]  # in seconds, asked for when all is over; None on ranks that only help


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """`least`: of the compute beside it, the margin by which the rule holds; halfway to a broken one."""

    words: str
    play: Callable[[_Bench], Margin]
    least: float
    on_cpu: bool = False  # most are about work that is enqueued, and on a CPU none is


def communicator_order(place: Place) -> dict[str, Any]:
    """Every rule, on every rank; a rule is broken if it is so on one of them, in the median of its turns.

    A margin is how much later something was over than the compute it must wait for, or how much earlier than
    the compute it must not wait for; that compute takes `compute_s`.
    """
    bench = _bench(place)
    checks = {name: _try(rule, bench) for name, rule in RULES.items()}
    verdicts = {check["verdict"] for check in checks.values()}
    return {
        "verdict": FAIL if FAIL in verdicts else PASS if PASS in verdicts else NOT_MEASURED,
        "compute_s": bench.compute_s,
        "checks": checks,
    }


def _bench(place: Place) -> _Bench:
    watch, dtype, everybody = watch_of(place), scale_of(place).dtype, list(range(place.world))
    group, another = group_among([everybody]), group_among([everybody])

    def traffic(group: dist.ProcessGroup) -> Traffic:
        return Traffic(Collective.ALL_GATHER, MESSAGE_BYTES, place, dtype=dtype, group=group)

    return _Bench(
        place=place,
        watch=watch,
        series=gemm(place, watch),
        first=traffic(group),
        again=traffic(group),
        other=traffic(another),
        pair=group_among([[rank, rank + 1] for rank in range(0, place.world, 2)]),
        message=torch.zeros(MESSAGE_BYTES // dtype.itemsize, dtype=dtype, device=place.device),
    )


def _try(rule: _Rule, bench: _Bench) -> dict[str, Any]:
    if not (bench.place.on_gpu or rule.on_cpu):
        return {"rule": rule.words, "verdict": NOT_MEASURED}
    margins = []
    for turn in range(TURNS + 1):
        bench.place.settle()
        margin = rule.play(bench)
        bench.place.idle()
        found = margin()
        if turn and found is not None:  # in the first, communicators are made
            margins.append(found)
    mine = median(margins) if margins else None
    told = [each for each in bench.place.gathered(mine) if each is not None]
    holds = min(told) > rule.least * bench.compute_s
    return {
        "rule": rule.words,
        "verdict": PASS if holds else FAIL,
        "margin_s": min(told),
        "margin_most_s": max(told),
    }


# ---------------------------------------------------------------------------- rules


def _after_earlier(bench: _Bench) -> Margin:
    earlier = bench.compute()
    over = bench.watch.over(bench.first.launch())
    return lambda: bench.watch.seconds(earlier, over)


def _not_after_later(bench: _Bench) -> Margin:
    bench.compute()
    over = bench.watch.over(bench.first.launch())
    later = bench.compute()
    return lambda: bench.watch.seconds(over, later)


def _in_order(bench: _Bench) -> Margin:
    """The second op is posted from a stream that has nothing to do."""
    earlier = bench.compute()
    work = bench.first.launch()
    with bench.watch.side():
        over = bench.watch.over(bench.again.launch())
    work.wait()
    return lambda: bench.watch.seconds(earlier, over)


def _independent(bench: _Bench) -> Margin:
    earlier = bench.compute()
    work = bench.first.launch()
    with bench.watch.side():
        over = bench.watch.over(bench.other.launch())
    work.wait()
    return lambda: bench.watch.seconds(over, earlier)


def _receive(bench: _Bench, *, aside: bool) -> Margin:
    """Ranks of even numbers send at once; the others receive, with compute on their stream."""
    if bench.place.rank % 2 == 0:
        dist.isend(bench.message, bench.partner, bench.pair).wait()
        return lambda: None
    earlier = bench.compute()
    if not aside:
        over = bench.watch.over(dist.irecv(bench.message, bench.partner, bench.pair))
        return lambda: bench.watch.seconds(earlier, over)
    with bench.watch.side():
        over = bench.watch.over(dist.irecv(bench.message, bench.partner, bench.pair))
    return lambda: bench.watch.seconds(over, earlier)


def _receive_aside(bench: _Bench) -> Margin:
    return _receive(bench, aside=True)


def _receive_behind(bench: _Bench) -> Margin:
    return _receive(bench, aside=False)


WAITS, DOES_NOT_WAIT = -0.5, 0.5
RULES = {
    "after_earlier_compute": _Rule(
        words="a collective begins only behind compute enqueued before it was posted",
        play=_after_earlier,
        least=WAITS,
    ),
    "not_after_later_compute": _Rule(
        words="a collective does not wait for compute enqueued after it was posted",
        play=_not_after_later,
        least=DOES_NOT_WAIT,
        on_cpu=True,
    ),
    "one_communicator_in_order": _Rule(
        words="an op waits for the one before it on its communicator",
        play=_in_order,
        least=WAITS,
    ),
    "communicators_independent": _Rule(
        words="an op does not wait for an op that waits on another communicator",
        play=_independent,
        least=DOES_NOT_WAIT,
    ),
    "receive_on_side_stream": _Rule(
        words="a receive posted from a side stream does not wait for compute",
        play=_receive_aside,
        least=DOES_NOT_WAIT,
    ),
    "receive_on_main_stream": _Rule(
        words="a receive posted behind compute waits for it",
        play=_receive_behind,
        least=WAITS,
    ),
}
