"""Drawn batches: what is dealt is what was drawn, and playing some replicas is playing all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from optimus.cost.assumptions import get_preset
from optimus.errors import UserError
from optimus.ir.op import Communicator, Lane, OpKind
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job
from optimus.job.workload import TokenPercentiles, build_sequences_from_percentiles
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins
from optimus.planner.compare import Comparison, compare_systems
from optimus.schedule.simulator import simulate_schedule
from optimus.sensitivity.batch_steps import BatchSimulator, encoder_loads_of_batch, simulate_batches
from optimus.sensitivity.drawn_batches import (
    COMPUTE,
    DEALINGS,
    TOKENS,
    DrawnBatches,
    EncoderItemCosts,
    deal_batch_to_replicas,
    draw_batches,
    sum_encoder_loads,
)

SYSTEMS = ("stage0", "three-phase", "separate-gpus", "fsdp", "paper")


def few_layers(gpus: int = 8, *, pp: int = 1) -> Job:
    """The small job of the paper with few layers."""
    job = find_job("paper/small-a100", "a100:16").replace(gpus=gpus)
    vision, llm = job.model.encoders[0], job.model.llm
    model = replace(
        job.model,
        llm=replace(llm, stack=replace(llm.stack, layers=4)),
        encoders=(replace(vision, stack=replace(vision.stack, layers=4)),),
    )
    modules = {LLM: PartialLayout(pp=pp, tp=2)}
    workload = replace(job.workload, sequences_per_step=64)
    return replace(job, model=model, layout=replace(job.layout, modules=modules), workload=workload)


def uneven(job: Job, *, tokens: int = 512) -> Job:
    """Returns the job with pictures of many sizes, and some sequences without any."""
    drawn = TokenPercentiles(p50=tokens, p95=3 * tokens, max=4 * tokens, text_only_share=0.2, item=256)
    sequences = build_sequences_from_percentiles(job.workload.sequence_tokens, {"vision": drawn})
    return replace(job, workload=replace(job.workload, sequences=sequences))


@pytest.fixture(scope="module")
def even() -> Comparison:
    return compare_systems(few_layers(), names=[*SYSTEMS, "optimus"])


@pytest.fixture(scope="module")
def mixed() -> Comparison:
    return compare_systems(uneven(few_layers()), names=SYSTEMS)


def feeding_of(comparison: Comparison, name: str) -> BatchAssignment:
    return comparison.systems[name].candidate.batch_assignment()


def test_where_all_sequences_are_alike_every_step_is_the_mean_step(even: Comparison) -> None:
    found = simulate_batches(even, even.systems, count=3)
    assert set(found) == set(even.systems)
    for name, steps in found.items():
        assert steps.mean_s == pytest.approx(even.systems[name].step_s, rel=1e-9), name
        assert steps.p95_s == pytest.approx(steps.mean_s, rel=1e-12)
        assert steps.simulations == 1, name


@pytest.mark.parametrize("dealing", [dealing for dealing in DEALINGS if dealing != "items"])
def test_a_dealing_moves_sequences_and_loses_none(dealing: str) -> None:
    loads = np.random.default_rng(3).random(50)
    feeding = BatchAssignment(replicas=4, microbatches=6)
    slots = deal_batch_to_replicas(loads, feeding, dealing, order=[3, 1, 0, 2, 5, 4])
    assert [len(own) for own in slots] == [6] * 4
    dealt = Counter(int(sequence) for own in slots for microbatch in own for sequence in microbatch)
    assert dealt == Counter(range(50))
    plain = deal_batch_to_replicas(loads, feeding, "drawn")
    if dealing in ("sorted", "matched"):  # a replica keeps its microbatches, and they their contents
        for own, was in zip(slots, plain, strict=True):
            assert {tuple(m) for m in own} == {tuple(m) for m in was}
            heaviest = max(was, key=lambda m: float(loads[m].sum()))
            assert tuple(own[3]) == tuple(heaviest)


def test_reordering_evens_out_what_is_drawn() -> None:
    loads = np.random.default_rng(4).random(64)
    feeding = BatchAssignment(replicas=4, microbatches=4)

    def spread(dealing: str) -> float:
        slots = deal_batch_to_replicas(loads, feeding, dealing, order=[0, 1, 2, 3])
        sums = [loads[m].sum() for own in slots for m in own]
        return float(np.max(sums) / np.mean(sums))

    assert spread("reordered") < 1.05 < 1.2 < spread("drawn")


@pytest.mark.parametrize("each", [1, 2])
def test_reordering_evens_out_replicas_of_few_sequences_a_microbatch(each: int) -> None:
    """One of them cannot even out microbatches; but no replica gets all that are heavy."""
    loads = np.random.default_rng(5).pareto(1.5, 32 * each * 8)
    feeding = BatchAssignment(replicas=8, microbatches=32)
    slots = deal_batch_to_replicas(loads, feeding, "reordered", order=list(range(32)))
    sums = [sum(float(loads[m].sum()) for m in own) for own in slots]
    assert max(sums) < 1.02 * max(float(np.mean(sums)), float(loads.max()))
    assert {len(m) for own in slots for m in own} == {each}


def test_the_mean_of_many_batches_is_the_load_that_was_priced() -> None:
    """Whatever bins images go to: compute and tokens are those of the mean sequence."""
    job = uneven(few_layers())
    each_once = np.arange(256).reshape(4, 64)
    batches = replace(draw_batches(job), drawn=each_once)
    bins = {
        "vision": EncoderBins(bins=2, sharing="pieces", priced_sequences=2.0)
    }  # two pieces of four sequences
    feeding = BatchAssignment(replicas=2, microbatches=8, encoders=bins)
    loads = np.array([encoder_loads_of_batch(batches, b, feeding, "drawn", [])["vision"] for b in range(4)])
    assert loads.shape == (4, 2, 2, 16)
    assert loads[:, COMPUTE].mean() == pytest.approx(1.0, rel=1e-12)
    assert loads[:, TOKENS].mean() == pytest.approx(1.0, rel=1e-12)
    # Short images cost less than their share of tokens, because attention grows with squares.
    items = EncoderItemCosts.of(job.workload, job.model.encoders[0])
    flops = {n: f for lengths, costs in zip(items.lengths, items.flops, strict=True)
             for n, f in zip(lengths, costs, strict=True)}  # fmt: skip
    assert flops[min(flops)] / min(flops) < flops[max(flops)] / max(flops)


def test_batches_are_the_same_every_time_and_for_every_system(mixed: Comparison) -> None:
    one, two = draw_batches(mixed.job), draw_batches(mixed.job)
    assert np.array_equal(one.drawn, two.drawn) and one.drawn.shape == (100, 64)
    assert not np.array_equal(one.drawn, draw_batches(mixed.job, seed=1).drawn)
    first, again = (simulate_batches(mixed, ["fsdp", "paper"], count=4) for _ in range(2))
    assert all(np.array_equal(first[name].steps_s, again[name].steps_s) for name in first)


def total_tokens(batches: DrawnBatches, batch: int, which: int = TOKENS) -> float:
    items = batches.items["vision"]
    return float(items.totals[which, batches.drawn[batch]].sum() / items.means[which])


def test_loads_of_a_batch_add_up_to_its_images(mixed: Comparison) -> None:
    """Each way by its own rule, but nothing is encoded twice or left out."""
    batches = draw_batches(mixed.job, count=2)
    for batch in range(2):
        for name in ("stage0", "three-phase", "separate-gpus", "paper"):
            feeding = feeding_of(mixed, name)
            loads = encoder_loads_of_batch(batches, batch, feeding, "drawn", [])["vision"]
            sequences = loads[TOKENS].sum() * feeding.encoders["vision"].priced_sequences
            assert sequences == pytest.approx(total_tokens(batches, batch)), name
        feeding = feeding_of(mixed, "fsdp")  # ranks meet at every layer: the slowest stands for all
        loads = encoder_loads_of_batch(batches, batch, feeding, "drawn", [])["vision"]
        own = sum_encoder_loads(batches, batch, deal_batch_to_replicas(np.zeros(64), feeding, "drawn"),
                         replace(feeding, locked=False))["vision"]  # fmt: skip
        assert loads.shape == (2, 1, feeding.microbatches * feeding.encoders["vision"].bins)
        assert np.array_equal(loads[:, 0], own.max(axis=1))


def test_only_encoder_work_is_scaled(mixed: Comparison) -> None:
    """Twice the load: twice the compute and TP traffic of encoders, the same of all else, one step longer."""
    system = mixed.systems["stage0"]
    schedule = system.schedule
    own = schedule.module == schedule.modules.index("vision")
    own &= ~np.isin(schedule.kind, (OpKind.UNSHARD, OpKind.REDUCE_GRAD))
    duration_s = np.where(own & (schedule.lane <= Lane.TP), 2 * schedule.duration_s, schedule.duration_s)
    assumed = get_preset("default")
    slowdown, launch_s = assumed.residence_slowdown, assumed.launch_s
    by_hand = simulate_schedule(
        replace(schedule, duration_s=duration_s), slowdown=slowdown, launch_s=launch_s
    ).step_s
    feeding = feeding_of(mixed, "stage0")
    player = BatchSimulator(system, feeding, slowdown=slowdown, launch_s=launch_s)
    ones = np.ones((2, feeding.replicas, feeding.microbatches * feeding.encoders["vision"].bins))
    twice_s, same_s, without_s = player.steps_s({"vision": load * ones} for load in (2, 1, 0))
    assert twice_s == pytest.approx(by_hand, rel=1e-3)  # what runs under collectives is that of one load
    assert same_s == pytest.approx(system.step_s, rel=1e-12)
    assert without_s < system.step_s < by_hand


@pytest.mark.ci("search")
def test_some_replicas_stand_for_all() -> None:
    """On small cases: never more than playing all of them says, and hardly less."""
    comparison = compare_systems(uneven(few_layers(32, pp=2)), names=("stage0", "balanced", "paper"))
    assert feeding_of(comparison, "stage0").replicas == 8
    some = simulate_batches(comparison, comparison.systems, count=6)
    whole = simulate_batches(comparison, comparison.systems, count=6, all_replicas=True)
    for name, steps in some.items():
        assert steps.simulations < whole[name].simulations
        assert (steps.steps_s <= whole[name].steps_s + 1e-12).all()
        assert steps.steps_s == pytest.approx(whole[name].steps_s, rel=0.01), name
        assert steps.p95_s == pytest.approx(whole[name].p95_s, rel=0.005), name


def test_a_heavy_microbatch_goes_where_there_is_room(mixed: Comparison) -> None:
    """Sorted is the better end; matched is no worse than either, and different microbatches are not free."""
    system, feeding = mixed.systems["paper"], feeding_of(mixed, "paper")
    player = BatchSimulator(system, feeding, slowdown=0.1, launch_s=0.0)
    ahead = list(range(feeding.microbatches))

    def ramp_s(order: list[int]) -> float:
        loads = np.empty(len(order))
        loads[order] = np.linspace(2.0, 0.0, len(order))
        own = loads.repeat(feeding.encoders["vision"].bins)
        return float(player.steps_s([{"vision": np.tile(own, (2, 1, 1))}])[0])

    ends = [ramp_s(ahead), ramp_s(ahead[::-1])]
    assert ends[0] != ends[1]
    assert ramp_s(player.order("sorted")) == min(ends)
    assert sorted(player.order("matched")) == ahead
    assert ramp_s(player.order("matched")) <= min(ends)
    assert player.order("drawn") == []
    assert player.order("reordered") == player.order("matched")
    drawn = simulate_batches(mixed, ["paper"], count=8)["paper"]
    assert drawn.p95_s >= drawn.mean_s > system.step_s  # heavy replicas end the step, light ones wait


def test_items_dealt_over_replicas_are_those_of_the_batch(mixed: Comparison) -> None:
    """By encoder microbatch, by rank of a microbatch, or all at once: nothing twice, nothing left out."""
    batches = draw_batches(mixed.job, count=2)
    for batch in range(2):
        for name in ("paper", "three-phase", "separate-gpus"):
            feeding = feeding_of(mixed, name)
            assert feeding.dealing_replicas == feeding.replicas > 1
            loads = encoder_loads_of_batch(batches, batch, feeding, "items", [])["vision"]
            assert loads.shape == encoder_loads_of_batch(batches, batch, feeding, "drawn", [])["vision"].shape
            sequences = loads[TOKENS].sum() * feeding.encoders["vision"].priced_sequences
            assert sequences == pytest.approx(total_tokens(batches, batch)), name
        feeding = feeding_of(mixed, "fsdp")  # the fullest of all, not less than the mean one
        bins = feeding.encoders["vision"]
        loads = encoder_loads_of_batch(batches, batch, feeding, "items", [])["vision"]
        assert loads.shape == (2, 1, feeding.microbatches * bins.bins)
        whole = total_tokens(batches, batch, COMPUTE)
        share = whole / feeding.replicas / bins.priced_sequences
        assert share - 1e-9 <= loads[COMPUTE].sum() <= 1.15 * share


def test_groups_of_replicas_share_their_own_items_only() -> None:
    """Two groups of eight: no pipeline is 2 % above the mean, which whole sequences do not reach."""
    job = uneven(few_layers())
    job = replace(job, workload=replace(job.workload, sequences_per_step=16 * 16))
    bins = {"vision": EncoderBins(bins=2, sharing="pieces", priced_sequences=0.5, pipelines=(0, 1) * 16)}
    feeding = BatchAssignment(replicas=16, microbatches=16, encoders=bins, dealing_replicas=8)
    batches = draw_batches(job, count=5)

    def fullest(dealing: str) -> float:
        ratios = []
        for batch in range(5):
            order = list(range(16))
            loads = encoder_loads_of_batch(batches, batch, feeding, dealing, order)["vision"][COMPUTE]
            assert loads.shape == (16, 32)
            by_pipeline = loads.reshape(16, 16, 2).sum(axis=1)
            ratios.append(float(by_pipeline.max() / by_pipeline.mean()))
        return float(np.mean(ratios))

    assert fullest("items") < 1.02 < fullest("reordered") < fullest("drawn")


def test_each_system_gets_the_best_dealing_it_can_use(mixed: Comparison) -> None:
    best = simulate_batches(mixed, SYSTEMS, dealing="best", count=4)
    ways = [simulate_batches(mixed, SYSTEMS, dealing=dealing, count=4) for dealing in ("items", "reordered")]
    for name, steps in best.items():
        assert steps.mean_s == min(way[name].mean_s for way in ways), name
    assert best["stage0"].dealing == "reordered"  # its encoder is on the ranks of a stage
    assert {best["fsdp"].dealing, best["paper"].dealing} == {"items"}
    assert best["fsdp"].mean_s < simulate_batches(mixed, ["fsdp"], count=4)["fsdp"].mean_s


def test_rows_that_travel_between_replicas_take_time(mixed: Comparison) -> None:
    """In a plan that deals they are among its ops; elsewhere every microbatch waits for them."""
    for name, system in mixed.systems.items():
        deals = bool((system.schedule.communicator == Communicator.DEAL).any())
        assert deals == (name in ("fsdp", "three-phase"))
        assert (feeding_of(mixed, name).exchange_s > 0) == (name == "paper")
    system, feeding = mixed.systems["paper"], feeding_of(mixed, "paper")
    player = BatchSimulator(system, feeding, slowdown=0.1, launch_s=0.0)
    ones = {"vision": np.ones((2, 1, feeding.microbatches * feeding.encoders["vision"].bins))}
    longer = player.steps_s([ones], exchange_s=0.25)[0] - player.steps_s([ones])[0]
    assert 0.2 < longer / feeding.microbatches < 0.251  # gathers of the next layer go on


def test_an_unknown_dealing_is_refused(mixed: Comparison) -> None:
    with pytest.raises(UserError, match="is not a dealing"):
        simulate_batches(mixed, ["fsdp"], dealing="sort")
