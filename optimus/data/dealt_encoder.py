"""Encodes the images of all ranks together, so that no rank waits for the one with the largest images.

For trainers without a pipeline (FSDP2, HSDP, DDP). Items of all ranks of a group are dealt by cost; inputs
travel to the ranks that encode them and rows travel back, by one all-to-all each way. Losses and gradients
are those of the undealt run.

    DealtEncoder(model.model.visual, model.model.language_model)

Ranks call a tower unequally often: for images, for videos, or never. Every call is a round in which all ranks
take part; before the LLM runs, a rank joins the rounds of others until no rank has more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from optimus.data.dealing import deal_items
from optimus.errors import UserError

GRID = "grid_thw"  # argument of towers that read the patches of all items as one sequence
Cost = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A rank's call of the tower, without tensors. It has no items if the rank joins a round of others."""

    items: tuple[tuple[int, ...], ...] = ()  # grids, or () for each item of a batch
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()  # arguments: name, shape of a row
    options: tuple[tuple[str, Any], ...] = ()  # other arguments


class DealtEncoder:
    """Deals the items of `tower` over the ranks of `group`; its parameters and their names stay as they are.

    `llm` is the module that runs behind the tower in every forward of the model. `projector` is a module of
    its own between both, if there is one: ranks without items run it on no rows. `outputs` are the fields of
    the tower's output that the model reads, and `hidden_states` the layers of that field: others do not
    travel. `cost` prices an item, or a frame of a video, by its tokens.
    """

    def __init__(
        self,
        tower: nn.Module,
        llm: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        projector: nn.Module | None = None,
        outputs: Sequence[str] = (),
        hidden_states: Sequence[int] = (),
        cost: Cost | None = None,
    ) -> None:
        self.tower, self.group, self.projector = tower, group, projector
        self.outputs, self.hidden_states = tuple(outputs), tuple(hidden_states)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._cost = cost or partial(count_tower_flops, tower)
        self.loads: tuple[float, ...] = ()  # costs of every rank in the last round
        self._signature = inspect.signature(tower.forward)
        self._token: Tensor | None = None  # output of the last round: it orders the backwards of rounds
        self._has_items = False
        self._run_tower = _wrap_call(tower, self._call_tower)
        self._run_llm = _wrap_call(llm, self._call_llm)

    def _call_tower(self, *args: Any, **kwargs: Any) -> Any:
        call, tensors = self._describe(args, kwargs)
        self._has_items = True
        return self._run_round(tensors, self._exchange(call))

    def _call_llm(self, *args: Any, **kwargs: Any) -> Any:
        """Joins rounds until no rank has more, and ties all rounds to the inputs of the LLM."""
        calls = self._exchange(Call())
        while any(call.items for call in calls):
            outputs = self._run_round({}, calls)
            calls = self._exchange(Call())
            if self.projector is not None and not self._has_items:
                rows = next(leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor))
                self._tie(self.projector(rows).sum())
        token, self._token, self._has_items = self._token, None, False
        if token is not None:
            leaves, spec = tree_flatten((args, kwargs))
            at = next((at for at, leaf in enumerate(leaves) if _is_float(leaf)), None)
            if at is None:
                raise UserError(
                    field="llm",
                    problem="is called without embeddings, so gradients could not reach the encoder",
                    hint="give the module that is called with inputs_embeds",
                )
            leaves[at] = leaves[at] + token.to(leaves[at].dtype)
            args, kwargs = tree_unflatten(leaves, spec)
        return self._run_llm(*args, **kwargs)

    def _tie(self, scalar: Tensor) -> None:
        """Makes the backward of the LLM's inputs reach a scalar, with a gradient of zero."""
        zero = 0 * scalar
        self._token = zero if self._token is None else self._token + zero

    def _exchange(self, call: Call) -> list[Call]:
        calls: list[Any] = [None] * self.size
        dist.all_gather_object(calls, call, self._host_group)
        return calls

    # ------------------------------------------------------------------------ one round

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, dict[str, Tensor]]:
        """Divides the arguments of a call into items, tensors that are dealt, and the rest."""
        bound = dict(self._signature.bind(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        grid = bound.pop(GRID, None)
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        options = tuple((n, value) for n, value in bound.items() if n not in tensors and value is not None)
        first, rows = next(iter(tensors)), len(next(iter(tensors.values())))
        items = ((),) * rows if grid is None else tuple(map(tuple, grid.tolist()))
        for name, tensor in tensors.items():
            is_dealt = len(tensor) == sum(map(prod, items)) and (grid is None or name == first)
            if not is_dealt or tensor.requires_grad:
                raise UserError(
                    field=f"{type(self.tower).__name__}: {name}",
                    value=tuple(tensor.shape),
                    problem="requires gradients" if is_dealt else f"has no row for each of {rows} of {first}",
                    hint="compute it inside the tower: only inputs without gradients are dealt",
                )
        described = tuple((name, tuple(each.shape[1:]), each.dtype) for name, each in tensors.items())
        return Call(items=items, tensors=described, options=options), tensors

    def _run_round(self, tensors: Mapping[str, Tensor], calls: Sequence[Call]) -> Any:
        """Encodes the items of all ranks; returns the outputs of this rank's."""
        template = _merge_calls(type(self.tower).__name__, calls)
        items = [(rank, item) for rank, call in enumerate(calls) for item in call.items]
        dealt = deal_items([[self._price(item) for _, item in items]], [range(self.size)])
        self.loads = tuple(dealt.loads[0].tolist())
        routes = Routes(rank=self.rank, size=self.size, items=tuple(items), owners=dealt.bins)
        device = next(self.tower.parameters()).device
        inputs: dict[str, Any] = {}
        own = routes.encoded or [_smallest_item(self.tower, template.items[0])]
        for name, shape, dtype in template.tensors:
            tensor = tensors.get(name)
            if tensor is None:  # a joining rank, or one that needs no mask
                fill = dtype == torch.bool
                tensor = torch.full((routes.own_rows, *shape), fill, dtype=dtype, device=device)
            received = routes.send(tensor, self.group)
            # Hooks of FSDP2 and DDP run on every rank: one without items encodes zeros.
            is_empty = not routes.encoded
            inputs[name] = received.new_zeros(prod(own[0]), *shape) if is_empty else received
        if template.items[0]:
            inputs[GRID] = torch.tensor(own, device=device)
        output = self._select(self._run_tower(**inputs, **dict(template.options)))
        leaves, spec = tree_flatten(output)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rows = sum(map(prod, own))
        for at in places:
            self._check_rows(leaves[at], rows)
        if self._token is None:
            self._token = torch.zeros((), device=device, requires_grad=leaves[places[0]].requires_grad)
        self._token, *returned = _Return.apply(
            self._token, routes, rows, self.group, *(leaves[at] for at in places)
        )
        for at, leaf in zip(places, returned, strict=True):
            leaves[at] = leaf
        return tree_unflatten(leaves, spec)

    def _check_rows(self, leaf: Tensor, rows: int) -> None:
        """Raises unless an output has a row per input row, or per merged rows: others have no owner."""
        merged = rows // getattr(self.tower, "spatial_merge_size", 1) ** 2
        if leaf.ndim == 0 or len(leaf) not in (rows, merged):
            raise UserError(
                field=f"{type(self.tower).__name__}: output",
                value=tuple(leaf.shape),
                problem=f"has no row for each of {rows} input rows or {merged} merged ones",
                hint="name the fields that the model reads in outputs=",
            )

    def _price(self, item: tuple[int, ...]) -> float:
        """Returns the cost of an item; frames of a video do not attend to each other."""
        *frames, height, width = item or (1, 1)
        return prod(frames) * self._cost(height * width)

    def _select(self, output: Any) -> Any:
        """Drops fields and hidden states that do not travel."""
        if self.outputs:
            for name in [name for name in output if name not in self.outputs]:
                output[name] = None
        if self.hidden_states:
            count = len(output.hidden_states)
            kept = {layer % count for layer in self.hidden_states}
            output.hidden_states = tuple(
                state if at in kept else None for at, state in enumerate(output.hidden_states)
            )
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Ways of the items of all ranks to the ranks that encode them, and of their rows back."""

    rank: int
    size: int
    items: tuple[tuple[int, tuple[int, ...]], ...]  # source and grid
    owners: tuple[int, ...]

    @cached_property
    def encoded(self) -> list[tuple[int, ...]]:
        """Items that this rank encodes, by source."""
        return [item for (_, item), owner in zip(self.items, self.owners, strict=True) if owner == self.rank]

    @cached_property
    def _own(self) -> list[tuple[int, int]]:
        """Rows and owner of every item of this rank."""
        pairs = zip(self.items, self.owners, strict=True)
        return [(prod(item), owner) for (source, item), owner in pairs if source == self.rank]

    @property
    def own_rows(self) -> int:
        """Rows of this rank's items."""
        return sum(rows for rows, _ in self._own)

    @cached_property
    def _sent(self) -> list[int]:
        """Rows to every rank."""
        return [sum(rows for rows, owner in self._own if owner == rank) for rank in range(self.size)]

    @cached_property
    def _received(self) -> list[int]:
        """Rows from every rank."""
        counts = [0] * self.size
        for (source, item), owner in zip(self.items, self.owners, strict=True):
            counts[source] += prod(item) * (owner == self.rank)
        return counts

    def _order(self, numerator: int, denominator: int) -> Tensor:
        """Returns the index of this rank's rows, sorted by the rank that encodes them."""
        lengths = [rows * numerator // denominator for rows, _ in self._own]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        by_owner = sorted(range(len(self._own)), key=lambda at: self._own[at][1])
        ranges = [torch.arange(starts[at], starts[at + 1]) for at in by_owner]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64)

    def send(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Sends the rows of this rank's items to their encoders; returns those that came."""
        return self._exchange(tensor[self._order(1, 1).to(tensor.device)], self._sent, self._received, group)

    def send_back(self, leaf: Tensor, rows: int, group: dist.ProcessGroup | None) -> Tensor:
        """Returns the outputs of this rank's items, given those of `rows` input rows that it encoded."""
        scale = len(leaf), rows
        came = self._exchange(
            leaf if self.encoded else leaf[:0],
            [n * scale[0] // scale[1] for n in self._received],
            [n * scale[0] // scale[1] for n in self._sent],
            group,
        )
        back = torch.empty_like(came)
        back[self._order(*scale).to(came.device)] = came
        return back

    def send_gradient(self, gradient: Tensor, shape: torch.Size, rows: int, group: Any) -> Tensor:
        """Returns the gradient of the rows that this rank encoded: the way of `send_back`, backwards."""
        scale = shape[0], rows
        came = self._exchange(
            gradient[self._order(*scale).to(gradient.device)],
            [n * scale[0] // scale[1] for n in self._sent],
            [n * scale[0] // scale[1] for n in self._received],
            group,
        )
        return came if self.encoded else gradient.new_zeros(shape)

    def _exchange(
        self, tensor: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        came = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(came, tensor.contiguous(), received, sent, group=group)
        return came


class _Return(torch.autograd.Function):
    """Sends all outputs of a round back; the scalar makes rounds' backwards run last round first."""

    @staticmethod
    def forward(
        context: Any, token: Tensor, routes: Routes, rows: int, group: Any, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        context.routes, context.rows, context.group = routes, rows, group
        context.shapes = [leaf.shape for leaf in leaves]
        return (token.clone(), *(routes.send_back(leaf, rows, group) for leaf in leaves))

    @staticmethod
    def backward(context: Any, token: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        routes, rows, group = context.routes, context.rows, context.group
        pairs = zip(gradients, context.shapes, strict=True)
        return (token, None, None, None, *(routes.send_gradient(g, s, rows, group) for g, s in pairs))


def count_tower_flops(tower: nn.Module, tokens: int) -> float:
    """Returns forward FLOPs of an item: products with all parameters, and attention inside the item."""
    config = tower.config
    names = ("depth", "num_hidden_layers", "encoder_layers"), ("hidden_size", "embed_dim", "d_model")
    layers, hidden = (next((getattr(config, n) for n in some if hasattr(config, n)), 0) for some in names)
    full = getattr(config, "fullatt_block_indexes", None)
    parameters: int = sum(p.numel() for p in tower.parameters())
    quadratic: int = 4 * hidden * (layers if full is None else len(full))
    return 2.0 * parameters * tokens + quadratic * float(tokens) ** 2


def _wrap_call(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces what a call of a module runs, in front of all its hooks; returns what it ran before.

    The module gets a class of its own, as FSDP2 does it, so that names of parameters stay. The class has the
    name of the module's: transformers and wrapping policies look modules up by it.
    """
    original = type(module)
    members = {
        "__call__": lambda self, *args, **kwargs: call(*args, **kwargs),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    module.__class__ = type(original.__name__, (original,), members)
    return partial(original.__call__, module)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _smallest_item(tower: nn.Module, like: tuple[int, ...]) -> tuple[int, ...]:
    side = getattr(tower, "spatial_merge_size", 1)
    return (1, side, side) if like else ()


def _merge_calls(name: str, calls: Sequence[Call]) -> Call:
    """Returns the arguments of all ranks with items; raises if they differ.

    A mask may be missing on some of them: nothing is masked there.
    """
    filled = [(rank, call) for rank, call in enumerate(calls) if call.items]
    tensors = dict.fromkeys(each for _, call in filled for each in call.tensors)
    names = [tensor for tensor, _, _ in tensors]
    for rank, call in filled:
        missing = [each[0] for each in tensors if each not in call.tensors]
        is_equal = call.options == filled[0][1].options and len(set(names)) == len(names)
        if not is_equal or any(not each.endswith("mask") for each in missing):
            raise UserError(
                field=name,
                value=[*call.tensors, *call.options],
                problem=f"are its arguments on rank {rank}, and others on rank {filled[0][0]}",
                hint="call it with the same options, dtypes and sizes of a row on all ranks",
            )
    return replace(filled[0][1], tensors=tuple(tensors))
