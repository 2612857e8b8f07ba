"""Tiny configurations of real transformers classes, their microbatches, and what one process computes.

`build(case)` returns the model, `microbatches(case)` processor-like dicts, `reference(case)` loss
and gradients of one process: documents of a packed microbatch run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from optimus.hf.inputs import IGNORED, pack_documents

IMAGE, VIDEO, AUDIO = 150, 151, 152
DTYPE = torch.float64
TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 2, 1]}}
INTERLEAVED = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
QWEN_VISION = {
    "depth": 4,
    "num_heads": 4,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
}
WINDOWS = {"window_size": 8, "fullatt_block_indexes": [1, 3]}
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "layer_norm_eps": 1e-3,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 153,
    "vision_end_token_id": 154,
}


def _qwen(name: str, vision: dict[str, Any], text: dict[str, Any], tied: bool = False) -> Any:
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **text},
        vision_config={**QWEN_VISION, **vision},
        tie_word_embeddings=tied,
        **SPECIAL,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _pretrained(name: str, vision: dict[str, Any], text: dict[str, Any], **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        vision_config={**VISION, **vision}, text_config={**TEXT, **text}, **more
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _llava(vision: dict[str, Any], text: str, strategy: str) -> Any:
    return _pretrained(
        "Llava",
        vision,
        {"model_type": text},
        image_token_index=IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=False,
    )


def _internvl() -> Any:
    vision = {
        **VISION,
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "use_qk_norm": True,
        "attention_bias": True,
        "norm_type": "rms_norm",
        "layer_scale_init_value": 0.3,
    }
    config = transformers.InternVLConfig(
        vision_config=vision,
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _gemma3() -> Any:
    text = {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
    }
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False}
    return _pretrained(
        "Gemma3",
        vision,
        text,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=153,
        eoi_token_index=154,
    )


def _qwen2_audio() -> Any:
    config = transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **WHISPER},
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_index=AUDIO,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _omni() -> Any:
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config={**WHISPER, "n_window": 5, "output_dim": 32},
        vision_config={**QWEN_VISION, **WINDOWS},
        text_config={**TEXT, **MROPE},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        vision_start_token_id=153,
        vision_end_token_id=154,
        audio_start_token_id=155,
        audio_end_token_id=156,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


SIGLIP, CLIP = {"model_type": "siglip_vision_model"}, {"model_type": "clip_vision_model"}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen("Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2}, MROPE),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", WINDOWS, MROPE),
    "qwen3_vl": lambda: _qwen("Qwen3VL", DEEPSTACK, INTERLEAVED),
    "qwen3_vl_tied": lambda: _qwen("Qwen3VL", DEEPSTACK, INTERLEAVED, tied=True),
    "qwen3_vl_moe": lambda: _qwen("Qwen3VLMoe", DEEPSTACK, {**INTERLEAVED, **EXPERTS}),
    "llava_siglip_qwen2": lambda: _llava(SIGLIP, "qwen2", "full"),
    "llava_siglip_llama": lambda: _llava(SIGLIP, "llama", "full"),
    "llava_clip_llama": lambda: _llava(CLIP, "llama", "default"),
    "internvl": _internvl,
    "gemma3": _gemma3,
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _omni,
}
CASES = tuple(case for case in MODELS if case != "llava_siglip_llama")  # pairs of towers and LLMs cover it
PACKED = ("qwen3_vl_moe", "gemma3")


def model_class(case: str) -> Any:
    return type(MODELS[case]())


def build(case: str, *, attention: str = "sdpa", dtype: torch.dtype = DTYPE) -> Any:
    """Returns a model in eval mode with all weights at std 0.2, norms around their neutral value."""
    torch.manual_seed(0)
    model = MODELS[case]().to(dtype).eval()
    model.set_attn_implementation(attention)
    if "moe" in case:
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name or name.endswith(("ln_q.weight", "ln_post.weight"))
            parameter.copy_(noise + (is_norm and name.endswith("weight") and case != "gemma3"))
    return model


GRIDS = {  # of images, then of videos, of each document
    "two": ([[1, 6, 10], [1, 4, 4]], []),
    "text": ([], []),
    "one": ([[1, 4, 8]], []),
    "video": ([[1, 4, 4]], [[2, 4, 6]]),
    "three": ([[1, 2, 8], [1, 4, 8], [1, 6, 4]], []),
}
# Each microbatch is a list of documents, packed into one sequence; those of a tuple are padded rows.
BATCH: list[list[str] | tuple[str, ...]] = [["two"], ["text"], ["video"], ["one", "three"], ("one", "text")]


def _document(case: str, kind: str, generator: torch.Generator) -> dict[str, Any]:
    images, videos = GRIDS[kind]
    if case.startswith("qwen") and case != "qwen2_audio":
        return _qwen_document(case, images, videos, generator)
    runs: list[tuple[int, int]] = []
    more: dict[str, Any] = {}
    count = len(images) + len(videos)
    if case == "qwen2_audio":
        lengths = [40, 27, 34][:count]
        runs = [(AUDIO, ((length - 1) // 2 + 1 - 2) // 2 + 1) for length in lengths]
        more = _audio(lengths, generator)
    else:
        runs = [(IMAGE, 4 if case in ("gemma3", "internvl") else 16)] * count
        if count:
            more = {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator, dtype=DTYPE)}
    ids, labels = _tokens(runs, generator)
    if case == "gemma3":
        more["token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **more}


def _audio(lengths: list[int], generator: torch.Generator) -> dict[str, Any]:
    if not lengths:
        return {}
    features = torch.randn(len(lengths), 8, 40, generator=generator, dtype=DTYPE)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    return {"input_features": features * mask[:, None], "feature_attention_mask": mask.long()}


def _qwen_document(case: str, images: Any, videos: Any, generator: torch.Generator) -> dict[str, Any]:
    runs, more = [], {}
    for token, name, grid in ((IMAGE, "image", images), (VIDEO, "video", videos)):
        if not grid:
            continue
        frames = [[1, h, w] for t, h, w in grid for _ in range(t)] if "qwen3" in case else grid
        runs += [(token, t * h * w // 4) for t, h, w in frames]
        key = "pixel_values" if name == "image" else "pixel_values_videos"
        rows = sum(t * h * w for t, h, w in grid)
        more[key] = torch.randn(rows, 24, generator=generator, dtype=DTYPE)
        more[f"{name}_grid_thw"] = torch.tensor(grid)
    if videos and case == "qwen2_5_vl":
        more["second_per_grid_ts"] = torch.tensor([1.5] * len(videos))
    marks = {IMAGE: (153, 154), VIDEO: (153, 154), AUDIO: (155, 156)}
    if case == "qwen2_5_omni" and images:
        runs.append((AUDIO, 7))
        more |= _audio([27], generator)
    ids, labels = _tokens(runs, generator, marks)
    if case == "qwen2_5_omni":
        more["attention_mask"] = torch.ones_like(ids)
        if videos:
            more["video_second_per_grid"] = torch.tensor([1.5] * len(videos))
    else:
        more["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"input_ids": ids, "labels": labels, **more}


def _tokens(
    runs: list[tuple[int, int]], generator: torch.Generator, marks: Any = None
) -> tuple[Tensor, Tensor]:
    """Returns ids with runs of placeholders between texts of random lengths, and labels of some text."""

    def text() -> Tensor:
        length = int(torch.randint(2, 9, (), generator=generator))
        return torch.randint(10, 100, (length,), generator=generator)

    pieces = [text()]
    for token, length in runs:
        begin, end = (marks or {}).get(token, (153, 154))
        pieces += [torch.tensor([begin]), torch.full((length,), token), torch.tensor([end]), text()]
    ids = torch.cat(pieces)[None]
    labels = ids.clone()
    labels[ids >= IMAGE] = IGNORED
    labels[:, : int(torch.randint(0, 3, (), generator=generator))] = IGNORED
    return ids, labels


def documents(case: str) -> list[list[dict[str, Any]]]:
    """Returns documents of every microbatch."""
    generator = torch.Generator().manual_seed(9)
    batches = [[_document(case, kind, generator) for kind in kinds] for kinds in BATCH]
    return [
        _pad(docs) if isinstance(kinds, tuple) else docs for docs, kinds in zip(batches, BATCH, strict=True)
    ]


def _pad(docs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one document whose rows are documents, padded on the right."""
    longest = max(document["input_ids"].shape[1] for document in docs)

    def padded(name: str, fill: int) -> Tensor:
        rows = [document.get(name, torch.ones_like(document["input_ids"])) for document in docs]
        return torch.cat([functional.pad(row, (0, longest - row.shape[1]), value=fill) for row in rows])

    fills = {"input_ids": 0, "labels": IGNORED, "mm_token_type_ids": 0, "token_type_ids": 0}
    rows = {name: padded(name, fill) for name, fill in fills.items() if name in docs[0]}
    rest = {name: value for document in docs for name, value in document.items() if name not in fills}
    return [{**rest, **rows, "attention_mask": padded("attention_mask", 0)}]


def microbatches(case: str) -> list[dict[str, Any]]:
    """Returns processor-like dicts with labels: unequal images, text only, a video (Qwen), a packed pair,
    a padded pair."""
    with torch.device("meta"):
        model = MODELS[case]()
    return [docs[0] if len(docs) == 1 else pack_documents(model, docs) for docs in documents(case)]


def sum_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def reference(
    case: str, model: Any = None, *, packed: bool = False, reverse: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Returns the batch's loss and gradients by parameter name of one process of transformers.

    Documents of a packed microbatch run alone, unless `packed` or in PACKED: the router loss couples them,
    and eager attention and Gemma's norms sum in float32.
    """
    model = build(case) if model is None else model
    router = "moe" in case
    batches = [[batch] for batch in microbatches(case)] if packed or case in PACKED else documents(case)
    flat = [document for docs in batches for document in docs][:: -1 if reverse else 1]
    count = sum(int((document["labels"][:, 1:] != IGNORED).sum()) for document in flat)
    total = 0.0
    for document in flat:
        inputs = {name: value for name, value in document.items() if name != "labels"}
        out = model(**inputs, use_cache=False)
        loss = sum_of_labels(out.logits, document["labels"]) / count
        if router:
            loss = loss + model.config.text_config.router_aux_loss_coef * out.aux_loss.double() / len(batches)
        if loss.requires_grad:  # not if all that trains is an encoder without inputs
            loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
