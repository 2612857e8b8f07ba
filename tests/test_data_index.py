"""Lengths of a data set equal those of the model's processor run on its files, whatever the files hold."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers
from chat_data import ENDINGS, FOLDERS, chat, write_folder, write_image, write_wav
from PIL import Image, ImageFile, ImageOps

from optimus.data import media_headers
from optimus.data.chat_format import parse_chat_sample
from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.token_counts import TokenCounter

pytestmark = pytest.mark.ci("data")
IMAGES = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "internvl")
SIZES = ((56, 56), (500, 333), (30, 900), (1203, 17), (641, 480), (1, 1))  # width and height


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            folder = write_folder(tmp_path_factory.mktemp(kind) / "model", kind)
            made[kind] = TokenCounter(folder)
        return made[kind]

    return get


def measure(counter: Any, row: Any, folder: Path) -> Any:
    sample = parse_chat_sample(json.dumps(row).encode())
    return counter.count(sample, media_headers.MediaFolder(root=folder))


def skip_reason(counter: Any, row: Any, folder: media_headers.MediaFolder) -> SkipReason | None:
    try:
        counter.count(parse_chat_sample(json.dumps(row).encode()), folder)
    except SkippedSample as skipped:
        return skipped.reason
    return None


def processed(counter: Any, row: Any, folder: Path) -> tuple[int, list[int]]:
    """Returns text tokens and runs of item tokens that the processor itself makes of the decoded files."""
    sample = parse_chat_sample(json.dumps(row).encode())
    media, messages = iter(sample.media), [dict(message) for message in sample.messages]
    for message in messages:
        content = []
        for part in message["content"]:
            if part["type"] == "image":
                content.append({"type": "image", "image": Image.open(folder / str(next(media).path))})
            elif part["type"] == "audio":
                values, _ = soundfile.read(folder / str(next(media).path), dtype="float32")
                content.append({"type": "audio", "audio": values})
            else:
                content.append(part)
        message["content"] = content
    output = counter.processor.apply_chat_template(messages, tokenize=True, return_dict=True)
    (kind,) = counter._item_tokens
    number = counter.processor.tokenizer.convert_tokens_to_ids(counter._item_tokens[kind])
    ids = output["input_ids"][0]
    runs = "".join("x" if token == number else " " for token in ids).split()
    return sum(token != number for token in ids), [len(run) for run in runs]


@pytest.mark.parametrize("kind", IMAGES)
def test_lengths_are_those_of_the_processor_run_on_decoded_images(
    kind: str, counters: Callable[[str], Any], tmp_path: Path
) -> None:
    counter, rows = counters(kind), [chat("no image at all", "the end", "\n\nand?", "no\n")]
    sizes = [size for size in SIZES if kind == "gemma3" or max(size) / min(size) < 70]
    for place, size in enumerate(sizes):
        name = f"{place}.{ENDINGS[place % 3]}"
        write_image(tmp_path / name, size)
        rows.append(chat("<image>what is in the cat\n\n", images=[name]))
        rows.append(
            chat("the<image>\n\nand<image>", "that", "\n<image>", "cat", images=["0.png", name, name])
        )
    for row in rows:
        text, runs = processed(counter, row, tmp_path)
        lengths = measure(counter, row, tmp_path)
        tile = counter.encoders["image"].tokens_per_item if kind == "internvl" else 0
        items = [length for run in runs for length in ([tile] * (run // tile) if tile else [run])]
        assert (lengths.text, [*lengths.items.get("vision", ())]) == (text, items), row
    assert counter._image_arithmetic is not None


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
def test_arithmetic_that_a_probe_disproves_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def by_area(processor: object, image_sizes: list[tuple[int, int]]) -> dict[str, list[int]]:
        return {"num_image_tokens": [height * width // 784 for height, width in image_sizes]}

    family = getattr(transformers, FOLDERS[kind][0])
    monkeypatch.setattr(family, "_get_num_multimodal_tokens", by_area)
    counter = TokenCounter(write_folder(tmp_path / "model", kind))
    for size in SIZES[:3]:
        write_image(tmp_path / "a.png", size)
        row = chat("see <image> the cat", images=["a.png"])
        text, runs = processed(counter, row, tmp_path)
        lengths = measure(counter, row, tmp_path)
        assert (lengths.text, sum(lengths.items["vision"])) == (text, sum(runs))
    assert counter._image_arithmetic is None


def test_lengths_are_those_of_the_processor_run_on_sounds(
    counters: Callable[[str], Any], tmp_path: Path
) -> None:
    counter, generator = counters("qwen2_audio"), random.Random(0)
    lengths = [400, 16000, 63999, 64000, 64001, *(generator.randrange(800, 70000) for _ in range(20))]
    for place, samples in enumerate(lengths):
        write_wav(tmp_path / f"{place}.wav", samples, 16000)
        row = chat("hear <audio> the cat", audios=[f"{place}.wav"])
        text, runs = processed(counter, row, tmp_path)
        found = measure(counter, row, tmp_path)
        assert (found.text, [*found.items["audio"]]) == (text, runs), samples
    soundfile.write(tmp_path / "slow.flac", np.zeros(12001), 8000)
    write_wav(tmp_path / "same.wav", 24002, 16000)
    slow, same = (
        measure(counter, chat("<audio>", audios=[name]), tmp_path) for name in ("slow.flac", "same.wav")
    )
    assert slow == same


def test_an_image_is_turned_as_its_exif_says_and_never_decoded(
    counters: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for ending in ENDINGS:
        write_image(tmp_path / f"turned.{ending}", (50, 30), exif=exif)
        upright = ImageOps.exif_transpose(Image.open(tmp_path / f"turned.{ending}"))
        assert upright.size == (30, 50)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    for ending in ENDINGS:
        assert media_headers.read_image_size(tmp_path / f"turned.{ending}") == (50, 30)


# ---------------------------------------------------------------------------- files that cannot be used


def _bomb(path: Path) -> None:
    """A PNG whose header states 100,000 x 100,000 pixels."""
    write_image(path, (8, 8))
    content = bytearray(path.read_bytes())
    content[16:24] = (100_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)


def test_files_that_cannot_be_used_are_skipped_by_name(
    counters: Callable[[str], Any], tmp_path: Path
) -> None:
    counter, root = counters("qwen2_5_vl"), tmp_path / "data"
    root.mkdir()
    write_image(tmp_path / "secret.png", (50, 50))
    write_image(root / "good.png", (50, 50))
    write_image(root / "thin.png", (1000, 2))
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "empty.png").touch()
    (root / "text.png").write_text("<svg>")
    os.mkfifo(root / "pipe.png")
    _bomb(root / "bomb.png")
    reasons = {
        "good.png": None,
        str(root / "good.png"): None,
        "none.png": SkipReason.MISSING_FILE,
        "loop.png": SkipReason.MISSING_FILE,
        "": None,
        "a\0b": SkipReason.MISSING_FILE,
        "\ud800.png": SkipReason.MISSING_FILE,
        "a" * 5000: SkipReason.MISSING_FILE,
        "a/" * 1500: SkipReason.MISSING_FILE,
        "../secret.png": SkipReason.OUTSIDE,
        str(tmp_path / "secret.png"): SkipReason.OUTSIDE,
        "/etc/passwd": SkipReason.OUTSIDE,
        "link.png": SkipReason.OUTSIDE,
        "https://example.org/a.png": SkipReason.NOT_LOCAL,
        "data:image/png;base64,aaaa": SkipReason.NOT_LOCAL,
        ".": SkipReason.BAD_FILE,
        "pipe.png": SkipReason.BAD_FILE,
        "empty.png": SkipReason.BAD_FILE,
        "text.png": SkipReason.BAD_FILE,
        "bomb.png": SkipReason.TOO_LARGE,
        "thin.png": SkipReason.PROCESSOR,
    }
    for name, reason in reasons.items():
        row = chat("see" if name == "" else "<image>", images=name)
        assert skip_reason(counter, row, media_headers.MediaFolder(root=root)) == reason, name


def test_files_that_are_cut_are_skipped_where_they_are_decoded(
    counters: Callable[[str], Any], tmp_path: Path
) -> None:
    used = {False: 0, True: 0}
    for name in ("a.png", "b.jpg", "c.gif", "d.bmp", "e.tiff"):
        write_image(tmp_path / name, (60, 50))
    soundfile.write(tmp_path / "f.flac", np.random.default_rng(0).normal(0, 0.1, 9000), 16000)
    for path in sorted(tmp_path.iterdir()):
        content, is_sound = path.read_bytes(), path.suffix == ".flac"
        counter, kind = (
            counters("qwen2_audio" if is_sound else "qwen2_5_vl"),
            "audio" if is_sound else "image",
        )
        for share in (0.3, 0.6, 0.9, 1.0):
            path.write_bytes(content[: int(share * len(content))])
            for decode in used:
                folder = media_headers.MediaFolder(root=tmp_path, decode=decode)
                row = chat(f"<{kind}>", **{f"{kind}s": [path.name]})
                reason = skip_reason(counter, row, folder)
                used[decode] += reason is None
                assert reason in ((None,) if share == 1.0 else (None, SkipReason.BAD_FILE)), path.name
                assert not decode or (reason is None) == (share == 1.0), (path.name, share)
    assert used[True] == 6 < used[False]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_placeholders_in_text_and_kinds_without_an_encoder_are_skipped(
    kind: str, counters: Callable[[str], Any], tmp_path: Path
) -> None:
    counter = counters(kind)
    for token in counter._kinds:
        with pytest.raises(SkippedSample, match="placeholder in text"):
            measure(counter, chat(f"mind {token} the gap"), tmp_path)
    other = "audio" if "image" in counter.encoders else "image"
    with pytest.raises(SkippedSample, match="not supported"):
        measure(counter, chat("hi", **{f"{other}s": ["a.bin"]}), tmp_path)
    with pytest.raises(SkippedSample, match="not Unicode"):
        measure(counter, chat("\ud800"), tmp_path)


# ---------------------------------------------------------------------------- hostile input


def mutate(content: bytes, generator: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(generator.randrange(1, 6)):
        place = generator.randrange(len(data) + 1)
        match generator.randrange(5):
            case 0:
                data[place:] = b""
            case 1:
                data[place : place + 1] = generator.randbytes(1)
            case 2:
                data[place:place] = generator.choice(
                    [b'"', b"{", b"[", b"<image>", b"\\ud800", b"null", b"\0"]
                )
            case 3:
                del data[place : place + generator.randrange(1, 40)]
            case _:
                data[place : place + 4] = generator.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
    return bytes(data)


def _fuzz(counters: Callable[[str], Any], folder: Path, mutations: int) -> Counter[str]:
    """Mutates lines, images and sounds in turn; anything but lengths or a named skip fails."""
    lines = [
        json.dumps(row).encode()
        for row in (
            chat("<image>what", "a", "and <image>", images=["a.png", "b.jpg"]),
            {
                "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "cat"}],
                "image": "a.png",
            },
            chat([{"type": "image", "image": "c.webp"}, {"type": "text", "text": "in"}]),
            {"instruction": "add", "input": "1", "output": "2", "history": [["a", "b"]], "images": ["b.jpg"]},
        )
    ]
    for name in ("a.png", "b.jpg", "c.webp", "d.gif", "e.bmp", "f.tiff"):
        write_image(folder / name, (40, 30))
    write_wav(folder / "g.wav", 4000, 16000)
    soundfile.write(folder / "h.flac", np.zeros(4000), 16000)
    soundfile.write(folder / "i.ogg", np.zeros(4000), 16000)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    generator, seen = random.Random(1), Counter[str]()
    for _ in range(mutations):
        media = media_headers.MediaFolder(root=folder, decode=generator.random() < 0.5)
        if generator.random() < 0.5:
            counter, line = counters("qwen2_5_vl"), mutate(generator.choice(lines), generator)
        else:
            name = generator.choice(list(files))
            mutant = folder / f"mutant{Path(name).suffix}"
            mutant.write_bytes(mutate(files[name], generator))
            kind = "audio" if name[0] in "ghi" else "image"
            counter = counters("qwen2_audio" if kind == "audio" else "qwen2_5_vl")
            line = json.dumps(chat(f"<{kind}>", **{f"{kind}s": [mutant.name]})).encode()
        try:
            assert counter.count(parse_chat_sample(line), media).tokens > 0
            seen["used"] += 1
        except SkippedSample as skipped:
            seen[skipped.reason] += 1
    return seen


def test_mutated_lines_and_files_are_used_or_skipped(counters: Callable[[str], Any], tmp_path: Path) -> None:
    seen = _fuzz(counters, tmp_path, 400)
    assert seen.total() == 400 and {"used", SkipReason.NOT_JSON, SkipReason.BAD_FILE} <= set(seen)


@pytest.mark.heavy
def test_10_000_mutated_lines_and_files_are_used_or_skipped(
    counters: Callable[[str], Any], tmp_path: Path
) -> None:
    assert _fuzz(counters, tmp_path, 10_000).total() == 10_000
