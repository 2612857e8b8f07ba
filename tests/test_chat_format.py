"""Chat samples are parsed from the forms of ms-swift and LLaMA-Factory, and lines are found by number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus.data import jsonl_file
from optimus.data.chat_format import ChatSample, parse_chat_sample
from optimus.data.jsonl_file import SkippedSample, SkipReason, scan_jsonl
from optimus.data.packing import pack_documents
from optimus.errors import UserError


def parse(row: Any) -> ChatSample:
    return parse_chat_sample(json.dumps(row).encode())


def text_of(sample: ChatSample) -> list[str]:
    """Messages in short: `user: <image>what`."""
    return [
        f"{message['role']}: " + "".join(part.get("text", f"<{part['type']}>") for part in message["content"])
        for message in sample.messages
    ]


ASKED, ANSWERED = "<image>what is it?", "a cat"
SAME: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}],
        "images": ["a.png"],
    },
    "openai": {
        "messages": [
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "what is it?"},
            ]},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWERED}]},
        ],
    },
    "transformers": {
        "messages": [
            {"role": "user", "content": [
                {"type": "image", "image": "a.png"}, {"type": "text", "text": "what is it?"},
            ]},
            {"role": "assistant", "content": ANSWERED},
        ],
    },
    "placed": {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
            {"role": "assistant", "content": ANSWERED},
        ],
        "images": [{"path": "a.png", "bytes": None}],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}],
        "images": ["a.png"],
    },
    "llava": {
        "id": 7, "image": "a.png",
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}],
    },
    "conversation": {"conversation": [{"human": ASKED, "assistant": ANSWERED}], "images": "a.png"},
    "alpaca": {"instruction": ASKED, "input": "", "output": ANSWERED, "images": ["a.png"]},
    "query": {"query": ASKED, "response": ANSWERED, "images": ["a.png"]},
    "untagged": {"query": "what is it?", "response": ANSWERED, "images": ["a.png"]},
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_the_same_conversation(form: str) -> None:
    sample = parse(SAME[form])
    assert text_of(sample) == ["user: <image>what is it?", "assistant: a cat"]
    assert [(item.kind, item.path) for item in sample.media] == [("image", "a.png")]


def test_files_take_the_places_of_tags_in_order_and_those_without_a_tag_come_first() -> None:
    turns = ["see <image> and <audio>", "yes", "<image> then?"]
    roles = ["user", "assistant", "user"]
    row = {
        "system": "be kind",
        "messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)],
        "images": ["1.png", "2.png", "3.png"],
        "audios": ["1.wav"],
    }
    sample = parse(row)
    assert text_of(sample) == [
        "system: be kind", "user: <image>see <image> and <audio>", "assistant: yes", "user: <image> then?",
    ]  # fmt: skip
    assert [item.path for item in sample.media] == ["1.png", "2.png", "1.wav", "3.png"]


def test_history_and_input_of_an_alpaca_sample_are_turns_and_a_second_line() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "history": [["hi", "hello"]], "system": "s"}
    shown = ["system: s", "user: hi", "assistant: hello", "user: add\n1 2", "assistant: 3"]
    assert text_of(parse(row)) == shown


GOOD = SAME["messages"]
REFUSED: list[tuple[SkipReason, Any]] = [
    (SkipReason.UNKNOWN_FORM, []),
    (SkipReason.UNKNOWN_FORM, {"text": "of pre-training"}),
    (SkipReason.UNKNOWN_FORM, {"messages": "hello"}),
    (SkipReason.UNKNOWN_FORM, {"messages": []}),
    (SkipReason.UNKNOWN_FORM, {"messages": [{"role": "user", "content": 7}]}),
    (SkipReason.UNKNOWN_FORM, {"messages": [{"role": 7, "content": "a"}]}),
    (SkipReason.UNKNOWN_FORM, {"query": "a", "response": None}),
    (SkipReason.UNKNOWN_FORM, {"query": "a", "response": "b", "history": [["a"]]}),
    (SkipReason.UNKNOWN_FORM, {"messages": [{"role": "user", "content": [{"type": "poem"}]}]}),
    (SkipReason.UNKNOWN_FORM, {"messages": [{"role": "user", "content": [{"type": "image", "image": 7}]}]}),
    (SkipReason.UNKNOWN_FORM, {**GOOD, "image": "b.png"}),
    (SkipReason.NO_ANSWER, {"messages": [{"role": "user", "content": "hello"}]}),
    (SkipReason.UNSUPPORTED, {"messages": [{"role": "tool", "content": "hello"}]}),
    (SkipReason.UNSUPPORTED, {**GOOD, "tools": "[]"}),
    (SkipReason.UNSUPPORTED, {**GOOD, "rejected_response": "no"}),
    (SkipReason.UNSUPPORTED, {**GOOD, "videos": ["a.mp4"]}),
    (SkipReason.TAGS, {**GOOD, "images": []}),
    (SkipReason.TAGS, {**SAME["openai"], "images": ["b.png"]}),
    (SkipReason.NOT_LOCAL, {**GOOD, "images": [{"bytes": "abc"}]}),
    (SkipReason.TOO_LARGE, {**GOOD, "images": ["a.png"] * 2000}),
]


@pytest.mark.parametrize(("reason", "row"), REFUSED)
def test_a_row_that_is_read_by_no_form_is_skipped_by_name(reason: SkipReason, row: Any) -> None:
    with pytest.raises(SkippedSample) as skipped:
        parse(row)
    assert skipped.value.reason == reason
    assert skipped.value.detail


@pytest.mark.parametrize(
    "line", [b"{", b"\xff{}", b"[" * 100_000, b'{"a": ' * 50_000, b"9" * 10_000, b'{"messages": [}', b"\0\0"]
)
def test_bytes_that_are_no_json_are_skipped(line: bytes) -> None:
    with pytest.raises(SkippedSample) as skipped:
        parse_chat_sample(line)
    assert skipped.value.reason == SkipReason.NOT_JSON


# ---------------------------------------------------------------------------- lines by number


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" ")), max_size=30))
def test_lines_are_those_of_a_split_with_blank_ones_left_out(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "data.jsonl"
    path.write_bytes(b"\n".join(lines))
    file = scan_jsonl(path)
    expected = [(place + 1, line) for place, line in enumerate(lines) if len(line) > 1]
    assert [(int(file.lines[n]), file.read(n)) for n in range(len(file))] == expected


def test_a_scan_joins_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_file, "BLOCK_BYTES", 7)
    path = tmp_path / "data.jsonl"
    lines = [f'{{"a": {number}}}'.encode() for number in range(50)]
    path.write_bytes(b"\r\n".join(lines))
    file = scan_jsonl(path)
    assert [file.read(n).strip() for n in range(len(file))] == lines


def test_a_long_line_is_skipped_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with path.open("wb") as sparse:
        sparse.truncate(4 * jsonl_file.MAX_LINE_BYTES)
    with pytest.raises(SkippedSample, match="line too long"):
        scan_jsonl(path).read(0)


def test_a_file_that_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n')
    file = scan_jsonl(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="changed"):
        file.read(0)


@pytest.mark.parametrize("name", ["data.json", "missing.jsonl", "folder.jsonl"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.json").write_text("[]")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError) as error:
        scan_jsonl(tmp_path / name)
    assert ("jq -c" in error.value.hint) == (name == "data.json")


# ---------------------------------------------------------------------------- packing


@given(st.lists(st.integers(0, 100), max_size=200), st.integers(1, 64))
def test_packing_keeps_every_document_once_and_fits(lengths: list[int], window: int) -> None:
    sequences = list(pack_documents(lengths, 100, window=window))
    packed = [number for sequence in sequences for number in sequence]
    assert sorted(packed) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in sequence) <= 100 for sequence in sequences)
    assert all(list(sequence) == sorted(sequence) for sequence in sequences)
    windows = [{number // window for number in sequence} for sequence in sequences]
    assert all(len(of_sequence) == 1 for of_sequence in windows)
    for start in range(
        0, len(lengths), window
    ):  # first fit leaves at most one sequence of a window half empty
        totals = [
            sum(lengths[number] for number in sequence)
            for sequence in sequences
            if sequence[0] // window == start // window
        ]
        assert sum(2 * total <= 100 for total in totals) <= 1


def test_packing_of_known_documents() -> None:
    assert list(pack_documents([50, 60, 40, 50, 10], 100)) == [(0, 3), (1, 2), (4,)]
