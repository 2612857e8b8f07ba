"""Chat data sets with real files, and model folders with real processor classes, as the hub has them."""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast

VOCABULARY = 288
ENDINGS = ("png", "jpg", "webp")
CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for content in message['content'] %}\
{% if content['type'] == 'image' %}IMAGE{% elif content['type'] == 'audio' %}AUDIO\
{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN_IMAGE, QWEN_AUDIO = "<|vision_start|><|image_pad|><|vision_end|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
CHAT = ["<s>", "<|im_start|>", "<|im_end|>"]
QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
CLIP = {"do_center_crop": True, "crop_size": {"height": 28, "width": 28}, "size": {"shortest_edge": 28}}
QWEN_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}, "patch_size": 14}
# Model type: processor, its file, preprocessor_config.json, special tokens, an item in its template
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str], str]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLProcessor", {}, {"image_processor_type": "Qwen2VLImageProcessor", **QWEN_SIZE},
        QWEN_TOKENS, QWEN_IMAGE,
    ),
    "qwen3_vl": (
        "Qwen3VLProcessor", {},
        {"image_processor_type": "Qwen2VLImageProcessor", **QWEN_SIZE, "patch_size": 16},
        QWEN_TOKENS, QWEN_IMAGE,
    ),
    "llava": (
        "LlavaProcessor",
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_processor_type": "CLIPImageProcessor", **CLIP}, ["<image>"], "<image>\n",
    ),
    "llava_siglip": (
        "LlavaProcessor", {"patch_size": 4, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
        ["<image>"], "<image>\n",
    ),
    "internvl": (
        "InternVLProcessor", {"image_seq_length": 256},
        {
            "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28},
            "crop_to_patches": True, "max_patches": 6,
        },
        ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"], "<IMG_CONTEXT>",
    ),
    "gemma3": (
        "Gemma3Processor", {"image_seq_length": 16},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"], "<start_of_image>",
    ),
    "qwen2_audio": (
        "Qwen2AudioProcessor", {},
        {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 4, "feature_size": 8},
        ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], QWEN_AUDIO,
    ),
}  # fmt: skip

NAMED = {  # attributes of the tokenizer
    "gemma3": ("boi_token", "eoi_token", "image_token"),
    "internvl": ("start_image_token", "end_image_token", "context_image_token", "video_token"),
}
ITEMS = ("<image_soft_token>", "<|image_pad|>", "<IMG_CONTEXT>", "<image>", "<|AUDIO|>")


def write_folder(folder: Path, kind: str) -> Path:
    """Writes a model folder of a kind, with the class's default sizes and its tokens in the vocabulary."""
    processor, options, preprocessor, tokens, item = FOLDERS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(CHAT + tokens)
    if kind in NAMED:
        tokenizer = _tokenizer(
            CHAT + tokens, extra_special_tokens=dict(zip(NAMED[kind], tokens, strict=True))
        )
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(kind.removesuffix("_siglip"))  # sizes of the class
    placeholder = next(token for token in ITEMS if token in tokens)
    name = "audio_token_id" if kind == "qwen2_audio" else "image_token_id"
    setattr(config, name, tokenizer.convert_tokens_to_ids(placeholder))
    if kind.startswith("qwen") and hasattr(config, "vision_config"):
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    config.save_pretrained(folder)
    template = CHATML.replace("IMAGE", item).replace("AUDIO", item)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor, **options}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": processor, **preprocessor})
    )
    return folder


def write_weights(folder: Path, kind: str, dtype: Any) -> Path:
    """Writes a model folder of a kind whose model is tiny and has weights."""
    import hf_models
    import torch

    write_folder(folder, kind)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    preset = "llava_siglip_llama" if kind == "llava_siglip" else kind
    config = hf_models.MODELS[preset]().config
    config.text_config.vocab_size = VOCABULARY
    if kind == "llava_siglip":
        config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
        config.vision_config.image_size = 28
    else:
        config.vision_config.patch_size = FOLDERS[kind][2]["patch_size"]
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        for name, token in zip(names, QWEN_TOKENS, strict=True):
            setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    if kind == "qwen2_5_vl":
        config.vision_config.window_size = 56
    torch.manual_seed(0)
    model = hf_models.model_class(preset)(config).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder


def _tokenizer(special: list[str], **named: Any) -> Any:
    """A byte-level BPE with a few merges, so that any text has tokens and neighbours matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("Ċ", "Ċ"), ("i", "n"), ("Ġ", "a"), ("c", "at")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(BPE({word: number for number, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=special[1:], **named,
    )  # fmt: skip


def chat(*content: Any, **columns: Any) -> dict[str, Any]:
    turns = [*content] if len(content) % 2 == 0 else [*content, "the cat"]
    roles = ["user", "assistant"] * len(turns)
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)],
        **columns,
    }


def write_image(path: Path, size: tuple[int, int], **options: Any) -> None:
    noise = np.random.default_rng(sum(size)).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, **options)


def write_wav(path: Path, samples: int, rate: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(samples, dtype=np.int16).tobytes())


def write_data_set(folder: Path, samples: int, images: int = 12) -> Path:
    """A quarter of the samples are text, one of every 1,000 is broken, and images have a long tail."""
    generator = random.Random(0)
    folder.mkdir(exist_ok=True)
    names = []
    for place in range(images):
        names.append(f"{place}.{ENDINGS[place % 3]}")
        write_image(folder / names[-1], (round(40 * 1.25 ** (place % 12)), 60 + place // 12))
    with (folder / "train.jsonl").open("w") as file:
        for place in range(samples):
            named = [generator.choice(names) for _ in range(generator.choice((0, 1, 1, 2)))]
            row = chat("<image>" * len(named) + "what is in " * generator.randrange(1, 30), images=named)
            if place % 1000 == 500:
                row["images"] = ["missing.png"] * max(1, len(named))
            file.write(json.dumps(row) + "\n")
    return folder / "train.jsonl"
