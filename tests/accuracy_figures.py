"""Predicts the published steps without each of the cost model's effects of real training.

`python tests/accuracy_figures.py` prints bias and median error of every variant, by split and system: of
models without experts, and of tuned runs of models with experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimus.cost import compute
from optimus.cost.assumptions import PRESETS
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.layer_shape import LayerShape
from optimus.job.measured_runs import MeasuredRun, load_measured_runs
from optimus.planner import context
from optimus.sensitivity.accuracy import group_runs, predict_runs

SHOWN = ("all", "held-out", "fsdp", "pipeline", "h100", "a100", "b200")
SHOWN_WITH_EXPERTS = ("all", "fsdp", "pipeline")
BURST_SHARE = 0.8  # of the memory bandwidth, what aiconfigurator-core states


def take_full_clocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compute, "SUSTAINED_SHARE", {})


def take_burst_bandwidth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compute, "MEMORY_BANDWIDTH_SHARE", BURST_SHARE)


def add_no_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compute, "accumulation_s", lambda *_: 0.0)


def tune_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compute, "FLASH2_SLOWDOWN", {})


def fuse_kernels(patch: pytest.MonkeyPatch) -> None:
    for name, preset in PRESETS.items():
        fused = replace(preset, rmsnorm_bytes_factor=1.0, layernorm_bytes_factor=1.0, gated_bytes_factor=1.0)
        patch.setitem(PRESETS, name, fused)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context, "add_gather_copies", lambda layers, *_, **__: tuple(layers))


def price_scores_as_fused(patch: pytest.MonkeyPatch) -> None:
    """Stored scores take memory, but as long as attention that stores none."""
    plain = LayerShape.attention_s

    def fused(shape: LayerShape, *, backward: bool = False) -> float:
        assumptions = replace(shape.cost_model.assumptions, fused_attention=True)
        other = replace(shape, cost_model=replace(shape.cost_model, assumptions=assumptions))
        return plain(other, backward=backward)

    patch.setattr(LayerShape, "attention_s", fused)


EFFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sustained clocks": take_full_clocks,
    "memory bandwidth of training": take_burst_bandwidth,
    "adding weight gradients": add_no_gradients,
    "torch's own attention": tune_attention,
    "unfused kernels": fuse_kernels,
    "copies of FSDP2": copy_nothing,
    "scores that are stored": price_scores_as_fused,
}


def permute_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerShape, "permutation_s", lambda *_: 0.0)


def send_every_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterCostModel, "deduplicates_tokens", False)


def expose_exchanges(patch: pytest.MonkeyPatch) -> None:
    seconds = ClusterCostModel.exchange_s

    def exposed(cost_model: ClusterCostModel, *exchanged: Any) -> float:
        assumptions = replace(cost_model.assumptions, ep_overlapped_share=0.0)
        return seconds(replace(cost_model, assumptions=assumptions), *exchanged)

    patch.setattr(ClusterCostModel, "exchange_s", exposed)


EFFECTS_OF_EXPERTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "permutation of tokens": permute_nothing,
    "deduplicated tokens": send_every_copy,
    "overlapped exchanges": expose_exchanges,
}


def print_table(
    runs: Sequence[MeasuredRun],
    effects: Mapping[str, Callable[[pytest.MonkeyPatch], None]],
    shown: Sequence[str],
) -> None:
    """Prints errors with all effects, without each, and without any."""
    variants: dict[str, Sequence[str]] = {"all effects": ()}
    variants |= {f"without {name}": (name,) for name in effects} | {"without any": tuple(effects)}
    print(f"| bias, median % | {' | '.join(shown)} |")  # noqa: T201
    print(f"| --- |{' ---: |' * len(shown)}")  # noqa: T201
    for name, without in variants.items():
        with pytest.MonkeyPatch.context() as patch:
            for effect in without:
                effects[effect](patch)
            predicted = predict_runs(runs=runs, cores=2)
        groups = {group.name: group for group in group_runs(predicted)}
        cells = [f"{100 * groups[key].bias:+.1f}, {100 * groups[key].median:.1f}" for key in shown]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)  # noqa: T201


def main() -> int:
    """Prints both tables."""
    tuned = [run for run in load_measured_runs() if run.split != "untuned"]
    print_table([run for run in tuned if run.kind == "dense"], EFFECTS, SHOWN)
    print()  # noqa: T201
    print_table([run for run in tuned if run.kind == "moe"], EFFECTS_OF_EXPERTS, SHOWN_WITH_EXPERTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
