"""Command line of the benchmarks: `python -m benchmarks real|paced|shaped|gpu`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from benchmarks.report import to_json, to_text
from optimus.cli import run_and_report_errors
from optimus.cli.console import announce_compilation, exceptions_from_signals, print_result, progress_bar
from optimus.cli.flags import NO, OK, JsonFlag, import_trainer
from optimus.errors import UserError


@dataclass(frozen=True)
class Bench:
    """Run our schedule and torch's side by side: on 2 cores, paced on more ranks, or on GPUs of one node."""

    kind: Annotated[
        tyro.conf.Positional[Literal["real", "paced", "shaped", "gpu"]],
        tyro.conf.arg(
            help="real: CPU ranks compute; paced: ranks sleep for given times, order and messages are real; "
            "shaped: real, over a slow link (needs root: network namespaces); "
            "gpu: what plans assume of NCCL and streams, and a step, on 2, 4 or 8 GPUs in under ten minutes"
        ),
    ]
    ranks: Annotated[
        int | None, tyro.conf.arg(metavar="N", help="ranks of `paced`: 4, 8, 16 (default), 32, 64")
    ] = None
    dp: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="N",
            help="replicas of `paced`, sharded; default 1, or with --tp what makes pipelines of four stages. "
            "Without --tp, 2 or more leave out torch's schedules",
        ),
    ] = None
    tp: Annotated[
        bool,
        tyro.conf.arg(help="`paced` with tensor-parallel layers (tp 2); what each idea is worth"),
    ] = False
    long_tail: Annotated[
        bool,
        tyro.conf.arg(
            help="`paced` with images of very different sizes: what dealing them over replicas is worth"
        ),
    ] = False
    systems: Annotated[
        bool,
        tyro.conf.arg(
            help="`paced` with the plans of all systems of one job, and torch's FSDP2 and schedules like them"
        ),
    ] = False
    rounds: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="N",
            help="times each variant is timed: 28 real, 3 paced (1 with --long-tail), 14 shaped; "
            "gpu: what fits, up to 14",
        ),
    ] = None
    against: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME",
            help="variants of `real`, `paced --tp` or `paced --long-tail`, or systems of `paced --systems`, "
            "to compare ours with; default all",
        ),
    ] = ()
    link: Annotated[
        Literal["dp", "tp"] | None,
        tyro.conf.arg(
            help="traffic over the link of `shaped`: data-parallel (dp, default) or tensor-parallel (tp)"
        ),
    ] = None
    mbit: Annotated[
        float | None,
        tyro.conf.arg(
            metavar="N", help="Mbit/s of the link of `shaped`; 400 if left out, or 600 with --link tp"
        ),
    ] = None
    layout: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="MODULE=AXES ...", help="layouts of the step of `gpu`; llm=pp8,tp1 on 8 GPUs if left out"
        ),
    ] = ()
    json: JsonFlag = False

    def __call__(self) -> int:
        options: dict[str, Any] = {
            "rounds": _positive("--rounds", self.rounds),
            "layout": self.layout or None,
            "ranks": self.ranks,
            "dp": _positive("--dp", self.dp),
            "against": self.against or None,
            "axis": self.link,
            "mbit_per_s": _positive("--mbit", self.mbit),
        }
        self._refuse_options_of_other_kinds()
        name = self._module
        bench = getattr(import_trainer(f"benchmarks.{name}"), f"bench_{name}")
        with exceptions_from_signals(), progress_bar("measuring") as progress, announce_compilation():
            stated = {option: value for option, value in options.items() if value is not None}
            result = bench(progress=progress, **stated)
        print_result(to_json(result), to_text(result), as_json=self.json)
        return OK if result.ok else NO

    @property
    def _module(self) -> str:
        if self.systems:
            return "paced_systems"
        return "paced_tail" if self.long_tail else "paced_tp" if self.tp else self.kind

    def _refuse_options_of_other_kinds(self) -> None:
        takes_names = self.tp or self.long_tail or self.systems
        has = "one on each GPU" if self.kind == "gpu" else "2"
        for field, value, kind, hint in (
            ("--ranks", self.ranks, "paced", f"leave it out: `{self.kind}` has {has}"),
            ("--dp", self.dp, "paced", "leave it out"),
            ("--tp", self.tp or None, "paced", "leave it out"),
            ("--long-tail", self.long_tail or None, "paced", "leave it out"),
            ("--systems", self.systems or None, "paced", "leave it out"),
            ("--link", self.link, "shaped", "leave it out"),
            ("--mbit", self.mbit, "shaped", "leave it out"),
            (
                "--against",
                None if takes_names or not self.against else self.against[0],
                "real",
                "leave it out",
            ),
            ("--layout", self.layout[0] if self.layout else None, "gpu", "leave it out"),
        ):
            if self.kind != kind and value is not None:
                raise UserError(field=field, value=value, problem=f"is for `{kind}`", hint=hint)


def _positive(field: str, value: float | None) -> float | None:
    if value is not None and not value >= 1:  # nan is refused too
        raise UserError(field=field, value=value, problem="is too few", hint="use 1 or more")
    return value


def run(arguments: list[str]) -> int:
    """Runs one benchmark and returns its exit code."""

    def benchmark() -> int:
        config = (tyro.conf.FlagCreatePairsOff,)
        return tyro.cli(Bench, prog="python -m benchmarks", args=arguments, config=config)()

    return run_and_report_errors(benchmark, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
