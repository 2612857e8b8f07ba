"""The ends of an LLM: embedding with the places of encoder rows, and head with the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimus.job.model import Llm
from optimus.models.dropout import dropout, hashed
from optimus.models.linear import embedding, linear
from optimus.models.norms import Norm
from optimus.models.numerics import Kernels, Numerics
from optimus.models.sample import IGNORED
from optimus.models.segment import Deferred, Segment, State


class Embedding(Segment):
    """(ids, rows of encoder 0, rows of encoder 1, ...) to (x)."""

    kernels = ("embedding",)
    defers = True

    def __init__(self, llm: Llm, numerics: Numerics, **where: Any) -> None:
        super().__init__()
        hidden = llm.stack.hidden
        self.site, self.share = hashed("site", f"{llm.name}.embedding"), numerics.dropout
        self.weight = nn.Parameter(torch.empty(llm.vocab, hidden, **where))
        self.positions = nn.Parameter(torch.empty(llm.positions, hidden, **where)) if llm.positions else None

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        ids, *encoded = state
        x = embedding(ids, self.weight, deferred=deferred)
        if encoded:
            n = ids.shape[0]
            x = functional.pad(x, (0, 0, 0, 1))  # row n takes what nobody needs
            for rows, target in zip(encoded, context.targets, strict=True):
                x = x.index_copy(0, target, rows.to(x.dtype))
            x = x[:n]
        if self.positions is not None:
            x = x + embedding(context.positions, self.positions, deferred=deferred)
        return (dropout(x, context.keys, self.site, self.share),)


class Head(Segment):
    """(x) to (loss): final norm, logits, summed cross entropy times the context's scale."""

    kernels = ("head",)
    defers = True

    def __init__(self, llm: Llm, numerics: Numerics, compute: Kernels, **where: Any) -> None:
        super().__init__()
        self.compute = compute
        self.norm = Norm(llm.stack.norm, llm.stack.hidden, numerics.norm_eps, **where)
        self.weight = nn.Parameter(torch.empty(llm.vocab, llm.stack.hidden, **where))

    def logits(self, state: State, deferred: Deferred | None = None) -> torch.Tensor:
        (x,) = state
        return linear(self.norm(x), self.weight, deferred=deferred, kernels=self.compute.linear)

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        logits = self.logits(state, deferred)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        loss = functional.cross_entropy(logits, context.labels, ignore_index=IGNORED, reduction="sum")
        return (loss.reshape(1) * context.scale,)
