"""Turns a processor's output into what stages and blocks get: arguments, keywords, target, encoder inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from optimus.engine.stage_profile import StageInputs
from optimus.errors import UserError, nearest
from optimus.hf.families import Family, Tower, find_family
from optimus.hf.parts import Features, capture_audio_mask, capture_text_call

IGNORED = -100  # labels without a loss
SAMPLED_ELEMENTS = 4096  # of pixels or audio, compared between the ranks of a replica
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")
TEXT_CALL = ("inputs_embeds", "deepstack_visual_embeds", "use_cache", "return_dict")  # that stages make


@dataclass(frozen=True, kw_only=True)
class MicrobatchInputs:
    """Inputs of a microbatch: `args` for the first stage, `kwargs` for every stage, `target` for the loss."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    encoders: dict[str, StageInputs | None]  # None without images or audio


def make_inputs(model: Any, family: Family, batch: Mapping[str, Any], *, router: bool) -> MicrobatchInputs:
    """Returns a microbatch's inputs from a processor's output; positions and masks are transformers' own."""
    given = {name: value for name, value in batch.items() if value is not None}
    _refuse_unknown(model, family, given)
    ids = given["input_ids"]
    encoders = {name: _encoder_inputs(model, tower, given) for name, tower in family.towers.items()}
    kwargs = _text_kwargs(model, family, given)
    if router and "attention_mask" in given:
        kwargs["router_mask"] = given["attention_mask"]
    return MicrobatchInputs(args=(ids,), kwargs=kwargs, target=make_target(model, given), encoders=encoders)


def make_target(model: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Returns the labels of a processor's output that enter the loss of its model."""
    target, mask = batch.get("labels"), batch.get("attention_mask")
    if target is not None and mask is not None and model.config.model_type == "qwen2_audio":
        target = target.masked_fill(mask == 0, IGNORED)  # as its loss does
    return target


def check_labels(batches: Sequence[Mapping[str, Any]]) -> None:
    """Raises unless every microbatch has labels of the shape of its ids."""
    for number, batch in enumerate(batches):
        labels, ids = batch.get("labels"), batch["input_ids"]
        if labels is None or labels.shape != ids.shape:
            problem = (
                "is missing" if labels is None else f"has shape {tuple(labels.shape)}, not that of input_ids"
            )
            raise UserError(
                field=f"batches[{number}]: labels",
                problem=problem,
                hint=f"give input_ids with {IGNORED} where there is no loss",
            )


def _refuse_unknown(model: Any, family: Family, given: Mapping[str, Any]) -> None:
    towers = family.towers.values()
    known = {*TEXT_INPUTS, *family.text_inputs, *(n for t in towers for n in (*t.inputs, *t.videos))}
    for name in given:
        if name not in known:
            raise UserError(
                field=name,
                problem=f"is no input of {model.config.model_type} here",
                hint=nearest(name, known),
            )
    for names in (names for tower in towers for names in (tower.inputs, tower.videos)):
        missing = [name for name in names if name not in given]
        if missing and len(missing) < len(names):
            raise UserError(field=missing[0], problem="is missing", hint=f"give {' and '.join(names)}")
    for field in ("input_ids", *(("mm_token_type_ids",) if "image_grid_thw" in given else ())):
        if field not in given and field in known:
            raise UserError(field=field, problem="is missing", hint="give the processor's output as it is")
    ids, vocabulary = given["input_ids"], model.config.get_text_config().vocab_size
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UserError(
            field="input_ids",
            value=int(ids.max()),
            problem=f"is outside the vocabulary of {vocabulary}",
            hint="use the tokenizer of this model",
        )


def _encoder_inputs(model: Any, tower: Tower, given: Mapping[str, Any]) -> StageInputs | None:
    """Concatenates images and videos, which share a tower; None without either."""
    kinds = [
        (names, field)
        for names, field in ((tower.inputs, tower.token), (tower.videos, tower.video_token))
        if names and names[0] in given
    ]
    parts = [[given[name] for name in names] for names, _ in kinds]
    tokens = [getattr(model.config, field) for field in (tower.token, tower.video_token) if field]
    placed = any(bool((given["input_ids"] == token).any()) for token in tokens)
    if placed != bool(parts):
        problem = (
            "has tokens of an encoder without its inputs" if placed else "has no token of an encoder's inputs"
        )
        raise UserError(field="input_ids", problem=problem, hint=f"give {tower.inputs[0]} with its tokens")
    if not parts:
        return None
    for inputs, *grids in parts:
        patches = int(grids[0].prod(-1).sum()) if "grid" in "".join(tower.inputs[1:]) else len(inputs)
        if patches != len(inputs):
            raise UserError(
                field=tower.inputs[0],
                problem=f"has {len(inputs)} rows, and {tower.inputs[1]} has {patches} patches",
                hint="give both as the processor returned them",
            )
    for names, field in kinds if "grid" in "".join(tower.inputs[1:]) else ():
        merged = model.config.vision_config.spatial_merge_size**2
        rows = int(given[names[1]].prod(-1).sum()) // merged
        check_token_count(names[0], count_tokens(model, given["input_ids"], field), rows)
    first, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
    keywords = ["grid_thw" if "grid" in name else name for name in tower.inputs[1:]]
    kwargs: dict[str, Any] = dict(zip(keywords, rest, strict=True))
    if not tower.features:
        kwargs = _inline_audio_kwargs(model, tower, given)
    return StageInputs(args=(first,), kwargs=kwargs)


def _inline_audio_kwargs(model: Any, tower: Tower, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mask of an audio tower, and which of its rows are no padding."""
    inputs = {name: given[name] for name in ("input_ids", *tower.inputs)}
    mask = capture_audio_mask(model.model, tower.module, inputs)
    audio = model.model._modules[tower.module]
    counts = audio._get_feat_extract_output_lengths(given[tower.inputs[1]].sum(-1))[1]
    most = audio.config.max_source_positions // 2
    valid = torch.arange(most, device=counts.device) < counts[:, None]
    return {"attention_mask": mask, "valid_rows": valid}


def count_tokens(model: Any, ids: Tensor, *fields: str) -> int:
    """Returns how many ids are placeholders, by their fields of the configuration."""
    return sum(int((ids == getattr(model.config, field)).sum()) for field in fields if field)


def check_token_count(name: str, tokens: int, rows: int) -> None:
    """Raises an error unless there is one placeholder for every row of an encoder."""
    if tokens != rows:
        raise UserError(
            field="input_ids",
            problem=f"has {tokens} tokens for the {rows} rows that {name} becomes",
            hint="give the processor's output as it is",
        )


def _text_kwargs(model: Any, family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keywords of the text model's call, but for embeddings, from the inner model's own forward."""
    dtype, ids = model.dtype, given["input_ids"]

    def embed(tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 1, dtype=dtype, device=tokens.device)

    features: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for tower in family.towers.values():
        for method, names, token in (
            (tower.features, tower.inputs, tower.token),
            (tower.video_features, tower.videos, tower.video_token),
        ):
            if not method or not names or names[0] not in given:
                continue
            rows = embed(ids[ids == getattr(model.config, token)])
            features[method] = lambda *args, rows=rows, **more: Features(rows, [rows])
            inputs |= {names[0]: ids, **{name: given[name] for name in names[1:]}}
    inputs |= {
        name: given[name]
        for name in (*TEXT_INPUTS, *family.text_inputs)
        if name in given and name != "labels"
    }
    call = capture_text_call(model.model, embed, features, inputs)
    return {name: value for name, value in call.items() if name not in TEXT_CALL}


def step_arguments(batches: Sequence[MicrobatchInputs]) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Returns positional and keyword arguments of `FillSchedule.step`: lists with an entry per microbatch."""
    names = dict.fromkeys(name for batch in batches for name in batch.kwargs)
    kwargs = {name: [batch.kwargs.get(name) for batch in batches] for name in names}
    encoders = {name: [batch.encoders[name] for batch in batches] for name in batches[0].encoders}
    args = [list(column) for column in zip(*(batch.args for batch in batches), strict=True)]
    return args, {**kwargs, **encoders, "target": [batch.target for batch in batches]}


def count_labels(batches: Sequence[MicrobatchInputs]) -> int:
    """Returns the number of labels with a loss; the first of a sequence is predicted by nothing."""
    return sum(int((batch.target[:, 1:] != IGNORED).sum()) for batch in batches if batch.target is not None)


def pack_documents(model: Any, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenates documents, each a processor's output of one sequence, into one; positions restart.

    Attention keeps to the document: transformers recognises restarts of `position_ids` without a mask.
    """
    for document in documents:
        mask = document.get("attention_mask")
        if len(document["input_ids"]) != 1 or (mask is not None and not bool(mask.all())):
            raise UserError(
                field="attention_mask",
                value=None if mask is None else tuple(mask.shape),
                problem="is of several sequences or pads one",
                hint="pack documents of one sequence, without padding",
            )
    family = find_family(model.config)
    positions = [_document_positions(model, family, document) for document in documents]
    packed: dict[str, Any] = {"position_ids": torch.cat(positions, -1)}
    for name in dict.fromkeys(name for document in documents for name in document):
        values = [document[name] for document in documents if document.get(name) is not None]
        if name == "labels":
            packed[name] = torch.cat([_without_first(value) for value in values], -1)
        elif name in ("input_ids", "mm_token_type_ids", "token_type_ids"):
            packed[name] = torch.cat(values, -1)
        elif values and name != "attention_mask":
            packed[name] = torch.cat(values)
    return packed


def _without_first(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[:, 0] = IGNORED
    return labels


def _document_positions(model: Any, family: Family, document: Mapping[str, Any]) -> Tensor:
    """Returns positions of a document: (1, n), or (4, 1, n) with the text's own first for three-axis rope."""
    ids = document["input_ids"]
    plain = torch.arange(ids.shape[1], device=ids.device)[None]
    if not hasattr(model.model, "get_rope_index"):
        return plain
    given = {name: value for name, value in document.items() if value is not None}
    axes = _text_kwargs(model, family, given).get("position_ids", plain[None].expand(3, 1, -1))
    return torch.cat([plain[None], axes])


def digest_batches(batches: Sequence[Mapping[str, Any]]) -> int:
    """Returns a number that other batches do not have, from all integers and a sample of other values."""
    content = sha256()
    for batch in batches:
        for name, value in sorted((name, value) for name, value in batch.items() if value is not None):
            content.update(name.encode())
            if not isinstance(value, Tensor):
                content.update(repr(value).encode())
                continue
            flat = value.detach().flatten()
            if value.is_floating_point():
                flat = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].double()
            content.update(repr(tuple(value.shape)).encode() + flat.cpu().numpy().tobytes())
    return int.from_bytes(content.digest()[:7], "big")
