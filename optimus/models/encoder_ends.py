"""The ends of an encoder: patches or frames to rows, and the projector to LLM rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimus.job.model import Encoder
from optimus.models.dropout import Dropout
from optimus.models.kernels import Kernels, Numerics
from optimus.models.linear import Linear, embedding, linear
from optimus.models.norms import Norm
from optimus.models.segment import Segment, State, WeightGradStore


class Patches(Segment):
    """(inputs) to (x): a linear map (a convolution over unfolded inputs), then positions."""

    kernels = ("patches",)
    defers_weight_grads, is_end = True, True

    def __init__(self, encoder: Encoder, numerics: Numerics, compute: Kernels, **where: Any) -> None:
        super().__init__()
        hidden = encoder.stack.hidden
        self.compute = compute
        self.dropout = Dropout(f"{encoder.name}.patches", numerics.dropout)
        self.weight = nn.Parameter(torch.empty(hidden, encoder.patch_inputs, **where))
        self.bias = nn.Parameter(torch.empty(hidden, **where))
        table = torch.empty(encoder.positions, hidden, **where) if encoder.positions else None
        self.positions = None if table is None else nn.Parameter(table)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        (inputs,) = state
        x = linear(inputs, self.weight, self.bias, weight_grads=weight_grads, kernels=self.compute.linear)
        if self.positions is not None:
            x = x + embedding(context.positions, self.positions, weight_grads=weight_grads)
        elif context.waves is not None:
            x = x + context.waves
        return (self.dropout(x, context.keys),)


class Project(Segment):
    """(x) to (rows of the LLM): the encoder's final norm, then `merge` rows to one, and linear maps."""

    kernels = ("projector",)
    defers_weight_grads, is_end = True, True

    def __init__(self, encoder: Encoder, numerics: Numerics, compute: Kernels, **where: Any) -> None:
        super().__init__()
        self.projector, self.compute = encoder.projector, compute
        stack = encoder.stack
        self.norm = Norm(stack.norm, stack.hidden, numerics.norm_eps, **where)
        bias, linears = self.projector.bias, self.projector.linears(stack.hidden)
        self.linears = nn.ModuleList(Linear(*each, bias=bias, **where) for each in linears)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        (x,) = state
        merge = self.projector.merge
        rows = self.norm(x).unflatten(0, (x.shape[0] // merge, merge))
        rows = rows.flatten(1) if self.projector.concatenates else rows.mean(1)
        for number, part in enumerate(self.linears):
            rows = functional.gelu(rows) if number else rows
            rows = part(rows, weight_grads, self.compute.linear)
        return (rows,)
