"""The command that runs us side by side with torch's own schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from optimus.cli.flags import NO, OK, Json, trainer_part
from optimus.console import announced_compilation, progress_bar, show
from optimus.errors import UserError


@dataclass(frozen=True)
class Bench:
    """Run our schedule and torch's side by side: for real on 2 cores, or paced on more ranks than cores."""

    kind: Annotated[
        tyro.conf.Positional[Literal["real", "paced", "shaped"]],
        tyro.conf.arg(
            help="real: CPU ranks compute; paced: ranks sleep for given times, order and messages are real; "
            "shaped: real, over a slow link (needs root: network namespaces)"
        ),
    ]
    ranks: Annotated[
        int | None, tyro.conf.arg(metavar="N", help="ranks of `paced`: 4, 8, 16 (default), 32, 64")
    ] = None
    dp: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="N", help="replicas of `paced`, sharded and without torch's schedules; default 1"
        ),
    ] = None
    rounds: Annotated[
        int | None,
        tyro.conf.arg(metavar="N", help="times each variant is timed: 28 real, 3 paced, 14 shaped"),
    ] = None
    against: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="NAME", help="variants of `real` to time beside ours; all if left out"),
    ] = ()
    link: Annotated[
        Literal["dp", "tp"] | None,
        tyro.conf.arg(
            help="what goes over the link of `shaped`: traffic of replicas (dp, default) or of divided layers"
        ),
    ] = None
    mbit: Annotated[
        float | None,
        tyro.conf.arg(metavar="N", help="Mbit/s of the link of `shaped`: 400, or 1000 with --link tp"),
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.render.benching import bench_json, bench_text

        given: dict[str, Any] = {} if self.rounds is None else {"rounds": _positive("--rounds", self.rounds)}
        if self.kind != "paced" and self.ranks is not None:
            hint = f"leave it out: `{self.kind}` has 2"
            raise UserError(field="--ranks", value=self.ranks, problem="is for `paced`", hint=hint)
        if self.kind != "paced" and self.dp is not None:
            raise UserError(field="--dp", value=self.dp, problem="is for `paced`", hint="leave it out")
        if self.kind != "shaped" and self.link is not None:
            raise UserError(field="--link", value=self.link, problem="is for `shaped`", hint="leave it out")
        if self.kind != "shaped" and self.mbit is not None:
            raise UserError(field="--mbit", value=self.mbit, problem="is for `shaped`", hint="leave it out")
        if self.kind != "real" and self.against:
            raise UserError(
                field="--against", value=self.against[0], problem="is for `real`", hint="leave it out"
            )
        if self.ranks is not None:
            given["ranks"] = self.ranks
        if self.dp is not None:
            given["dp"] = _positive("--dp", self.dp)
        if self.against:
            given["against"] = self.against
        if self.link is not None:
            given["axis"] = self.link
        if self.mbit is not None:
            given["mbit_per_s"] = _positive("--mbit", self.mbit)
        bench = getattr(trainer_part(f"optimus.bench.{self.kind}"), f"bench_{self.kind}")
        with progress_bar() as progress, announced_compilation():
            result = bench(progress=progress, **given)
        show(bench_json(result), bench_text(result), as_json=self.json)
        return OK if result.ok else NO


def _positive(field: str, value: float) -> float:
    if value < 1:
        raise UserError(field=field, value=value, problem="is too few", hint="use 1 or more")
    return value
