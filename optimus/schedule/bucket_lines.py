"""Finds the gathers and reduces of buckets among the lines of programs, and the phases that need them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from optimus.ir.op import PARAMETER_TRAFFIC, Bools, Floats, Ints, Lane, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Span
from optimus.schedule.program_table import BACKWARDS, ProgramTable

Edges = tuple[Ints, Ints]  # lines, and the line that each of them waits for
GATHER, GATHER_B, REDUCE = range(len(PARAMETER_TRAFFIC))
_WHICH = np.full(len(OpKind), -1)
_WHICH[list(PARAMETER_TRAFFIC)] = GATHER, GATHER_B, REDUCE
REDUCES_IN_FLIGHT = 2  # of single microbatches: the gradients of others have been freed


class BucketLines:
    """Lines that gather and reduce buckets, with seconds, bytes and lane of each."""

    def __init__(self, lines: ProgramTable) -> None:
        self._lines, self._header = lines, lines.header
        header, self._buckets = lines.header, list(_all_buckets(lines))
        most = 1 + max((number for _, _, number, _ in self._buckets), default=-1)
        shape = len(header.names), int(header.pp.max()), most + 1  # the last is none
        self._seconds, self._bytes = np.zeros((*shape, 3)), np.zeros((*shape, 3), np.int64)
        self._lane: Ints = np.zeros(shape, np.int64)
        self._is_whole: Bools = np.zeros(shape, np.bool_)
        self._gathered_per: Ints = np.full(shape, Span.STEP, np.int64)
        # Whether there is a line of each kind for every microbatch, not one for the step.
        self._repeats: Bools = np.zeros((*shape, 3), np.bool_)
        for number_of_module, stage, number, bucket in self._buckets:
            at = number_of_module, stage, number
            self._seconds[at] = bucket.gather_s, bucket.gather_s, bucket.reduce_s
            self._bytes[at] = bucket.gather_bytes, bucket.gather_bytes, bucket.reduce_bytes
            self._lane[at], self._gathered_per[at] = bucket.lane, bucket.gathered_per
            self._is_whole[at] = bucket.chunk == WHOLE_STAGE
            resharded = bucket.gathered_per > Span.STEP
            self._repeats[at] = resharded, resharded, bucket.reduced_per == Span.MICROBATCH
        columns = header.microbatches if self._repeats.any() else 1
        self._rows: Ints = np.full((header.devices, len(header.names), most + 1, 3, columns), -1, np.int64)
        self.moves: Ints = np.flatnonzero(np.isin(lines.kind, PARAMETER_TRAFFIC))
        module, _, place, which = self._places(self.moves)
        self._rows[lines.device[self.moves], module, place, which, lines.microbatch[self.moves]] = self.moves

    def _places(self, moves: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns module, stage, bucket and kind of traffic of lines, as indices."""
        lines, module = self._lines, self._lines.module[moves]
        stage = self._header.stage[module, lines.device[moves]]
        return module, stage, lines.place[moves], _WHICH[lines.kind[moves]]

    @property
    def columns(self) -> tuple[Floats, Ints, Ints]:
        """Seconds, bytes and lane of `moves`."""
        at = self._places(self.moves)
        return self._seconds[at], self._bytes[at], self._lane[at[:3]]

    # ------------------------------------------------------------------------ waits

    def edges(self) -> Iterator[Edges]:
        """Yields waits of phases for gathers and for buffers, of reduces for phases, of the optimizer."""
        lines, header = self._lines, self._header
        kind = lines.kind[lines.phases]
        opens = header.opens_layer[lines.phase[lines.phases]]
        forwards, backwards = (
            lines.phases[opens & np.isin(kind, kinds)] for kinds in ((OpKind.FORWARD,), BACKWARDS)
        )
        for whole in (False, True):
            gather = self._line_of(forwards, GATHER, whole=whole, gating=True)
            yield forwards[gather >= 0], gather[gather >= 0]
            reduce = self._line_of(self._backwards, REDUCE, whole=whole)
            yield self._last_of_each_lane(reduce[reduce >= 0], self._backwards[reduce >= 0])
        gather = self._line_of(backwards, GATHER_B)
        yield backwards[gather >= 0], gather[gather >= 0]
        for reduces, starts, at_most in self._microbatch_reduces:
            yield starts[at_most:], reduces[:-at_most]
            bucket = lines.module[reduces] * (1 + int(lines.place.max())) + lines.place[reduces]
            order = np.argsort(bucket, kind="stable")
            same = bucket[order[1:]] == bucket[order[:-1]]
            yield starts[order[1:][same]], reduces[order[:-1][same]]
        finish = np.full(header.devices, -1, np.int64)
        ends = np.flatnonzero(lines.kind == OpKind.OPTIMIZER)
        finish[lines.device[ends]] = ends
        all_reduces = np.flatnonzero(lines.kind == OpKind.REDUCE_GRAD)
        all_reduces = all_reduces[finish[lines.device[all_reduces]] >= 0]
        yield finish[lines.device[all_reduces]], all_reduces

    @cached_property
    def _backwards(self) -> Ints:
        """Phases of backwards."""
        phases = self._lines.phases
        backwards: Ints = phases[self._lines.kind[phases] != OpKind.FORWARD]
        return backwards

    @cached_property
    def _microbatch_reduces(self) -> list[tuple[Ints, Ints, int]]:
        """Reduces of single microbatches on each class in order, and the first compute of their gradients.

        And of how many buckets gradients are in memory at most. A bucket of the whole stage, whose gradients
        are there from the first backward to the last, is counted by itself.
        """
        lines = self._lines
        module, stage, bucket, which = self._places(self.moves)
        single = self.moves[(which == REDUCE) & self._repeats[module, stage, bucket, which]]
        if not len(single):
            return []
        phases = self._backwards[lines.lane[self._backwards] == Lane.COMPUTE]
        starts = np.full(len(lines), len(lines), np.int64)
        for whole in (False, True):
            reduce = self._line_of(phases, REDUCE, whole=whole)
            np.minimum.at(starts, reduce[reduce >= 0], phases[reduce >= 0])
        module, stage, bucket, _ = self._places(single)
        by_stage = self._is_whole[module, stage, bucket]
        queue = np.where(by_stage, 1 + module, 0) * self._header.devices + lines.device[single]
        by_queue = [single[queue == number] for number in np.unique(queue)]
        limits = np.where(np.unique(queue) < self._header.devices, REDUCES_IN_FLIGHT, 1).tolist()
        return [(rows, starts[rows], most) for rows, most in zip(by_queue, limits, strict=True)]

    def _last_of_each_lane(self, waits: Ints, sources: Ints) -> Edges:
        """Keeps the last source on each lane: lanes run in order, so all others have ended by then."""
        key = waits * len(Lane) + self._lines.lane[sources]
        order = np.lexsort((sources, key))
        last = order[np.append(key[order][1:] != key[order][:-1], True)] if len(order) else order
        return waits[last], sources[last]

    def _line_of(self, phases: Ints, which: int, *, whole: bool = False, gating: bool = False) -> Ints:
        """Returns the gather or reduce of the bucket of each phase line (-1: none), in its microbatch."""
        lines = self._lines
        if not self._has(which, whole):
            return np.full(len(phases), -1, np.int64)
        module, device = lines.module[phases], lines.device[phases]
        stage, bucket = self._header.stage[module, device], self._bucket_of(phases, whole, gating)
        repeats = self._repeats[module, stage, bucket, which]
        turn = np.where(repeats, self._header.turn[module, lines.microbatch[phases]], 0)
        found: Ints = self._rows[device, module, bucket, which, turn]
        return found

    def _has(self, which: int, whole: bool) -> bool:
        """Returns whether there is such traffic, of buckets of layers or of whole stages."""
        numbers = [number for _, _, number, bucket in self._buckets if (bucket.chunk == WHOLE_STAGE) == whole]
        return bool((self._rows[:, :, numbers, which] >= 0).any())

    def _bucket_of(self, phases: Ints, whole: bool, gating: bool) -> Ints:
        """Returns the bucket of each phase line (-1: none): its layer's, or the whole stage's."""
        lines, header = self._lines, self._header
        layers = 1 + int(header.layer.max(initial=0))
        table = np.full((len(header.names), int(header.pp.max()), header.chunks, layers), -1, np.int64)
        for module, stage, number, bucket in self._buckets:
            if (bucket.chunk == WHOLE_STAGE) != whole or (gating and not bucket.gates):
                continue
            if whole:
                table[module, stage] = number
            else:
                table[module, stage, bucket.chunk, bucket.first_layer : bucket.end_layer] = number
        stages = header.stage[lines.module[phases], lines.device[phases]]
        layer = header.layer[lines.phase[phases]]
        numbers: Ints = table[lines.module[phases], stages, lines.chunk[phases], layer]
        return numbers

    # ------------------------------------------------------------------------ memory

    def live_bytes(self) -> tuple[Ints, Ints]:
        """Returns bytes that lines start to hold, and stop to hold, of buckets not held for a step.

        Parameters are held from their gather to the last phase that reads them; gradients from the first
        that adds to them until the gradients of the second bucket after them are begun.
        """
        lines, count = self._lines, len(self._lines)
        added, freed = np.zeros(count, np.int64), np.zeros(count, np.int64)
        phases = lines.phases
        forward = phases[lines.kind[phases] == OpKind.FORWARD]
        backward = phases[np.isin(lines.kind[phases], BACKWARDS)]
        module, stage, bucket, which = self._places(self.moves)
        size, span = self._bytes[module, stage, bucket, which], self._gathered_per[module, stage, bucket]
        gathers = (which != REDUCE) & (span > Span.STEP)
        last = np.full(count, -1, np.int64)
        for readers, line in (
            (forward, self._line_of(forward, GATHER)),
            (forward, self._line_of(forward, GATHER, whole=True)),
            (backward, self._line_of(backward, GATHER_B)),
            (backward, self._line_of(backward, GATHER)),
            (backward, self._line_of(backward, GATHER, whole=True)),
        ):
            known = line >= 0
            if readers is backward:  # parameters gathered for an op are freed behind it
                at = self._places(line[known])
                known[known] = (at[3] == GATHER_B) | (self._gathered_per[at[:3]] == Span.MICROBATCH)
            np.maximum.at(last, line[known], readers[known])
        rows = self.moves[gathers]
        added[rows] += size[gathers]
        np.add.at(freed, last[rows], size[gathers])
        finish = np.flatnonzero(lines.kind == OpKind.OPTIMIZER)
        for reduces, starts, at_most in self._microbatch_reduces:
            module, stage, bucket, which = self._places(reduces)
            size = self._bytes[module, stage, bucket, which]
            np.add.at(added, starts, size)
            end = finish[lines.device[finish] == lines.device[reduces[0]]]
            ends = np.append(starts[at_most:] - 1, np.repeat(end, at_most))
            np.add.at(freed, ends[: len(size)], size)
        return added, freed


def _all_buckets(lines: ProgramTable) -> Iterator[tuple[int, int, int, Bucket]]:
    """Yields module, stage, number and bucket."""
    for module, name in enumerate(lines.header.names):
        for stage, buckets in enumerate(lines.header.plan.modules[name].buckets):
            for number, bucket in enumerate(buckets):
                yield module, stage, number, bucket
