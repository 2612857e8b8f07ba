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
from optimus.models.loss import vocab_parallel_cross_entropy
from optimus.models.norms import Norm
from optimus.models.param_split import ParamSplit
from optimus.models.sample import IGNORED
from optimus.models.segment import FunctionSegment, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import NO_TP, AllGather, ReduceScatter, SeamExchange, TpGroup

PLACE = ("place",)  # no kernel of a plan: it runs where the exchange before it has ended


class Embedding(Segment):
    """(ids, rows of encoder 0, rows of encoder 1, ...) to (x).

    Where it is divided, each rank looks up all ids in its part of the vocabulary, and rows of encoders come
    to who holds their places; `fed` says whether any encoder feeds the LLM and wants gradients.
    """

    kernels = ("embedding",)
    defers_weight_grads, is_end = True, True

    def __init__(
        self, llm: Llm, numerics: Numerics, tp_group: TpGroup = NO_TP, *, fed: bool = True, **where: Any
    ) -> None:
        super().__init__()
        hidden, split = llm.stack.hidden, ParamSplit(dim=0, blocks=((llm.vocab, 1),))
        self.splits, self.tp_group, self.fed = {"weight": split}, tp_group, fed
        self.dropout = Dropout(f"{llm.name}.embedding", numerics.dropout)
        rows = split.length(tp_group.size)
        self._first = tp_group.rank * rows
        self.weight = nn.Parameter(torch.empty(rows, hidden, **where))
        self.positions = nn.Parameter(torch.empty(llm.positions, hidden, **where)) if llm.positions else None

    def tp_segments(self) -> list[Segment]:
        width = self.weight.shape[1]
        return [
            SeamExchange(self.tp_group, width=width, dtype=self.weight.dtype, needs_backward=self.fed),
            FunctionSegment(self, self._looked_up, self.kernels, [self.weight]),
            ReduceScatter(
                self.tp_group,
                1,
                forward_name="embedding.scatter",
                kernel="embedding",
                in_wgrad=True,
                freed=(0,),
            ),
            FunctionSegment(self, self._placed, PLACE, [self.positions]),
        ]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        ids, *encoded = state
        x = embedding(ids, self.weight, weight_grads=weight_grads)
        return self._finished(_placed(x, encoded, context.targets), context, weight_grads)

    def _looked_up(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        ids, rows = state
        return rows, embedding(ids, self.weight, first=self._first, weight_grads=weight_grads)

    def _placed(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        rows, x = state
        return self._finished(_placed(x, (rows,), (context.seam.targets,)), context, weight_grads)

    def _finished(self, x: Tensor, context: Any, weight_grads: WeightGradStore | None) -> State:
        if self.positions is not None:
            x = x + embedding(context.positions, self.positions, weight_grads=weight_grads)
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
    defers_weight_grads, is_end = True, True

    def __init__(
        self, llm: Llm, numerics: Numerics, compute: Kernels, tp_group: TpGroup = NO_TP, **where: Any
    ) -> None:
        super().__init__()
        split = ParamSplit(dim=0, blocks=((llm.vocab, 1),))
        self.compute, self.tp_group, self.splits = compute, tp_group, {"weight": split}
        self.norm = Norm(llm.stack.norm, llm.stack.hidden, numerics.norm_eps, **where)
        rows = split.length(tp_group.size)
        self._first, self._count = tp_group.rank * rows, max(0, min(rows, llm.vocab - tp_group.rank * rows))
        self.weight = nn.Parameter(torch.empty(rows, llm.stack.hidden, **where))

    def tp_segments(self) -> list[Segment]:
        return [
            FunctionSegment(self, self._normed, ("head.norm",), [self.norm]),
            AllGather(self.tp_group, 0, forward_name="head.gather", kernel="head", regather=False),
            FunctionSegment(self, self._vocab_parallel_loss, self.kernels, [self.weight], waits_for_tp=True),
        ]

    def logits(self, state: State, weight_grads: WeightGradStore | None = None) -> Tensor:
        (x,) = state
        return linear(self.norm(x), self.weight, weight_grads=weight_grads, kernels=self.compute.linear)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        logits = _wide(self.logits(state, weight_grads))
        loss = functional.cross_entropy(logits, context.labels, ignore_index=IGNORED, reduction="sum")
        return (loss.reshape(1) * context.scale,)

    def _normed(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        return (self.norm(state[0]),)

    def _vocab_parallel_loss(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        logits = linear(state[0], self.weight, weight_grads=weight_grads, kernels=self.compute.linear)
        loss = vocab_parallel_cross_entropy(
            _wide(logits), context.labels, self.tp_group, first=self._first, count=self._count
        )
        return (loss.reshape(1) * context.scale,)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
