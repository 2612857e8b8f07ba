"""Splits a transformers model into LLM stages and encoder blocks; says which shapes travel between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from optimus.engine.stage_profile import StageInputs
from optimus.errors import UserError, nearest
from optimus.hf.families import Family, Tower, find_family
from optimus.hf.inputs import MicrobatchInputs, check_token_count, count_tokens, make_inputs
from optimus.hf.parts import Block, Stage

Shape = tuple[int, ...]
ShapesOf = Callable[[int, StageInputs], list[Shape]]


@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model as `FillSchedule` takes it: virtual stages of the LLM and blocks of every encoder, in order.

    Parts share modules with `model`. On a rank, parts of other ranks stay on `meta`.
    """

    model: Any
    family: Family
    stages: list[Stage]
    encoders: dict[str, list[Block]]
    router: bool

    @property
    def shapes(self) -> dict[str, ShapesOf]:
        """Functions from the number of a stage or block and its microbatch's inputs to its output shapes."""
        return {"llm": self._stage_shapes, **{name: self._shapes_of(name) for name in self.encoders}}

    def inputs(self, batch: Mapping[str, Any]) -> MicrobatchInputs:
        """Returns the inputs of a microbatch from a processor's output."""
        inputs = make_inputs(self.model, self.family, batch, router=self.router)
        for name, of_encoder in inputs.encoders.items():
            if of_encoder is not None:
                tower, last = self.family.towers[name], len(self.encoders[name]) - 1
                tokens = count_tokens(self.model, inputs.args[0], tower.token, tower.video_token)
                check_token_count(tower.inputs[0], tokens, self.shapes[name](last, of_encoder)[0][0])
        return inputs

    def router_weight(self, num_labels: int, num_microbatches: int) -> float | None:
        """Returns the weight of a microbatch's router loss in `causal_lm_loss`, None without one.

        With it the batch's router loss is the mean over microbatches of what transformers adds for each.
        """
        if not self.router:
            return None
        coef = float(self.model.config.get_text_config().router_aux_loss_coef)
        return coef * num_labels / num_microbatches

    def tied(self, parts: Iterable[nn.Module]) -> list[nn.Parameter]:
        """Returns parameters among `parts` that are ends of the tied embedding."""
        ends: dict[int, nn.Parameter] = {}
        if is_tied(self.model):
            for part in parts:
                if isinstance(part, Stage) and part.is_first:
                    ends[id(part.text.embed_tokens.weight)] = part.text.embed_tokens.weight
                if isinstance(part, Stage) and part.is_last:
                    ends[id(part.hf.lm_head.weight)] = part.hf.lm_head.weight
        return list(ends.values())

    def _stage_shapes(self, index: int, inputs: StageInputs) -> list[Shape]:
        text, stage = self.model.config.get_text_config(), self.stages[index]
        stats: list[Shape] = [(2 * text.num_experts + 1,)] if self.router else []
        size = tuple(inputs.args[0].shape)
        if stage.is_last:
            return [(*size, text.vocab_size), *stats]
        masks = inputs.kwargs.get("visual_pos_masks")
        rows = 0 if masks is None else int(masks.sum())
        levels = max(0, stage.deepstack - stage.end)
        return [(*size, text.hidden_size), *[(rows, text.hidden_size)] * levels, *stats]

    def _shapes_of(self, name: str) -> ShapesOf:
        blocks = self.encoders[name]

        def shapes(index: int, inputs: StageInputs) -> list[Shape]:
            block, args, kwargs = blocks[index], inputs.args, inputs.kwargs
            hidden: Shape = ()
            if "grid_thw" in kwargs:
                return _qwen_shapes(self.model, blocks, index, args[0])
            if "valid_rows" in kwargs:
                rows = int(kwargs["valid_rows"].sum())
                hidden = (len(args[0]), block.module.config.max_source_positions, block.module.config.d_model)
            elif "feature_attention_mask" in kwargs:
                lengths = kwargs["feature_attention_mask"].sum(-1)
                rows = int(block.module._get_feat_extract_output_lengths(lengths)[1].sum())
            else:
                tokens, per_image = image_tokens(self.model)
                rows, hidden = (
                    len(args[0]) * per_image,
                    (len(args[0]), tokens, block.module.config.hidden_size),
                )
            return [(rows, self.model.config.get_text_config().hidden_size) if block.is_last else hidden]

        return shapes


def _qwen_shapes(model: Any, blocks: Sequence[Block], index: int, pixels: Tensor) -> list[Shape]:
    vision = model.config.vision_config
    block, rows = blocks[index], len(pixels) // vision.spatial_merge_size**2
    width = model.config.get_text_config().hidden_size
    levels = sum(len(other.deepstack) for other in blocks[: index + 1])
    hidden = (
        getattr(vision, "embed_dim", None) if model.config.model_type == "qwen2_vl" else vision.hidden_size
    )
    first = (rows, width) if block.is_last else (len(pixels), int(hidden or 0))
    return [first, *[(rows, width)] * levels]


def image_tokens(model: Any) -> tuple[int, int]:
    """Returns tokens inside the tower and rows for the LLM of an image of the one size a tower takes."""
    config, vision = model.config, model.config.vision_config
    size, patch = (
        (v if isinstance(v, (list, tuple)) else (v, v)) for v in (vision.image_size, vision.patch_size)
    )
    patches = math.prod(side // step for side, step in zip(size, patch, strict=True))
    tokens = patches + (vision.model_type != "siglip_vision_model")  # the class token
    if config.model_type == "gemma3":
        return tokens, config.mm_tokens_per_image
    dropped = config.vision_feature_select_strategy == "default"
    scale = getattr(config, "downsample_ratio", 1) ** 2
    return tokens, round((tokens - dropped) * scale)


def is_tied(model: Any) -> bool:
    """Returns whether the head is the embedding."""
    return bool(model.all_tied_weights_keys)


def split_model(
    model: Any,
    *,
    stages: Sequence[int],
    blocks: Mapping[str, Sequence[int]] | None = None,
    router_loss: bool | None = None,
) -> SplitModel:
    """Splits a model by numbers of layers: of each virtual stage, and of each block of encoders that are cut.

    Encoders that `blocks` does not name are one block. With `router_loss` (by default the configuration's
    `output_router_logits`) the last stage returns router statistics behind the logits.
    """
    family = find_family(model.config)
    text = model.config.get_text_config()
    router = bool(getattr(text, "output_router_logits", False)) if router_loss is None else router_loss
    if router and not hasattr(text, "num_experts"):
        raise UserError(field="router_loss", value=router_loss, problem="needs experts", hint="leave it out")
    for name in blocks or {}:
        if name not in family.towers:
            raise UserError(
                field=f"blocks.{name}", problem="is no encoder", hint=nearest(name, family.towers)
            )
    towers = family.towers
    depth = len(model.model.language_model.layers)
    return SplitModel(
        model=model,
        family=family,
        router=router,
        stages=[
            Stage(model, list(towers.values()), first, end, router=router)
            for first, end in _ranges("stages", stages, depth)
        ],
        encoders={
            name: _cut_tower(model, name, tower, (blocks or {}).get(name)) for name, tower in towers.items()
        },
    )


def _ranges(field: str, counts: Sequence[int], depth: int) -> list[tuple[int, int]]:
    if sum(counts) != depth or min(counts) < 1:
        raise UserError(
            field=field,
            value=list(counts),
            problem=f"does not divide {depth} layers",
            hint="give a positive number of layers for each, in order",
        )
    return list(pairwise(accumulate(counts, initial=0)))


def _cut_tower(model: Any, name: str, tower: Tower, counts: Sequence[int] | None) -> list[Block]:
    module = model.model._modules[tower.module]
    if tower.cut is None:
        if counts is not None and len(counts) > 1:
            raise UserError(
                field=f"blocks.{name}",
                value=list(counts),
                problem="cuts a tower that is one block",
                hint="leave it out",
            )
        return [Block(model, tower, 0, 1, 1)]
    depth = len(module.get_submodule(tower.cut.layers))
    ranges = _ranges(f"blocks.{name}", counts or [depth], depth)
    layers = getattr(model.config, "vision_feature_layer", -1)
    wanted = min(
        layer if layer >= 0 else layer + depth + 1
        for layer in ([layers] if isinstance(layers, int) else layers)
    )
    if len(ranges) > 1 and (wanted < ranges[-1][0] or not isinstance(layers, int)):
        raise UserError(
            field=f"blocks.{name}",
            value=list(counts or ()),
            problem=f"cuts behind layer {wanted}, which vision_feature_layer selects",
            hint="make the last block longer",
        )
    return [Block(model, tower, first, end, depth) for first, end in ranges]
