"""Computes and writes the tables of docs/validation.md."""

from __future__ import annotations

from benchmarks.docs.pages import DOCS, fill_tables, markdown
from optimus.cost.assumptions import Assumptions, get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.kernel import Kernel
from optimus.cost.layer_kernels import list_backward_kernels, list_forward_kernels
from optimus.cost.layer_shape import LayerShape
from optimus.ir.op import Lane, OpKind
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.job.workload import TokenLoad
from optimus.planner.compare import compare_systems
from optimus.schedule.bubbles import CAUSES
from optimus.schedule.schedule_builder import ScheduleBuilder, build_kernel_graph
from optimus.schedule.simulator import simulate_schedule

PAGE = DOCS / "validation.md"
TABLE_1 = dict(zip(CAUSES, (3.3, 8.9, 5.0, 9.2, 8.7, 11.2), strict=True))  # shares, per cent
TABLE_1_STEP_S = 5.12


def table_1() -> str:
    """Compares the paper's Table 1 with ours."""
    header = ["", "step s", "DP gather", "DP reduce", "PP warm-up", "PP cool-down", "PP other", "TP", "sum"]
    rows = [["paper, Table 1", f"{TABLE_1_STEP_S}", *(f"{v:.1f}" for v in TABLE_1.values())]]
    rows[0].append(f"{sum(TABLE_1.values()):.1f}")
    for assumptions in ("paper", "paper-first-chunk"):
        for chunks in (1, 12):
            job = find_job("paper/strong-3072", layouts=[f"llm=chunks{chunks}"])
            comparison = compare_systems(job, names=["stage0", "balanced"], assumptions=assumptions)
            for name, system in comparison.systems.items():
                shares = [100 * getattr(system.bubbles, cause) / system.step_s for cause in CAUSES]
                label = f"{name}, V = {chunks}, `{assumptions}`"
                shown = [f"{share:.1f}" for share in (*shares, sum(shares))]
                rows.append([label, f"{system.step_s:.2f}", *shown])
    return markdown(header, rows)


def kernels() -> str:
    """Compares times of single layers and collectives that the paper states."""
    vit, gpt = layer_shape("vision", tokens=4096, span=2048), layer_shape("llm", tokens=4096, span=2048)
    both = [*list_forward_kernels(gpt), *list_backward_kernels(gpt, weights=True)]
    collectives = [kernel.duration_s for kernel in both if kernel.lane == Lane.TP]
    times = {
        "ViT-22B layer, forward": (1.4, 1e3 * makespan_s(list_forward_kernels(vit)), "ms"),
        "ViT-22B layer, backward": (2.0, 1e3 * makespan_s(list_backward_kernels(vit, weights=True)), "ms"),
        "TP bubble of GPT-175B, mean": (300.0, 1e6 * sum(collectives) / len(collectives), "us"),
    }
    rows = [
        [name, f"{theirs:g} {unit}", f"{ours:.3g} {unit}", f"{100 * (ours / theirs - 1):+.1f} %"]
        for name, (theirs, ours, unit) in times.items()
    ]
    return markdown(["", "paper", "ours", "difference"], rows)


def layer_shape(
    module: str, *, tokens: float, span: float, tp: int = 8, assumptions: Assumptions | None = None
) -> LayerShape:
    """Returns the first layer of a module of paper/strong-3072, for `tokens` tokens in spans of `span`."""
    job = find_job("paper/strong-3072")
    chosen = next(m for m in job.model.modules if m.name == module)
    return LayerShape(
        module=module,
        stack=chosen.stack,
        layer=0,
        load=TokenLoad(tokens=tokens, squares=tokens * span),
        layout=Layout(dp=48, pp=8, tp=tp),
        cost_model=ClusterCostModel(cluster=job.cluster, assumptions=assumptions or get_preset("paper")),
    )


def makespan_s(kernels: list[Kernel]) -> float:
    """Returns the seconds of a layer simulated alone."""
    builder = ScheduleBuilder(["m"], 1)
    builder.add(build_kernel_graph([(kernels, 0)], OpKind.FORWARD), device=0)
    return simulate_schedule(builder.build()).step_s


TABLES = {"table-1": table_1, "kernels": kernels}


def fill(page: str) -> str:
    """Returns the page with every table computed."""
    return fill_tables(page, {name: make() for name, make in TABLES.items()})


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
