"""Samples of chat files are what the model's processor makes of them; broken ones are skipped alike."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_data import CHATML, FOLDERS, chat, write_folder, write_image, write_weights
from PIL import Image

from optimus.data.chat_format import parse_chat_sample
from optimus.data.chat_template import ChatTemplate
from optimus.data.jsonl_file import SkippedSample, scan_jsonl
from optimus.data.media_headers import MediaFolder
from optimus.data.processor import load_processor
from optimus.data.sample_index import IndexKey, SampleIndex, build_index
from optimus.errors import UserError
from optimus.hf.chat_dataset import ChatDataset
from optimus.hf.image_patches import ImagePatches
from optimus.job.hf_config import read_hf_config
from optimus.models.sample import IGNORE_INDEX, Sample, SampleItem

pytestmark = pytest.mark.ci("data")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_siglip")
SIZES = ((56, 56), (100, 333), (333, 90), (64, 48))
SYSTEM = {"role": "system", "content": "Be brief: the cat."}
ROWS: list[dict[str, Any]] = [
    chat("no image at all", "the end", "\n\nand?", "no\n"),
    chat("<image>what is in the cat\n\n", " the cat ä€ ", images=["0.png"]),
    chat("the<image>\n\nand<image>", "that\n", "\n<image>", "cat", images=["1.jpg", "2.webp", "3.png"]),
    {"messages": [SYSTEM, *chat("see", "a\n\n", "<image>and?", "")["messages"]], "images": ["turned.jpg"]},
    chat("what", "it is <image> in the", images=["grey.png"]),
]


def _marked_template(item: str) -> str:
    """The template with marks around answers and the token that ends them."""
    content = CHATML.split("\n", 1)[1].split("<|im_end|>")[0]
    body = content.replace("IMAGE", item).replace("AUDIO", item)
    end = "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}" + body + "<|im_end|>\n{% endif %}"
    begin = "{% if message['role'] == 'assistant' %}{% generation %}"
    head = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    return f"{head}{begin}{body}{end}{{% endfor %}}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_weights(tmp_path_factory.mktemp(kind) / "model", kind, torch.float32)
        return made[kind]

    return get


def write_data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for place, (size, ending) in enumerate(zip(SIZES, ("png", "jpg", "webp", "png"), strict=True)):
        write_image(folder / f"{place}.{ending}", size)
    exif = Image.Exif()
    exif[0x0112] = 6
    write_image(folder / "turned.jpg", (50, 90), exif=exif)
    Image.new("LA", (70, 40), (90, 30)).save(folder / "grey.png")
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def open_data(path: Path, model: Path, **options: Any) -> ChatDataset:
    file, folder = scan_jsonl(path), MediaFolder(root=path.parent)
    key = IndexKey.make(file, model=model, folder=folder, sequence_tokens=options.get("sequence_tokens"))
    index = build_index(file, key, model=model, folder=folder, workers=1, progress=lambda *_: None)
    index.save(path.with_suffix(".npz"))
    read = SampleIndex.load(path.with_suffix(".npz"), key)
    assert read is not None and read.lengths.columns().keys() == index.lengths.columns().keys()
    assert (read.skipped, read.examples) == (index.skipped, index.examples)
    return ChatDataset.open(file, read, folder=folder, model_dir=model)


def processed(data: ChatDataset, row: dict[str, Any], template: str) -> Any:
    """Runs the processor itself on decoded files, with a template that marks what is said."""
    sample = parse_chat_sample(json.dumps(row).encode())
    media, messages = iter(sample.media), [dict(message) for message in sample.messages]
    for message in messages:
        message["content"] = [
            part
            if part["type"] == "text"
            else {"type": "image", "image": str(data.folder.root / str(next(media).path))}
            for part in message["content"]
        ]
    return data._counter.processor.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )


def patch_of(item: SampleItem, y: int, x: int) -> torch.Tensor:
    return item.inputs[y * item.grid[1] + x]


def their_patch(output: Any, kind: str, image: int, y: int, x: int) -> torch.Tensor:
    """Returns a patch by the arithmetic of the family: merge groups, or a square of pixels."""
    if kind == "llava_siglip":
        square: torch.Tensor = output["pixel_values"][image][:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
        return square.flatten()
    grids = output["image_grid_thw"].tolist()
    start = sum(t * h * w for t, h, w in grids[:image])
    group = (y // 2) * (grids[image][2] // 2) + x // 2
    patch: torch.Tensor = output["pixel_values"][start + 4 * group + 2 * (y % 2) + x % 2]
    return patch


@pytest.mark.parametrize("kind", FAMILIES)
def test_samples_are_what_the_processor_makes_of_decoded_files(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    data = open_data(write_data(tmp_path, ROWS), folders(kind))
    assert len(data) == len(ROWS)
    placeholder = next(iter(data._counter.item_ids))
    for number, row in enumerate(ROWS):
        sample, theirs = data.sample(number), processed(data, row, _marked_template(FOLDERS[kind][4]))
        assert not sample.skipped
        ids, said = theirs["input_ids"][0], theirs["assistant_masks"][0].bool()
        assert torch.equal(sample.tokens, ids)
        labels = torch.where(said & (ids != placeholder), ids, IGNORE_INDEX)
        assert torch.equal(sample.labels, torch.cat((labels[1:], torch.tensor([IGNORE_INDEX]))))
        assert_sizes(data, sample)
        assert int((sample.labels >= 0).sum()) > 0
        for index, item in enumerate(sample.items["vision"]):
            assert int(ids[item.offset]) == placeholder and int(ids[item.offset - 1]) != placeholder
            for y in range(item.grid[0]):
                for x in range(item.grid[1]):
                    assert torch.equal(patch_of(item, y, x), their_patch(theirs, kind, index, y, x))


def test_answers_are_found_with_marks_and_without(folders: Callable[[str], Path]) -> None:
    processor = load_processor(folders("qwen3_vl"))
    found = []
    for template in (processor.chat_template, _marked_template(FOLDERS["qwen3_vl"][4])):
        processor.chat_template = template
        chats = [parse_chat_sample(json.dumps(row).encode()) for row in ROWS]
        found.append([ChatTemplate(processor).render(sample) for sample in chats])
    assert found[0] == found[1]
    text, ((begin, end), (other, _)) = found[0][0]
    assert text[begin:end] == "the end<|im_end|>" and text[other:].startswith("no\n<|im_end|>")

    processor.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}</s>{% endfor %}"
    with pytest.raises(SkippedSample, match="cannot be told"):  # the role would be trained
        ChatTemplate(processor).render(parse_chat_sample(json.dumps(ROWS[0]).encode()))
    processor.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content[0].text }} [/INST]"
        "{% else %} {{ m.content[0].text }}</s>{% endif %}{% endfor %}"
    )
    text, spans = ChatTemplate(processor).render(parse_chat_sample(json.dumps(ROWS[0]).encode()))
    assert [text[begin:end] for begin, end in spans] == [" the end</s>", " no\n</s>"]
    endless = chat(*["the cat" * 100] * 4000)
    with pytest.raises(SkippedSample, match="2,000 answers"):
        ChatTemplate(processor).render(parse_chat_sample(json.dumps(endless).encode()))


def assert_sizes(data: ChatDataset, sample: Sample) -> None:
    """Sizes and labels of the index are those of the sample, or of what it was."""
    sizes = {name: tuple(item.tokens for item in items) for name, items in sample.items.items()}
    assert data.sizes(sample.number).items == sizes
    assert sample.length == data.index.lengths[sample.number].tokens
    if not sample.skipped:
        assert data.labels(sample.number) == int((sample.labels >= 0).sum())


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_broken_after_indexing_keeps_its_sizes_and_trains_nothing(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    data = open_data(write_data(tmp_path, ROWS), folders(kind))
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:-200])
    (tmp_path / "1.jpg").unlink()
    write_image(tmp_path / "turned.jpg", (300, 300))
    (tmp_path / "grey.png").write_bytes(b"\x89PNG")
    reasons = {}
    for number in range(len(data)):
        sample, again = data.sample(number), data.sample(number)
        assert_sizes(data, sample)
        assert sample.skipped == again.skipped and torch.equal(sample.tokens, again.tokens)
        if sample.skipped:
            (reasons[number],) = sample.skipped
            assert bool((sample.labels == IGNORE_INDEX).all())
            assert all(not item.inputs.any() for item in sample.items["vision"])
    assert reasons[1].startswith("line 3: unreadable file: 0.png")
    assert reasons[2].startswith("line 5: file missing: 1.jpg")
    assert reasons[4].startswith("line 9: unreadable file: grey.png")
    if kind != "llava_siglip":  # whose images all have the same tokens
        assert reasons[3] == "line 7: changed since it was indexed: it has other lengths"
    assert reasons.keys() >= {1, 2, 4} and 0 not in reasons


def test_an_index_is_read_again_only_for_the_same_data_processor_and_options(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    path, model = write_data(tmp_path, ROWS), write_folder(tmp_path / "model", "qwen2_5_vl")
    open_data(path, model)

    def loads(sequence_tokens: int | None = None, **limits: int) -> bool:
        folder = MediaFolder(root=tmp_path, **limits)  # type: ignore[arg-type]
        key = IndexKey.make(scan_jsonl(path), model=model, folder=folder, sequence_tokens=sequence_tokens)
        return SampleIndex.load(path.with_suffix(".npz"), key) is not None

    assert loads()
    assert not loads(sequence_tokens=64) and not loads(max_pixels=100) and not loads(max_audio_s=3)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template + " ")
    assert not loads()
    (model / "chat_template.jinja").write_text(template)
    (model / "model.safetensors.index.json").write_text("{}")
    assert loads()
    text = path.read_text()
    path.write_text(text.replace("brief", "short"))
    assert not loads()
    path.write_text(text)
    assert loads()
    content = path.with_suffix(".npz").read_bytes()
    path.with_suffix(".npz").write_bytes(content[:-500])
    assert not loads()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_rank_prepares_only_the_images_that_it_encodes(
    kind: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, prepared = open_data(write_data(tmp_path, ROWS), folders(kind)), list[int]()
    cut = ImagePatches.cut

    def count(self: ImagePatches, images: Sequence[Image.Image]) -> Any:
        prepared.append(len(images))
        return cut(self, images)

    assert data._patches.find_grid(100, 100) is not None
    monkeypatch.setattr(ImagePatches, "cut", count)
    for number in range(len(ROWS)):
        whole = data.sample(number)
        images = len(whole.items["vision"])
        for chosen in ([], [0], [1, 2]):
            needed = frozenset(("vision", index) for index in chosen if index < images)
            prepared.clear()
            sample = data.sample(number, needed)
            assert prepared == [len(needed)]
            assert torch.equal(sample.tokens, whole.tokens) and torch.equal(sample.labels, whole.labels)
            assert_sizes(data, sample)
            for index, (item, full) in enumerate(
                zip(sample.items["vision"], whole.items["vision"], strict=True)
            ):
                assert (item.offset, item.grid) == (full.offset, full.grid)
                rows = full.inputs if ("vision", index) in needed else full.inputs[:0]
                assert torch.equal(item.inputs, rows)

    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:-200])  # the last of sample 2
    for keys in (None, frozenset({("vision", 0)}), frozenset[tuple[str, int]]()):
        sample = data.sample(2, keys)
        assert sample.skipped[0].startswith("line 5: unreadable file: 3.png")
        assert_sizes(data, sample)
        given = [len(item.inputs) > 0 for item in sample.items["vision"]]
        assert given == [keys is None or ("vision", index) in keys for index in range(3)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_grids_are_known_from_sizes_alone(kind: str, folders: Callable[[str], Path]) -> None:
    encoder = read_hf_config(folders(kind) / "config.json").encoders[0]
    patches = ImagePatches(encoder, load_processor(folders(kind)).image_processor)
    generator = random.Random(0)
    sizes = [(generator.randrange(8, 400), generator.randrange(8, 400)) for _ in range(150)]
    for height, width in [*sizes, (8, 400), (400, 8), (9, 1500), (28, 28), (42, 70), (1000, 1000)]:
        ((grid, _),) = patches.cut([Image.new("RGB", (width, height))])
        assert patches.find_grid(height, width) == grid, (height, width)
    assert patches.find_grid(3, 100) is None and patches.find_grid(100, 1) is None
    patches._processor.do_resize = False
    assert ImagePatches(encoder, patches._processor).find_grid(100, 100) is None


def test_a_family_that_is_not_compared_is_refused(tmp_path: Path) -> None:
    path, model = write_data(tmp_path, ROWS[:2]), write_folder(tmp_path / "model", "gemma3")
    with pytest.raises(UserError, match=r"model\.family = gemma3"):
        open_data(path, model)


def test_images_over_the_cap_are_skipped(folders: Callable[[str], Path], tmp_path: Path) -> None:
    path, model = write_data(tmp_path, ROWS), folders("qwen2_5_vl")
    file, folder = scan_jsonl(path), MediaFolder(root=tmp_path, max_pixels=60 * 60)
    key = IndexKey.make(file, model=model, folder=folder, sequence_tokens=None)
    index = build_index(file, key, model=model, folder=folder, workers=1, progress=lambda *_: None)
    assert index.numbers.tolist() == [0, 1, 4]
    assert [line for line, _ in index.examples[next(iter(index.skipped))]] == [5, 7]
