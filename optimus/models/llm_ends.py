"""The ends of an LLM: embedding with the places of encoder rows, and head with the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.job.model import Llm
from optimus.models.dropout import Dropout
from optimus.models.kernels import Kernels, Numerics
from optimus.models.linear import embedding, linear
from optimus.models.loss import divided_cross_entropy
from optimus.models.norms import Norm
from optimus.models.param_split import Split
from optimus.models.sample import IGNORED
from optimus.models.segment import Part, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import ALONE, Gather, Scatter, Seam, TpGroup

PLACE = ("place",)  # no kernel of a plan: it runs where the exchange before it has ended


class Embedding(Segment):
    """(ids, rows of encoder 0, rows of encoder 1, ...) to (x).

    Where it is divided, each rank looks up all ids in its part of the vocabulary, and rows of encoders come
    to who holds their places; `fed` says whether any encoder feeds the LLM and wants gradients.
    """

    kernels = ("embedding",)
    defers, is_end = True, True

    def __init__(
        self, llm: Llm, numerics: Numerics, share: TpGroup = ALONE, *, fed: bool = True, **where: Any
    ) -> None:
        super().__init__()
        hidden, split = llm.stack.hidden, Split(dim=0, blocks=((llm.vocab, 1),))
        self.splits, self.share, self.fed = {"weight": split}, share, fed
        self.dropout = Dropout(f"{llm.name}.embedding", numerics.dropout)
        rows = split.length(share.size)
        self._first = share.rank * rows
        self.weight = nn.Parameter(torch.empty(rows, hidden, **where))
        self.positions = nn.Parameter(torch.empty(llm.positions, hidden, **where)) if llm.positions else None

    def parts(self) -> list[Segment]:
        width = self.weight.shape[1]
        return [
            Seam(self.share, width=width, dtype=self.weight.dtype, learns=self.fed),
            Part(self, self._looked_up, self.kernels, [self.weight]),
            Scatter(self.share, 1, there="embedding.scatter", of="embedding", late=True, spent=(0,)),
            Part(self, self._placed, PLACE, [self.positions]),
        ]

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        ids, *encoded = state
        x = embedding(ids, self.weight, deferred=deferred)
        return self._finished(_placed(x, encoded, context.targets), context, deferred)

    def _looked_up(self, state: State, context: Any, deferred: WeightGradStore | None) -> State:
        ids, rows = state
        return rows, embedding(ids, self.weight, first=self._first, deferred=deferred)

    def _placed(self, state: State, context: Any, deferred: WeightGradStore | None) -> State:
        rows, x = state
        return self._finished(_placed(x, (rows,), (context.seam.targets,)), context, deferred)

    def _finished(self, x: Tensor, context: Any, deferred: WeightGradStore | None) -> State:
        if self.positions is not None:
            x = x + embedding(context.positions, self.positions, deferred=deferred)
        return (self.dropout(x, context.keys),)


def _placed(x: Tensor, encoded: Any, targets: Any) -> Tensor:
    """Rows at their places; those for a place behind the last are dropped."""
    if not encoded:
        return x
    found = functional.pad(x, (0, 0, 0, 1))
    for rows, target in zip(encoded, targets, strict=True):
        found = found.index_copy(0, target, rows.to(x.dtype))
    return found[: x.shape[0]]


class Head(Segment):
    """(x) to (loss): final norm, logits, summed cross entropy times the context's scale."""

    kernels = ("head",)
    defers, is_end = True, True

    def __init__(
        self, llm: Llm, numerics: Numerics, compute: Kernels, share: TpGroup = ALONE, **where: Any
    ) -> None:
        super().__init__()
        split = Split(dim=0, blocks=((llm.vocab, 1),))
        self.compute, self.share, self.splits = compute, share, {"weight": split}
        self.norm = Norm(llm.stack.norm, llm.stack.hidden, numerics.norm_eps, **where)
        rows = split.length(share.size)
        self._first, self._count = share.rank * rows, max(0, min(rows, llm.vocab - share.rank * rows))
        self.weight = nn.Parameter(torch.empty(rows, llm.stack.hidden, **where))

    def parts(self) -> list[Segment]:
        return [
            Part(self, self._normed, ("head.norm",), [self.norm]),
            Gather(self.share, 0, there="head.gather", of="head", regathers=False),
            Part(self, self._divided_loss, self.kernels, [self.weight], meets=True),
        ]

    def logits(self, state: State, deferred: WeightGradStore | None = None) -> Tensor:
        (x,) = state
        return linear(self.norm(x), self.weight, deferred=deferred, kernels=self.compute.linear)

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        logits = _wide(self.logits(state, deferred))
        loss = functional.cross_entropy(logits, context.labels, ignore_index=IGNORED, reduction="sum")
        return (loss.reshape(1) * context.scale,)

    def _normed(self, state: State, context: Any, deferred: WeightGradStore | None) -> State:
        return (self.norm(state[0]),)

    def _divided_loss(self, state: State, context: Any, deferred: WeightGradStore | None) -> State:
        logits = linear(state[0], self.weight, deferred=deferred, kernels=self.compute.linear)
        loss = divided_cross_entropy(
            _wide(logits), context.labels, self.share, first=self._first, count=self._count
        )
        return (loss.reshape(1) * context.scale,)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
