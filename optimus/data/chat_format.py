"""Parses one sample of the chat forms that ms-swift and LLaMA-Factory read into messages of transformers.

| form           | keys of a line                                                                  |
|----------------|---------------------------------------------------------------------------------|
| messages       | `messages`: [{role, content}], content a string or a list of parts              |
| ShareGPT       | `conversations`: [{from, value}], or `conversation`: [{human, assistant}]       |
| alpaca         | `instruction`, `input`, `output`                                                |
| query-response | `query`, `response`                                                             |

The last three may have `system`, the last two `history`: [[query, response]]. All may have `images` and
`audios` (or `image` and `audio`), whose files replace the tags <image> and <audio> in order. As in ms-swift,
files without a tag come before the first message that is not the system's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_bytes import EmbeddedMedia

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
}  # fmt: skip
COLUMNS = {"image": ("images", "image"), "audio": ("audios", "audio"), "video": ("videos", "video")}
PATH_KEYS = frozenset(
    {*(name for names in COLUMNS.values() for name in names), "image_url", "audio_url", "path", "url"}
)
# Keys that change the text or the loss, in data for preferences, tools and grounding.
REFUSED_KEYS = ("tools", "objects", "chosen", "rejected", "rejected_response", "kto_tag")
TAG = re.compile(r"<(image|audio|video)>")
MAX_ITEMS = 1024  # files of a sample
MAX_MESSAGES = 4096

# "text" and the text, or a kind of media and its path or contents; None: of the column
Part = tuple[str, str | EmbeddedMedia | None]
Turn = tuple[str, list[Part]]


@dataclass(frozen=True, kw_only=True)
class MediaReference:
    """A file that a sample names or holds."""

    kind: str  # image or audio
    path: str | EmbeddedMedia  # as it is written


@dataclass(frozen=True, kw_only=True)
class ChatSample:
    """A conversation in the form of transformers' chat templates, and its files in order of appearance."""

    messages: tuple[dict[str, Any], ...]
    media: tuple[MediaReference, ...]


def parse_chat_sample(line: bytes | dict[str, Any]) -> ChatSample:
    """Parses a line, or an object whose media may be embedded; raises SkippedSample if it is no form."""
    row = line if isinstance(line, dict) else _load_object(line)
    for key in REFUSED_KEYS:
        if row.get(key):
            raise SkippedSample(SkipReason.UNSUPPORTED, f"column {key}")
    turns = list(_read_turns(row))
    if not 0 < len(turns) <= MAX_MESSAGES:
        raise _unknown(f"{len(turns)} messages")
    if all(role != "assistant" for role, _ in turns):
        raise SkippedSample(SkipReason.NO_ANSWER, "no message of the assistant")
    for kind in COLUMNS:
        _place_files(kind, _read_column(row, kind), turns)
    media = [
        (kind, path) for _, parts in turns for kind, path in parts if kind != "text" and path is not None
    ]
    if any(kind == "video" for kind, _ in media):
        raise SkippedSample(SkipReason.UNSUPPORTED, "a video; give some of its frames as images")
    if len(media) > MAX_ITEMS:
        raise SkippedSample(SkipReason.TOO_LARGE, f"{len(media):,} files; at most {MAX_ITEMS:,}")
    return ChatSample(
        messages=tuple(
            {"role": role, "content": [_content_part(kind, value) for kind, value in parts]}
            for role, parts in turns
        ),
        media=tuple(MediaReference(kind=kind, path=path) for kind, path in media),
    )


def _content_part(kind: str, value: str | EmbeddedMedia | None) -> dict[str, Any]:
    return {"type": "text", "text": value} if kind == "text" else {"type": kind}


def _load_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError:
        raise SkippedSample(SkipReason.NOT_JSON, "nested too deeply") from None
    except ValueError as error:
        raise SkippedSample(SkipReason.NOT_JSON, str(error)) from None
    if not isinstance(row, dict):
        raise _unknown(f"a {type(row).__name__} instead of an object")
    return row


def _read_turns(row: dict[str, Any]) -> Iterator[Turn]:
    """Yields messages of the first form whose keys the row has."""
    if row.get("system") not in (None, ""):
        yield "system", _read_content(row["system"])
    if "messages" in row:
        for message in _read_list(row, "messages"):
            if "loss" in message:
                raise SkippedSample(SkipReason.UNSUPPORTED, "loss of a message")
            yield _read_role(message, "role"), _read_content(message.get("content"))
    elif "conversations" in row:
        for message in _read_list(row, "conversations"):
            yield _read_role(message, "from"), _read_content(message.get("value"))
    elif "conversation" in row:
        for message in _read_list(row, "conversation"):
            yield "user", _read_content(message.get("human"))
            yield "assistant", _read_content(message.get("assistant"))
    elif "instruction" in row or "query" in row:
        question, answer = ("instruction", "output") if "instruction" in row else ("query", "response")
        history = row.get("history") or []
        if not isinstance(history, list) or len(history) > MAX_MESSAGES:
            raise _unknown("history is no list of pairs")
        for pair in history:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _unknown("history is no list of pairs")
            yield "user", _read_content(pair[0])
            yield "assistant", _read_content(pair[1])
        asked = [row[key] for key in (question, "input") if row.get(key) not in (None, "")]
        if not all(isinstance(text, str) for text in asked):
            raise _unknown(f"{question} is no text")
        yield "user", _read_content("\n".join(asked))
        yield "assistant", _read_content(row.get(answer))
    else:
        raise _unknown(f"keys {', '.join(map(str, list(row)[:6]))}")


def _read_list(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = row[key]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise _unknown(f"{key} is no list of objects")
    return value


def _read_role(message: dict[str, Any], key: str) -> str:
    role = message.get(key)
    if not isinstance(role, str):
        raise _unknown(f"{key} is no text")
    if role not in ROLES:
        raise SkippedSample(SkipReason.UNSUPPORTED, f"role {role}")
    return ROLES[role]


def _read_content(content: Any) -> list[Part]:
    """Returns the parts of a message; tags in its text are media without a path."""
    if isinstance(content, str):
        pieces = TAG.split(content)  # text and kinds alternate
        parts: list[Part] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                parts.append((piece, None))
            elif piece:
                parts.append(("text", piece))
        return parts
    if isinstance(content, list):
        return [part for entry in content for part in _read_part(entry)]
    raise _unknown(f"content is a {type(content).__name__}")


def _read_part(entry: Any) -> list[Part]:
    """Returns what one entry of a content list holds, in the forms of OpenAI and of transformers."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "text" and isinstance(entry.get("text"), str):
        return _read_content(entry["text"])
    if not isinstance(kind, str) or kind.removesuffix("_url") not in COLUMNS:
        raise _unknown(f"a part of type {kind}")
    kind = kind.removesuffix("_url")
    value = next((entry[key] for key in (kind, f"{kind}_url", "path", "url") if key in entry), None)
    if isinstance(value, dict):
        value = value.get("url", value.get("path"))
    if value is not None and not isinstance(value, str | EmbeddedMedia):
        raise _unknown(f"{kind} is no path")
    return [(kind, value)]


def _read_column(row: dict[str, Any], kind: str) -> list[str | EmbeddedMedia]:
    """Returns the paths or contents that stand in a column beside the messages."""
    values = [row[key] for key in COLUMNS[kind] if row.get(key) not in (None, [], "")]
    if len(values) > 1:
        raise _unknown(f"both {' and '.join(COLUMNS[kind])}")
    entries = values[0] if values and isinstance(values[0], list) else values
    paths = list[str | EmbeddedMedia]()
    for entry in entries:
        path = entry.get("path") if isinstance(entry, dict) else entry
        if not isinstance(path, str | EmbeddedMedia):
            raise SkippedSample(SkipReason.NOT_LOCAL, f"{COLUMNS[kind][0]} has data instead of a path")
        paths.append(path)
    return paths


def _place_files(kind: str, files: list[str | EmbeddedMedia], turns: list[Turn]) -> None:
    """Gives every tag of a kind its file, in order; files without a tag come first."""
    tags = sum(part == (kind, None) for _, parts in turns for part in parts)
    named = any(part[0] == kind and part[1] is not None for _, parts in turns for part in parts)
    if tags > len(files) or (named and files):
        counted = f"{tags} tags <{kind}>, {len(files)} files in {COLUMNS[kind][0]}"
        raise SkippedSample(SkipReason.TAGS, f"{counted}{', and paths in messages' if named else ''}")
    if len(files) > tags:
        first = next((parts for role, parts in turns if role != "system"), turns[0][1])
        first[:0] = [(kind, None)] * (len(files) - tags)
    rest = iter(files)
    for _, parts in turns:
        parts[:] = [(kind, next(rest)) if part == (kind, None) else part for part in parts]


def _unknown(detail: str) -> SkippedSample:
    return SkippedSample(SkipReason.UNKNOWN_FORM, detail)
