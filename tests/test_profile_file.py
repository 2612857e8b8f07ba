"""Profiles: read strictly, written readably, and used so that an op takes as long as was measured."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from made_profiles import HERE, SEGMENTS, made_profile, priced, segment_s, sorts

from optimus import cli
from optimus.cost import profile_file
from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import (
    KERNELS,
    MEASURED_KINDS,
    LinkMeasurement,
    MessageTime,
    Profile,
    SegmentMeasurement,
    first_layer_of_each_class,
    hash_module_shape,
)
from optimus.cost.priced_layer import price_encoder_layers, price_llm_layers
from optimus.cost.profile_file import format_profile, load_profile, parse_profile, save_profile
from optimus.errors import UserError
from optimus.ir.binding import hash_fields, list_bound_parts, require_plan_of_job
from optimus.ir.op import Lane, OpKind
from optimus.ir.planfile import format_plan
from optimus.job.catalog_files import list_catalog_names
from optimus.job.layout import Layout
from optimus.job.nodes import MAX_BYTES
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.planner.planning import make_plan

TINY = "cpu/tiny-vl"
FLAT = "llm=pp1,tp1"  # one stage: no order of ops to search for
SEND = LinkMeasurement(
    operation="send",
    backend="gloo",
    ranks=2,
    latency_s=5e-5,
    bandwidth_bytes_per_s=2e9,
    sizes=(MessageTime(size_bytes=64, median_s=5e-5, p25_s=4e-5, p75_s=6e-5, repetitions=15),),
)


def row(
    tokens: int = 256, seconds: float = 1e-3, kind: OpKind = OpKind.FORWARD, **other: Any
) -> SegmentMeasurement:
    fields: dict[str, Any] = {
        "module": "llm",
        "layers": "full",
        "segment": "attention",
        "kernels": SEGMENTS[other.get("segment", "attention")],
        "kind": kind,
        "tokens": tokens,
        "tp": 1,
        "median_s": seconds,
        "p25_s": seconds / 2,
        "p75_s": seconds * 2,
        "repetitions": 15,
    }
    return SegmentMeasurement(**{**fields, **other})


def profile_of(*rows: SegmentMeasurement) -> Profile:
    return Profile(name="made", measured=HERE, modules=(("llm", "0" * 16),), segments=rows)


# ---------------------------------------------------------------- the file


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    found = made_profile(find_job(TINY), lambda s: float(f"{s:.4g}"), sequences=(0.5, 1))
    rows = [replace(r, p25_s=r.median_s, p75_s=r.median_s) for r in found.segments]
    found = replace(found, segments=tuple(rows), links=(SEND,), issue_s=4e-6, slowdown=0.12)
    digest = save_profile(found, tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == found
    assert save_profile(load_profile(tmp_path / "p.yaml"), tmp_path / "q.yaml") == digest
    assert [path.name for path in tmp_path.iterdir()] != [] and not list(tmp_path.glob(".*"))
    lines = format_profile(found).splitlines()
    assert len(lines) < len(rows) + 20 and max(map(len, lines)) < 260  # one measurement per line


def test_json_is_read_too_and_the_name_is_the_file_s(tmp_path: Path) -> None:
    document = yaml.safe_load(format_profile(profile_of(row())))
    del document["name"]
    (tmp_path / "h100.json").write_text(json.dumps(document, indent=1))
    found = load_profile(tmp_path / "h100.json")
    assert found.name == "h100" and found.segments == (row(),) and found.source == "profile h100"


MISTAKES = [  # what is replaced, by what, and what the error says
    ("format: optimus.profile/1", "format: optimus.profile/2", "format = optimus.profile/2"),
    ("format: optimus.profile/1", "", "format is missing, so this is not a profile"),
    ("kind: F", "kind: R", "segments[0].kind = R is not F, I, W or B"),
    ("tokens: 256", "tokens: 0", "segments[0].tokens = 0 is not more than 0"),
    ("tokens: 256", "tokens: 256, token: 1", "segments[0].token is not known here"),
    ("tokens: 256, ", "", "segments[0].tokens is missing"),
    ("tp: 1", "tp: true", "segments[0].tp = true is not a whole number"),
    ("median_s: 0.001", "median_s: -1", "segments[0].median_s = -1 is not 0 or more"),
    ("median_s: 0.001", "median_s: .nan", "is not a finite number"),
    ("p25_s: 0.0005", "p25_s: 0.5", "segments[0].p25_s = 0.5 is more than median_s = 0.001"),
    ("p75_s: 0.002", "p75_s: 0.0001", "segments[0].p75_s = 0.0001 is less than median_s = 0.001"),
    ("layers: full", "layers: third", "segments[0].layers = third"),
    ("[attention]", "[atention]", "did you mean attention?"),
    ("[attention]", "[]", "segments[0].kernels is empty"),
    ("[attention]", "[attention, attention]", "segments[0].kernels[1] = attention is given twice"),
    ("module: llm", "module: vision", "is not one of the modules that the file lists"),
    ("threads: 1", "threads: none", "measured.threads = none is not a whole number"),
    ("host: test, ", "", "measured.host is missing"),
    ("kind: I", "kind: F", "segments[1] is the same place as segments[0]"),
    ("segments:", "segments: 3\nrest:", "is not known here"),
]


@pytest.mark.parametrize(("text", "wrong", "message"), MISTAKES)
def test_mistakes_are_named_by_field_and_line_with_a_way_out(text: str, wrong: str, message: str) -> None:
    right = format_profile(profile_of(row(), row(kind=OpKind.INPUT_GRAD)))
    assert text in right
    parse_profile(right, "p.yaml")
    with pytest.raises(UserError) as caught:
        parse_profile(right.replace(text, wrong, 1), "p.yaml")
    assert message in str(caught.value) and "p.yaml" in str(caught.value) and "\nhint: " in str(caught.value)


def test_a_kernel_belongs_to_one_segment() -> None:
    twice = profile_of(row(), row(segment="out", kernels=("attention", "out")))
    with pytest.raises(UserError, match="names attention, which the segment attention covers"):
        parse_profile(format_profile(twice), "p.yaml")
    changing = profile_of(row(), row(512, kernels=("attention", "out")))
    with pytest.raises(UserError, match="differs from what attention of llm covers above"):
        parse_profile(format_profile(changing), "p.yaml")


def test_files_without_end_and_other_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(row(10**6), kernels=SEGMENTS["qkv"], layers="window-experts", median_s=1.23456e-5)
    lines = format_profile(profile_of(long)).splitlines()
    assert profile_file.MAX_ROWS * len(lines[-1]) < MAX_BYTES  # what may be written may be read
    monkeypatch.setattr(profile_file, "MAX_ROWS", 20)
    many = format_profile(profile_of(*(row(tokens) for tokens in range(1, 22))))
    with pytest.raises(UserError, match="segments has 21 rows, more than 20"):
        parse_profile(many, "p.yaml")
    (tmp_path / "big.yaml").write_text("x" * (2 << 20))
    for name, problem in (("big.yaml", "larger"), ("none.yaml", "does not exist"), ("a.plan", "not a .yaml")):
        with pytest.raises(UserError, match=problem):
            load_profile(tmp_path / name)
    with pytest.raises(UserError, match="cannot be written"):
        save_profile(profile_of(row()), tmp_path / "no" / "p.yaml")


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("tokens", "seconds", "beyond"),
    [
        (50, 0.5, True),
        (100, 1.0, False),
        (150, 2.0, False),
        (200, 3.0, False),
        (300, 3.5, False),
        (800, 8.0, True),
    ],
)
def test_between_sizes_a_line_and_outside_in_proportion(tokens: int, seconds: float, beyond: bool) -> None:
    found = profile_of(row(400, 4.0), row(100, 1.0), row(200, 3.0))
    (estimate,) = found.estimates("llm", "full", OpKind.FORWARD, tokens=tokens, tp=1)
    assert estimate.seconds == pytest.approx(seconds) and estimate.beyond == beyond


def test_recomputing_is_a_forward_and_b_is_i_and_w_unless_measured() -> None:
    found = profile_of(row(256, 1.0), row(256, 2.0, OpKind.INPUT_GRAD), row(256, 3.0, OpKind.WEIGHT_GRAD))

    def at(profile: Profile, kind: OpKind, tp: int = 1) -> list[float]:
        return [e.seconds for e in profile.estimates("llm", "full", kind, tokens=256, tp=tp)]

    assert at(found, OpKind.RECOMPUTE) == [1.0] and at(found, OpKind.BACKWARD) == [5.0]
    assert at(
        replace(found, segments=(*found.segments, row(256, 4.5, OpKind.BACKWARD))), OpKind.BACKWARD
    ) == [4.5]
    assert at(found, OpKind.FORWARD, tp=4) == [0.25]  # of the nearest width, in proportion
    assert at(replace(found, segments=(*found.segments, row(256, 0.6, tp=2))), OpKind.FORWARD, tp=4) == [0.3]
    assert found.estimates("vision", "full", OpKind.FORWARD, tokens=256, tp=1) == ()


# ---------------------------------------------------------------- prices


def test_segments_cover_kernels_that_exist() -> None:
    """Every compute kernel of every model in the catalog, but what selective recomputation makes again."""
    found = set()
    for name in list_catalog_names("models"):
        job = find_job(name, on="h100:512")
        for module in job.model.modules:
            for layer in priced(job, module, 1):
                kernels = [k for listed in layer.kernels.values() for k in listed]
                found |= {k.name.partition(".")[0] for k in kernels if k.lane == Lane.COMPUTE}
    assert found == set(KERNELS)


@pytest.mark.parametrize("name", [TINY, "qwen2.5-vl-72b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_op_takes_as_long_as_was_measured(name: str, tp: int) -> None:
    job = find_job(name, on=None if name == TINY else "h100:512")
    profile = made_profile(job, lambda s: 3 * s + 1e-5, tp=tp)
    for module in job.model.modules:
        before, after = (priced(job, module, 1, tp=tp, profile=p) for p in (None, profile))
        for was, now, sort in zip(before, after, sorts(module), strict=True):
            for kind in MEASURED_KINDS:
                for segment, kernels in SEGMENTS.items():
                    analytic_s = segment_s(was, kind, kernels)
                    expected_s = 3 * analytic_s + 1e-5 if analytic_s else 0.0
                    found_s = segment_s(now, kind, kernels)
                    assert found_s == pytest.approx(expected_s, rel=1e-4), (sort, kind, segment)
                other = [(k.name, k.after) for k in was.kernels[kind]]
                assert other == [(k.name, k.after) for k in now.kernels[kind]]
                traffic = [k for k in was.kernels[kind] if k.lane != Lane.COMPUTE]
                assert traffic == [k for k in now.kernels[kind] if k.lane != Lane.COMPUTE]


def test_windowed_and_full_layers_have_their_own_seconds() -> None:
    job = find_job("qwen2.5-vl-72b", on="h100:512")
    vision = job.model.encoders[0]
    assert set(first_layer_of_each_class(vision.stack)) == {"full", "window"}
    rows = made_profile(job).segments
    slow = [replace(r, median_s=10 * r.median_s, p75_s=20.0) if r.layers == "full" else r for r in rows]
    before, after = (
        priced(job, vision, 1, profile=p) for p in (None, replace(made_profile(job), segments=tuple(slow)))
    )
    for was, now, sort in zip(before, after, sorts(vision), strict=True):
        times = 10 if sort == "full" else 1
        found = segment_s(now, OpKind.FORWARD, ("attention",))
        assert found == pytest.approx(times * segment_s(was, OpKind.FORWARD, ("attention",)), rel=1e-4)


def test_a_profile_of_the_formula_changes_no_system() -> None:
    job = find_job(TINY, layouts=[FLAT])
    names = ["stage0", "balanced", "three-phase", "paper"]
    profile = made_profile(job, sequences=(0.25, 0.5, 1, 2, 4))
    plain, profiled = (compare_systems(job, names=names, profile=p) for p in (None, profile))
    for name in names:
        assert profiled.systems[name].step_s == pytest.approx(plain.systems[name].step_s, rel=1e-3)
    assert profiled.profile_notes == [] and plain.profile_notes == []


def test_what_was_not_measured_is_said() -> None:
    job = find_job(TINY, layouts=[FLAT])
    half = made_profile(job, sequences=(0.5,))
    rows = tuple(r for r in half.segments if not (r.module == "llm" and r.segment == "down"))
    found = compare_systems(job, names=["stage0"], profile=replace(half, segments=rows))
    assert found.profile_notes == [
        "llm at tp 1: B down, F down, I down, W down priced by the formula",
        "llm at tp 1 is asked for 256 to 1,024 tokens, measured at 128: extrapolated in proportion",
        "vision at tp 1 is asked for 256 tokens, measured at 128: extrapolated in proportion",
    ]
    only = replace(half, segments=tuple(r for r in rows if r.module == "llm"))
    notes = compare_systems(job, names=["stage0"], profile=only).profile_notes
    assert "vision was not measured: priced by the formula" in notes
    wider = compare_systems(replace(job, layout=find_job(TINY, layouts=["llm=pp1,tp2"]).layout), profile=half)
    assert "llm at tp 2 was measured at tp 1 only: extrapolated in proportion" in wider.profile_notes


def test_the_host_s_time_to_issue_replaces_the_assumed_one() -> None:
    job = find_job(TINY, layouts=[FLAT])
    profile = replace(made_profile(job), issue_s=1e-4)
    found = compare_systems(job, names=["stage0"], profile=profile)
    assert found.assumptions.launch_s == 1e-4
    clean = compare_systems(job, names=["stage0"], profile=profile, assumptions="clean")
    assert clean.assumptions.launch_s == 0  # the preset leaves launches out


def test_a_measured_slow_down_replaces_the_assumed_one_and_binds_a_plan() -> None:
    job = find_job(TINY, layouts=[FLAT])
    plain = made_profile(job)
    profile = replace(plain, slowdown=0.5)
    assert compare_systems(job, names=["stage0"], profile=plain).assumptions.residence_slowdown == 0.1
    assert compare_systems(job, names=["stage0"], profile=profile).assumptions.residence_slowdown == 0.5
    clean = compare_systems(job, names=["stage0"], profile=profile, assumptions="clean")
    assert clean.assumptions.residence_slowdown == 0
    assert list_bound_parts(job, plain) != list_bound_parts(job, profile)
    assert "slowdown" not in list_bound_parts(job, plain)["profile"]


def test_a_profile_of_another_model_is_refused() -> None:
    job = find_job(TINY, layouts=[FLAT])
    wider = replace(job.model.llm, stack=replace(job.model.llm.stack, hidden=256))
    other = replace(job, model=replace(job.model, llm=wider))
    with pytest.raises(UserError, match="was measured with another llm than that of tiny-vl"):
        made_profile(other).check_model(job.model)
    deeper = replace(job.model.llm, stack=replace(job.model.llm.stack, layers=40), train=False)
    assert hash_module_shape(deeper) == hash_module_shape(job.model.llm)
    audio = replace(made_profile(job), modules=(("audio", "0" * 16),))
    with pytest.raises(UserError, match="measures audio, and the modules of tiny-vl are vision or llm"):
        audio.check_model(job.model)


def test_kinds_that_do_not_run_are_not_missed() -> None:
    """A frozen encoder has no backward: nothing of it is priced by the formula."""
    job = find_job(TINY, layouts=[FLAT])
    vision = job.model.encoders[0]
    frozen = replace(vision, train=False, projector=replace(vision.projector, train=False))
    job = replace(job, model=replace(job.model, encoders=(frozen,)))
    cost_model = ClusterCostModel(
        cluster=job.cluster, assumptions=get_preset("default"), profile=made_profile(job)
    )
    price_llm_layers(job.model.llm, job.workload.llm_load(), Layout(), cost_model, "full")
    for sequences in (0.5, 1):
        load = job.workload.encoder_load("vision", frozen.projector.merge).times(sequences)
        price_encoder_layers(frozen, load, Layout(), cost_model, "none")
    assert {each.tokens: each.unmeasured for each in cost_model.profile_gaps} == {
        128: ()
    }  # smaller than measured


# ---------------------------------------------------------------- plans


@pytest.mark.ci
def test_a_plan_is_bound_to_its_profile() -> None:
    job = find_job(TINY, layouts=[FLAT])
    profile = made_profile(job, lambda s: 2 * s)
    planned = make_plan(job, profile=profile, systems=[])
    shuffled = replace(profile, segments=profile.segments[::-1], name="other", links=(SEND,))
    again = make_plan(job, profile=shuffled, systems=[])
    assert planned.report.ok  # and how it was measured does not matter:
    assert format_plan(planned.plan) == format_plan(again.plan)
    assert planned.step_s > 1.5 * make_plan(job, systems=[]).step_s
    require_plan_of_job(planned.plan, list_bound_parts(job, shuffled))
    with pytest.raises(UserError, match=r"profile\.kernels is \[\]"):
        require_plan_of_job(planned.plan, list_bound_parts(job))
    changed = replace(profile, segments=(replace(profile.segments[0], median_s=1.0), *profile.segments[1:]))
    with pytest.raises(UserError, match=r"profile\.kernels"):
        require_plan_of_job(planned.plan, list_bound_parts(job, changed))
    assert hash_fields({"kernels": []}) == hash_fields(
        list_bound_parts(job)["profile"]
    )  # as plans without one have


# ---------------------------------------------------------------- the command line


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.run([str(word) for word in words])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_commands_take_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "two-cores.yaml", tmp_path / "a.plan.json"
    save_profile(replace(made_profile(find_job(TINY)), name="two-cores"), file)
    code, out, _ = run(capsys, "simulate", TINY, "--layout", FLAT, "--system", "stage0", "--profile", file)
    assert code == 0 and "cost model     profile two-cores; preset default" in out
    code, out, _ = run(
        capsys, "simulate", TINY, "--layout", FLAT, "--system", "stage0", "--profile", file, "--json"
    )
    assert json.loads(out)["cost_model"]["profile"] == "two-cores"
    code, out, _ = run(
        capsys, "plan", TINY, "--layout", FLAT, "--system", "stage0", "--profile", file, "-o", plan
    )
    assert code == 0 and "profile two-cores" in out
    assert run(capsys, "check", plan, "--job", TINY, "--profile", file)[0] == 0
    code, out, _ = run(capsys, "check", plan, "--job", TINY)
    assert code == 1 and "profile.kernels" in out
    code, _, err = run(capsys, "check", plan, "--profile", file)
    assert code == 2 and "--profile needs --job" in err
    code, _, err = run(capsys, "simulate", plan, "--profile", file)
    assert code == 2 and "--profile does not apply to a plan file" in err


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, f"optimus.profiler.{name}", SimpleNamespace(**functions))


def test_profile_writes_a_profile_and_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = find_job(TINY)
    stub(monkeypatch, "segments", profile_job=lambda job, progress: made_profile(job))
    stub(monkeypatch, "links", measure_links=lambda: (SEND,), measure_slowdown_under_all_reduce=lambda: 0.25)
    described = {
        "describe_host_as_cluster": lambda links, ranks: job.cluster,
        "format_cluster_file": lambda cluster: "x: 1\n",
    }
    stub(monkeypatch, "machine", **described)
    file = tmp_path / "p.yaml"
    code, out, _ = run(capsys, "profile", TINY, "-o", file)
    assert code == 0 and "send           50 us and 2.00 GB/s between 2 ranks over gloo" in out
    assert "slow-down      matrix products take 25% longer under an all-reduce" in out
    assert load_profile(file).name == "p" and load_profile(file).links == (SEND,)
    assert load_profile(file).slowdown == 0.25
    assert (tmp_path / "p.cluster.yaml").read_text() == "x: 1\n"
    code, out, _ = run(capsys, "profile", TINY, "-o", file, "--json")
    found = json.loads(out)
    assert {"schema", "profile", "segments", "links", "mapped_share"} <= set(found)
    assert found["slowdown"] == 0.25
    assert len(found["segments"]) == len(load_profile(file).segments)


def test_without_torch_profile_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importlib, "import_module", no_torch)
    code, _, err = run(capsys, "profile", TINY, "-o", tmp_path / "p.yaml")
    assert code == 2
    assert err == "error: torch is not installed\nhint: pip install 'optimus-mllm[train]'\n"


# ---------------------------------------------------------------- the page


def test_the_profile_of_the_page_is_one_of_the_job_it_speaks_of() -> None:
    text = (Path(__file__).parents[1] / "docs" / "profile.md").read_text()
    shown = text[text.index("```yaml\n") + 8 :].partition("```")[0]
    found = parse_profile(shown, "shown.yaml")
    found.check_model(find_job(TINY).model)
    for kind in (SegmentMeasurement, MessageTime, LinkMeasurement):
        for field in fields(kind):
            assert field.name in text
    assert f"{profile_file.MAX_ROWS:,} rows" in text
