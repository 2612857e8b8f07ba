"""Defines the first and last layers of modules: patch embedding, projector, token embedding and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.ir.op import KernelName
from optimus.job.model import Encoder, Llm
from optimus.job.own_layers import GELU_APPROXIMATIONS
from optimus.models.collectives import ParamSplit, TpGroup
from optimus.models.deepstack import keep_rows, take_rows
from optimus.models.dropout import Dropout
from optimus.models.kernels import KernelSet, Linear, Norm, embedding, linear
from optimus.models.sample import IGNORE_INDEX
from optimus.models.segment import FunctionSegment, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import AllGather, ReduceScatter, SeamAxis, SeamExchange

NORMALIZER_BLOCKS = 4  # of rows, so that the temporary of a logsumexp is a quarter of the logits
PLACE_ROWS = ("place_rows",)  # no kernel of plans: it runs where the collective before it has ended


# ---------------------------------------------------------------------------------------- encoders


class PatchEmbedding(Segment):
    """Embeds patches or frames (a convolution over unfolded inputs) and their positions: (inputs) to (x)."""

    kernels = (KernelName.PATCHES,)
    defers_weight_grads, is_end = True, True

    def __init__(self, encoder: Encoder, compute: KernelSet, **factory_kwargs: Any) -> None:
        super().__init__()
        hidden = encoder.stack.hidden
        self.compute = compute
        self.dropout = Dropout(f"{encoder.name}.patches", encoder.stack.dropout_rate)
        self.weight = nn.Parameter(torch.empty(hidden, encoder.patch_inputs, **factory_kwargs))
        bias = torch.empty(hidden, **factory_kwargs) if encoder.patch_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)
        self.positions = _position_table(encoder.positions, hidden, factory_kwargs)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        (inputs,) = state
        kernels = self.compute.linear
        x = linear(inputs, self.weight, self.bias, weight_grads=weight_grads, kernels=kernels)
        if self.positions is not None:
            positions = embedding(context.positions, self.positions, weight_grads=weight_grads)
            if context.position_weights is not None:  # of the four nearest of the learned grid
                positions = (positions * context.position_weights[:, :, None]).sum(1)
            x = x + positions
        elif context.sinusoids is not None:
            x = x + context.sinusoids
        return (self.dropout(x, context.dropout_keys),)


class EncoderProjector(Segment):
    """Normalizes, merges `merge` rows into one and projects them to the LLM: (x) to (rows of the LLM)."""

    kernels = (KernelName.PROJECTOR,)
    defers_weight_grads, is_end = True, True

    def __init__(self, encoder: Encoder, compute: KernelSet, **factory_kwargs: Any) -> None:
        super().__init__()
        self.projector, self.compute = encoder.projector, compute
        stack, bias = encoder.stack, encoder.projector.bias
        norm = Norm(stack.norm, stack.hidden, stack.norm_eps, **factory_kwargs)
        self.norm = norm if encoder.final_norm else None
        self._gelu = GELU_APPROXIMATIONS.get(self.projector.activation, "none")  # unused by one linear
        widths = self.projector.linears(stack.hidden)
        self.linears = nn.ModuleList(
            Linear(inputs, outputs, bias=bias, **factory_kwargs) for inputs, outputs in widths
        )
        self.deepstack = nn.ModuleList(
            DeepstackProjector(encoder, **factory_kwargs) for _ in encoder.deepstack_layers
        )

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        (x,) = state
        merge = self.projector.merge
        rows = x if self.norm is None else self.norm(x)
        rows = rows.unflatten(0, (x.shape[0] // merge, merge))
        rows = rows.flatten(1) if self.projector.concatenates else rows.mean(1)
        outputs = [self._project(rows, self.linears, weight_grads)]
        for index, projector in enumerate(self.deepstack):
            earlier = take_rows(x, context.side, index).unflatten(0, (x.shape[0] // merge, merge)).flatten(1)
            outputs.append(self._project(projector.norm(earlier), projector.linears, weight_grads))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1),)

    def _project(self, rows: Tensor, linears: nn.ModuleList, weight_grads: WeightGradStore | None) -> Tensor:
        for index, layer in enumerate(linears):
            rows = functional.gelu(rows, approximate=self._gelu) if index else rows
            rows = layer(rows, weight_grads, self.compute.linear)
        return rows


class DeepstackProjector(nn.Module):
    """Parameters of the projector of an earlier layer's output, which is normed after the merge."""

    def __init__(self, encoder: Encoder, **factory_kwargs: Any) -> None:
        super().__init__()
        projector, hidden = encoder.projector, encoder.stack.hidden
        assert projector.norm is not None
        width = projector.input_width(hidden)
        self.norm = Norm(projector.norm, width, projector.norm_eps, **factory_kwargs)
        self.linears = nn.ModuleList(
            Linear(inputs, outputs, bias=projector.bias, **factory_kwargs)
            for inputs, outputs in projector.linears(hidden)
        )


# ---------------------------------------------------------------------------------------- the LLM


class TokenEmbedding(Segment):
    """Embeds tokens and puts encoder rows at their positions: (ids, rows of encoder 0, ...) to (x).

    With tensor parallelism, each rank looks up all ids in its shard of the vocabulary. Encoder rows go to the
    tensor- and context-parallel rank that holds their positions. `encoders_train` says whether any encoder
    needs gradients.
    """

    kernels = (KernelName.EMBEDDING,)
    defers_weight_grads, is_end = True, True

    def __init__(
        self,
        llm: Llm,
        tp_group: TpGroup,
        cp_group: TpGroup,
        *,
        encoders_train: bool,
        deepstack: int = 0,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        self.deepstack = deepstack
        hidden, split = llm.stack.hidden, ParamSplit(dim=0, blocks=((llm.vocab, 1),))
        self.splits, self.encoders_train = {"weight": split}, encoders_train
        self.tp_group, self.cp_group = tp_group, cp_group
        self.dropout = Dropout(f"{llm.name}.embedding", llm.stack.dropout_rate)
        rows = split.shard_length(tp_group.size)
        self._first_id = tp_group.rank * rows
        self.weight = nn.Parameter(torch.empty(rows, hidden, **factory_kwargs))
        self.positions = _position_table(llm.positions, hidden, factory_kwargs)

    def make_exchange(self, group: TpGroup, axis: SeamAxis) -> SeamExchange:
        """Returns the exchange of encoder rows that precedes the lookup."""
        return SeamExchange(
            group,
            axis,
            width=self.weight.shape[1] * (1 + self.deepstack),
            dtype=self.weight.dtype,
            needs_backward=self.encoders_train,
        )

    def parallel_segments(self) -> list[Segment]:
        to_context = [self.make_exchange(self.cp_group, "cp")] if self.cp_group.size > 1 else []
        if self.tp_group.size == 1:
            return [*to_context, self]
        return [
            self.make_exchange(self.tp_group, "tp"),
            *to_context,
            FunctionSegment(self, self._sharded_lookup, self.kernels, [self.weight]),
            ReduceScatter(
                self.tp_group,
                1,
                forward_name=KernelName.EMBEDDING.scatter,
                kernel=KernelName.EMBEDDING,
                in_wgrad=True,
                freed=(0,),
            ),
            FunctionSegment(self, self._place_received, PLACE_ROWS, [self.positions]),
        ]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        ids, *encoder_rows = state
        x = embedding(ids, self.weight, weight_grads=weight_grads)
        return self._add_positions(
            self._place(x, encoder_rows, context.targets, context), context, weight_grads
        )

    def _place(self, x: Tensor, rows: Sequence[Tensor], targets: Sequence[Tensor], context: Any) -> Tensor:
        """Puts rows at their positions; columns behind the first are kept for layers of the LLM."""
        if not self.deepstack or not rows:
            return _place_rows(x, rows, targets)
        width = x.shape[1]
        x = _place_rows(x, [piece[:, :width] for piece in rows], targets)
        return keep_rows(
            x, torch.cat([piece[:, width:] for piece in rows]), torch.cat(tuple(targets)), context.side
        )

    def _sharded_lookup(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        ids, rows = state
        return rows, embedding(ids, self.weight, first_id=self._first_id, weight_grads=weight_grads)

    def _place_received(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        rows, x = state
        x = self._place(x, (rows,), context.targets, context)
        return self._add_positions(x, context, weight_grads)

    def _add_positions(self, x: Tensor, context: Any, weight_grads: WeightGradStore | None) -> State:
        if self.positions is not None:
            x = x + embedding(context.positions, self.positions, weight_grads=weight_grads)
        return (self.dropout(x, context.dropout_keys),)


def _place_rows(x: Tensor, encoder_rows: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Replaces rows of `x` at the targets; rows with a target past the end are dropped."""
    if not encoder_rows:
        return x
    padded = functional.pad(x, (0, 0, 0, 1))
    for rows, target in zip(encoder_rows, targets, strict=True):
        padded = padded.index_copy(0, target, rows.to(x.dtype))
    return padded[: x.shape[0]]


def _position_table(count: int, width: int, factory_kwargs: dict[str, Any]) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(count, width, **factory_kwargs)) if count else None


class LossHead(Segment):
    """Computes norm, logits and summed cross entropy times the context's scale: (x) to (loss)."""

    kernels = (KernelName.HEAD,)
    defers_weight_grads, is_end = True, True

    def __init__(
        self,
        llm: Llm,
        compute: KernelSet,
        tp_group: TpGroup,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        split = ParamSplit(dim=0, blocks=((llm.vocab, 1),))
        self.compute, self.tp_group, self.splits = compute, tp_group, {"weight": split}
        self.norm = Norm(llm.stack.norm, llm.stack.hidden, llm.stack.norm_eps, **factory_kwargs)
        rows = split.shard_length(tp_group.size)
        self._first_id = tp_group.rank * rows
        self._count = max(0, min(rows, llm.vocab - self._first_id))
        self.weight = nn.Parameter(torch.empty(rows, llm.stack.hidden, **factory_kwargs))

    def parallel_segments(self) -> list[Segment]:
        if self.tp_group.size == 1:
            return [self]
        return [
            FunctionSegment(self, self._norm, (KernelName.HEAD_NORM,), [self.norm]),
            AllGather(
                self.tp_group, 0, forward_name=KernelName.HEAD.gather, kernel=KernelName.HEAD, regather=False
            ),
            FunctionSegment(self, self._sharded_loss, self.kernels, [self.weight], waits_for_tp=True),
        ]

    def logits(self, state: State, weight_grads: WeightGradStore | None = None) -> Tensor:
        """Returns the logits of all rows, for callers that compute the loss themselves."""
        (x,) = state
        return self._logits(self.norm(x), weight_grads)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        return self._loss(_widened(self.logits(state, weight_grads)), context)

    def _norm(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        return (self.norm(state[0]),)

    def _sharded_loss(self, state: State, context: Any, weight_grads: WeightGradStore | None) -> State:
        return self._loss(_widened(self._logits(state[0], weight_grads)), context)

    def _loss(self, logits: Tensor, context: Any) -> State:
        group, first_id, count = self.tp_group, self._first_id, self._count
        loss = vocab_parallel_cross_entropy(logits, context.labels, group, first_id=first_id, count=count)
        return (loss.reshape(1) * context.scale,)

    def _logits(self, normed: Tensor, weight_grads: WeightGradStore | None) -> Tensor:
        return linear(normed, self.weight, weight_grads=weight_grads, kernels=self.compute.linear)


def _widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: TpGroup, *, first_id: int, count: int
) -> Tensor:
    """Returns the cross entropy summed over all rows, equal on all ranks of the group.

    This rank holds the logits of `count` ids from `first_id` on. Columns after them are padding and count as
    minus infinity.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, tp_group, first_id, count)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps one number per logit until the backward, which turns it into the gradient in place.

    Ranks of a group gather their parts of every row's normalizer and label logit: one small collective.
    """

    @staticmethod
    def forward(
        context: Any, logits: Tensor, labels: Tensor, tp_group: TpGroup, first_id: int, count: int
    ) -> Tensor:
        has_label, index = labels != IGNORE_INDEX, labels - first_id
        inside = has_label & (index >= 0) & (index < count)
        column = index.clamp(0, max(0, logits.shape[1] - 1))[:, None]
        blocks = logits[:, :count].tensor_split(NORMALIZER_BLOCKS)  # each copied once to be summed
        normalizer = torch.cat([torch.logsumexp(block, 1) for block in blocks])
        label_logit = torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
        parts = torch.stack((normalizer, label_logit))[None]
        if tp_group.size > 1:
            parts = tp_group.all_gather(parts).wait()
        normalizer = torch.logsumexp(parts[:, 0], 0)
        context.save_for_backward(logits, normalizer, has_label, inside, column)
        context.count = count
        return torch.where(has_label, normalizer - parts[:, 1].sum(0), 0.0).sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, normalizer, has_label, inside, column = context.saved_tensors
        logits_grad = logits.sub_(normalizer[:, None]).exp_()  # in place: logits are large
        logits_grad[:, context.count :].zero_()
        logits_grad.scatter_add_(1, column, -inside[:, None].to(logits_grad.dtype))
        return logits_grad.mul_((has_label * gradient)[:, None]), None, None, None, None
