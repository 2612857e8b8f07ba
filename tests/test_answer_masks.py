"""Labels are the tokens that transformers' own mask of the assistant marks, at every edge of an answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_data import CHATML, FOLDERS, write_folder, write_weights
from test_chat_dataset import open_data, processed

from optimus.data.chat_format import parse_chat_sample
from optimus.data.media_headers import MediaFolder
from optimus.data.token_counts import TokenCounter
from optimus.models.sample import IGNORE_INDEX

pytestmark = pytest.mark.ci("data")
KIND = "qwen3_vl"
TEXTS = ("the cat", " the  cat ", "\n\nin", "a", "  ", "a cat\n", "ä€ cat  ", "  at in")
BODY = CHATML.split("\n", 1)[1].split("<|im_end|>")[0].replace("IMAGE", FOLDERS[KIND][4])
SAID = f"{{% generation %}}{BODY}{{% endgeneration %}}"
SPOKEN = "{% for message in messages %}{% if message['role'] == 'assistant' %}" + SAID
TEMPLATES = {
    "bare": SPOKEN + "{% else %}Q: " + BODY + " A: {% endif %}{% endfor %}",
    "ended": SPOKEN + "<|im_end|>{% else %}<|im_start|>" + BODY + "\n{% endif %}{% endfor %}",
}


def draw_chat(generator: random.Random) -> dict[str, Any]:
    """Draws a conversation in which either side may speak first."""
    roles = ["user", "assistant"] * generator.randrange(1, 4)
    turns = roles[1:] if len(roles) > 2 and generator.random() < 0.5 else roles
    return {"messages": [{"role": role, "content": generator.choice(TEXTS)} for role in turns]}


def write_model(folder: Path, template: str, *, trimmed: bool) -> Path:
    """Writes a folder whose tokenizer may cut spaces from the offsets of its tokens, as GPT-2's does."""
    write_folder(folder, KIND)
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trimmed, "use_regex": True,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_are_the_mask_of_transformers(template: str, trimmed: bool, tmp_path: Path) -> None:
    counter = TokenCounter(write_model(tmp_path / "model", template, trimmed=trimmed))
    generator, widths, first = random.Random(1), set[int](), set[bool]()
    for _ in range(80):
        row = draw_chat(generator)
        sample = parse_chat_sample(json.dumps(row).encode())
        ours = counter.tokenize(sample, MediaFolder(root=tmp_path))
        theirs = counter.processor.apply_chat_template(
            list(sample.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(said) for said in theirs["assistant_masks"][0]]
        assert ours.ids == theirs["input_ids"][0]
        assert ours.is_answer == mask, row
        assert ours.labels == sum(mask[1:])
        text = counter.processor.tokenizer.decode(ours.ids)
        offsets = counter.processor.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        widths |= {end - begin for begin, end in offsets}
        first.add(mask[0])
    assert (0 in widths) == trimmed
    assert first == ({False, True} if template == "bare" else first)


def test_answers_are_the_tokens_with_a_character_of_an_answer(tmp_path: Path) -> None:
    """Characters are counted by hand, over tokens that are decoded one by one."""
    counter = TokenCounter(write_model(tmp_path / "model", "bare", trimmed=False))
    generator = random.Random(2)
    for _ in range(80):
        row = draw_chat(generator)
        text, said = "", list[bool]()
        for message in row["messages"]:
            answers = message["role"] == "assistant"
            more = message["content"] if answers else f"Q: {message['content']} A: "
            text += more
            said += [answers] * len(more.encode())
        sample = parse_chat_sample(json.dumps(row).encode())
        ours = counter.tokenize(sample, MediaFolder(root=tmp_path))
        tokens = counter.processor.tokenizer.convert_ids_to_tokens(ours.ids)
        assert sum(map(len, tokens)) == len(said), "a byte is a letter of a token"
        begin = 0
        for token, is_answer in zip(tokens, ours.is_answer, strict=True):
            assert is_answer == any(said[begin : begin + len(token)]), (row, token)
            begin += len(token)


def test_a_sample_that_begins_with_an_answer_predicts_all_but_its_first_token(tmp_path: Path) -> None:
    model = write_weights(tmp_path / "model", KIND, torch.float32)
    (model / "chat_template.jinja").write_text(TEMPLATES["bare"])
    spoken = [("assistant", "the cat"), ("user", "a"), ("assistant", " in")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in (spoken, spoken[1:])
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_data(path, model)
    for number, row in enumerate(rows):
        theirs = processed(data, row, TEMPLATES["bare"])
        ids, said = theirs["input_ids"][0], theirs["assistant_masks"][0].bool()
        assert bool(said[0]) == (number == 0)
        labels = data.sample(number).labels
        expected = torch.where(said[1:], ids[1:], IGNORE_INDEX)
        assert torch.equal(labels[:-1], expected) and int(labels[-1]) == IGNORE_INDEX
        assert data.labels(number) == int(said[1:].sum())
