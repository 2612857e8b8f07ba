"""Our system: layouts, pieces and layers of every encoder beside an LLM pipeline, scheduled by `fill`.

What is tried is ranked by the loop's own time; the best are lowered and replayed, and the replay decides.
Budgets are counts of evaluations, so that the same job gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimus.errors import DoesNotFit
from optimus.job.layout import Layout
from optimus.schedule.arrangement import Base
from optimus.schedule.fill import Arranged
from optimus.systems.colocated import even_counts
from optimus.systems.encoder_layouts import common_layouts
from optimus.systems.filled import FilledPlan
from optimus.systems.found import Found, TriedLayout
from optimus.systems.inline import InlinePipeline
from optimus.systems.rejected import Rejected, count_by_reason
from optimus.systems.setting import Setting, describe_recompute
from optimus.systems.traffic_cut import counts_by_traffic, moved
from optimus.systems.trial import Beside, Trial

MOST_LAYOUTS = 3  # scheduled beside one LLM pipeline, the most promising first
HALVINGS = 4  # of the shift of the LLM
MOST_MOVES = 6  # of a layer from one stage to another
MOST_REFINED = 2  # layouts
LITTLE = 2e-3  # share of a step: delays below it are not worth a search


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """A way to lay encoders beside the LLM, and the best arrangement that was found for it."""

    trial: Trial
    arranged: Arranged

    @property
    def beside(self) -> Mapping[str, Beside]:
        return self.trial.beside

    @cached_property
    def step_s(self) -> float:
        return self.trial.step_s(self.arranged)


class Search:
    """Everything that is tried beside one LLM pipeline."""

    def __init__(self, setting: Setting, llm: InlinePipeline) -> None:
        self.setting, self.llm = setting, llm
        self.rejected: list[Rejected] = []
        self.considered = 0
        self._base: Base | None = None

    def best(self) -> list[Tried]:
        """Ways that fit by their bytes, the fastest first: only that one is refined."""
        found = [self._tried(trial) for trial in self._layouts()]
        found.sort(key=lambda tried: tried.step_s)
        refined = [self._refined(tried) for tried in found[:MOST_REFINED]]
        return sorted([*refined, *found[MOST_REFINED:]], key=lambda tried: tried.step_s)

    def as_layout(self, tried: Tried) -> TriedLayout:
        """For those who look at what was tried: one layout is common to all encoders."""
        return TriedLayout(
            layout=next(iter(tried.beside.values())).layout,
            module=self.setting.encoder_names,
            step_s=tried.step_s,
            peak_bytes=tried.trial.most_bytes,
            replayed=False,
        )

    # ------------------------------------------------------------------------ layouts

    def _layouts(self) -> list[Trial]:
        """One layout for all encoders, with the least recomputation that fits; the most promising first."""
        fitting: list[Trial] = []
        for layout in common_layouts(self.setting, self.llm.layout):
            self.considered += 1
            found = layout if isinstance(layout, Rejected) else self._fitting(layout)
            if isinstance(found, Rejected):
                self.rejected.append(found)
            else:
                fitting.append(found)
        return sorted(fitting, key=lambda trial: trial.encoder_s)[:MOST_LAYOUTS]

    def _fitting(self, layout: Layout) -> Trial | Rejected:
        pieces, needs = self.llm.layout.tp // layout.tp, 0.0
        for policy in self.setting.policies(self.setting.job.model.encoders):
            chosen = {name: Beside(layout=layout, recompute=step, pieces=pieces) for name, step in policy}
            trial = self._trial(chosen)
            if trial.fits:
                return trial
            needs = trial.most_bytes
        capacity = f"{self.setting.capacity_bytes / 1e9:.1f} GB"
        reason = f"memory: {needs / 1e9:.1f} of {capacity} with the most recomputation"
        return Rejected(layout=layout, reason=reason, module=self.setting.encoder_names)

    # ------------------------------------------------------------------------ evaluations

    def _trial(self, beside: Mapping[str, Beside]) -> Trial:
        trial = Trial(self.setting, self.llm, beside, self._base)
        self._base = trial.base
        return trial

    def _tried(self, trial: Trial) -> Tried:
        """Arranged with the best shift of the LLM: the least that keeps encoders ahead."""
        best = trial.fill.arrange(0.0)
        low_s, high_s = 0.0, best.late_s
        for _ in range(HALVINGS if best.late_s > LITTLE * best.step_s else 0):
            middle = trial.fill.arrange((low_s + high_s) / 2)
            best = min(best, middle, key=lambda arranged: arranged.step_s)
            ahead = middle.late_s - middle.shift_s < (high_s - low_s) / 2
            low_s, high_s = (low_s, middle.shift_s) if ahead else (middle.shift_s, high_s)
        return Tried(trial=trial, arranged=best)

    def _refined(self, tried: Tried) -> Tried:
        """With other numbers of layers on stages, and smaller pieces, while that helps."""
        whole = {name: replace(chosen, split=False) for name, chosen in tried.beside.items()}
        for beside in (whole, self._counted(tried)):
            tried = _faster(tried, self._tried(self._trial(beside)))
        for change in tried.trial.other_deals:
            beside = {name: replace(chosen, **change) for name, chosen in tried.beside.items()}
            tried = _faster(tried, self._tried(self._trial(beside)))
        while True:
            smaller = self._tried(self._trial(_cut_again(tried.beside)))
            if _faster(tried, smaller) is tried:
                break
            tried = smaller
        return self._levelled(tried)

    def _levelled(self, tried: Tried) -> Tried:
        """Layers moved one by one from the stage that ends last to one that ends early, while that helps."""
        for _ in range(MOST_MOVES):
            for name in tried.beside:
                trials = filter(lambda trial: trial.fits, map(self._trial, self._moved(tried, name)))
                shift_s = tried.arranged.shift_s
                found = [Tried(trial=trial, arranged=trial.fill.arrange(shift_s)) for trial in trials]
                best = min([tried, *found], key=lambda each: each.step_s)
                if best is tried:
                    return tried
                tried = best
        return tried

    def _moved(self, tried: Tried, name: str) -> list[dict[str, Beside]]:
        """One layer of an encoder from its last stage to end to each of the two that end first."""
        module, chosen = tried.trial.header.modules[name], tried.beside[name]
        stages = module.layout.pp
        ends = [max(tried.arranged.ends_s[stage::stages]) for stage in range(stages)]
        inner = next(e.stack.layers for e in self.setting.job.model.encoders if e.name == name)
        counts = chosen.counts or even_counts(inner, stages)
        order = sorted(range(stages), key=lambda stage: ends[stage])
        if stages == 1 or counts[order[-1]] < 2:
            return []
        return [
            {**tried.beside, name: replace(chosen, counts=moved(counts, order[-1], taker))}
            for taker in order[: min(2, stages - 1)]
        ]

    def _counted(self, tried: Tried) -> dict[str, Beside]:
        """The same with layers on stages by what their traffic leaves open."""
        found = {}
        for name, chosen in tried.beside.items():
            encoder = next(e for e in self.setting.job.model.encoders if e.name == name)
            layers = self.setting.encoder_layers(encoder, chosen.layout, self.llm.sequences, chosen.recompute)
            counts = counts_by_traffic(self.setting, layers, tried.trial.base, chosen.layout.pp)
            found[name] = replace(chosen, counts=counts)
        return found


def search_ours(setting: Setting, llms: Sequence[Iterable[InlinePipeline]]) -> Found:
    """The best beside each LLM pipeline, by replay. A pipeline comes with more and more recomputation."""
    plans: list[tuple[FilledPlan, Tried]] = []
    rejected: list[Rejected] = []
    layouts: list[TriedLayout] = []
    considered = 0
    for ladder in llms:
        for llm in ladder:
            search = Search(setting, llm)
            ranked = search.best()
            layouts += [search.as_layout(tried) for tried in ranked]
            made = ((tried.trial.plan(tried.arranged), tried) for tried in ranked)
            best = next((pair for pair in made if pair[0].fits), None)
            considered += search.considered
            rejected += search.rejected
            if best is not None:
                plans.append(best)
                break
    if not plans:
        words = "; ".join(count_by_reason(rejected))
        raise DoesNotFit(
            f"encoders fit beside the LLM at {setting.layout} in none of {considered} layouts: {words}",
            "use recompute: full, more GPUs, more tp or pp, or another system",
        )
    filled, tried = min(plans, key=lambda pair: pair[0].step_s)
    return Found(
        filled=filled,
        llm=tried.trial.llm,
        how=_describe(tried),
        considered=considered,
        hidden_share=_hidden_share(filled),
        notes={"shift_s": tried.arranged.shift_s},
        rejected=rejected,
        tried=layouts,
    )


def _faster(one: Tried, other: Tried) -> Tried:
    """The faster of two, if it fits."""
    return other if other.step_s < one.step_s and other.trial.fits else one


def _cut_again(beside: Mapping[str, Beside]) -> dict[str, Beside]:
    """In pieces of half the size."""
    return {name: replace(chosen, pieces=2 * chosen.pieces) for name, chosen in beside.items()}


def _describe(tried: Tried) -> str:
    llm = tried.trial.llm
    parts = []
    for name, chosen in tried.beside.items():
        counts = "" if not chosen.counts else f" layers {'+'.join(map(str, chosen.counts))}"
        pieces = "" if chosen.pieces == 1 else f" in {chosen.pieces} pieces"
        parts.append(f"{name} {chosen.layout}{pieces}{counts}")
    again = describe_recompute((*((n, c.recompute) for n, c in tried.beside.items()), *llm.policy))
    size = f"microbatch {llm.sequences:.3g}"
    return f"{'; '.join(parts)}; llm {llm.layout}; {llm.order_name}; {size}; {again}"


def _hidden_share(filled: FilledPlan) -> float:
    """Share of encoder compute that lies in slots of, or between, the LLM's phases."""
    seconds = filled.plan.claims.encoder_s
    total = sum(seconds.values())
    return (seconds["slots"] + seconds["between"]) / total if total else 1.0
