"""Counts the tokens of a sample as the model's own processor does, from the sizes of its files alone.

A chat template places one placeholder per file, and the processor replaces it by as many as the file has
tokens, with text between or around them in some families. The replacement depends on the size of an image and
on the length of a sound, not on their contents: it is taken from the processor, run once on a blank of that
size, and kept.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig

from optimus.data.chat_format import ChatSample, MediaReference
from optimus.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, Span
from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_headers import (
    MediaFolder,
    check_audio,
    count_audio_samples,
    decode_image,
    read_image_size,
)
from optimus.data.processor import load_processor
from optimus.errors import UserError
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Encoder

KEPT_SIZES = 65536  # images whose replacement is kept
PROBES = ((56, 84), (333, 500), (1200, 700), (90, 640), (700, 1900), (48, 48))  # heights and widths
MODALITIES = {"image": "vision", "audio": "audio"}

Replacement = tuple[str, int]  # text with every run of an item's tokens cut to one, and their number


@dataclass(frozen=True, kw_only=True)
class SampleLengths:
    """Text tokens of a sample, the LLM tokens of every item by encoder, and tokens that enter the loss."""

    text: int
    items: dict[str, tuple[int, ...]]
    labels: int = 0

    @property
    def tokens(self) -> int:
        return self.text + sum(map(sum, self.items.values()))


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """Tokens of a sample. An item's tokens are adjacent, and cut to one here."""

    ids: list[int]
    is_answer: list[bool]  # said by the assistant, and no item's
    item_lengths: list[int]  # of every file

    @property
    def labels(self) -> int:
        """How many tokens are predicted: the first of a sample is not."""
        return sum(self.is_answer[1:])


class TokenCounter:
    """Counts tokens of samples for the model of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        model = read_hf_config(folder / "config.json")
        self.processor: Any = load_processor(folder)
        self._template = ChatTemplate(self.processor)
        self._item_tokens = _find_item_tokens(folder, self.processor)
        self.encoders = {
            kind: encoder
            for kind in self._item_tokens
            for encoder in model.encoders
            if encoder.modality == MODALITIES[kind]
        }
        if not self.encoders:
            raise UserError(
                field="--model",
                value=str(folder),
                problem=f"has a processor, {type(self.processor).__name__}, without placeholder tokens",
                hint="give the folder of a model that reads images or sounds between its text tokens",
            )
        self._image_replacement = lru_cache(KEPT_SIZES)(self._replace_image)
        self._audio_replacement = _MonotoneCache(self._replace_audio)
        for kind in self.encoders:
            self._compare_with_processor(kind)

    def __reduce__(self) -> tuple[type[TokenCounter], tuple[Path]]:
        return TokenCounter, (self._folder,)  # a worker process loads its own

    def count(self, sample: ChatSample, folder: MediaFolder) -> SampleLengths:
        """Returns the lengths of a sample; raises SkippedSample if it cannot be used."""
        return self._count(sample, [self._measure(item, folder) for item in sample.media])

    def tokenize(self, sample: ChatSample, folder: MediaFolder) -> ChatTokens:
        """Returns the tokens of a sample; raises SkippedSample if it cannot be used."""
        return self._tokenize(sample, [self._measure(item, folder) for item in sample.media])

    def _count(self, sample: ChatSample, replacements: list[Replacement]) -> SampleLengths:
        tokens = self._tokenize(sample, replacements)
        items: dict[str, tuple[int, ...]] = {}
        for item, length in zip(sample.media, tokens.item_lengths, strict=True):
            encoder = self.encoders[item.kind]
            items[encoder.name] = (*items.get(encoder.name, ()), *_split_tiles(encoder, length))
        text = sum(token not in self.item_ids for token in tokens.ids)
        return SampleLengths(text=text, items=items, labels=tokens.labels)

    def _tokenize(self, sample: ChatSample, replacements: list[Replacement]) -> ChatTokens:
        text, answers = self._template.render(sample)
        matches = list(self._placeholders.finditer(text))
        if [self._kinds[match[0]] for match in matches] != [item.kind for item in sample.media]:
            detail = f"the template places {len(matches)} placeholders for {len(sample.media)} files"
            raise SkippedSample(SkipReason.PLACEHOLDER, detail)
        expanded, answers = _replace(text, matches, [text for text, _ in replacements], answers)
        bos = self.processor.tokenizer.bos_token  # as apply_chat_template: none is added to one that is there
        is_begun = bos is not None and text.startswith(bos)
        output = self.processor.tokenizer(
            expanded, add_special_tokens=not is_begun, return_offsets_mapping=True
        )
        ids: list[int] = output["input_ids"]
        is_answer = _find_overlaps(output["offset_mapping"], answers)
        return ChatTokens(
            ids=ids,
            is_answer=[
                said and token not in self.item_ids for said, token in zip(is_answer, ids, strict=True)
            ],
            item_lengths=[length for _, length in replacements],
        )

    def _compare_with_processor(self, kind: str) -> None:
        """Raises unless a conversation with two blanks has the tokens that the processor makes of it."""
        height, width = PROBES[1]
        value: Any = Image.new("RGB", (width, height))
        if kind == "audio":
            value = np.zeros(self.processor.feature_extractor.sampling_rate, dtype=np.float32)

        def converse(item: dict[str, Any]) -> tuple[dict[str, Any], ...]:
            text = {"type": "text", "text": "What is it?\n"}
            contents = ([item, text], [text], [text, item], [text])
            roles = ("user", "assistant") * 2
            return tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))

        media = (MediaReference(kind=kind, path=""),) * 2
        try:
            measured = (
                self._audio_replacement(len(value)) if kind == "audio" else self._replace_image(height, width)
            )
            ours = self._count(ChatSample(messages=converse({"type": kind}), media=media), [measured] * 2)
            messages = list(converse({"type": kind, kind: value}))
            output = self.processor.apply_chat_template(messages, tokenize=True, return_dict=True)
            text = sum(token not in self.item_ids for token in output["input_ids"][0])
            theirs, expected = (
                (text, len(output["input_ids"][0]) - text),
                (ours.text, ours.tokens - ours.text),
            )
            problem = f"counts {theirs} tokens of text and of items where {expected} were expected"
            is_equal = theirs == expected
        except (SkippedSample, *TEMPLATE_ERRORS) as error:
            problem, is_equal = f"cannot be used for a conversation with two items: {error}", False
        if not is_equal:
            raise UserError(
                field="--model",
                value=str(self._folder),
                problem=f"has a {type(self.processor).__name__} that {problem}",
                hint="use a model of a family that docs/data.md lists as compared",
            )

    def _measure(self, item: MediaReference, folder: MediaFolder) -> Replacement:
        if item.kind not in self.encoders:
            raise SkippedSample(SkipReason.UNSUPPORTED, f"{item.kind}, for which the model has no encoder")
        path = folder.find(item.path)
        try:
            if item.kind == "image":
                replacement = self._image_replacement(*read_image_size(path, folder.max_pixels))
            else:
                rate = self.processor.feature_extractor.sampling_rate
                replacement = self._audio_replacement(count_audio_samples(path, rate, folder.max_audio_s))
        except (ValueError, ZeroDivisionError) as error:  # of the processor: sizes that it refuses
            raise SkippedSample(SkipReason.PROCESSOR, f"{path.name}: {error}") from None
        if folder.decode:
            (decode_image if item.kind == "image" else check_audio)(path)
        return replacement

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Kinds by placeholder of the processor, of videos too, and by token of an item."""
        named = {kind: getattr(self.processor, f"{kind}_token", None) for kind in ("image", "audio", "video")}
        kinds = {str(token): kind for kind, token in named.items() if token}
        return {**{token: kind for kind, token in self._item_tokens.items()}, **kinds}

    @cached_property
    def item_ids(self) -> frozenset[int]:
        return frozenset(self.processor.tokenizer.convert_tokens_to_ids(list(self._item_tokens.values())))

    @cached_property
    def _placeholders(self) -> re.Pattern[str]:
        return re.compile("|".join(f"({re.escape(token)})" for token in self._kinds))

    def _replace_image(self, height: int, width: int) -> Replacement:
        if self._image_arithmetic is not None:
            text, more = self._image_arithmetic
            return text, self._count_image_tokens(height, width) - more
        return self._run("image", images=[Image.new("RGB", (width, height))])

    def _replace_audio(self, samples: int) -> Replacement:
        rate = self.processor.feature_extractor.sampling_rate
        return self._run("audio", audio=[np.zeros(samples, dtype=np.float32)], sampling_rate=rate)

    def _run(self, kind: str, **inputs: Any) -> Replacement:
        """Runs the processor on one item and returns what it puts in the place of the placeholder."""
        token, placeholder = self._item_tokens[kind], getattr(self.processor, f"{kind}_token")
        output = self.processor(text=[placeholder], return_text_replacement_offsets=True, **inputs)
        (replaced,) = output["text_replacement_offsets"][0]
        text: str = replaced["replacement"]
        return re.sub(f"(?:{re.escape(token)})+", lambda _: token, text), text.count(token)

    def _count_image_tokens(self, height: int, width: int) -> int:
        (count,) = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])[
            "num_image_tokens"
        ]
        return int(count)

    @cached_property
    def _image_arithmetic(self) -> tuple[str, int] | None:
        """Text of a replacement and tokens of it that the processor's arithmetic for serving counts too.

        None unless both are the same at all probes: the arithmetic is wrong or missing in some families.
        """
        found = set()
        try:
            for height, width in PROBES:
                text, count = self._run("image", images=[Image.new("RGB", (width, height))])
                found.add((text, self._count_image_tokens(height, width) - count))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        return found.pop() if len(found) == 1 else None


def _find_item_tokens(folder: Path, processor: Any) -> dict[str, str]:
    """Returns, by kind, the token whose embeddings the model replaces by an item's."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config = getattr(config, "thinker_config", config)
    tokens = {}
    for kind in MODALITIES:
        ids = [getattr(config, f"{kind}_token_{word}", None) for word in ("id", "index")]
        number = next((number for number in ids if number is not None), None)
        if number is not None and getattr(processor, f"{kind}_token", None):
            tokens[kind] = str(processor.tokenizer.convert_ids_to_tokens(number))
    return tokens


def _replace(
    text: str, matches: list[re.Match[str]], replacements: list[str], spans: list[Span]
) -> tuple[str, list[Span]]:
    """Replaces matches of a text, and moves spans that do not cut them."""
    pieces, begin = list[str](), 0
    ends, moved = [0], [0]  # of matches in the text, and how far what follows moves
    for match, replacement in zip(matches, replacements, strict=True):
        pieces += [text[begin : match.start()], replacement]
        begin = match.end()
        ends.append(begin)
        moved.append(moved[-1] + len(replacement) - len(match[0]))
    spans = [(a + moved[bisect_right(ends, a) - 1], b + moved[bisect_right(ends, b) - 1]) for a, b in spans]
    return "".join([*pieces, text[begin:]]), spans


def _find_overlaps(tokens: list[Span], spans: list[Span]) -> list[bool]:
    """Tells of each token whether it overlaps one of the spans; both are in ascending order.

    Tokens whose whitespace was trimmed (`trim_offsets`) may have no width: inside a span they overlap it.
    """
    overlaps, place = [], 0
    for begin, end in tokens:
        while place < len(spans) and spans[place][1] <= begin:
            place += 1
        overlaps.append(place < len(spans) and spans[place][0] < end)
    return overlaps


def _split_tiles(encoder: Encoder, length: int) -> tuple[int, ...]:
    """Returns the items that an encoder sees of a file: tiles of an image, where their length is fixed."""
    tile = encoder.tokens_per_item
    return (tile,) * (length // tile) if tile and length % tile == 0 else (length,)


class _MonotoneCache:
    """Caches a function that never falls: between two arguments with one value it has that value."""

    def __init__(self, function: Callable[[int], Replacement]) -> None:
        self._function = function
        self._arguments: list[int] = []
        self._values: list[Replacement] = []

    def __call__(self, argument: int) -> Replacement:
        place = bisect_left(self._arguments, argument)
        after = self._values[place] if place < len(self._values) else None
        if after is not None and self._arguments[place] == argument:
            return after
        if after is not None and place and self._values[place - 1] == after:
            return after
        value = self._function(argument)
        self._arguments.insert(place, argument)
        self._values.insert(place, value)
        return value
