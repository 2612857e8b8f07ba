"""Cuts unmodified transformers modules into LLM stages and encoder blocks that run transformers' own forward.

A part holds a copy of the model's outer modules in which everything that other parts hold is a stand-in
without parameters. Names of parameters under `hf.` are therefore the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.hf.families import Tower

State = tuple[Tensor, ...]


class Elsewhere(nn.Module):
    """Stands for a module of another part: returns its input, or zeros where indices are embedded."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.stride = getattr(original, "stride", None)
        self.weight = torch.zeros(1, 1)  # that convolutions of Whisper are asked for

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        return x if x.is_floating_point() else self.weight.new_zeros(*x.shape, 1)


class MergerElsewhere(Elsewhere):
    """Stands for a deepstack merger of another part: returns as many rows as it would."""

    def __init__(self, original: nn.Module, merged: int) -> None:
        super().__init__(original)
        self.merged = merged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0][:: self.merged]


class Resume(nn.Module):
    """Stands for the layer before a part's first: returns the state that the part was given."""

    state: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.state


class _Captured(Exception):
    """Carries the keywords of a captured call out of transformers' forward."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


class _Capture(nn.Module):
    """Stands for a module whose call is wanted, not its result."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Captured({**kwargs, "args": args})


class Rows(tuple[Tensor, ...]):
    """Rows of an encoder as the list of tensors, or the one tensor, that a family's forward expects."""

    def to(self, *args: Any) -> Tensor:
        return self[0].to(*args)


class Features:
    """The output of a tower's features, by the names that families read."""

    def __init__(self, rows: Tensor, deepstack: Sequence[Tensor] = ()) -> None:
        self.last_hidden_state, self.pooler_output = rows, Rows((rows,))
        self.deepstack_features = [Rows((level,)) for level in deepstack]


def copy_shell(module: Any) -> Any:
    """Returns a module with the same children and parameters, whose children can be replaced alone."""
    shell = object.__new__(type(module))
    shell.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    return shell


def open_path(shell: Any, path: str) -> Any:
    """Copies the shells of all modules on a path and returns the last."""
    for name in path.split("."):
        shell._modules[name] = copy_shell(shell._modules[name])
        shell = shell._modules[name]
    return shell


def leave_out(shell: Any, *names: str) -> None:
    """Replaces children by stand-ins."""
    for name in names:
        if shell._modules.get(name) is not None:
            shell._modules[name] = Elsewhere(shell._modules[name])


def capture_text_call(
    model: Any,
    embed: Callable[[Tensor], Tensor],
    features: Mapping[str, Callable[..., Features]],
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the keywords with which an inner model's forward calls its text model, given features."""
    shell = copy_shell(model)
    shell._modules["language_model"] = _Capture()
    shell.__dict__.update(features, get_input_embeddings=lambda: embed)
    try:
        shell.forward(**inputs)
    except _Captured as call:
        return {name: value for name, value in call.kwargs.items() if value is not None and name != "args"}
    raise AssertionError("the model's forward did not call its text model")


def capture_audio_mask(model: Any, tower: str, inputs: Mapping[str, Any]) -> Any:
    """Returns the attention mask that the inner model's forward gives an audio tower that it calls inline."""
    shell, original = copy_shell(model), model._modules[tower]
    spy = _Capture()
    spy.config, spy.device = original.config, inputs["input_ids"].device
    spy._get_feat_extract_output_lengths = original._get_feat_extract_output_lengths
    shell._modules[tower] = spy
    dtype = model.dtype
    shell.__dict__["get_input_embeddings"] = lambda: (
        lambda ids: torch.zeros(*ids.shape, 1, dtype=dtype, device=ids.device)
    )
    try:
        shell.forward(**inputs)
    except _Captured as call:
        return call.kwargs.get("attention_mask")
    raise AssertionError("the model's forward did not call its audio tower")


class Block(nn.Module):
    """Layers `first` to `end` of a tower; the last block ends in rows for the LLM, then deepstack rows."""

    def __init__(self, hf: Any, tower: Tower, first: int, end: int, depth: int) -> None:
        super().__init__()
        self.hf, self.tower = copy_shell(hf), tower
        self.first, self.end = first, end
        self.is_first, self.is_last = first == 0, end == depth
        leave_out(self.hf, "lm_head")
        inner = open_path(self.hf, "model")
        leave_out(inner, *(name for name in inner._modules if name not in (tower.module, tower.projector)))
        if not self.is_last:
            leave_out(inner, tower.projector)
        module = open_path(inner, tower.module)
        self.deepstack = [
            at
            for at, layer in enumerate(getattr(module, "deepstack_visual_indexes", ()))
            if first <= layer < end
        ]
        if tower.cut is not None:
            self._leave_out_layers(module, tower.cut.layers, depth)
            leave_out(
                module, *(() if self.is_first else tower.cut.stem), *(() if self.is_last else tower.cut.tail)
            )

    def _leave_out_layers(self, module: Any, path: str, depth: int) -> None:
        layers = open_path(module, path)
        leave_out(layers, *(str(layer) for layer in range(depth) if not self.first <= layer < self.end))
        if not self.is_first:
            layers._modules[str(self.first - 1)] = Resume()
        if "deepstack_merger_list" in module._modules:
            mergers = open_path(module, "deepstack_merger_list")
            for name, merger in mergers._modules.items():
                if int(name) not in self.deepstack:
                    mergers._modules[name] = MergerElsewhere(merger, module.spatial_merge_unit)

    @property
    def module(self) -> Any:
        return self.hf.model._modules[self.tower.module]

    def forward(self, x: Tensor, *state: Tensor, **kwargs: Any) -> State:
        valid = kwargs.pop("valid_rows", None)
        given = x
        if not self.is_first:
            assert self.tower.cut is not None
            resume = self.module.get_submodule(self.tower.cut.layers)._modules[str(self.first - 1)]
            resume.state, given = x, self._stand_in(x)
        if not self.is_last:
            out = self.module(given, *kwargs.values())
            rows = out.last_hidden_state
        elif self.tower.features:
            out = getattr(self.hf.model, self.tower.features)(
                given, *kwargs.values(), **self._feature_layer()
            )
            rows = join_rows(out.pooler_output)
        else:
            out = self.module(given, *kwargs.values())
            projected = self.hf.model._modules[self.tower.projector](out.last_hidden_state)
            rows = projected[valid]
        if not self.is_first:
            resume.state = None
        levels = getattr(out, "deepstack_features", None) or ()
        return (rows, *state, *(join_rows(levels[at]) for at in self.deepstack))

    def _stand_in(self, x: Tensor) -> Tensor:
        """Returns a cheap input of a shape that the stem's stand-ins and transformers' checks accept."""
        if "conv1" not in self.module._modules:
            return x.detach()
        steps = self.module.config.max_source_positions
        for name in ("conv1", "conv2"):
            steps *= self.module._modules[name].stride[0]
        return x.new_zeros(len(x), 1, 1).expand(len(x), 1, steps)

    def _feature_layer(self) -> dict[str, Any]:
        """Counts a selected layer from the end: only this part's layers are recorded."""
        layer = getattr(self.hf.config, "vision_feature_layer", -1)
        if self.is_first or not isinstance(layer, int) or layer < 0:
            return {}
        return {"vision_feature_layer": layer - self.end - 1}


def join_rows(rows: Any) -> Tensor:
    """Returns rows of all images in one tensor of rows."""
    if isinstance(rows, Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return torch.cat([join_rows(part) for part in rows])


class Stage(nn.Module):
    """Layers `first` to `end` of the LLM.

    The first stage gets ids, then the rows of every tower (each with its deepstack rows). Between stages
    travel hidden states, deepstack rows that later layers add, and sums of router statistics if any.
    """

    def __init__(self, hf: Any, towers: Sequence[Tower], first: int, end: int, *, router: bool) -> None:
        super().__init__()
        self.hf, self.towers, self.router = copy_shell(hf), tuple(towers), router
        self.first, self.end = first, end
        inner = open_path(self.hf, "model")
        self.deepstack = len(
            getattr(getattr(inner, "visual", None), "deepstack_visual_indexes", ())
        )  # levels, one of each of the first layers
        leave_out(inner, *(name for name in inner._modules if name != "language_model"))
        text = open_path(inner, "language_model")
        layers = open_path(text, "layers")
        self.is_first, self.is_last = first == 0, end == len(layers)
        leave_out(layers, *(str(layer) for layer in range(len(layers)) if not first <= layer < end))
        leave_out(text, *(() if self.is_first else ("embed_tokens",)), *(() if self.is_last else ("norm",)))
        if not self.is_last:
            leave_out(self.hf, "lm_head")

    @property
    def text(self) -> Any:
        return self.hf.model._modules["language_model"]

    def forward(self, *inputs: Tensor, **kwargs: Any) -> State:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if self.is_first:
            hidden, levels = self._merge(inputs[0], inputs[1:], kwargs)
            stats = self._no_stats(hidden)
        else:
            hidden, *levels = inputs
            stats = levels.pop() if self.router else None
        own, later = levels[: self.end - self.first], levels[self.end - self.first :]
        more: dict[str, Any] = {name: value for name, value in kwargs.items() if name != "router_mask"}
        masks = more.pop("visual_pos_masks", None)
        if own and masks is not None:
            before = [torch.zeros_like(own[0])] * self.first  # stand-ins get what they ignore
            more |= {"visual_pos_masks": masks, "deepstack_visual_embeds": [*before, *own]}
        if self.router:
            more["output_router_logits"] = True
        out = self.text(inputs_embeds=hidden, use_cache=False, **more)
        hidden = out.last_hidden_state
        if self.router:
            assert stats is not None
            stats = self._add_stats(stats, out.router_logits, kwargs.get("router_mask"))
        tail = () if stats is None else (stats,)
        return (self.hf.lm_head(hidden), *tail) if self.is_last else (hidden, *later, *tail)

    def _merge(
        self, ids: Tensor, rows: Sequence[Tensor], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """Embeds ids and puts encoder rows in the place of their tokens, by the model's own forward."""
        config, rest = self.hf.config, list(rows)
        wanted = len(self.towers) + self.deepstack
        if len(rows) != wanted:
            raise UserError(
                field="encoder rows",
                value=len(rows),
                problem=f"are not the {wanted} outputs of one microbatch of each encoder",
                hint="plan one encoder microbatch for each LLM microbatch",
            )
        features: dict[str, Callable[..., Features]] = {}
        inputs = {name: kwargs[name] for name in ("position_ids", "attention_mask") if name in kwargs}
        inline: list[tuple[str, Tensor]] = []
        levels: list[Tensor] = []
        for tower in self.towers:
            count = 1 + (self.deepstack if tower.module == "visual" else 0)
            own, rest = rest[:count], rest[count:]
            levels += own[1:]
            if not tower.features:
                inline.append((tower.token, own[0]))
                continue
            images = int((ids == getattr(config, tower.token)).sum())
            for method, name, part in (
                (tower.features, tower.inputs[0], slice(images)),
                (tower.video_features, next(iter(tower.videos), ""), slice(images, None)),
            ):
                if name and len(own[0][part]):
                    given = Features(own[0][part], [level[part] for level in own[1:]])
                    features[method] = lambda *args, given=given, **more: given
                    inputs[name] = ids  # anything that is not None
        call = capture_text_call(
            self.hf.model, self.text.embed_tokens, features, {"input_ids": ids, **inputs}
        )
        hidden = call["inputs_embeds"]
        for token, own_rows in inline:
            hidden = hidden.masked_scatter(
                (ids == getattr(config, token))[..., None], own_rows.to(hidden.dtype)
            )
        return hidden, list(call.get("deepstack_visual_embeds", levels))

    def _no_stats(self, hidden: Tensor) -> Tensor | None:
        if not self.router:
            return None
        experts = self.hf.config.get_text_config().num_experts
        return torch.zeros(2 * experts + 1, dtype=torch.float32, device=hidden.device)

    def _add_stats(self, stats: Tensor, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Adds, layer by layer as transformers does: tokens and probabilities per expert, and rows."""
        text = self.hf.config.get_text_config()
        for layer in logits:
            weights = torch.softmax(layer, dim=-1)
            chosen = torch.topk(weights, text.num_experts_per_tok, dim=-1)[1]
            flat = weights.new_ones(len(weights)) if mask is None else mask.reshape(-1)
            flat = flat.to(dtype=torch.float32)
            tokens = torch.zeros(text.num_experts, dtype=torch.float32, device=stats.device).scatter_add_(
                0, chosen.reshape(-1), flat.repeat_interleave(text.num_experts_per_tok)
            )
            probabilities = (weights.float() * flat[:, None]).sum(0)
            stats = stats + torch.cat([tokens, probabilities, flat.sum()[None]])
        return stats
