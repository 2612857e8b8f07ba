"""Loads the processor of a model folder: tokenizer, chat template, image processor, feature extractor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import ProcessorMixin

from optimus.errors import UserError

CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
VIDEOS = "video_processor"  # its classes need torchvision, which the processors of images do not


def load_processor(folder: Path) -> Any:
    """Returns the processor of a folder, without its part for videos.

    Nothing is downloaded, and no code of the folder runs but its chat template, which is sandboxed.
    """
    base = _find_class(folder)
    parts: list[str] = base.get_attributes()  # in the order of its arguments
    if VIDEOS in parts[:-1]:
        raise UserError(
            field="--model",
            value=str(folder),
            problem=f"has a {base.__name__}, which needs its part for videos, and that needs torchvision",
            hint="use a model whose processor can do without, such as Qwen2.5-VL or Qwen2-Audio",
        )

    def get_attributes(cls: type[Any]) -> list[str]:
        return [name for name in parts if name != VIDEOS]

    without_videos: Any = type(base.__name__, (base,), {"get_attributes": classmethod(get_attributes)})
    try:
        processor = without_videos.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any of its parts
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            field="--model",
            value=str(folder),
            problem=f"has no processor that transformers can load: {first}",
            hint="give the folder with the model's tokenizer and preprocessor files",
        ) from None
    if not processor.chat_template:
        processor.chat_template = processor.tokenizer.chat_template
    if not processor.chat_template:
        raise UserError(
            field="--model",
            value=str(folder),
            problem="has no chat template",
            hint="add chat_template.jinja, as folders of instruction-tuned models have",
        )
    return processor


def _find_class(folder: Path) -> type[Any]:
    """Returns the class of transformers that the folder's files name."""
    for name in CLASS_FILES:
        try:
            named = json.loads((folder / name).read_bytes()).get("processor_class")
        except (OSError, ValueError, AttributeError):
            continue
        found = getattr(transformers, named, None) if isinstance(named, str) else None
        if isinstance(found, type) and issubclass(found, ProcessorMixin):
            return found
    raise UserError(
        field="--model",
        value=str(folder),
        problem=f"names no processor of transformers {transformers.__version__}",
        hint=f"give a model folder with {CLASS_FILES[0]}; its processor_class is a class of transformers",
    )
