"""Whatever is wrong in a plan file is named: file, line, field, problem and what to do."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import allowed_s
from plan_by_hand import llm_alone, two_pipelines

from optimus.errors import UserError
from optimus.ir import planfile
from optimus.ir.plan import Span
from optimus.ir.planfile import format_plan, load_plan, parse_plan, save_plan

ParsedDocument = dict[str, Any]


def refused(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_plan(text, "x.json")
    assert caught.value.file == "x.json" and caught.value.hint and caught.value.field
    return caught.value


def edited(edit: Callable[[ParsedDocument], Any]) -> str:
    document = json.loads(format_plan(two_pipelines()))
    edit(document)
    return json.dumps(document)


def put(value: Any, *path: str | int) -> Callable[[ParsedDocument], None]:
    def edit(document: Any) -> None:
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = value

    return edit


def drop(*path: str | int) -> Callable[[ParsedDocument], None]:
    def edit(document: Any) -> None:
        for name in path[:-1]:
            document = document[name]
        del document[path[-1]]

    return edit


PHASE, LAYOUT = ("templates", "llm-F", 1), ("modules", "enc0", "layout")
REFUSALS: list[tuple[Callable[[ParsedDocument], Any], str, str]] = [
    (drop("schema"), "plan", "has no schema"),
    (put("optimus.job/1", "schema"), "schema", "is not the schema of a plan"),
    (put(1, "schema"), "schema", "is not the schema of a plan"),
    (put("optimus.plan/6", "schema"), "schema", "is newer"),
    (put([], "requires"), "requires", "is not known here"),
    (put("attention", "modules", "llm", "recomputed"), "modules.llm.recomputed", "is not a list"),
    (put([1], "modules", "llm", "recomputed"), "modules.llm.recomputed[0]", "is not text"),
    (put(0, "modules", "llm", "regather"), "modules.llm.regather", "is not true or false"),
    (drop("modules", "llm", "regather"), "modules.llm.regather", "is missing"),
    (put(1, "extra"), "extra", "is not known here"),
    (drop("order"), "order", "is missing"),
    (put(3, "name"), "name", "is not text"),
    (put("a\nb", "name"), "name", "has unprintable characters"),
    (put(1.5, "microbatches"), "microbatches", "is not a whole number"),
    (put(True, "microbatches"), "microbatches", "is not a whole number"),
    (put(2**31, "microbatches"), "microbatches", "is not a whole number from 1 to 2147483647"),
    (put(-1, "capacity_bytes"), "capacity_bytes", "is not a whole number"),
    (put(2**63, "capacity_bytes"), "capacity_bytes", "is not a whole number"),
    (put(-0.1, "slowdown"), "slowdown", "is not 0 or more"),
    (put("fast", "launch_s"), "launch_s", "is not a number"),
    (put([0.1], "finish_s"), "finish_s", "has 1 numbers"),
    (put({"elsewhere": 1.0}, "claims", "encoder_s"), "claims.encoder_s.elsewhere", "is not a known region"),
    (put({}, "legend"), "legend", "is not the legend"),
    (put("0" * 64, "hashes", "model"), "hashes.model", "is not the hash of bound_to.model"),
    (put(5, "bound_to", "model", "llm.stack.layers"), "hashes.model", "is not the hash"),
    (put("\ud800", "notes", "why"), "notes.why", "has half a character"),
    (put({}, "modules"), "modules", "does not end with llm"),
    (lambda d: d["modules"].update(vit=d["modules"].pop("enc0")), "modules", "does not end with llm"),
    (put(0, *LAYOUT, "dp"), "modules.enc0.layout.dp", "is not a whole number from 1"),
    (put(3, *LAYOUT, "pp"), "modules.enc0.layout.pp", "does not divide modules.llm.layout.pp = 4"),
    (put(4, *LAYOUT, "tp"), "modules.enc0.layout.tp", "does not divide modules.llm.layout.tp = 2"),
    (put(4, *LAYOUT, "dp"), "modules.enc0.layout.dp", "makes 16 GPUs, and the LLM has 8"),
    (put(2, *LAYOUT, "chunks"), "modules.enc0.chunks", "has 2 chunks, not 4"),
    (put([], "modules", "enc0", "chunks"), "modules.enc0.chunks", "has 0 chunks, not 2"),
    (put({}, "chunks", 0, 0), "modules.enc0.chunks", "has no chunk with a template"),
    (put(3, "modules", "llm", "layout", "ep"), "modules.llm.layout.ep", "does not divide dp x cp x tp"),
    (put(2**20, "modules", "llm", "layout", "dp"), "modules.enc0.layout.dp", "GPUs"),
    (put([1, 1, 1], "modules", "llm", "chunks"), "modules.llm.chunks", "has 3 chunks, not 4"),
    (put([1, 1, 1, 2], "modules", "llm", "chunks"), "modules.llm.chunks[3]", "is not a whole number"),
    (put([[0]], "modules", "enc0", "buckets"), "modules.enc0.buckets", "has 1 stages, not 2"),
    (put([[0], [9]], "modules", "enc0", "buckets"), "modules.enc0.buckets[1][0]", "is not a whole number"),
    (put(1, "buckets", 0, 0), "modules.enc0.buckets[0]", "has a bucket of a chunk that there is not"),
    (put([0], "modules", "enc0", "pipelines"), "modules.enc0.pipelines", "has 1 microbatches, not 2"),
    (put([0, 2], "modules", "enc0", "pipelines"), "modules.enc0.pipelines[1]", "is not a whole number"),
    (put(2, "modules", "llm", "pieces"), "modules.llm.pieces", "is more than 1"),
    (put("llm-X", "chunks", 1, 0, "F"), "chunks[1][0].F", "is not a known template"),
    (put("llm-F", "chunks", 1, 0, "X"), "chunks[1][0].X", "is not a known op kind"),
    (put("llm-F", "chunks", 1, 0, "R"), "chunks[1][0].R", "is not a kind of op"),
    (put("llm-F", "chunks", 1, 0, "I"), "chunks[1][0]", "has B together with its halves"),
    (put(-1, "chunks", 1, 2), "chunks[1][2]", "is not a whole number"),
    (put("gpu", "buckets", 0, 7), "buckets[0][7]", "is not a known lane"),
    (put("p2p", "buckets", 0, 7), "buckets[0][7]", "is not a lane of buckets"),
    (put(2, "buckets", 0, 1), "buckets[0][2]", "is before first_layer = 2"),
    (put([], "templates", "llm-F"), "templates.llm-F", "has no phases"),
    (put("X", *PHASE, 1), "templates.llm-F[1][1]", "is not a known op kind"),
    (put("send-f", *PHASE, 1), "templates.llm-F[1][1]", "is not a kind of phase"),
    (put("compute", *PHASE, 5), "templates.llm-F[1][5]", "is not a lane of collectives"),
    (put("none", *PHASE, 6), "templates.llm-F[1][6]", "cannot carry a collective"),
    (put("world", *PHASE, 6), "templates.llm-F[1][6]", "is not a known communicator"),
    (put([1], *PHASE, 7), "templates.llm-F[1][7]", "names phase 1, which does not precede phase 1"),
    (put([9], *PHASE, 7), "templates.llm-F[1][7]", "names phase 9"),
    (put([-1], *PHASE, 7), "templates.llm-F[1][7][0]", "is not 0 or more"),
    (drop(*PHASE, 7), "templates.llm-F[1]", "has 7 columns, not 8"),
    (drop("memory", 1), "memory", "has 4 rows"),
    (put("seem", "memory", 0, 4), "memory[0]", "does not end with"),
    (put(-1, "memory", 1, 0), "memory[1][0]", "is not a whole number"),
    (drop("programs", 0), "programs", "has 3 device classes, not 4"),
    (put([], "programs", 0), "programs[0]", "does not open with its device class"),
    (lambda d: d["programs"].reverse(), "programs[0]", "does not open with its device class"),
    (put("llm.F 0 0", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put("llm.F 0 0 0\n", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put("llm.F 0 0 0\x0b", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put("llm.F 0 0\u00a00", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put("", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put("llm.F 0 0 0\nllm.F 0 0 0", "programs", 0, 5), "programs[0][5]", "is not a line of a program"),
    (put(7, "programs", 0, 5), "programs[0][5]", "is not text"),
    (put("llm.G 0 0 0", "programs", 0, 5), "programs[0][5]", "is of no known kind"),
    (put("vit.F 0 0 0", "programs", 0, 5), "programs[0][5]", "is of no known kind"),
    (put("all.F 0 0 0", "programs", 0, 5), "programs[0][5]", "is of no known kind"),
    (put("llm.F 0 llm.F 0", "programs", 0, 5), "programs[0][5]", "needs three whole numbers"),
    (put("llm.F 0 -1 0", "programs", 0, 5), "programs[0][5]", "needs three whole numbers"),
    (put("llm.F 0 ٣ 0", "programs", 0, 5), "programs[0][5]", "needs three whole numbers"),
    (put("llm.F 0 01 0", "programs", 0, 5), "programs[0][5]", "needs three whole numbers"),
    (put("llm.F 0 2147483648 0", "programs", 0, 5), "programs[0][5]", "needs three whole numbers"),
    (put("llm.F 1 0 0", "programs", 0, 5), "programs[0][5]", "names chunk 1, and there are 1"),
    (put("llm.F 0 2 0", "programs", 0, 5), "programs[0][5]", "names microbatch 2, and there are 2"),
    (put("llm.F 0 0 3", "programs", 0, 5), "programs[0][5]", "names place 3, and there are 3"),
    (put("llm.W 0 0 0", "programs", 0, 5), "programs[0][5]", "names place 0, and there are 0"),
    (put("llm.gather 0 0 1", "programs", 0, 5), "programs[0][5]", "names place 1, and there are 1"),
]


@pytest.mark.parametrize(
    ("edit", "field", "problem"), REFUSALS, ids=[f"{field} {problem}" for _, field, problem in REFUSALS]
)
def test_what_is_wrong_is_named(edit: Callable[[ParsedDocument], Any], field: str, problem: str) -> None:
    error = refused(edited(edit))
    assert error.field == field
    assert problem in error.problem


def test_a_wrong_line_is_found_in_the_file() -> None:
    text = format_plan(two_pipelines())
    broken = text.replace('"llm.F 0 1 2"', '"llm.F 0 1 9"', 1)
    assert refused(broken).line == broken[: broken.index("llm.F 0 1 9")].count("\n") + 1
    first = text.index("class 1")
    broken = text[:first] + text[first:].replace('"llm.F 0 1 2"', '"llm.F 0 1 1 1"', 1)
    assert refused(broken).line == broken[: broken.index("llm.F 0 1 1 1")].count("\n") + 1
    broken = text.replace('"llm-F": [["attention", "F"', '"llm-F": [["attention", "X"')
    error = refused(broken)
    assert error.line == broken[: broken.index('"llm-F": [[')].count("\n") + 1
    assert str(error).startswith(f"error: x.json:{error.line} templates.llm-F[0][1] = ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not valid"),
        ("null", "is not an object"),
        ("[]", "is not an object"),
        ('{"schema": "optimus.plan/3", "schema": "optimus.plan/3"}', "is given twice"),
        ('{"schema": NaN}', "has NaN"),
        ('{"schema": "optimus.plan/3", "slowdown": -Infinity}', "has -Infinity"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("9" * 10_000, "is nested too deeply, or has too long a number"),
        ("{", "is not valid"),
    ],
)
def test_what_is_not_a_document(text: str, problem: str) -> None:
    assert problem in refused(text).problem


def test_numbers_that_are_not_finite() -> None:
    text = format_plan(two_pipelines())
    assert refused(text.replace('"slowdown": 0.05', '"slowdown": 1e999')).field == "slowdown"
    assert refused(text.replace('"figures": [1', '"figures": [1e999')).field == "notes.figures[0]"
    assert refused(text.replace('"figures": [1', f'"figures": [{10**30}')).field == "notes.figures[0]"
    nested = "[" * 30 + "]" * 30
    assert "is nested more than" in refused(text.replace('"figures": [1', f'"figures": [{nested}')).problem


def test_what_is_not_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            load_plan(path)
        return caught.value.problem

    path = tmp_path / "plan.json"
    assert problem(path) == "does not exist"
    assert problem(tmp_path) == "is not a file"
    os.mkfifo(tmp_path / "pipe")
    assert problem(tmp_path / "pipe") == "is not a file"
    path.write_bytes(gzip.compress(format_plan(llm_alone()).encode()))
    assert "is not UTF-8" in problem(path)
    path.write_bytes(b'{"schema": "\xff"}')
    assert "is not UTF-8" in problem(path)
    path.write_bytes(b"")
    assert "is not valid" in problem(path)
    monkeypatch.setattr(planfile, "MAX_BYTES", 1000)
    save_plan(llm_alone(), path)
    assert problem(path) == "is larger than 1,000 bytes"


def to_format_4(document: ParsedDocument) -> None:
    """Undoes what format 5 changed."""
    document["schema"] = "optimus.plan/4"
    for row in (*document["chunks"], document["legend"]["chunk"]):
        del row[4]
    document["legend"]["chunk"][2:4] = ["kept_bytes", "made_again_bytes"]
    for row in (*document["memory"], document["legend"]["memory"]):
        del row[-1]


def to_format_3(document: ParsedDocument) -> None:
    """Undoes what formats 4 and 5 changed."""
    to_format_4(document)
    document["schema"] = "optimus.plan/3"
    for row in (*document["buckets"], document["legend"]["bucket"]):
        del row[-2:]
    for row in (*document["memory"], document["legend"]["memory"]):
        del row[-1]


def to_format_2(document: ParsedDocument) -> None:
    """Undoes what formats 3 to 5 changed."""
    to_format_3(document)
    document["schema"] = "optimus.plan/2"
    del document["dealing_replicas"]
    for module in document["modules"].values():
        del module["item_cost"]


def to_format_1(document: ParsedDocument) -> None:
    """Undoes what format 2 changed."""
    to_format_2(document)
    document |= {"schema": "optimus.plan/1", "seed": 0, "requires": [], "single_connection": False}
    document["legend"]["line"][0] = "module.verb"
    for module in document["modules"].values():
        del module["recomputed"], module["regather"]


def to_format_0(document: ParsedDocument) -> None:
    to_format_1(document)
    document["schema"] = "optimus.plan/0"
    del document["requires"], document["single_connection"]


@pytest.mark.parametrize("to_old", [to_format_0, to_format_1])
def test_older_formats_are_read(to_old: Callable[[ParsedDocument], None]) -> None:
    assert format_plan(parse_plan(edited(to_old), "x.json")) == format_plan(two_pipelines())

    def with_recomputation(document: ParsedDocument) -> None:
        document["templates"]["llm-B"][0][:2] = ["attention", "R"]
        document["templates"]["llm-B"][1][0] = "qkv.gather"

    def both(document: ParsedDocument) -> None:
        with_recomputation(document)
        to_old(document)

    old = parse_plan(edited(both), "x.json").modules
    assert old["llm"].recomputed == ("attention",) and old["llm"].regather
    assert old["enc0"].recomputed == () and not old["enc0"].regather


def test_a_plan_from_before_dealing_keeps_images_on_their_replica() -> None:
    old = parse_plan(edited(to_format_2), "x.json")
    assert old.dealing_replicas == 1 and old.modules["enc0"].cost_of(7) == 7
    assert format_plan(old) == format_plan(two_pipelines())


def test_a_plan_from_before_sharded_parameters_gathers_them_once_a_step() -> None:
    old = parse_plan(edited(to_format_3), "x.json")
    assert {bucket.gathered_per for stage in old.modules["llm"].buckets for bucket in stage} == {Span.STEP}
    assert format_plan(old) == format_plan(two_pipelines())


def test_a_plan_from_before_counted_logits_has_those_of_one_microbatch() -> None:
    def with_logits(document: ParsedDocument) -> None:
        to_format_4(document)
        for number, row in enumerate(document["memory"]):
            row[:0] = (5, 2) if number else ("logits", "working")

    old = parse_plan(edited(with_logits), "x.json").memory[0]
    assert old.fixed["working"] == 7 and old.logits == 0 and "logits" not in old.fixed
    assert format_plan(parse_plan(edited(to_format_4), "x.json")) == format_plan(two_pipelines())


@pytest.mark.parametrize("to_old", [to_format_3, to_format_4])
@pytest.mark.parametrize(
    "path",
    [("buckets",), ("chunks",), ("memory",), ("legend",), ("buckets", 0), ("chunks", 0), ("memory", 0)],
)
@pytest.mark.parametrize("value", [None, 3, "x", {}, [[]], [None]])
def test_broken_files_of_older_formats_are_refused(
    path: tuple[str | int, ...], value: Any, to_old: Callable[[ParsedDocument], None]
) -> None:
    def broken(document: ParsedDocument) -> None:
        to_old(document)
        put(value, *path)(document)

    refused(edited(broken))


@pytest.mark.parametrize("path", [("modules",), ("chunks",), ("templates",), ("legend",), ("modules", "llm")])
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [[]], [[[]]], {"llm-F": [[]]}, {"a": [["x", 1]]}])
def test_broken_files_of_format_1_are_refused(path: tuple[str, ...], value: Any) -> None:
    def broken(document: ParsedDocument) -> None:
        to_format_1(document)
        put(value, *path)(document)

    refused(edited(broken))


def test_formats_that_cannot_be_read() -> None:
    assert "update" in refused(edited(put("optimus.plan/6", "schema"))).hint

    def old(value: Any, field: str) -> UserError:
        document = json.loads(format_plan(two_pipelines()))
        to_format_1(document)
        return refused(json.dumps({**document, field: value}))

    error = old(["time-travel"], "requires")
    assert error.field == "requires[0]" and str(error.value) == '"time-travel"' and "0.1" in error.problem
    error = old(True, "single_connection")
    assert error.field == "single_connection" and "plan again" in error.hint


def test_numbers_that_would_cost_minutes() -> None:
    """They are refused because they are mistakes: nobody has that many GPUs, layers or microbatches."""
    alone = json.loads(format_plan(llm_alone()))
    alone["microbatches"] = 2**31 - 1
    assert "has fewer lines than microbatches" in refused(json.dumps(alone)).problem
    alone["microbatches"], alone["modules"]["llm"]["layout"]["dp"] = 3, 2**31 - 1
    assert "GPUs" in refused(json.dumps(alone)).problem
    assert refused(edited(put(2**31 - 1, "buckets", 0, 2))).field == "buckets[0][2]"


@pytest.mark.ci("plan file")
def test_large_nonsense_is_refused_at_once() -> None:
    started = time.perf_counter()
    names = [f'"n{number}": 0' for number in range(300_000)]
    refused("{" + ", ".join([*names, '"n299999": 1']) + "}")
    many = {f"t{number}": [["a", "F", 0, 0.0, 0, "compute", "none", []]] for number in range(20_000)}
    assert len(refused(edited(put(many, "templates"))).hint) < 2000
    refused(edited(lambda document: document["modules"].update({f"m{n}": {} for n in range(100_000)})))
    refused(edited(put(["x"] * 300_000, "programs", 0)))
    assert time.perf_counter() - started < allowed_s(8)
