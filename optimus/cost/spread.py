"""Puts measured seconds of segments in place of the formula's seconds of the kernels they cover.

A segment is measured as a whole, a kernel list is finer: in B, `qkv` is an input gradient, a weight gradient
and a norm, and tensor-parallel traffic runs under some of them and not under others. The measured sum is
therefore divided in proportion to the formula's seconds: an op takes as long as was measured, and what
overlaps with what stays as the model has it.
"""

from __future__ import annotations

from dataclasses import replace

from optimus.cost.kernel import Kernel
from optimus.cost.measured import KERNELS, Layers, Shortfall
from optimus.cost.prices import Prices
from optimus.ir.op import Lane, OpKind

KernelsByKind = dict[OpKind, tuple[Kernel, ...]]


def spread_profile(
    kernels: KernelsByKind, prices: Prices, *, module: str, layers: Layers, tokens: float, tp: int
) -> KernelsByKind:
    """The kernels of one layer at what was measured; what was not is left, and noted in `prices`."""
    profile = prices.profile
    if not profile.segments or tokens <= 0:
        return kernels
    missing: set[str] = set()
    beyond = False
    result: KernelsByKind = {}
    for op, listed in kernels.items():
        changed = list(listed)
        for kind in dict.fromkeys(kernel.kind for kernel in listed):
            places = [at for at, k in enumerate(listed) if k.lane == Lane.COMPUTE and k.kind == kind]
            left = set(places)
            for estimate in profile.estimates(module, layers, kind, tokens=tokens, tp=tp):
                mine = [at for at in places if _base(listed[at]) in estimate.kernels]
                _divide(changed, mine, prices.measured_s(estimate.seconds))
                left -= set(mine)
                beyond |= estimate.beyond and bool(mine)
            missing |= {f"{kind.word} {_base(listed[at])}" for at in left if _counts(listed[at])}
        result[op] = tuple(changed)
    if missing or beyond:
        prices.shortfalls.add(
            Shortfall(module=module, tp=tp, tokens=tokens, unmeasured=tuple(sorted(missing)), beyond=beyond)
        )
    return result


def _divide(kernels: list[Kernel], places: list[int], seconds: float) -> None:
    """An estimate over kernels in proportion to what they cost so far; equally, if that is nothing."""
    before = [kernels[at].duration_s for at in places]
    total = sum(before)
    for at, was in zip(places, before, strict=True):
        share = was / total if total > 0 else 1 / len(places)
        kernels[at] = replace(kernels[at], duration_s=share * seconds)


def _counts(kernel: Kernel) -> bool:
    """A segment could have covered it: not so what selective recomputation makes again."""
    return kernel.duration_s > 0 and _base(kernel) in KERNELS


def _base(kernel: Kernel) -> str:
    """`qkv` of `qkv.dgrad`."""
    return kernel.name.partition(".")[0]
