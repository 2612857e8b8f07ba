"""Makes what a first training run needs: images with captions, and the folder of a tiny Qwen2.5-VL.

    python examples/make_captions.py photos tiny-qwen

writes 300 images of a coloured shape and `photos/train.jsonl` with a caption for each, and a model folder as
`save_pretrained` writes it, with random weights, tokenizer, chat template and image processor.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

IMAGES = 300
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
SHAPES = ("circle", "square", "triangle")
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for content in message['content'] %}\
{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": 257,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1, 3],
}  # fmt: skip


def write_images(folder: Path) -> None:
    """Writes images of different sizes, and a line with question and caption for each."""
    folder.mkdir(exist_ok=True)
    drawn, lines = random.Random(0), []
    for number in range(IMAGES):
        colour, background = drawn.sample(COLOURS, 2)
        shape, size = drawn.choice(SHAPES), (drawn.randrange(56, 280), drawn.randrange(56, 168))
        image = Image.new("RGB", size, background)
        box = (size[0] // 4, size[1] // 4, 3 * size[0] // 4, 3 * size[1] // 4)
        pen = ImageDraw.Draw(image)
        if shape == "circle":
            pen.ellipse(box, fill=colour)
        elif shape == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), (size[0] // 2, box[1])], fill=colour)
        image.save(folder / f"{number:03}.png")
        messages = [
            {"role": "user", "content": "<image>What is in the picture?"},
            {"role": "assistant", "content": f"A {colour} {shape} on {background}."},
        ]
        lines.append(json.dumps({"messages": messages, "images": [f"{number:03}.png"]}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


def write_model(folder: Path) -> None:
    """Writes a model folder with random weights; letters are its tokens."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, tokens), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": 264}, vision_config=VISION, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 280 * 280},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    write_images(Path(sys.argv[1]))
    write_model(Path(sys.argv[2]))
    print(f"wrote {IMAGES} images and train.jsonl to {sys.argv[1]}, a model to {sys.argv[2]}")
