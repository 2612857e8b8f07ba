"""Says which models our own layers train: whatever is not listed here is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

from optimus.errors import UserError, one_of
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Encoder, Llm, Model

# Families (`model_type` of config.json) that a test compares with transformers as whole models: losses and
# gradients, with every constant. Value: the test's file.
COMPARED_FAMILIES: dict[str, str] = dict.fromkeys(
    ("llava", "qwen2_5_vl", "qwen3_vl"), "tests/test_own_families.py"
)

GELU_APPROXIMATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}  # torch's, by name
PLAN_ONLY = "can be planned, but the engine does not run it yet"


def find_untrainable(model: Model) -> UserError | None:
    """Returns why our own layers cannot train a model, or None if they can."""
    if model.family and model.family not in COMPARED_FAMILIES:
        compared = f"compared are {one_of(sorted(COMPARED_FAMILIES))}; " if COMPARED_FAMILIES else ""
        return UserError(
            field="model.family",
            value=model.family,
            problem="can be planned, but no test compares our own layers with this family of transformers",
            hint=f"{compared}only plan it, or run its transformers modules in FillSchedule",
        )
    deep = next((encoder for encoder in model.encoders if encoder.deepstack_layers), None)
    if deep is not None and len(model.encoders) > 1:
        return UserError(
            field=f"model.{deep.name}.deepstack_layers",
            value=deep.deepstack_layers,
            problem=f"can be planned, but the engine does not run it with {len(model.encoders)} encoders yet",
            hint="leave out the other encoders, or only plan",
        )
    return next((error for error in map(find_unsupported, model.modules) if error is not None), None)


def refuse_untrainable(model: Model) -> None:
    """Raises an error that names the first field that our own layers cannot train."""
    error = find_untrainable(model)
    if error is not None:
        raise error


def find_unsplittable(llm: Llm) -> UserError | None:
    """Returns why our own layers cannot split the sequences of an LLM over ranks (cp), or None."""
    if llm.stack.attention.causal:
        return None
    return UserError(
        field=f"model.{llm.name}.stack.attention.causal",
        value=False,
        problem="can be planned with cp, but the engine splits sequences of causal attention only",
        hint=f"plan with {llm.name}=cp1",
    )


# Fields of a job's model that say how it is trained, not what it computes.
_OF_JOBS = ("name", "source", "train", "recompute", "precision", "dropout", "dropout_rate")


def refuse_other_model(model: Model, folder: Path) -> None:
    """Raises unless a job's model is that of a folder's config.json; the error names the first difference."""
    for field, ours, theirs in _differences(model, read_hf_config(folder / "config.json"), "model"):
        raise UserError(
            field=field,
            value=ours,
            problem=f"is {theirs} in the model folder",
            hint="plan and train the job with this folder's config.json as its model",
            file=str(folder / "config.json"),
        )


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields fields of nested dataclasses that differ, with both values."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            if field.name not in _OF_JOBS:
                pair = getattr(ours, field.name), getattr(theirs, field.name)
                yield from _differences(*pair, f"{path}.{field.name}")
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif ours != theirs:
        yield path, ours, theirs


def find_unsupported(module: Encoder | Llm) -> UserError | None:
    """Returns an error about the first field of a module that our own layers cannot honour."""
    for field, value, supported in _limits(module):
        if not supported:
            name, hint = f"model.{module.name}.{field}", "leave it out, or only plan"
            return UserError(field=name, value=value, problem=PLAN_ONLY, hint=hint)
    return None


def _limits(module: Encoder | Llm) -> Iterator[tuple[str, object, bool]]:
    """Yields fields, their values, and whether our layers honour them."""
    stack, attention = module.stack, module.stack.attention
    rope, mlp = attention.rope, stack.mlp
    yield "stack.experts", "given", stack.experts is None
    yield "stack.attention.latent", "given", attention.latent is None
    yield "stack.attention.linear", "given", attention.linear is None
    yield "stack.attention.output_gate", True, not attention.output_gate
    yield "stack.attention.kv_projection", attention.kv_projection, attention.kv_projection == "both"
    yield "stack.variants", "given", not stack.variants
    yield "stack.mlp.merge", mlp.merge, mlp.merge == 1
    yield "stack.linears", "given", not stack.linears
    yield "stack.extra_parameters", stack.extra_parameters, not stack.extra_parameters
    yield "stack.attention.rope.scaling", rope.scaling and rope.scaling.type, rope.scaling is None
    yield "stack.attention.rope.local_theta", rope.local_theta, rope.local_theta is None
    yield "stack.attention.rope.partial_factor", rope.partial_factor, rope.partial_factor == 1
    yield "stack.attention.rope.interleaved", True, not rope.interleaved
    takes_turns = rope.interleaved_sections and len(rope.sections) != 3
    yield "stack.attention.rope.interleaved_sections", True, not takes_turns
    kind, over = attention.qk_norm_kind, attention.qk_norm_over
    yield "stack.attention.qk_norm_kind", kind, not attention.qk_norm or kind == "rmsnorm"
    yield "stack.attention.qk_norm_over", over, not attention.qk_norm or over == "head"
    has_default_scale = attention.softmax_scale in (None, attention.score_dim**-0.5)
    yield "stack.attention.softmax_scale", attention.softmax_scale, has_default_scale
    yield "stack.attention.softcap", attention.softcap, attention.softcap is None
    activations = ("silu",) if mlp.gated else tuple(GELU_APPROXIMATIONS)
    yield "stack.mlp.activation", mlp.activation_name, mlp.activation_name in activations
    yield "stack.norm_offset", True, not stack.norm_offset
    yield "stack.post_norms", True, not stack.post_norms
    yield "stack.layer_scale", True, not stack.layer_scale
    yield from _encoder_limits(module) if isinstance(module, Encoder) else _llm_limits(module)


def _encoder_limits(encoder: Encoder) -> Iterator[tuple[str, object, bool]]:
    projector, rope = encoder.projector, encoder.stack.attention.rope
    layers, deep = encoder.deepstack_layers, bool(encoder.deepstack_layers)
    fitted = encoder.interpolates_positions
    in_order = encoder.feeds == tuple(range(len(encoder.feeds)))
    yield "feeds", encoder.feeds, encoder.feeds == (0,) or (in_order and deep)
    ascending = all(before < after for before, after in pairwise(layers))
    yield "deepstack_layers", layers, len(encoder.feeds) == 1 + len(layers) and ascending
    yield "stack.attention.rope.sections", rope.sections, not rope.sections
    yield "stack.attention.rotary", True, not (encoder.rotary and encoder.positions and not fitted)
    yield "stack.attention.rotary", True, not (encoder.rotary and encoder.modality == "audio")
    yield "class_token", True, not encoder.class_token
    yield "pre_norm", True, not encoder.pre_norm
    yield "drops_first_row", True, not encoder.drops_first_row
    is_square = encoder.positions > 0 and isqrt(encoder.positions) ** 2 == encoder.positions
    yield "interpolates_positions", True, not fitted or (is_square and encoder.modality != "audio")
    yield "projector.deepstack_norm", projector.deepstack_norm, projector.deepstack_norm == deep
    yield "projector.norm", projector.norm, (projector.norm is not None) == deep
    yield "projector.concatenates", False, projector.concatenates or not deep
    supported = len(projector.widths) == 1 or projector.activation in GELU_APPROXIMATIONS
    yield "projector.activation", projector.activation, supported


def _llm_limits(llm: Llm) -> Iterator[tuple[str, object, bool]]:
    attention = llm.stack.attention
    yield "stack.attention.window_tokens", attention.window_tokens, attention.window_tokens is None
    yield "stack.attention.rotary", attention.rotary, attention.rotary in (None, not llm.positions)
    yield "embedding_scale", llm.embedding_scale, llm.embedding_scale == 1
    yield "per_layer_inputs", "given", llm.per_layer_inputs is None
    yield "logit_softcap", llm.logit_softcap, llm.logit_softcap is None
