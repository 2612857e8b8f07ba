"""Lists the kernels of a layer in the order in which they run, with modelled or measured seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import KERNELS, LayerClass, ProfileGap
from optimus.cost.network import Collective
from optimus.ir.op import Communicator, Lane, OpKind
from optimus.job.model import Experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel of the cost model; waits for the kernels at `after` in its list."""

    name: str
    kind: OpKind
    lane: Lane
    duration_s: float
    size_bytes: float = 0.0
    after: tuple[int, ...] = ()
    communicator: Communicator = Communicator.NONE


@dataclass(kw_only=True)
class KernelListBuilder:
    """Builds a list of kernels; each waits for the one added before it unless `after` is given."""

    cost_model: ClusterCostModel
    kind: OpKind
    tp: int
    kernels: list[Kernel] = field(default_factory=list)
    last: tuple[int, ...] = ()  # kernels that the next one waits for

    def compute(self, name: str, seconds: float, *, after: tuple[int, ...] | None = None) -> int:
        return self._add(name, Lane.COMPUTE, seconds, 0.0, after, Communicator.NONE)

    def collective(
        self, name: str, kind: Collective, size_bytes: float, *, after: tuple[int, ...] | None = None
    ) -> int | None:
        """Adds a TP collective, unless tp is 1."""
        if self.tp == 1:
            return None
        seconds = self.cost_model.tp_s(kind, size_bytes, self.tp)
        return self._add(name, Lane.TP, seconds, size_bytes, after, Communicator.TP)

    def group(
        self,
        name: str,
        kind: Collective,
        size_bytes: float,
        communicator: Communicator,
        *,
        ranks: int,
        stride: int,
    ) -> None:
        """Adds a CP collective, on the NIC when it leaves the node."""
        if ranks > 1:
            seconds = self.cost_model.group_s(kind, size_bytes, ranks=ranks, stride=stride)
            lane = self.cost_model.group_lane(ranks, stride)
            self._add(name, lane, seconds, size_bytes, None, communicator)

    def exchange(self, name: str, token_bytes: float, experts: Experts, ep: int) -> None:
        """Adds the exchange of tokens between experts, on the NIC when it leaves the node."""
        if ep > 1:
            seconds = self.cost_model.exchange_s(token_bytes, experts, ep)
            size_bytes = token_bytes * self.cost_model.copies_sent(experts, ep)
            lane = self.cost_model.group_lane(ep, 1)
            self._add(name, lane, seconds, size_bytes, None, Communicator.EP)

    def join(self, *places: int | None) -> None:
        """Makes the next kernel wait for all of these."""
        self.last = tuple(place for place in places if place is not None)

    def _add(
        self,
        name: str,
        lane: Lane,
        seconds: float,
        size_bytes: float,
        after: tuple[int, ...] | None,
        communicator: Communicator,
    ) -> int:
        self.kernels.append(
            Kernel(
                name=name,
                kind=self.kind,
                lane=lane,
                duration_s=seconds,
                size_bytes=size_bytes,
                after=self.last if after is None else after,
                communicator=communicator,
            )
        )
        place = len(self.kernels) - 1
        self.last = (place,)
        return place


KernelsByKind = dict[OpKind, tuple[Kernel, ...]]


def apply_measured_times(
    kernels: KernelsByKind,
    cost_model: ClusterCostModel,
    *,
    module: str,
    layers: LayerClass,
    tokens: float,
    tp: int,
) -> KernelsByKind:
    """Replaces modelled seconds of kernels by measured ones; notes in `cost_model` which were not measured.

    A segment is measured as a whole and a kernel list is finer: a backward of `qkv` is an input gradient, a
    weight gradient and a norm, and TP collectives overlap with some of them only. The measured sum is divided
    in proportion to the modelled seconds, so that an op takes as long as measured and overlaps stay.
    """
    profile = cost_model.profile
    if not profile.segments or tokens <= 0:
        return kernels
    missing: set[str] = set()
    beyond = False
    result: KernelsByKind = {}
    for op, listed in kernels.items():
        changed = list(listed)
        for kind in dict.fromkeys(kernel.kind for kernel in listed):
            places = [at for at, k in enumerate(listed) if k.lane == Lane.COMPUTE and k.kind == kind]
            unmeasured = set(places)
            for estimate in profile.estimates(module, layers, kind, tokens=tokens, tp=tp):
                mine = [at for at in places if _base(listed[at]) in estimate.kernels]
                _divide(changed, mine, cost_model.measured_s(estimate.seconds))
                unmeasured -= set(mine)
                beyond |= estimate.beyond and bool(mine)
            missing |= {f"{kind.word} {_base(listed[at])}" for at in unmeasured if _counts(listed[at])}
        result[op] = tuple(changed)
    if missing or beyond:
        cost_model.profile_gaps.add(
            ProfileGap(module=module, tp=tp, tokens=tokens, unmeasured=tuple(sorted(missing)), beyond=beyond)
        )
    return result


def _divide(kernels: list[Kernel], places: list[int], seconds: float) -> None:
    """Divides an estimate over kernels in proportion to their seconds, or equally if those are 0."""
    before = [kernels[at].duration_s for at in places]
    total = sum(before)
    for at, was in zip(places, before, strict=True):
        share = was / total if total > 0 else 1 / len(places)
        kernels[at] = replace(kernels[at], duration_s=share * seconds)


def _counts(kernel: Kernel) -> bool:
    """Returns whether a segment could cover the kernel, which it cannot for selective recomputation."""
    return kernel.duration_s > 0 and _base(kernel) in KERNELS


def _base(kernel: Kernel) -> str:
    """Returns `qkv` for `qkv.dgrad`."""
    return kernel.name.partition(".")[0]
