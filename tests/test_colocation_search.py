"""Our scheduler: every plan holds, its own time is the replay's, and it stays near the floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from random_jobs import random_job, random_setting
from random_plans import bound, random_llm

from benchmarks.docs.dealing_tables import CASES, job_of
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit, UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import DeviceClassMemory, Plan, Span
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.planner.layouts import choose_smallest_context, valid_encoder_layouts
from optimus.planner.systems.base import simulate_step_s
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus, split_layers_evenly
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.colocation_search import (
    PIECES_PER_BLOCK,
    ColocationSearch,
    move_layer,
    schedule_on_all_cores,
)
from optimus.planner.systems.llm_only import LlmPipelines, ShardedLlm, build_llm_pipeline
from optimus.planner.systems.optimus import OptimusSearch
from optimus.schedule.pipeline_orders import peak_microbatches_in_flight
from optimus.schedule.plan_claims import compute_device_class_memory
from optimus.verify.validator import check_plan

Record = Callable[[str, object], None]
RANDOM, CI_RANDOM, PART = 12, 60, 30
SHARDED = 600
CI_WAYS, HEAVY_WAYS, WAYS_PART = 500, 100_000, 250
# Of the LLM's own step with interleaved 1F1B: as the catalog has the images, and with images of a quarter.
OVER_FLOOR_1F1B = {
    ("paper/strong-3072", "clean"): (1.031, 1.025),
    ("paper/strong-2048", "clean"): (1.022, 1.018),
    ("paper/strong-1536", "clean"): (1.018, 1.018),
    ("paper/strong-3072", "clean-slack"): (1.016, 1.016),
    ("paper/strong-2048", "clean-slack"): (1.015, 1.013),
    ("paper/strong-1536", "clean-slack"): (1.017, 1.018),
    ("paper/B", "clean"): (1.172, 1.169),
    ("paper/B", "clean-slack"): (1.172, 1.168),
}


def check_random(seeds: range) -> None:
    """Each plan passes all rules; nothing but a typed refusal stops a search."""
    plans = 0
    for seed in seeds:
        rng = Random(seed)
        context = random_setting(rng, random_job(rng))
        if not context.job.model.encoders:
            continue
        try:
            llm = random_llm(Random(seed), context, splits=bool(seed % 2))
            found = OptimusSearch(context, [llm]).find_plan()
        except (DoesNotFit, UserError):
            continue
        violations = check_plan(bound(found.filled.plan, context)).violations
        assert not violations, f"seed {seed}: {violations[0]}"
        plans += 1
    assert plans > len(seeds) // 2


@pytest.mark.ci("search")
def test_plans_of_random_jobs_pass_all_rules() -> None:
    check_random(range(RANDOM))


@pytest.mark.ci("search")
@pytest.mark.parametrize("first", range(0, CI_RANDOM, PART))
def test_plans_of_many_random_jobs_pass_all_rules(first: int) -> None:
    check_random(range(first, first + PART))


def check_sharded(seeds: range) -> None:
    """Plans around a fully sharded LLM pass all rules, fit, and are no faster than it is alone."""
    plans = fills = 0
    for seed in seeds:
        job = random_job(Random(seed))
        job = replace(job, layout=replace(job.layout, modules={}))
        try:
            context, _ = choose_smallest_context(job, get_preset("default"))
            found = OptimusSearch.around(ShardedLlm(context)).find_plan()
        except (DoesNotFit, UserError):
            continue
        violations = check_plan(bound(found.filled.plan, found.context)).violations
        assert not violations, f"seed {seed}: {violations[0]}"
        alone_s = simulate_step_s(found.llm)
        assert found.filled.plan.locked and found.filled.step_s >= (1 - 1e-9) * alone_s, f"seed {seed}"
        assert found.peak_bytes_at_p99 is not None
        assert max(m.total for m in found.memories) <= found.peak_bytes_at_p99 <= found.context.capacity_bytes
        plans += 1
        fills += found.hidden_share > 0
    assert plans >= len(seeds) // 6 and fills > 0, (plans, fills)


@pytest.mark.ci("search")
def test_plans_around_a_sharded_llm_pass_all_rules() -> None:
    check_sharded(range(20, 20 + RANDOM))  # seed 30: an order of gathers that deadlocked


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(0, SHARDED, PART))
def test_plans_of_many_jobs_around_a_sharded_llm_pass_all_rules(first: int) -> None:
    check_sharded(range(first, first + PART))


@pytest.mark.ci("search")
def test_encoders_are_placed_around_a_sharded_llm_where_that_is_faster(record_property: Record) -> None:
    """On a slow network a sharded LLM waits for gathers and reduces; encoders of fsdp do so, too."""
    job = find_job("siglip-so400m-8b", "b200:16")
    llm, (vision,), nodes = job.model.llm, job.model.encoders, job.cluster.between_nodes
    model = replace(
        job.model,
        llm=replace(llm, stack=replace(llm.stack, layers=6)),
        encoders=(replace(vision, stack=replace(vision.stack, layers=4)),),
    )
    slow = replace(nodes, bandwidth_bytes_per_s=nodes.bandwidth_bytes_per_s / 2)
    small = replace(
        job,
        model=model,
        cluster=replace(job.cluster, between_nodes=slow),
        workload=replace(job.workload, sequences_per_step=32),
        layout=replace(job.layout, limits=replace(job.layout.limits, allow=("fsdp", "fill"))),
    )
    found = compare_systems(small, names=["fsdp", "optimus"]).systems
    result = found["optimus"].search_result
    assert result is not None and result.plan.locked and "fully sharded" in result.how
    assert all(bucket.reduced_per <= Span.STEP for bucket in result.plan.modules["vision"].buckets[0])
    record_property("step over that of fsdp", found["optimus"].step_s / found["fsdp"].step_s)
    assert found["optimus"].step_s < 0.95 * found["fsdp"].step_s


def random_way(seed: int) -> Plan | None:
    """Encoders beside an LLM in any way that a search may try, and in some that it would not."""
    rng = Random(seed)
    context = random_setting(rng, random_job(rng))
    llm = random_llm(rng, context, splits=rng.random() < 0.5)
    layouts = [list(valid_encoder_layouts(context, e, llm.layout)) for e in context.job.model.encoders]
    if not layouts or not all(layouts):
        return None
    least = peak_microbatches_in_flight(llm.order)
    placements = {}
    for encoder, possible in zip(context.job.model.encoders, layouts, strict=True):
        layout = rng.choice(possible)
        across, inner = llm.layout.tp // layout.tp, encoder.stack.layers
        counts = split_layers_evenly(inner, layout.pp)
        for _ in range(rng.randrange(3)):
            giver, taker = rng.randrange(layout.pp), rng.randrange(layout.pp)
            counts = move_layer(counts, giver, taker) if counts[giver] > 1 else counts
        placements[encoder.name] = EncoderPlacement(
            layout=layout,
            recompute=rng.choice(["none", "selective", "full"]),
            pieces=rng.choice([across, 2 * across, 1]),
            layers_per_stage=counts,
            split_backward=rng.random() < 0.5,
            window=rng.choice([0, least + llm.layout.pp, 2 * least + 2]),
            reverse_pipelines=rng.random() < 0.3,
        )
    if len({chosen.layout.tp for chosen in placements.values()}) > 1:  # then blocks must be alike
        placements = {
            name: replace(chosen, pieces=max(chosen.pieces, llm.layout.tp // chosen.layout.tp))
            for name, chosen in placements.items()
        }
    candidate = ColocationCandidate(context, llm, placements)
    arranged = candidate.fill.schedule_encoders(rng.choice([0.0, 0.1, 0.5]) * candidate.base.step_s)
    if rng.random() < 0.05:
        arranged = candidate.fill.shorten(arranged)
    filled = candidate.lowered(arranged)
    stages = [filled.plan.ranks.coordinates(device)[0] for device in range(len(filled.plan.memory))]
    working = llm.sums.stage_bytes(llm.cut, llm.layout.pp).working
    for stage, held in zip(stages, filled.plan.memory, strict=True):  # the LLM's own as it was reckoned
        own = llm.memories[stage].llm_activations - float(working[stage])
        assert held.peak - held.llm_activations + own <= candidate.peak_bytes_bound + 1
    return bound(replace(filled.plan, capacity_bytes=10**15), context)


def check_ways(seeds: range) -> None:
    made = 0
    for seed in seeds:
        plan = random_way(seed)
        if plan is not None:
            violations = check_plan(plan).violations
            assert not violations, f"seed {seed}: {violations[0]}"
            made += 1
    assert made > len(seeds) // 2


@pytest.mark.ci("search")
def test_whatever_is_tried_passes_all_rules() -> None:
    check_ways(range(40))


@pytest.mark.ci("search")
@pytest.mark.parametrize("first", range(0, CI_WAYS, WAYS_PART))
def test_five_hundred_ways_pass_all_rules(first: int) -> None:
    check_ways(range(first, first + WAYS_PART))


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(CI_WAYS, HEAVY_WAYS, WAYS_PART))
def test_a_hundred_thousand_ways_pass_all_rules(first: int) -> None:
    check_ways(range(first, first + WAYS_PART))


@pytest.mark.ci("search")
@pytest.mark.parametrize(("name", "assumed"), [("paper/strong-3072", "clean")])
def test_large_encoders_hide_behind_the_llm(name: str, assumed: str, record_property: Record) -> None:
    check_over_floor(name, assumed, record_property)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "assumed"), [*OVER_FLOOR_1F1B][1:])
def test_large_encoders_hide_behind_the_llm_at_fewer_gpus_and_with_slack(
    name: str, assumed: str, record_property: Record
) -> None:
    check_over_floor(name, assumed, record_property)


def check_over_floor(name: str, assumed: str, record_property: Record) -> None:
    """Beside interleaved 1F1B, all traffic of encoders in full; the loop's time is nearly the replay's."""
    job = find_job(name)
    for made, limit in zip((job, with_small_images(job)), OVER_FLOOR_1F1B[name, assumed], strict=True):
        context, _ = choose_smallest_context(made, get_preset(assumed))
        floor = LlmPipelines(context).floor_1f1b
        floor_s = simulate_step_s(floor)
        found = OptimusSearch(context, [floor]).find_plan()
        over = found.filled.step_s / floor_s
        record_property("over floor-1f1b", round(over, 4))
        assert over <= limit, f"{over:.4f}"
        assert found.filled.estimate_s == pytest.approx(found.filled.step_s, rel=2e-3)
        assert not check_plan(bound(found.filled.plan, context)).violations


def with_small_images(job: Job) -> Job:
    """Four images of a quarter of the size for each."""
    sequences = []
    for sequence in job.workload.sequences:
        items = tuple(
            (name, tuple(n // 4 for n in lengths for _ in range(4))) for name, lengths in sequence.items
        )
        sequences.append(replace(sequence, items=items))
    return replace(job, workload=replace(job.workload, sequences=tuple(sequences)))


@pytest.mark.ci("search")
def test_a_window_bounds_what_encoders_keep() -> None:
    """The replay keeps at most 18 of 32 microbatches, for an eighth more time at most."""
    context, _ = choose_smallest_context(find_job("paper/strong-1536"), get_preset("clean"))
    (encoder,) = context.job.model.encoders
    llm = build_llm_pipeline(context, chunks=1, order_name="1f1b")
    assert (peak_microbatches_in_flight(llm.order), llm.microbatches) == (8, 32)
    layout = encoder_layout_on_llm_gpus(llm.layout, pp=8, tp=8)
    steps, kept = [], []
    for window in (0, 18):
        placements = {encoder.name: EncoderPlacement(layout=layout, recompute="none", window=window)}
        candidate = ColocationCandidate(context, llm, placements)
        made = candidate.plan(candidate.fill.schedule_encoders(0.0))
        assert not check_plan(bound(made.plan, context)).violations
        assert max(held.peak for held in made.plan.memory) <= candidate.peak_bytes_bound
        steps.append(made.step_s)
        kept.append(max(held.encoder_activations for held in memory_of_saved_activations(made.plan)))
    assert kept[1] == pytest.approx(18 / 32 * kept[0])
    assert steps[0] < steps[1] <= 1.125 * steps[0]


def memory_of_saved_activations(plan: Plan) -> tuple[DeviceClassMemory, ...]:
    """Returns the memory of a plan without what waits for weight gradients."""
    modules = {
        name: replace(module, chunks=tuple(replace(chunk, recomputed_bytes=0) for chunk in module.chunks))
        for name, module in plan.modules.items()
    }
    bare = replace(plan, modules=modules)
    return compute_device_class_memory(bare, bare.programs, [device.fixed for device in plan.memory])


@pytest.mark.ci("search")
def test_encoders_may_have_layouts_of_their_own() -> None:
    """Two of them in unequal layouts: the plan holds, and what a search tries takes them into account."""
    context, _ = choose_smallest_context(find_job("paper/dual-22-11"), get_preset("clean"))
    context = replace(context, kept_free_bytes=-0.5 * context.capacity_bytes)  # room for all layouts
    llm = build_llm_pipeline(context, chunks=1, order_name="1f1b")
    first, second = (encoder.name for encoder in context.job.model.encoders)
    placements = {
        first: EncoderPlacement(
            layout=encoder_layout_on_llm_gpus(llm.layout, pp=8, tp=8), recompute="none", pieces=2
        ),
        second: EncoderPlacement(
            layout=encoder_layout_on_llm_gpus(llm.layout, pp=4, tp=4), recompute="none", pieces=2
        ),
    }
    candidate = ColocationCandidate(context, llm, placements)
    filled = candidate.lowered(candidate.fill.schedule_encoders(0.0))
    assert not check_plan(bound(filled.plan, context)).violations
    assert {name: module.layout.tp for name, module in filled.plan.encoders.items()} == {first: 8, second: 4}
    search = ColocationSearch(context, llm)
    common = search.schedule_common_layouts()[0]
    apart = list(search._separate_layouts(common))
    assert apart and all(len({chosen.layout for chosen in way.values()}) == 2 for way in apart)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_an_image_is_never_cut(pieces: int) -> None:
    """Two images in a microbatch: a quarter of it takes as long as half of it."""
    context, _ = choose_smallest_context(find_job("paper/strong-3072"), get_preset("clean"))
    (encoder,) = context.job.model.encoders
    llm = build_llm_pipeline(context, chunks=12, order_name="interleaved")
    layout = encoder_layout_on_llm_gpus(llm.layout, pp=8, tp=8)
    placements = {encoder.name: EncoderPlacement(layout=layout, recompute="none", pieces=pieces)}
    header = ColocationCandidate(context, llm, placements).header
    seconds = sum(phase.duration_s for phase in header.template_of(encoder.name, OpKind.FORWARD, 3, 0))
    whole = {encoder.name: EncoderPlacement(layout=layout, recompute="none", pieces=2)}
    one_image = ColocationCandidate(context, llm, whole).header.template_of(
        encoder.name, OpKind.FORWARD, 3, 0
    )
    assert seconds >= sum(phase.duration_s for phase in one_image)


def long_tailed() -> Job:
    """InternVL3-78B on 512 GPUs: 3.5 images in the mean sequence."""
    job = job_of(CASES[0])
    return replace(job, layout=replace(job.layout, modules={LLM: PartialLayout(pp=4, tp=4)}))


@pytest.mark.parametrize(("tp", "pieces"), [(4, [3]), (2, [4]), (1, [])])
def test_a_block_has_as_many_pieces_as_images_and_no_more(tp: int, pieces: list[int]) -> None:
    """The busier of two blocks has two of the images, each of four has one."""
    context, _ = choose_smallest_context(long_tailed(), get_preset("default"))
    (encoder,) = context.job.model.encoders
    llm = build_llm_pipeline(context, chunks=1, order_name="1f1b")
    layout = encoder_layout_on_llm_gpus(llm.layout, pp=1, tp=tp)
    start = EncoderPlacement(layout=layout, recompute="none", pieces=max(2, 4 // tp))
    candidate = ColocationCandidate(context, llm, {encoder.name: start})
    more = candidate.placements_in_more_pieces(PIECES_PER_BLOCK)
    assert [placements[encoder.name].pieces for placements in more] == pieces


@pytest.mark.ci("search")
def test_three_pieces_fit_slots_that_two_do_not() -> None:
    """Pieces that are only doubled take 16.33 s: their kernels do not fit between the LLM's collectives.

    Three take 15.64 s, with as many microbatches resident as fit at p99 of steps.
    """
    context, _ = choose_smallest_context(long_tailed(), get_preset("default"))
    found = OptimusSearch(context, LlmPipelines(context).for_colocation).find_plan()
    (name,) = found.plan.encoders
    assert found.plan.modules[name].microbatches_per_llm_microbatch == 3
    assert found.filled.step_s < 15.7
    assert not check_plan(bound(found.filled.plan, context)).violations


@pytest.mark.ci("search")
@pytest.mark.parametrize("chunks", [6, 10])
def test_stated_chunks_are_kept(chunks: int) -> None:
    """The LLM alone would be fastest with 19; encoders lie beside it with as many as the job says."""
    context, _ = choose_smallest_context(
        find_job("paper/B", layouts=[f"llm=chunks{chunks}"]), get_preset("default")
    )
    floors = LlmPipelines(context)
    assert floors.floor.layout.chunks == 19
    assert {llm.layout.chunks for llm in floors.for_colocation} == {chunks}
    roomier = [
        llm for free in (4e9, 16e9) for llm in floors.with_free_memory(floors.for_colocation[0], [free])
    ]
    assert roomier and {llm.layout.chunks for llm in roomier} == {chunks}


@pytest.mark.ci("search")
def test_chunks_left_open_are_also_halved() -> None:
    """Half as many chunks cost the LLM time, and leave the first microbatches of encoders more of it."""
    job = find_job("paper/A")
    open_job = replace(job, layout=replace(job.layout, modules={LLM: PartialLayout(pp=4, tp=8)}))
    context, _ = choose_smallest_context(open_job, get_preset("default"))
    floors = LlmPipelines(context)
    assert [llm.layout.chunks for llm in floors.for_colocation] == [20, 20, 10]
    best = OptimusSearch(context, floors.for_colocation).find_plan()
    assert best.llm.layout.chunks == 10
    assert best.filled.step_s < OptimusSearch(context, floors.floors).find_plan().filled.step_s


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_shorter_than_its_compute(seed: int) -> None:
    """The search leaves out candidates by this bound; some schedules are as short as it."""
    rng = Random(seed)
    job = random_job(rng)
    if not job.model.encoders:
        pytest.skip("no encoder to place")
    context = random_setting(rng, job)
    search = ColocationSearch(context, build_llm_pipeline(context))
    for scheduled in search.schedule_common_layouts():
        rounding_s = 1e-12 * scheduled.lines  # plans state picoseconds
        lowered = scheduled.candidate.plan(scheduled.arranged)
        assert scheduled.candidate.work_s <= min(scheduled.step_s, lowered.step_s) + rounding_s
    assert not search.schedule_layouts(6, below_s=0.0)


def test_two_cores_find_what_one_does() -> None:
    """Schedules, shifts and refinements of another process are recomputed, and are the same."""
    context, _ = choose_smallest_context(find_job("paper/small-a100"), get_preset("default"))
    found = []
    for cores in (1, 2):
        own = replace(context, cores=cores)
        search = ColocationSearch(own, build_llm_pipeline(own))
        common = search.schedule_common_layouts()
        refined = [
            each
            for each, _ in schedule_on_all_cores([(search, c) for c in common[:3]], ColocationSearch.refine)
        ]
        found.append([(c.placements, c.shift_s, c.step_s, c.late_s, c.lines) for c in (*common, *refined)])
        assert all(c.candidate.step_s(c.arranged) == c.step_s for c in (*common, *refined))
    assert found[0] == found[1] and len(found[0]) > 3
