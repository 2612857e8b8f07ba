"""The reason against a layout: from the file alone, as planning there says, every second accounted for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from busy_time import busy_s
from made_profiles import made_profile
from tiny_plans import tiny_plan

import optimus
from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit, UserError
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts, rebuild_job
from optimus.ir.plan import Plan
from optimus.ir.planfile import format_plan, parse_plan, save_plan
from optimus.job.catalog_files import list_catalog_names
from optimus.job.job import Job
from optimus.job.read import find_job, load_model, make_job
from optimus.job.workload import PackedSequence
from optimus.planner.compare import compare_systems
from optimus.planner.plan_replay import replay_llm_alone, replay_plan
from optimus.planner.planning import PlanningResult, make_plan
from optimus.schedule.bubbles import CAUSES
from optimus.sensitivity import why_not
from optimus.sensitivity.time_breakdown import BUSY, LABELS, break_down_step, describe_step_difference
from optimus.sensitivity.why_not import LayoutExplanation, explain_layout, find_memory_requirement

TINY = "cpu/tiny-vl"
AT_ONCE = (TINY, "paper/dual-22-11")  # jobs that are rebuilt in every run of the tests


def tiny(*layouts: str, memory_bytes: float = 8e9) -> Job:
    """A job without fsdp, whose plans have no pipeline and any size of microbatches."""
    job = find_job(TINY, None, layouts)
    cluster = replace(job.cluster, gpu=replace(job.cluster.gpu, memory_bytes=memory_bytes))
    limits = replace(job.layout.limits, allow=("fill", "balanced", "three-phase"))
    return replace(job, cluster=cluster, layout=replace(job.layout, limits=limits))


def planned(*layouts: str, memory_bytes: float = 8e9) -> PlanningResult:
    return make_plan(tiny(*layouts, memory_bytes=memory_bytes), strategy="optimus", systems=[])


@pytest.fixture(scope="module")
def narrow() -> PlanningResult:
    """A plan without a pipeline: quick to make."""
    return planned("llm=pp1,tp1")


@pytest.fixture(scope="module")
def wide() -> PlanningResult:
    return planned("llm=pp1,tp2")


@pytest.fixture(scope="module")
def file(narrow: PlanningResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("why") / "tiny.plan.json"
    save_plan(narrow.plan, path)
    return path


@pytest.fixture(scope="module")
def wider(file: Path) -> LayoutExplanation:
    return explain_layout(file, "llm=pp1,tp2")


# ---------------------------------------------------------------- the job from the file


@pytest.mark.parametrize(
    "name",
    [
        name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.ci("search"))
        for name in list_catalog_names("jobs")
    ],
)
def test_a_job_is_rebuilt_from_what_its_plan_is_bound_to(name: str, narrow: PlanningResult) -> None:
    job = find_job(name)
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(job))
    again = rebuild_job(replace(narrow.plan, bound_to=bound_to, hashes=hashes, name=name))
    assert (again.name, again.model, again.workload) == (name, job.model, job.workload)
    assert list_bound_parts(again)["cluster"].keys() == list_bound_parts(job)["cluster"].keys()
    assert flatten_and_hash_parts(list_bound_parts(again))[1] == hashes


@pytest.mark.ci("search")
@pytest.mark.parametrize("name", list_catalog_names("models"))
def test_every_model_is_rebuilt(name: str, narrow: PlanningResult) -> None:
    if not load_model(name).encoders:
        return
    job = make_job(model=name, on="h100:64")
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(job))
    assert rebuild_job(replace(narrow.plan, bound_to=bound_to, hashes=hashes)).model == job.model


def test_limits_are_those_of_the_job_or_in_older_files_the_usual_ones(narrow: PlanningResult) -> None:
    assert tiny().layout.limits.microbatch_sequences == (1,)
    assert rebuild_job(parse_plan(format_plan(narrow.plan), "a")).layout.limits == tiny().layout.limits
    notes = {name: note for name, note in narrow.plan.notes.items() if name != "limits"}
    old = replace(narrow.plan, notes=notes)
    assert rebuild_job(old).layout.limits.microbatch_sequences == (1, 2)
    fewer = replace(old, microbatches=1)  # of 4 sequences each, on 2 replicas
    assert rebuild_job(fewer).layout.limits.microbatch_sequences == (4, 1, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llm.vocab", 513),  # another job
        ("llm.vocab", "512"),
        ("llm.vocab", 512.0),
        ("llm.stack.norm", "softnorm"),
        ("encoders[0].stack", 3),
        ("encoders[2].name", "audio"),
        ("", 3),
        ("llm.words", 3),
    ],
)
def test_a_file_that_was_changed_describes_no_job(field: str, value: object, narrow: PlanningResult) -> None:
    model = {**narrow.plan.bound_to["model"], field: value}
    with pytest.raises(UserError) as error:
        rebuild_job(replace(narrow.plan, bound_to={**narrow.plan.bound_to, "model": model}))
    assert error.value.field == "bound_to" and "--job" in error.value.hint


def many_images(plan: Plan) -> tuple[Job, Plan]:
    """A job whose sequences are too long for the file, and its plan."""
    sequence = PackedSequence(text=128, items=(("vision", (1,) * 100 + (28,)),))
    job = tiny("llm=pp1,tp1")
    job = replace(job, workload=replace(job.workload, sequences=(sequence,)))
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(job))
    return job, replace(plan, bound_to=bound_to, hashes=hashes)


def test_what_is_too_long_for_the_file_is_asked_for_by_name(narrow: PlanningResult) -> None:
    job, plan = many_images(narrow.plan)
    with pytest.raises(UserError) as error:
        explain_layout(plan, "llm=tp2")
    assert error.value.field == "workload.sequences[0].items" and "--job" in error.value.hint
    assert explain_layout(plan, "llm=pp1", job=job).verdict == "own"
    with pytest.raises(UserError, match="made for"):
        explain_layout(plan, "llm=pp1", job=tiny())


def test_a_plan_made_with_a_profile_needs_it(narrow: PlanningResult) -> None:
    profile = made_profile(tiny())
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(tiny(), profile))
    plan = replace(narrow.plan, bound_to=bound_to, hashes=hashes)
    with pytest.raises(UserError) as error:
        explain_layout(plan, "llm=tp2")
    assert error.value.field == "--profile"
    assert explain_layout(plan, "llm=tp1", profile=profile).verdict == "own"


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "asked", ["llm=pp1,tp1", "llm=dp2 pp1 tp1", "llm=tp1", "vision=dp2", "llm=pp1,chunks1"]
)
def test_the_plan_s_own_layout_is_known(asked: str, file: Path) -> None:
    reason = explain_layout(file, asked)
    assert (reason.verdict, reason.reason) == ("own", "this is the plan's layout")


@pytest.mark.parametrize(
    "asked",
    [
        "llm=pp3",
        "llm=tp8",
        "llm=dp2,pp2,tp1",
        "vision=pp2",
        "vision=tp2",
        "llm=ep2",
        "llm=pp2,tp1,chunks3",
        "llm=cp2,pp2,tp1",
    ],
)
def test_a_broken_rule_is_the_one_that_a_job_file_would_break(asked: str, file: Path) -> None:
    """A job that states it is refused in the same words; the plan's LLM layout stays where none is asked."""
    with pytest.raises(UserError) as error:
        find_job(TINY, None, [asked] if asked.startswith("llm") else ["llm=pp1,tp1", asked])
    reason = explain_layout(file, asked)
    assert reason.verdict == "rule" and error.value.problem in reason.reason
    bare = UserError(field=error.value.field, value=error.value.value, problem=error.value.problem, hint="")
    assert (
        error.value.hint == reason.hint
        and reason.reason == str(bare).replace("error:", "breaks a rule:").split("\n")[0]
    )


def test_a_batch_that_does_not_divide_is_a_rule() -> None:
    job = tiny("llm=pp1,tp2").replace(sequences_per_step=7)
    plan = make_plan(job, strategy="optimus", systems=[])
    reason = explain_layout(plan, llm="pp1 tp1")
    assert reason.verdict == "rule" and "workload.sequences_per_step = 7" in reason.reason
    assert "dp = 2" in reason.reason and "6 or 8" in reason.hint


def test_a_layout_is_planned_as_plan_would_from_the_file_alone(
    wider: LayoutExplanation, narrow: PlanningResult, wide: PlanningResult
) -> None:
    there = wide
    assert wider.other is not None and wider.plan is not None
    assert wider.other.step_s == pytest.approx(there.step_s, abs=1e-9)
    assert wider.plan.step_s == pytest.approx(narrow.step_s, abs=1e-9)
    assert wider.other.layouts == {name: module.layout for name, module in there.plan.modules.items()}
    assert wider.other.peak_bytes == max(held.peak for held in there.plan.memory)
    assert wider.verdict == "slower" and "tensor-parallel waits" in wider.reason


def test_every_second_of_the_difference_is_accounted_for(
    wider: LayoutExplanation, wide: PlanningResult
) -> None:
    assert wider.plan is not None and wider.other is not None
    total = wider.other.step_s - wider.plan.step_s
    assert sum(wider.differences_s.values()) == pytest.approx(total, abs=1e-12)
    assert wider.differences_s["tp"] > 0.5 * total
    played = replay_plan(wide.plan)
    spent = wider.other.spent_s
    assert tuple(LABELS) == (*BUSY, *(name for name in LABELS if name in CAUSES)) and set(CAUSES) <= set(
        LABELS
    )
    busy = float(busy_s(played.schedule, played.timeline).mean())
    assert sum(spent[name] for name in BUSY) == pytest.approx(busy, abs=1e-12)
    for cause in CAUSES:
        assert spent[cause] == getattr(played.bubbles, cause)
    alone = replay_llm_alone(wide.plan)
    assert wider.other.llm_alone_s == alone.timeline.step_s
    assert wider.other.not_hidden_s == wider.other.step_s - alone.timeline.step_s > 0


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_plan_sum_to_its_step(seed: int) -> None:
    """Stages, encoders and TP blocks at random, each as much of the mean as any other."""
    played = replay_plan(tiny_plan(Random(seed), few=True))
    spent = break_down_step(played)
    assert sum(spent.values()) == pytest.approx(played.timeline.step_s, abs=1e-12)
    assert min(spent.values()) >= 0 and spent["llm_compute"] > 0


def test_recomputation_and_modules_are_told_apart() -> None:
    job = tiny("llm=pp1,tp1")
    model = replace(
        job.model,
        llm=replace(job.model.llm, recompute="full"),
        encoders=(replace(job.model.encoders[0], recompute="none"),),
    )
    found = explain_layout(
        make_plan(replace(job, model=model), strategy="optimus", systems=[]), llm="pp1 tp2"
    )
    assert found.plan is not None and found.plan.recompute == {"vision": "none", "llm": "full"}
    spent = found.plan.spent_s
    # Made again: the forward, which is a third of forward and backward.
    assert 0.2 * spent["llm_compute"] < spent["llm_recompute"] < 0.5 * spent["llm_compute"]
    assert spent["encoder_recompute"] == 0 < spent["encoder_compute"]


@pytest.mark.ci("search")
def test_a_faster_layout_is_said_to_be_missed(wide: PlanningResult) -> None:
    reason = explain_layout(wide, llm="tp1")
    assert reason.verdict == "faster" and "the plan's search missed it" in reason.reason
    assert reason.other is not None and reason.other.step_s < reason.plan_step_s


@pytest.mark.ci("search")
def test_an_llm_of_which_nothing_is_asked_stays() -> None:
    wide = planned("llm=pp1,tp2", "vision=tp1")
    reason = explain_layout(wide.plan, vision="tp2")
    assert reason.other is not None and reason.other.layouts["llm"] == wide.plan.modules["llm"].layout
    assert str(reason.other.layouts["vision"]) == "dp1 pp1 tp2"
    assert reason.other.step_s == pytest.approx(planned("llm=pp1,tp2", "vision=tp2").step_s, abs=1e-9)


@pytest.mark.ci("search")
def test_both_spellings_and_all_kinds_of_plan_are_one_question(
    file: Path, narrow: PlanningResult, wider: LayoutExplanation
) -> None:
    for reason in (
        explain_layout(narrow, llm="pp1 tp2"),
        explain_layout(narrow.plan, llm="pp1,tp2"),
        optimus.why(str(file), "llm=pp1 tp2"),
    ):
        assert reason == wider


def test_an_llm_that_does_not_fit_lacks_just_those_bytes() -> None:
    """With one byte less than what is said to be needed it does not fit, with as many it does."""
    needed = find_memory_requirement(
        tiny("llm=pp1,tp1", memory_bytes=0.8e9), get_preset("default"), None, "optimus"
    )
    assert needed is not None and needed.encoders is None and needed.needed_bytes == needed.llm_alone.total
    held = "reserve 0.5, communicators 0.4, model states 0.0"
    assert needed.description == f"the LLM alone needs 0.9 of 0.8 GB on stage 0 at dp2 pp1 tp1: {held}"
    enough = tiny("llm=pp1,tp1", memory_bytes=needed.needed_bytes)
    assert compare_systems(enough, names=["llm-only"]).systems["llm-only"].memory == needed.llm_alone
    with pytest.raises(DoesNotFit):
        compare_systems(tiny("llm=pp1,tp1", memory_bytes=needed.needed_bytes - 1), names=["llm-only"])


@pytest.mark.parametrize("strategy", ["optimus", pytest.param("paper", marks=pytest.mark.ci("search"))])
def test_encoders_that_do_not_fit_say_what_they_would_need(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes between what the LLM needs and what is reckoned for all do not suffice; 8 GB do."""
    job = tiny("llm=pp1,tp1")
    limits = replace(job.layout.limits, allow=("fill",))  # else the plan may be one without filling
    job = replace(job, layout=replace(job.layout, limits=limits))
    plan = make_plan(job, strategy=strategy, systems=[]).plan
    asked = tiny("llm=pp1,tp2", memory_bytes=1.2e9)
    need = find_memory_requirement(asked, get_preset("default"), None, strategy)
    assert need is not None and need.encoders is not None and need.needed_bytes > need.capacity_bytes
    assert need.llm_alone.total < need.needed_bytes == need.llm_alone.total + need.encoder_bytes
    short = tiny("llm=pp1,tp1", memory_bytes=need.needed_bytes - 1)
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(short))
    with monkeypatch.context() as patched:  # the plan itself does not fit, and is not asked about
        patched.setattr(why_not, "require_proven_plan", lambda plan, file: None)
        reason = explain_layout(replace(plan, bound_to=bound_to, hashes=hashes), llm="pp1 tp2")
    assert reason.verdict == "memory" and reason.need is not None
    assert (
        reason.need.needed_bytes == need.needed_bytes
        and need.description.partition(" of ")[0] in reason.reason
    )
    assert explain_layout(plan, llm="pp1 tp2").verdict in ("slower", "faster")


# ---------------------------------------------------------------- words


def test_parts_are_said_in_the_order_of_what_they_do() -> None:
    parts = dict.fromkeys(LABELS, 0.0) | {
        "pp_warmup": 0.06,
        "pp_cooldown": 0.05,
        "tp": 0.04,
        "dp_all_gather": -0.01,
    }
    words = describe_step_difference(2.27, 2.41, parts, not_hidden_s=None, equal=False)
    assert words == (
        "2.41 s, 6.2 % slower than the plan's 2.27 s: +0.11 s pipeline warm-up and cool-down, "
        "+0.04 s tensor-parallel waits, -0.01 s data-parallel waits"
    )
    back = describe_step_difference(
        2.41, 2.27, {name: -value for name, value in parts.items()}, not_hidden_s=(0.3, 0.2), equal=False
    )
    assert back == (
        "2.27 s, 5.8 % less than the plan's 2.41 s: the plan's search missed it: -0.11 s pipeline warm-up and"
        " cool-down, -0.04 s tensor-parallel waits, +0.01 s data-parallel waits; encoders add 0.20 s to the"
        " LLM's step here, 0.30 s in the plan"
    )


def test_small_differences_are_not_rounded_away() -> None:
    parts = dict.fromkeys(LABELS, 0.0) | {"optimizer": 0.00012}
    assert "+0.00012 s optimizer" in describe_step_difference(
        1.0, 1.00012, parts, not_hidden_s=None, equal=False
    )


# ---------------------------------------------------------------- the command


@pytest.mark.ci("plan file")
def test_the_command_answers_with_0_whatever_the_answer(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, verdict in (("llm=tp1", "own"), ("llm=pp3", "rule"), ("llm=tp2", "slower")):
        assert run(["why", str(file), asked, "--json"]) == OK
        found = json.loads(capsys.readouterr().out)
        assert found["schema"] == "optimus.why/1" and found["verdict"] == verdict
        assert isinstance(found["reason"], str) and found["plan_step_s"] > 0
    assert sum(found["differences_s"].values()) == pytest.approx(
        found["step_s"] - found["plan_step_s"], abs=1e-9
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["why", str(file), "llm=tp2", "--job", TINY]) == OK
    text = capsys.readouterr().out
    assert "tensor-parallel waits" in " ".join(text.split()) and "difference" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "LAYOUT is missing"),
        (("audio=tp2",), "use llm or vision"),
        (("llm=vpp2",), "what is vpp2?"),
        (("tp2",), "write MODULE=AXIS"),
        (("llm=tp2", "llm=pp2"), "states llm again"),
        (("llm=tp2", "--on", "h100:8"), "needs --job"),
        (("llm=tp2", "--job", "paper/small-a100"), "the plan was made for"),
    ],
)
def test_mistakes_are_named(
    words: tuple[str, ...], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["why", str(file), *words]) == USER_ERROR
    shown = capsys.readouterr()
    assert message in shown.err and "hint: " in shown.err and shown.out == ""


def test_every_layout_that_plan_proposes_to_ask_about_has_an_answer(narrow: PlanningResult) -> None:
    from optimus.cli.plan import suggest_neighbour_layout

    assert suggest_neighbour_layout(narrow.plan.modules["llm"].layout) == "llm=pp2,tp1"


@pytest.mark.ci("search")
@pytest.mark.parametrize("strategy", ["optimus", "paper"])
def test_pipelines_are_compared_cause_by_cause(strategy: str) -> None:
    job = tiny("llm=pp1,tp1").replace(sequences_per_step=4)
    plan = parse_plan(format_plan(make_plan(job, strategy=strategy, systems=[]).plan), "a")
    reason = explain_layout(plan, "llm=pp2,tp1")
    there = make_plan(
        tiny("llm=pp2,tp1").replace(sequences_per_step=4),
        strategy=strategy,
        systems=[],
        assumptions="default",
    )
    assert reason.other is not None and reason.plan is not None
    assert reason.other.step_s == pytest.approx(there.step_s, abs=1e-9)
    total = reason.other.step_s - reason.plan.step_s
    assert sum(reason.differences_s.values()) == pytest.approx(total, abs=1e-9)
    for cause in ("pp_warmup", "pp_cooldown", "pp_other"):
        assert reason.plan.spent_s[cause] < 1e-5  # launches only
    assert reason.other.spent_s["pp_other"] > 1e-5


@pytest.mark.ci("search")
def test_a_released_job_that_does_not_fit_is_told_what_would() -> None:
    job = find_job("paper/small-a100", layouts=["llm=pp1,tp4"])
    sharded = explain_layout(make_plan(job, strategy="optimus", systems=[]), llm="pp1 tp1")
    assert sharded.verdict == "faster" and sharded.other is not None  # as fsdp
    pipeline = explain_layout(make_plan(job, strategy="balanced", systems=[]), llm="pp1 tp1")
    assert pipeline.other is not None, "a plan of one system knows the others"
    assert "as fsdp, which is faster there than balanced or alone fits" in pipeline.reason
    limits = replace(job.layout.limits, allow=("fill", "balanced", "three-phase"))
    job = replace(job, layout=replace(job.layout, limits=limits))
    plan = make_plan(job, strategy="optimus", systems=[])
    narrow = explain_layout(plan, llm="pp1 tp1")
    assert narrow.verdict == "memory" and narrow.need is not None and "it fits with" in narrow.hint
    assert narrow.need.largest == "model states" and narrow.need.encoders is not None
