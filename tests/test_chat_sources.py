"""The same samples as JSONL, WebDataset shards and rows of `datasets` have one index and one content."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from chat_data import chat, write_folder, write_wav
from test_chat_dataset import ROWS, folders, write_data

from optimus.data.chat_format import parse_chat_sample
from optimus.data.chat_source import ChatSource, open_chat_source
from optimus.data.index_lengths import IndexedLengths, index_lengths
from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_bytes import FilePart, MediaBytes
from optimus.data.media_headers import MediaFolder
from optimus.data.sample_index import IndexKey, SampleIndex
from optimus.data.tar_shards import _expand
from optimus.errors import UserError
from optimus.hf.chat_dataset import ChatDataset

pytestmark = pytest.mark.ci("data")
__all__ = ["folders"]  # a fixture
Member = tuple[str, bytes]


def write_tar(path: Path, members: list[Member]) -> None:
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))


def sample_members(key: str, row: dict[str, Any], media: Path) -> list[Member]:
    """Returns a sample's JSON without paths, and its images by number."""
    rest = {name: value for name, value in row.items() if name != "images"}
    images = row.get("images", [])
    files = [
        (f"{key}.{n}.{name.split('.')[1]}", (media / name).read_bytes()) for n, name in enumerate(images)
    ]
    return [*files, (f"{key}.json", json.dumps(rest).encode())]


def write_shards(folder: Path, rows: list[dict[str, Any]], media: Path) -> Path:
    folder.mkdir(exist_ok=True)
    members = [sample_members(f"a/{place:03}", row, media) for place, row in enumerate(rows)]
    write_tar(folder / "shard_0.tar", [member for each in members[:2] for member in each])
    write_tar(folder / "shard_1.tar", [member for each in members[2:] for member in each])
    return folder


def write_arrow(folder: Path, rows: list[dict[str, Any]], media: Path) -> Path:
    import datasets

    table = {
        "messages": [row["messages"] for row in rows],
        "images": [
            [{"bytes": (media / name).read_bytes(), "path": name} for name in row.get("images", [])]
            for row in rows
        ],
    }
    data = datasets.Dataset.from_dict(table)
    data = data.cast_column("images", datasets.Sequence(datasets.Image()))
    data.save_to_disk(str(folder))
    return folder


def measure(source: ChatSource, model: Path, root: Path) -> IndexedLengths:
    return index_lengths(
        source, model=model, folder=MediaFolder(root=root), workers=1, progress=lambda *_: None
    )


def open_data(source: ChatSource, model: Path, root: Path) -> ChatDataset:
    folder = MediaFolder(root=root)
    key = IndexKey.make(source, model=model, folder=folder, sequence_tokens=None)
    index = SampleIndex.make(key, measure(source, model, root))
    return ChatDataset.open(source, index, folder=folder, model_dir=model)


def test_samples_are_the_same_whatever_holds_them(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = folders("qwen2_5_vl")
    broken = chat("<image>what", images=["broken.png"])
    rows = [*ROWS[:3], broken, *ROWS[3:]]
    lines = write_data(tmp_path / "lines", rows)
    (lines.parent / "broken.png").write_bytes(b"\x89PNG no image")
    empty = tmp_path / "empty"
    empty.mkdir()
    paths = {
        "shards": write_shards(tmp_path / "shards", rows, lines.parent),
        "arrow": write_arrow(tmp_path / "arrow", rows, lines.parent),
    }
    expected = open_data(open_chat_source(lines), model, lines.parent)
    assert len(expected) == len(ROWS) and expected.index.skipped == {SkipReason.BAD_FILE: 1}
    for name, path in paths.items():
        source = pickle.loads(pickle.dumps(open_chat_source(path)))
        data = open_data(source, model, empty)  # no file is read beside it
        assert data.index.skipped == expected.index.skipped, name
        assert data.file.lines.tolist() == [1, 2, 3, 5, 6]
        for number in range(len(expected)):
            theirs, ours = expected.sample(number), data.sample(number)
            assert not ours.skipped and data.sizes(number) == expected.sizes(number)
            assert data.labels(number) == expected.labels(number)
            assert ours.tokens.equal(theirs.tokens) and ours.labels.equal(theirs.labels)
            for one, other in zip(ours.items["vision"], theirs.items["vision"], strict=True):
                assert (one.offset, one.grid) == (other.offset, other.grid)
                assert torch.equal(one.inputs, other.inputs)


def test_sounds_in_shards_and_rows_have_the_lengths_of_files(tmp_path: Path) -> None:
    import datasets

    model = write_folder(tmp_path / "model", "qwen2_audio")
    write_wav(tmp_path / "a.wav", 9000, 16000)
    soundfile.write(tmp_path / "b.flac", np.zeros(5000), 8000)
    rows = [chat("<audio>who", audios=["a.wav"]), chat("<audio>who", audios=["b.flac"])]
    lines = tmp_path / "data.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    contents = {name: (tmp_path / name).read_bytes() for name in ("a.wav", "b.flac")}
    (tmp_path / "shards").mkdir()
    write_tar(
        tmp_path / "shards" / "x.tar",
        [
            (f"{n}.{end}", content)
            for n, (row, name) in enumerate(zip(rows, contents, strict=True))
            for end, content in (
                ("json", json.dumps({**row, "audios": [f"{n}.{name[2:]}"]}).encode()),
                (name[2:], contents[name]),
            )
        ],
    )
    table = {
        "messages": [row["messages"] for row in rows],
        "audio": [{"bytes": content, "path": None} for content in contents.values()],
    }
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "arrow"))
    tables = [
        measure(open_chat_source(path), model, tmp_path).samples
        for path in (lines, tmp_path / "shards", tmp_path / "arrow")
    ]
    assert len(tables[0]) == 2
    for other in tables[1:]:
        assert [other[n] for n in range(len(other))] == [tables[0][n] for n in range(2)]


# ---------------------------------------------------------------------------- shards


def write_meta(folder: Path, **files: Any) -> None:
    (folder / ".nv-meta").mkdir()
    for name, content in files.items():
        (folder / ".nv-meta" / f"{name}.yaml").write_text(json.dumps(content))


ROW = json.dumps(chat("what")).encode()


def test_energon_says_which_shards_and_where_samples_begin(tmp_path: Path) -> None:
    """An index that energon wrote is taken as it is; here one sample is two."""
    for shard in range(3):
        write_tar(tmp_path / f"s_{shard:02}.tar", [(f"{n}.json", ROW) for n in range(4)])
    scanned = open_chat_source(tmp_path)
    assert len(scanned) == 12
    parts = {"train": ["s_{00..01}.tar"], "val": ["s_02.tar"]}
    write_meta(
        tmp_path,
        split={"split_parts": parts, "exclude": ["s_00.tar/1"]},
        dataset={"__class__": "CrudeWebdataset"},
    )
    source = open_chat_source(tmp_path)
    assert len(source) == 7 and source.digest != scanned.digest
    np.array([0, 2048, 4096], dtype="<u8").tofile(tmp_path / "s_01.tar.idx")
    assert len(open_chat_source(tmp_path)) == 5
    np.array([0, 1 << 40], dtype="<u8").tofile(tmp_path / "s_01.tar.idx")  # of another file
    assert len(open_chat_source(tmp_path)) == 7


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"dataset": {"__class__": "VQAWebdataset"}}, "__class__ = VQAWebdataset is no class of energon"),
        ({"dataset": {"sample_type": {"__class__": "VQASample"}}}, "__class__ = VQASample is no class"),
        ({"split": {"split_parts": {"val": ["a.tar"]}}}, "split_parts.train is missing"),
        ({"split": {"split_parts": {"train": ["../a.tar"]}}}, "a.tar is no shard in the folder"),
    ],
)
def test_folders_of_energon_that_are_not_read_are_refused(
    tmp_path: Path, files: dict[str, Any], problem: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(tmp_path / "a.tar", [("0.json", ROW)])
    write_meta(folder, **files)
    with pytest.raises(UserError, match=problem):
        open_chat_source(folder)


def test_patterns_are_those_of_braceexpand() -> None:
    assert _expand("a_{8..10}.tar") == ["a_8.tar", "a_9.tar", "a_10.tar"]
    assert _expand("a_{08..10}.tar") == ["a_08.tar", "a_09.tar", "a_10.tar"]
    assert _expand("{0..1}/{0..1}.tar") == ["0/0.tar", "0/1.tar", "1/0.tar", "1/1.tar"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("0.jpg", b"x")], SkipReason.UNKNOWN_FORM),
        ([("0.json", b"{")], SkipReason.NOT_JSON),
        ([("0.json", b"[1]")], SkipReason.UNKNOWN_FORM),
        ([("0.json", b" " * (5 << 20))], SkipReason.LONG_LINE),
        ([("0.json", json.dumps(chat("<image>what")).encode())], SkipReason.TAGS),
    ],
)
def test_members_that_are_no_sample_are_skipped(
    tmp_path: Path, members: list[Member], reason: SkipReason
) -> None:
    write_tar(tmp_path / "a.tar", members)
    source = open_chat_source(tmp_path)
    with pytest.raises(SkippedSample) as skipped:
        parse_chat_sample(source.read(0))
    assert skipped.value.reason == reason


def test_paths_of_a_row_are_members_of_its_sample_alone(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "image": "0.b.png"},
        {"type": "text", "text": "0.a.png"},
        {"type": "image", "image": "a.png"},
    ]
    row = json.dumps(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "it"}]}
    )
    write_tar(tmp_path / "a.tar", [("0.a.png", b"first"), ("0.b.png", b"second"), ("0.json", row.encode())])
    media = parse_chat_sample(open_chat_source(tmp_path).read(0)).media
    contents = [item.path.open().read() for item in media if isinstance(item.path, FilePart)]
    assert contents == [b"second", b"first"]


def test_a_shard_that_is_cut_or_changed_is_refused_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{n}.json", ROW) for n in range(3)])
    source, content = open_chat_source(tmp_path), path.read_bytes()
    for broken in (content[:2600], b"no tar" * 200):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"a\.tar is no whole tar file"):
            open_chat_source(tmp_path)
        with pytest.raises(SkippedSample):
            source.read(2)


def mutate_shards(folder: Path, mutations: int) -> Counter[str]:
    """Reads shards with changed bytes; returns how they ended."""
    generator, path = random.Random(0), folder / "a.tar"
    write_tar(
        path,
        [member for n in range(3) for member in ((f"{n}.json", ROW), (f"{n}.{'x' * 120}.png", b"image"))],
    )
    content, ends = path.read_bytes().rstrip(b"\0") + b"\0" * 1024, Counter[str]()
    for _ in range(mutations):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 4))):
            block = generator.randrange(len(changed) // 512) * 512
            changed[block + generator.randrange(512)] = generator.randrange(256)
            if generator.random() < 0.5:  # a header whose checksum is right again
                changed[block + 148 : block + 156] = b" " * 8
                changed[block + 148 : block + 155] = f"{sum(changed[block : block + 512]):06o}\0".encode()
        path.write_bytes(changed)
        try:
            source = open_chat_source(folder)
        except UserError:
            ends["refused"] += 1
            continue
        for number in range(len(source)):
            try:
                parse_chat_sample(source.read(number))
                ends["read"] += 1
            except SkippedSample:
                ends["skipped"] += 1
    return ends


def test_mutated_shards_are_read_refused_or_skipped(tmp_path: Path) -> None:
    assert min(mutate_shards(tmp_path, 300)[end] for end in ("refused", "read", "skipped"))


@pytest.mark.heavy
def test_10_000_mutated_shards_are_read_refused_or_skipped(tmp_path: Path) -> None:
    assert mutate_shards(tmp_path, 10_000).total() > 10_000


# ---------------------------------------------------------------------------- rows of datasets


def test_folders_of_datasets_that_are_not_read_are_refused(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(UserError, match=r"holds no shards .* and no data set"):
        open_chat_source(tmp_path)
    data = datasets.Dataset.from_list([chat("what")])
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UserError, match=r"several splits\nhint: give the folder of one: .*train or .*test"):
        open_chat_source(tmp_path / "both")
    assert len(open_chat_source(tmp_path / "both" / "train")) == 1
    (arrow,) = (tmp_path / "both" / "train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        open_chat_source(tmp_path / "both" / "train")


def test_streams_read_parts_as_files_do(tmp_path: Path) -> None:
    path, content = tmp_path / "a", bytes(range(256))
    path.write_bytes(b"before" + content + b"behind")
    for media in (
        FilePart(name="x.png", path=path, begin=6, size=256),
        MediaBytes(name="x.png", content=content),
    ):
        with media.open() as stream:
            assert stream.read(3) == content[:3] and stream.tell() == 3
            assert stream.seek(-2, io.SEEK_END) == 254 and stream.read() == content[-2:]
            assert stream.read() == b"" and stream.seek(0) == 0 and stream.read() == content
            assert "0x" not in repr(stream) and "x.png" in repr(stream)
