"""Derives the dependencies, meetings, lanes and durations of a plan's lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from optimus.ir.op import (
    COMPUTE_OPS,
    NUM_LANES,
    PARAMETER_TRAFFIC,
    SENDS,
    Communicator,
    Floats,
    Ints,
    Lane,
    OpKind,
)
from optimus.ir.plan import WHOLE_STAGE, Bucket, Template
from optimus.ir.ranks import LLM
from optimus.verify.buckets import GRADIENTS, READERS, list_gradient_lifetimes
from optimus.verify.expected_program import ExpectedProgram, LineBlockKey, PlanLines, input_grad_kind

NO_LANE = -1  # of receives
RECV_OF = {OpKind.SEND_F: OpKind.RECV_F, OpKind.SEND_B: OpKind.RECV_B}


@dataclass(frozen=True, kw_only=True, eq=False)
class LineWaits:
    """Columns of dependencies; one entry per line unless noted otherwise."""

    lines: PlanLines
    before: Ints  # per dependency: the line that must have ended
    after: Ints  # per dependency: the line that waits
    send: Ints  # per transfer
    recv: Ints  # per transfer
    duration_s: Floats
    lane: Ints
    phase_kind: Ints  # -1 for lines that are no phase
    issue_s: Floats  # earliest issue by the host
    group: Ints  # the communicator of a collective; -1 for other lines
    group_members: list[tuple[int, ...]]  # device classes, per group
    meeting: Ints  # the k-th ops of a group of several classes meet; -1 for lines that meet none
    meeting_size: Ints  # per meeting: number of lines

    @property
    def resident(self) -> Ints:
        """Mask of the collectives that slow down compute on their device."""
        resident: Ints = (self.group >= 0) & ((self.lane == Lane.TP) | (self.lane == Lane.DP))
        return resident

    @property
    def lane_order(self) -> tuple[Ints, Ints]:
        """Pairs of consecutive lines on a lane."""
        return pair_consecutive_lines(self.lines.device * NUM_LANES + self.lane, self.lane != NO_LANE)


def pair_consecutive_lines(queue: Ints, taken: Ints) -> tuple[Ints, Ints]:
    """Returns pairs of consecutive lines of each queue, among those taken."""
    rows = np.flatnonzero(taken)
    rows = rows[np.argsort(queue[rows], kind="stable")]
    same = queue[rows[1:]] == queue[rows[:-1]]
    return rows[:-1][same], rows[1:][same]


class _TemplateColumns:
    """Template as columns, for all ops that follow it at once."""

    def __init__(self, template: Template) -> None:
        edges = [(dep, place) for place, phase in enumerate(template) for dep in phase.after]
        waited = {dep for dep, _ in edges}
        self.deps = [dep for dep, _ in edges]
        self.places = [place for _, place in edges]
        self.entries = [place for place, phase in enumerate(template) if not phase.after]
        self.exits = [place for place in range(len(template)) if place not in waited]
        self.kind = np.array([phase.kind for phase in template], np.int64)
        self.duration_s = np.array([phase.duration_s for phase in template], np.float64)
        named = [phase.lane if phase.kind == OpKind.LAUNCH else Lane.COMPUTE for phase in template]
        self.lane = np.array(named, np.int64)
        self.layer = np.array([phase.layer for phase in template], np.int64)
        self.launches = [
            (place, phase.communicator) for place, phase in enumerate(template) if phase.kind == OpKind.LAUNCH
        ]
        waits = [place for place, phase in enumerate(template) if phase.kind == OpKind.WAIT]
        self.wait_of = {  # the first wait for each launch
            launch: next((place for place in waits if launch in template[place].after), -1)
            for launch, _ in self.launches
        }

    def of(self, bucket: Bucket) -> Ints:
        """Returns the phases of the layers in a bucket; all phases for a bucket of the whole stage."""
        if bucket.chunk == WHOLE_STAGE:
            return np.arange(len(self.layer))
        return np.flatnonzero((self.layer >= bucket.first_layer) & (self.layer < bucket.end_layer))


class WaitDerivation:
    """Derives the dependencies of a plan that satisfies coverage, block by block."""

    def __init__(self, lines: PlanLines, expected: ExpectedProgram) -> None:
        self.lines, self.plan, self.expected, self.ranks = lines, lines.plan, expected, expected.ranks
        count = len(lines)
        self.phases = {name: _TemplateColumns(template) for name, template in self.plan.templates.items()}
        self._before: list[Ints] = []
        self._after: list[Ints] = []
        self._sends: list[Ints] = []
        self._recvs: list[Ints] = []
        self._duration = np.zeros(count)
        self._lane = np.full(count, NO_LANE)
        self._phase_kind = np.full(count, -1)
        self._group = np.full(count, -1)
        self._groups: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._group_at: dict[tuple[str, int, int], int] = {}

    def derive(self) -> LineWaits:
        for where, microbatches, rows in self.lines.all_blocks():
            if where.kind in COMPUTE_OPS:
                self._op(where, rows)
            elif where.kind in SENDS:
                self._send(where, microbatches, rows)
            elif where.kind in PARAMETER_TRAFFIC:
                self._buckets(where, rows)
            elif where.kind == OpKind.OPTIMIZER:
                self._finish(where, rows)
        for device in range(self.ranks.num_classes):
            self._wait_for_buffers(device)
        none = [np.zeros(0, np.int64)]
        send, recv = np.concatenate(none + self._sends), np.concatenate(none + self._recvs)
        self._wait(send, recv)
        self._wait(*self._posted())
        meeting, size = self._meetings()
        return LineWaits(
            lines=self.lines,
            before=np.concatenate(none + self._before),
            after=np.concatenate(none + self._after),
            send=send,
            recv=recv,
            duration_s=self._duration,
            lane=self._lane,
            phase_kind=self._phase_kind,
            issue_s=self._issues(send, recv),
            group=self._group,
            group_members=[members for _, _, members in self._groups],
            meeting=meeting,
            meeting_size=size,
        )

    # ------------------------------------------------------------------------ ops

    def shape(self, name: str, kind: OpKind, virtual: int) -> _TemplateColumns:
        """Returns the template of an op."""
        return self.phases[self.plan.modules[name].chunks[virtual].templates[kind]]

    def virtual(self, device: int, name: str, chunk: int) -> int:
        return chunk * self.plan.modules[name].layout.pp + self.ranks.stage_of(name, device)

    def _op(self, where: LineBlockKey, rows: Ints) -> None:
        device, name, kind, chunk = where
        virtual = self.virtual(device, name, chunk)
        shape = self.shape(name, kind, virtual)
        self._duration[rows], self._lane[rows], self._phase_kind[rows] = (
            shape.duration_s,
            shape.lane,
            shape.kind,
        )
        for place, communicator in shape.launches:
            self._group[rows[:, place]] = self._group_of(name, communicator, device)
        self._wait(rows[:, shape.deps].ravel(), rows[:, shape.places].ravel())
        entries = rows[:, shape.entries]
        if kind == OpKind.FORWARD:
            self._forward_inputs(device, name, chunk, virtual, entries)
        elif kind == OpKind.WEIGHT_GRAD:
            self._wait_all(self._ends(device, name, OpKind.INPUT_GRAD, chunk), entries)
        else:
            self._wait_all(self._ends(device, name, OpKind.FORWARD, chunk), entries)
            self._backward_inputs(device, name, chunk, virtual, entries)

    def _forward_inputs(self, device: int, name: str, chunk: int, virtual: int, entries: Ints) -> None:
        if virtual > self.plan.modules[name].virtual_stages[0]:
            if self.plan.modules[name].layout.pp > 1:
                self._wait_all(self.lines.at(device, name, OpKind.RECV_F, chunk), entries)
            else:
                self._wait_all(self._ends(device, name, OpKind.FORWARD, chunk - 1), entries)
        elif name == LLM:
            for encoder, module in self.plan.encoders.items():
                for rows, fed in self.arrivals(encoder, device):
                    self._wait_all(rows, entries[fed // module.microbatches_per_llm_microbatch])

    def arrivals(self, encoder: str, device: int, *, last: bool = False) -> list[tuple[Ints, Ints]]:
        """Returns the lines after which an encoder's rows are at the LLM's entry, and their microbatches.

        With `last`, the last phase of the encoder's op represents all phases with which it ends.
        """
        arrivals = []
        for sender, microbatches in self.expected.arriving(encoder, device):
            if sender == device:
                chunk = self.plan.exit_chunk(encoder)
                forward = self.lines.at(device, encoder, OpKind.FORWARD, chunk)
                arrivals.append(
                    (forward if last else self._ends(device, encoder, OpKind.FORWARD, chunk), microbatches)
                )
            else:
                arrivals.append((self._received(device, encoder, microbatches), microbatches))
        return arrivals

    def _received(self, device: int, encoder: str, microbatches: Ints) -> Ints:
        """Returns receives at the LLM's entry, where those from several classes are in one block."""
        remote = [rows for sender, rows in self.expected.arriving(encoder, device) if sender != device]
        places = np.searchsorted(np.sort(np.concatenate(remote)), microbatches)
        return self.lines.at(device, encoder, OpKind.RECV_SEAM)[places]

    def _backward_inputs(self, device: int, name: str, chunk: int, virtual: int, entries: Ints) -> None:
        module = self.plan.modules[name]
        if virtual < module.virtual_stages[-1]:
            if module.layout.pp > 1:
                self._wait_all(self.lines.at(device, name, OpKind.RECV_B, chunk), entries)
            else:
                self._wait_all(self._backward_ends(device, name, chunk + 1), entries)
        elif name != LLM:
            if not self.expected.is_entry(device):
                self._wait_all(self.lines.at(device, name, OpKind.RECV_SEAM_B), entries)
            else:
                mine = self.expected.microbatches(name, device)
                ends = self._backward_ends(device, LLM, self.plan.entry_chunk)
                self._wait_all(ends[mine // module.microbatches_per_llm_microbatch], entries)

    def _ends(self, device: int, name: str, kind: OpKind, chunk: int) -> Ints:
        """Returns the phases with which an op ends, per microbatch."""
        shape = self.shape(name, kind, self.virtual(device, name, chunk))
        return self.lines.at(device, name, kind, chunk)[:, shape.exits]

    def _backward_ends(self, device: int, name: str, chunk: int) -> Ints:
        kind = input_grad_kind(self.plan, name, self.virtual(device, name, chunk))
        assert kind is not None, "the header was checked"
        return self._ends(device, name, kind, chunk)

    # ------------------------------------------------------------------------ communication

    def _send(self, where: LineBlockKey, microbatches: Ints, rows: Ints) -> None:
        device, name, kind, chunk = where
        module, virtual = self.plan.modules[name], self.virtual(device, name, chunk)
        self._lane[rows] = Lane.P2P
        if kind in RECV_OF:
            step = 1 if kind == OpKind.SEND_F else -1
            peer = self.ranks.next_stage(name, device, step)
            received = self.lines.at(peer, name, RECV_OF[kind], (virtual + step) // module.layout.pp)
            # A gradient is as large as the activations it belongs to: those of the stage before.
            self._duration[rows] = module.chunks[virtual if step > 0 else virtual - 1].send_s
            ends = self._ends(device, name, OpKind.FORWARD, chunk) if step > 0 else None
            self._wait_all(self._backward_ends(device, name, chunk) if ends is None else ends, rows)
            self._transfer(rows, received)
            return
        self._duration[rows] = module.seam_s
        if kind == OpKind.SEND_SEAM:
            self._wait_all(self._ends(device, name, OpKind.FORWARD, self.plan.exit_chunk(name)), rows)
            entry = self.ranks.entry_of(device)
            self._transfer(rows, self._received(entry, name, microbatches))
            return
        ends = self._backward_ends(device, LLM, self.plan.entry_chunk)
        self._wait_all(ends[microbatches // module.microbatches_per_llm_microbatch], rows)
        for sender, theirs in self.expected.arriving(name, device):
            if sender != device:
                received = self.lines.at(sender, name, OpKind.RECV_SEAM_B)
                self._transfer(rows[np.searchsorted(microbatches, theirs)], received)

    def _transfer(self, send: Ints, recv: Ints) -> None:
        self._sends.append(send.ravel())
        self._recvs.append(recv.ravel())

    def _buckets(self, where: LineBlockKey, rows: Ints) -> None:
        """Adds waits of phases for gathers, and of reduces for phases; `rows`: microbatches by buckets."""
        device, name, kind, _ = where
        self._group[rows] = self._group_of(name, Communicator.DP, device)
        for column in rows.T:
            bucket = self.bucket_of(device, name, int(column[0]))
            gathers = kind != OpKind.REDUCE_GRAD
            self._duration[column] = bucket.gather_s if gathers else bucket.reduce_s
            self._lane[column] = bucket.lane
            if gathers and not bucket.gates:
                continue
            for phases in self.phases_of(device, name, bucket, READERS.get(kind, GRADIENTS)):
                # One line of a step goes with the phases of all microbatches.
                here = np.broadcast_to(column[:, None], phases.shape).ravel()
                self._wait(here, phases.ravel()) if gathers else self._wait(phases.ravel(), here)

    def bucket_of(self, device: int, name: str, line: int) -> Bucket:
        """Returns the bucket that a line gathers or reduces."""
        stage = self.ranks.stage_of(name, device)
        return self.plan.modules[name].buckets[stage][int(self.lines.place[line])]

    def phases_of(
        self, device: int, name: str, bucket: Bucket, kinds: Sequence[OpKind], *, compute: bool = False
    ) -> Iterator[Ints]:
        """Yields the phases of a bucket's layers, microbatches by places, for every op of these kinds.

        With `compute`, those on the compute lane.
        """
        chunks = range(self.plan.modules[name].layout.chunks)
        for chunk in chunks if bucket.chunk == WHOLE_STAGE else (bucket.chunk,):
            for kind in kinds:
                lines = self.lines.at(device, name, kind, chunk)
                if lines.size:
                    shape = self.shape(name, kind, self.virtual(device, name, chunk))
                    places = shape.of(bucket)
                    yield lines[:, places[shape.lane[places] == Lane.COMPUTE] if compute else places]

    def _wait_for_buffers(self, device: int) -> None:
        """Adds waits of gradients for memory that others free, and for the last reduce of their bucket."""
        for lifetimes, at_most in list_gradient_lifetimes(self, device):
            latest: dict[tuple[str, int], int] = {}
            for number, each in enumerate(lifetimes):
                before = [lifetimes[number - at_most].end] if number >= at_most else []
                before += [latest[each.bucket]] if each.bucket in latest else []
                self._wait(np.array(before, np.int64), np.full(len(before), each.begin))
                latest[each.bucket] = each.end

    def _finish(self, where: LineBlockKey, rows: Ints) -> None:
        stage = self.ranks.coordinates(where.device)[0]
        self._duration[rows] = self.plan.finish_s[stage] if self.plan.finish_s else 0.0
        self._lane[rows] = Lane.COMPUTE
        first, end = self.lines.first[where.device], self.lines.first[where.device + 1]
        reduces = first + np.flatnonzero(self.lines.kind[first:end] == OpKind.REDUCE_GRAD)
        self._wait(reduces, np.full(len(reduces), rows[0, 0]))

    def _posted(self) -> tuple[Ints, Ints]:
        """Returns pairs: the latest compute line before a line of communication, and that line."""
        before = np.maximum.accumulate(np.where(self._lane == Lane.COMPUTE, np.arange(len(self.lines)), -1))
        communicates = (self._lane != Lane.COMPUTE) & (self._lane != NO_LANE)
        rows = np.flatnonzero(communicates & (before >= self.lines.first[self.lines.device]))
        return before[rows], rows

    # ------------------------------------------------------------------------ meetings and issue

    def _group_of(self, name: str, communicator: Communicator, device: int) -> int:
        known = self._group_at.get((name, communicator, device))
        if known is None:
            alone = communicator in (Communicator.NONE, Communicator.PP)
            members = (device,) if alone else self.ranks.group_classes(name, communicator, device)
            known = self._groups.setdefault((name, communicator, members), len(self._groups))
            self._group_at[name, communicator, device] = known
        return known

    def _meetings(self) -> tuple[Ints, Ints]:
        """Returns the meeting of every line: the k-th ops of a group meet, one of each class."""
        count = len(self.lines)
        sizes = np.array([len(members) for *_, members in self._groups] + [self.ranks.num_classes])
        group = np.where(self.lines.kind == OpKind.OPTIMIZER, len(sizes) - 1, self._group)
        rows = np.flatnonzero((group >= 0) & (sizes[group] > 1))
        queue = group[rows] * self.ranks.num_classes + self.lines.device[rows]
        order = np.argsort(queue, kind="stable")
        starts = np.flatnonzero(np.diff(queue[order], prepend=-1))
        turn = np.empty(len(rows), np.int64)
        turn[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        met, number = np.unique(group[rows] * (count + 1) + turn, return_inverse=True)
        meeting = np.full(count, -1)
        meeting[rows] = number
        return meeting, sizes[met // (count + 1)]

    def _issues(self, send: Ints, recv: Ints) -> Floats:
        """Returns issue times: one line per `launch_s`, waits are free, a send is not before its receive."""
        costs = np.cumsum(self._phase_kind != OpKind.WAIT)
        costs = np.concatenate([[0], costs])
        first = self.lines.first[:-1][self.lines.device]
        issue: Floats = (costs[:-1] - costs[first]) * self.plan.launch_s
        issue[send] = np.maximum(issue[send], issue[recv])
        issue[recv] = 0.0  # a receive ends with its send
        return issue

    def _wait(self, before: Ints, after: Ints) -> None:
        self._before.append(before)
        self._after.append(after)

    def _wait_all(self, before: Ints, after: Ints) -> None:
        """Adds dependencies: in every row, each of `after` waits for each of `before`."""
        self._wait(np.repeat(before, after.shape[1], axis=1).ravel(), np.tile(after, before.shape[1]).ravel())
