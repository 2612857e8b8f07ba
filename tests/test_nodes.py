"""YAML or JSON in, typed dataclasses out: strict, with lines, and never more than plain data."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import allowed_s

from optimus.errors import UserError
from optimus.job.nodes import MAX_BYTES, DocumentNode, merge_yaml, parse_json
from optimus.job.typed import ROW, Count, NumberRange, Share, describe_type, read_typed
from optimus.job.yaml_parser import load_yaml, parse_yaml


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: Count
    share: Share = 0.5


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


def outer(text: str) -> Outer:
    return read_typed(Outer, parse_yaml(text, file="x.yaml"))


def refused(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        outer(text)
    return caught.value


def test_every_kind_of_field_is_read() -> None:
    found = outer(
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
    assert outer(f"name: n\nanything: {text}\n").anything == value


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
    root = parse_yaml("name: n\nmany:\n  - count: 1\n  - count: 2\n", file="x.yaml")
    assert root.at("many[1].count").error("is odd", "use 4", 2).line == 4
    assert root.at("many[1].share").error("is odd", "use 1").line == 4
    assert root.at("many[7]").error("is odd", "use 1").line == 2
    assert root.at("unheard.of").error("is odd", "use 1").file == "x.yaml"


def test_merging_keeps_what_is_not_stated_and_points_to_the_file_that_states() -> None:
    base = parse_yaml("name: base\ninner: {count: 1, share: 0.2}\n", file="base.yaml")
    over = parse_yaml("inner: {count: -5}\n", file="over.yaml")
    both = over.replaced(merge_yaml(base.value, over.value))
    with pytest.raises(UserError) as caught:
        read_typed(Outer, both)
    assert caught.value.file == "over.yaml"
    share = both["inner"]["share"]
    assert share.value == 0.2 and share.error("is odd", "use 1").file == "base.yaml"


def test_aliases_are_shared_and_point_to_where_they_are_used() -> None:
    node = parse_yaml("name: n\ninner: &i {count: 2}\nmany: [*i, *i]\nby_name:\n  x: *i\n", file="x.yaml")
    found = read_typed(Outer, node)
    assert found.many == (Inner(count=2), Inner(count=2))
    assert node.at("by_name.x").error("is odd", "use 1").line == 5


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
    assert len(load_yaml(path)["run"].value) == 65_000
    assert time.perf_counter() - begin < allowed_s(10)


# JSON ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    size: Annotated[int, NumberRange(least=0, most=9)] = 0


@dataclass(frozen=True, kw_only=True)
class Table:
    rows: tuple[Annotated[Cell, ROW], ...]
    pairs: tuple[tuple[str, int], ...] = ()
    left: object = None


def table(text: str, **options: Any) -> Table:
    return read_typed(Table, parse_json(text, file="x.json", line=7, hint="write JSON"), **options)


def test_rows_are_lists_with_an_item_per_field() -> None:
    assert table(
        '{"rows": [["a", 3]], "pairs": [["b", 1]], "left": {"c": NULL}}'.replace("NULL", "null")
    ) == (Table(rows=(Cell(name="a", size=3),), pairs=(("b", 1),), left={"c": None}))


@pytest.mark.parametrize(
    ("text", "field_", "line", "problem"),
    [
        ('{"rows": [["a"]]}', "rows[0]", 7, "has 1 columns, not 2"),
        ('{"rows": [["a", 1],\n["b", 10]]}', "rows[1][1]", 8, "is not a whole number from 0 to 9"),
        ('{"rows": [\n\n["a", 1.0]]}', "rows[0][1]", 9, "is not a whole number from 0 to 9"),
        ('{"rows": [],\n "pairs": [["\\"}", 1],\n["b"]]}', "pairs[1]", 9, "has 1 items, not 2"),
        ('{"left": {"rows": 1},\n\n"row": []}', "row", 9, "is not known here"),
        ('{"left": {"rows": 1},\n\n"pairs": []}', "rows", 7, "is missing"),
        ('{"rows": [],\n"rows": []}', "rows", None, "is given twice"),
        ('{"rows": [],\n,}', "JSON", 8, "is not valid: Expecting property name enclosed in double quotes"),
        ('{"rows": [["a", NaN]]}', "JSON", None, "has NaN, which is not a finite number"),
        ("[" * 100_000, "JSON", None, "is nested too deeply, or has too long a number"),
        ("[]", "JSON", 7, "is not an object"),
    ],
)
def test_json_is_refused_at_its_line(text: str, field_: str, line: int | None, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        table(text)
    error = caught.value
    assert (error.file, error.field, error.line, error.problem) == ("x.json", field_, line, problem)


def test_complete_documents_have_every_field() -> None:
    assert table('{"rows": []}').pairs == ()
    with pytest.raises(UserError, match=r"pairs is missing\nhint: add pairs: a list"):
        table('{"rows": []}', complete=True)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@pytest.mark.ci
@given(VALUES)
def test_every_value_of_a_json_document_is_found_on_its_line(value: object) -> None:
    """Written with one value per line, values are found in the order of their lines."""
    text = json.dumps({"root": value}, indent=1)
    lines = text.split("\n")

    def check(node: DocumentNode, above: int) -> int:
        line = node.error("is odd", "use 1").line
        assert line is not None and line > above
        if isinstance(node.path[-1], str):
            assert lines[line - 1].strip().startswith(json.dumps(node.path[-1]))
        steps = range(len(node.value)) if isinstance(node.value, list) else node.entries()
        for step in steps:
            line = check(node[step], line)
        return line

    check(parse_json(text, file="x.json", hint="")["root"], above=1)


# Fuzz ----------------------------------------------------------------------------------


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    refused = None
    try:
        assert isinstance(parse_yaml(text, file="x.yaml").value, dict)
    except UserError as error:
        refused = error
    assert refused is None or refused.hint


def test_kinds_are_described_in_words() -> None:
    assert describe_type(Count) == "a whole number, more than 0"
    assert describe_type(Literal["a", "b"]) == "a or b"
    assert describe_type(int | None) == "a whole number"
    assert describe_type(Inner) == "a mapping"
    assert describe_type(tuple[Count, ...]) == "a list of whole numbers"
    assert describe_type(Share) == "a number from 0 to 1"
