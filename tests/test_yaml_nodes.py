"""YAML in, typed dataclasses out: strict, with lines, and never more than plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import allowed_s

from optimus.errors import UserError
from optimus.job.typed import Places, describe
from optimus.job.yaml_nodes import MAX_BYTES, load_yaml, merged, parse_yaml


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: Annotated[int, "positive"]
    share: Annotated[float, "share"] = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    rate: float = 1.0
    maybe: int | None = None
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


def read(text: str) -> Outer:
    return Places().read(Outer, parse_yaml(text, file="x.yaml"), "")


def refused(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read(text)
    return caught.value


def test_every_kind_of_field_is_read() -> None:
    found = read(
        "name: n\nkind: b\nflag: true\nrate: 2\nmaybe: null\ninner: {count: 3}\n"
        "many: [{count: 1}, {count: 2, share: 0}]\nby_name: {x: {count: 9}}\nanything: {a: [1, two, 3.5]}\n"
    )
    assert found == Outer(
        name="n",
        kind="b",
        flag=True,
        rate=2.0,
        inner=Inner(count=3),
        many=(Inner(count=1), Inner(count=2, share=0.0)),
        by_name={"x": Inner(count=9)},
        anything={"a": [1, "two", 3.5]},
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("2026-11-02", "2026-11-02"),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("0x10", "0x10"),
        ("'7'", "7"),
        ('"true"', "true"),
        ("TRUE", True),
        ("~", None),
    ],
)
def test_plain_words_follow_yaml_1_2(text: str, value: object) -> None:
    assert read(f"name: n\nanything: {text}\n").anything == value


@pytest.mark.parametrize(
    ("text", "field_", "line"),
    [
        ("name: 3\n", "name", 1),
        ("name: n\nflag: 1\n", "flag", 2),
        ("name: n\nflag: yes\n", "flag", 2),
        ("name: n\nmaybe: true\n", "maybe", 2),
        ("name: n\nrate: false\n", "rate", 2),
        ("name: n\ninner:\n  count: 0\n", "inner.count", 3),
        ("name: n\ninner:\n  count: 1\n  share: 1.5\n", "inner.share", 4),
        ("name: n\nmany:\n  - count: 1\n  - count: -1\n", "many[1].count", 4),
        ("name: n\nby_name:\n  x: {count: 1, cuont: 2}\n", "by_name.x.cuont", 3),
        ("name: n\ninner: {}\n", "inner.count", 2),
        ("name: n\nkind: true\n", "kind", 2),
        ("name: n\nanything: .inf\n", "anything", 2),
        ('name: "a\\u0007b"\n', "name", 1),
        ("name: n\n<<: {flag: true}\n", "<<", 2),
        ("name: n\n? [a]\n: 1\n", "YAML", 2),
    ],
)
def test_what_does_not_fit_is_refused_at_its_line(text: str, field_: str, line: int) -> None:
    error = refused(text)
    assert (error.file, error.field, error.line) == ("x.yaml", field_, line)
    assert error.hint


def test_later_checks_find_the_line_of_a_field_or_of_the_block_around_it() -> None:
    places = Places()
    places.read(Outer, parse_yaml("name: n\nmany:\n  - count: 1\n  - count: 2\n", file="x.yaml"), "")
    assert places.error("many[1].count", "is odd", "use 4", 2).line == 4
    assert places.error("many[1].share", "is odd", "use 1").line == 4
    assert places.error("many[7]", "is odd", "use 1").line == 2
    assert places.error("unheard.of", "is odd", "use 1").file == "x.yaml"


def test_merging_keeps_what_is_not_stated_and_points_to_the_file_that_states() -> None:
    base = parse_yaml("name: base\ninner: {count: 1, share: 0.2}\n", file="base.yaml")
    over = parse_yaml("inner: {count: -5}\n", file="over.yaml")
    both = merged(base, over)
    with pytest.raises(UserError) as caught:
        Places().read(Outer, both, "")
    assert caught.value.file == "over.yaml"
    share = both.entries["inner"].entries["share"]
    assert (share.value, share.file) == (0.2, "base.yaml")


def test_aliases_are_shared_and_point_to_where_they_are_used() -> None:
    node = parse_yaml("name: n\ninner: &i {count: 2}\nmany: [*i, *i]\nby_name:\n  x: *i\n", file="x.yaml")
    found = Places().read(Outer, node, "")
    assert found.many == (Inner(count=2), Inner(count=2))
    assert node.entries["by_name"].entries["x"].line == 5


def test_alias_bombs_cost_nothing() -> None:
    levels = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
    begin = time.perf_counter()
    assert "values" in str(refused("\n".join(levels)))
    assert "aliases" in str(refused("a: &a x\nb: [" + "*a, " * 100 + "*a]\n"))
    assert time.perf_counter() - begin < 2


def test_deep_nesting_is_refused_before_the_stack_ends() -> None:
    assert "deeper" in str(refused("anything: " + "[" * 100_000))
    assert "deeper" in str(refused("\n".join("  " * n + "a:" for n in range(2_000))))


def test_files_are_bounded_and_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"a: " + b"x" * MAX_BYTES)
    with pytest.raises(UserError, match="larger than"):
        load_yaml(path)
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        load_yaml(path)
    with pytest.raises(UserError, match="not a file"):
        load_yaml(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read|does not exist"):
        load_yaml(Path("a\0b"))


def test_a_full_mebibyte_is_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("run:\n" + "".join(f"  k{n}: {n}\n" for n in range(65_000)), encoding="utf-8")
    begin = time.perf_counter()
    assert len(load_yaml(path).entries["run"].entries) == 65_000
    assert time.perf_counter() - begin < allowed_s(10)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    refused = None
    try:
        assert isinstance(parse_yaml(text, file="x.yaml").value, dict)
    except UserError as error:
        refused = error
    assert refused is None or refused.hint


def test_kinds_are_described_in_words() -> None:
    assert describe(Annotated[int, "positive"]) == "a whole number, more than 0"
    assert describe(Literal["a", "b"]) == "a or b"
    assert describe(int | None) == "a whole number"
    assert describe(Inner) == "a mapping"
