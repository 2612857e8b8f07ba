"""`optimus trace`: accounts for the idle time of GPUs in traces of PyTorch's profiler."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import print_result, progress_bar
from optimus.cli.flags import OK, JsonFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optimus.schedule.kineto_trace import DeviceTrace, StepIdle

SCHEMA = "optimus.trace/1"
AXES = ("dp", "pp", "tp")
WORDS = {
    "dp_all_gather": "waits for parameters",
    "dp_reduce_scatter": "waits for gradients",
    "pp_warmup": "pipeline, before the first work",
    "pp_cooldown": "pipeline, after the last work",
    "pp_other": "pipeline, in between",
    "tp": "waits inside layers (tp, cp, ep)",
}


@dataclass(frozen=True)
class TraceCommand:
    """Say why GPUs are idle in traces of torch.profiler, and what filling could use."""

    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        describe_option(metavar="FILE", help="traces of ranks, .json or .json.gz"),
    ]
    group: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="NAME=AXIS ...", help="what process groups are for: dp, pp or tp (cp and ep too)"
        ),
    ] = ()
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.schedule.kineto_trace import account_idle, average_steps, describe_step, read_traces

        groups = _read_groups(self.group)
        if not self.files:
            raise UserError(field="FILE", problem="is missing", hint="give at least one trace")
        traces: list[DeviceTrace] = []
        with progress_bar("reading") as progress:
            for place, path in enumerate(self.files):
                traces += read_traces(path, groups)
                progress(path.name, place, len(self.files))
        _check_groups(groups, traces)
        means = [average_steps(account_idle(trace)) for trace in traces]
        result = {
            "schema": SCHEMA,
            "traces": [
                {
                    "name": trace.name,
                    "device": trace.device,
                    "steps": len(trace.steps),
                    "unknown_groups": trace.unknown_groups,
                    **describe_step(mean),
                }
                for trace, mean in zip(traces, means, strict=True)
            ],
            "mean": describe_step(average_steps(means)),
        }
        print_result(result, format_traces(traces, means, average_steps(means)), as_json=self.json)
        return OK


def _read_groups(stated: Sequence[str]) -> Mapping[str, str]:
    groups = {}
    for each in stated:
        name, _, axis = each.rpartition("=")
        if axis not in AXES or not name:
            raise UserError(
                field="--group",
                value=each,
                problem="does not say what a group is for",
                hint="give NAME=dp, NAME=pp or NAME=tp",
            )
        groups[name] = axis
    return groups


def _check_groups(groups: Mapping[str, str], traces: Sequence[DeviceTrace]) -> None:
    """Refuses a name that no trace has; a rank need not be in every group."""
    known = {name for trace in traces for name in trace.groups}
    for name in groups:
        if name not in known:
            hint = f"use one of {', '.join(sorted(known))}" if known else "leave it out: they have none"
            raise UserError(field="--group", value=name, problem="is no group of the traces", hint=hint)


def format_traces(traces: Sequence[DeviceTrace], means: Sequence[StepIdle], mean: StepIdle) -> list[str]:
    """Returns the lines of the mean step, of every rank if there are several, and what they say."""
    steps = sum(len(trace.steps) for trace in traces)
    ranks = f"{len(traces)} GPUs" if len(traces) > 1 else traces[0].name
    devices = {trace.device for trace in traces}
    what = f"{ranks}, {devices.pop()}" if len(devices) == 1 else ranks
    counted = f"{steps} step{'s' * (steps > 1)} of {1e3 * mean.step_s:.1f} ms"
    lines = wrap_text("traced", f"{what}; {counted}")
    parts = {"compute": mean.busy_s}
    parts |= {WORDS[cause]: seconds for cause, seconds in asdict(mean.bubbles).items()}
    parts |= {"between launches": mean.launch_s, "the host": mean.host_s}
    if mean.unknown_s:
        parts["collectives of groups not named"] = mean.unknown_s
    rows = [[words, f"{1e3 * s:.1f}", f"{100 * s / mean.step_s:.1f}"] for words, s in parts.items()]
    rows.append(["all", f"{1e3 * mean.step_s:.1f}", "100.0"])
    lines += ["", *align_columns(["a step of a GPU", "ms", "%"], rows)]
    if len(traces) > 1:
        header = ["GPU", "step ms", "compute %", "to fill %", "host %"]
        rows = [
            [trace.name, f"{1e3 * each.step_s:.1f}"]
            + [f"{100 * s / each.step_s:.1f}" for s in (each.busy_s, each.fillable_s, each.host_s)]
            for trace, each in zip(traces, means, strict=True)
        ]
        lines += ["", *align_columns(header, rows)]
    share = mean.fillable_s / mean.step_s
    lines += [""]
    if not mean.fillable_s:
        return lines + wrap_text("filling", "nothing to use: no GPU waits for another")
    lines += wrap_text(
        "filling",
        f"at most {1e3 * mean.fillable_s:.1f} ms of a step, {share:.1%}, in which GPUs wait for one "
        "another; work of encoders that is in the step now can move there",
    )
    if mean.host_s > mean.fillable_s:
        lines += wrap_remark("GPUs wait for the host more than for one another: mend that first.")
    unknown = sorted({name for trace in traces for name in trace.unknown_groups})
    if unknown:
        lines += wrap_remark(f"Say what these groups are for, with --group NAME=dp: {', '.join(unknown)}.")
    return lines
