"""Our scheduler: every plan holds, its own time is the replay's, and it stays near the floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from random_jobs import random_job, random_setting
from random_plans import bound, random_llm

from optimus.cost.assumptions import preset
from optimus.errors import DoesNotFit, UserError
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.program.op import Kind
from optimus.program.validator import check_plan
from optimus.search.layouts import decide_setting
from optimus.systems.colocated import encoder_layout
from optimus.systems.known import Systems
from optimus.systems.listed import llm_pipeline
from optimus.systems.ours import Search, most_in_flight, search_ours
from optimus.systems.trial import Beside, Trial

Record = Callable[[str, object], None]
RANDOM, CI_RANDOM, PART = 12, 300, 75
# Of the LLM's own step with interleaved 1F1B: as the catalog has the images, and with images of a quarter.
OVER_FLOOR_1F1B = {
    ("paper/strong-3072", "clean"): (1.031, 1.025),
    ("paper/strong-2048", "clean"): (1.022, 1.018),
    ("paper/strong-1536", "clean"): (1.018, 1.014),
    ("paper/strong-3072", "clean-slack"): (1.016, 1.006),
    ("paper/strong-2048", "clean-slack"): (1.012, 1.004),
    ("paper/strong-1536", "clean-slack"): (1.010, 1.003),
}


def check_random(seeds: range) -> None:
    """Each plan passes all rules; nothing but a typed refusal stops a search."""
    plans = 0
    for seed in seeds:
        rng = Random(seed)
        setting = random_setting(rng, random_job(rng))
        if not setting.job.model.encoders:
            continue
        try:
            found = search_ours(setting, [random_llm(Random(seed), setting, splits=bool(seed % 2))])
        except (DoesNotFit, UserError):
            continue
        violations = check_plan(bound(found.filled.plan, setting)).violations
        assert not violations, f"seed {seed}: {violations[0]}"
        plans += 1
    assert plans > len(seeds) // 2


def test_plans_of_random_jobs_pass_all_rules() -> None:
    check_random(range(RANDOM))


@pytest.mark.ci("search")
@pytest.mark.parametrize("first", range(0, CI_RANDOM, PART))
def test_plans_of_many_random_jobs_pass_all_rules(first: int) -> None:
    check_random(range(first, first + PART))


@pytest.mark.ci("search")
@pytest.mark.parametrize(("name", "assumed"), [key for key in OVER_FLOOR_1F1B if "3072" in key[0]])
def test_large_encoders_hide_behind_the_llm(name: str, assumed: str, record_property: Record) -> None:
    check_over_floor(name, assumed, record_property)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "assumed"), [key for key in OVER_FLOOR_1F1B if "3072" not in key[0]])
def test_large_encoders_hide_behind_the_llm_at_fewer_gpus(
    name: str, assumed: str, record_property: Record
) -> None:
    check_over_floor(name, assumed, record_property)


def check_over_floor(name: str, assumed: str, record_property: Record) -> None:
    """Beside interleaved 1F1B, all traffic of encoders in full; the loop's time is nearly the replay's."""
    job = find_job(name)
    for made, limit in zip((job, with_small_images(job)), OVER_FLOOR_1F1B[name, assumed], strict=True):
        setting, _ = decide_setting(made, preset(assumed))
        systems = Systems(setting)
        floor_s = systems.step_s(systems.floor_1f1b)
        found = search_ours(setting, [systems.floor_1f1b])
        over = found.filled.step_s / floor_s
        record_property("over floor-1f1b", round(over, 4))
        assert over <= limit, f"{over:.4f}"
        assert found.filled.estimate_s == pytest.approx(found.filled.step_s, rel=2e-3)
        assert not check_plan(bound(found.filled.plan, setting)).violations


def with_small_images(job: Job) -> Job:
    """Four images of a quarter of the size for each."""
    sequences = []
    for sequence in job.workload.sequences:
        items = tuple(
            (name, tuple(n // 4 for n in lengths for _ in range(4))) for name, lengths in sequence.items
        )
        sequences.append(replace(sequence, items=items))
    return replace(job, workload=replace(job.workload, sequences=tuple(sequences)))


def test_a_window_bounds_what_encoders_keep() -> None:
    """Of 32 microbatches at most 18 are kept: the replayed memory says so, and the step is no longer."""
    setting, _ = decide_setting(find_job("paper/strong-1536"), preset("clean"))
    (encoder,) = setting.job.model.encoders
    llm = llm_pipeline(setting, chunks=1, order_name="1f1b")
    assert (most_in_flight(llm.order), llm.microbatches) == (8, 32)
    layout = encoder_layout(llm.layout, pp=8, tp=8)
    steps, kept = [], []
    for window in (0, 18):
        beside = {encoder.name: Beside(layout=layout, recompute="none", window=window)}
        trial = Trial(setting, llm, beside)
        made = trial.plan(trial.fill.arrange(0.0))
        assert not check_plan(bound(made.plan, setting)).violations
        assert max(held.peak for held in made.plan.memory) <= trial.most_bytes
        steps.append(made.step_s)
        kept.append(max(held.encoder_activations for held in made.plan.memory))
    assert kept[1] == pytest.approx(18 / 32 * kept[0])
    assert steps[1] <= 1.001 * steps[0]


@pytest.mark.ci("search")
def test_backwards_stay_whole_where_what_they_make_again_does_not_fit() -> None:
    """Weight gradients that wait hold what was made again for them; a backward in one holds nothing."""
    job = find_job("paper/small-a100", layouts=["llm=pp4,tp2", "vision=pp2,tp2"])
    setting, _ = decide_setting(job, preset("paper"))
    llm = llm_pipeline(setting, chunks=1, order_name="1f1b")
    search = Search(setting, llm)
    (tried,) = search.tried()
    peaks = [
        max(held.peak for held in each.trial.plan(each.arranged).plan.memory)
        for each in (tried, search.unsplit(tried))
    ]
    assert peaks[1] < tried.trial.most_bytes < peaks[0]
    room = (tried.trial.most_bytes + peaks[0]) / 2
    small = replace(setting, kept_free_bytes=job.cluster.gpu.memory_bytes - room)
    found = search_ours(small, [replace(llm, setting=small)])
    assert found.filled.fits
    assert not check_plan(bound(found.filled.plan, small)).violations


@pytest.mark.ci("search")
def test_encoders_get_layouts_of_their_own_where_that_is_faster() -> None:
    """A search that may only give both the same layout finds nothing faster."""
    setting, _ = decide_setting(find_job("paper/dual-22-11"), preset("clean"))
    llm = Systems(setting).floor_1f1b
    search = Search(setting, llm)
    common = search.tried()[0]
    found = search_ours(setting, [llm])
    layouts = {name: module.layout for name, module in found.filled.plan.encoders.items()}
    assert len(set(layouts.values())) == 2
    assert found.filled.step_s < common.step_s
    assert not check_plan(bound(found.filled.plan, setting)).violations


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_an_image_is_never_cut(pieces: int) -> None:
    """Two images in a microbatch: a quarter of it takes as long as half of it."""
    setting, _ = decide_setting(find_job("paper/strong-3072"), preset("clean"))
    (encoder,) = setting.job.model.encoders
    llm = llm_pipeline(setting, chunks=12, order_name="interleaved")
    layout = encoder_layout(llm.layout, pp=8, tp=8)
    beside = {encoder.name: Beside(layout=layout, recompute="none", pieces=pieces)}
    header = Trial(setting, llm, beside).header
    seconds = sum(phase.duration_s for phase in header.template_of(encoder.name, Kind.F, 3, 0))
    whole = {encoder.name: Beside(layout=layout, recompute="none", pieces=2)}
    one_image = Trial(setting, llm, whole).header.template_of(encoder.name, Kind.F, 3, 0)
    assert seconds >= sum(phase.duration_s for phase in one_image)
