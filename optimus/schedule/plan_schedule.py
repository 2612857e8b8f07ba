"""Builds the schedule of a plan's programs: every line as an op, with all dependencies and meetings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optimus.ir.op import RECVS, Communicator, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import Plan, Program
from optimus.schedule.bucket_lines import BucketLines, Edges
from optimus.schedule.program_table import BACKWARDS, PlanHeaderArrays, ProgramTable, find_messages
from optimus.schedule.schedule_builder import edges_to_csr


def build_plan_schedule(
    plan: Plan, programs: Sequence[Program], header: PlanHeaderArrays | None = None, *, ordered: bool = True
) -> Schedule:
    """Builds the schedule of programs."""
    return build_schedule_from_table(
        ProgramTable.of(header or PlanHeaderArrays(plan), programs), ordered=ordered
    )


def build_schedule_from_table(lines: ProgramTable, *, ordered: bool = True) -> Schedule:
    """Builds the schedule of the lines of a table.

    Communication is posted after all compute before it; if lines are not `ordered` (not yet, or on separate
    streams), only the LLM's communication after the LLM's compute.
    """
    plan, graph = lines.header.plan, _Graph(lines)
    pairs = [*graph.edges(), graph.posted(ordered=ordered), *(() if ordered else (graph.before_optimizer(),))]
    edges = [np.stack(pair, axis=1) for pair in pairs]
    dep_offset, deps = edges_to_csr(np.concatenate(edges), len(lines))
    return Schedule(
        modules=plan.names,
        num_devices=lines.header.devices,
        kind=graph.kind,
        module=lines.module.astype(np.int8),
        chunk=lines.chunk.astype(np.int32),
        segment=lines.place.astype(np.int32),
        microbatch=lines.microbatch.astype(np.int32),
        device=lines.device.astype(np.int32),
        lane=graph.lane,
        communicator=graph.communicator,
        bytes=graph.bytes,
        duration_s=graph.duration_s,
        dep_offset=dep_offset,
        deps=deps,
        meeting=graph.meetings(),
        labels=lines.header.labels,
        label=np.where(lines.phase >= 0, lines.header.label[lines.phase], -1),
        device_names=tuple(plan.ranks.class_name(device) for device in range(lines.header.devices)),
    )


class _Graph:
    """Columns and edges of all lines."""

    def __init__(self, lines: ProgramTable) -> None:
        self._lines, self._header = lines, lines.header
        here, phase, header = lines.phases, lines.phase[lines.phases], lines.header
        count = len(lines)
        self.kind: Ints = lines.kind.astype(np.int8)
        self.lane: Ints = np.full(count, Lane.COMPUTE, np.int8)
        self.communicator: Ints = np.full(count, Communicator.NONE, np.int8)
        self.bytes: Ints = np.zeros(count, np.int64)
        self.duration_s: Floats = np.zeros(count)
        self.kind[here], self.lane[here] = header.kind[phase], header.lane[phase]
        self.communicator[here], self.bytes[here] = header.communicator[phase], header.bytes[phase]
        self.duration_s[here] = header.duration_s[phase]
        self._fill_messages()
        self._fill_traffic()

    # ------------------------------------------------------------------------ columns

    def _fill_messages(self) -> None:
        """Fills the columns of sends and receives; `self._sent` is the line of every message's send."""
        lines, messages = self._lines, find_messages(self._lines)
        self._messages = messages
        by_key: Ints = np.full(len(lines.ops.number), -1, np.int64)
        moves = np.flatnonzero((lines.kind >= OpKind.SEND_F) & (lines.kind <= OpKind.RECV_SEAM_B))
        by_key[lines.op_key_of(moves, lines.device[moves])] = moves
        at, kind = messages.sender, messages.kind
        self._sent = by_key[self._key(at, kind, messages.sender_chunk)]
        self._received = by_key[self._key(messages.receiver, kind + 1, messages.receiver_chunk)]
        for rows in (self._sent, self._received):
            placed = rows >= 0  # receives may not be placed yet
            self.lane[rows[placed]], self.communicator[rows[placed]] = Lane.P2P, Communicator.PP
            self.bytes[rows[placed]] = messages.bytes[placed]
            self.duration_s[rows[placed]] = messages.duration_s[placed]
        assert (self._sent >= 0).all(), "a message is never sent"

    def _key(self, device: Ints, kind: Ints, chunk: Ints) -> Ints:
        messages = self._messages
        return self._lines.op_key(device, messages.module, kind, chunk, messages.microbatch)

    def _fill_traffic(self) -> None:
        lines, header = self._lines, self._header
        self._bucket_lines = BucketLines(lines)
        moves = self._bucket_lines.moves
        self.duration_s[moves], self.bytes[moves], self.lane[moves] = self._bucket_lines.columns
        self.communicator[moves] = Communicator.DP
        finish = np.flatnonzero(lines.kind == OpKind.OPTIMIZER)
        if len(finish) and header.plan.finish_s:
            stage = header.stage[header.llm, lines.device[finish]]
            self.duration_s[finish] = np.array(header.plan.finish_s)[stage]

    # ------------------------------------------------------------------------ edges

    def edges(self) -> Iterator[Edges]:
        yield from self._inside_ops()
        yield from self._inputs()
        messages = self._messages
        yield self._sent, messages.produced
        placed = self._received >= 0
        yield self._received[placed], self._sent[placed]
        yield from self._bucket_lines.edges()

    def posted(self, *, ordered: bool) -> Edges:
        """Returns waits of communication for the compute before it: a GPU stream runs both in order."""
        lines, count = self._lines, len(self._lines)
        of_llm = (lines.module == self._header.llm) & (lines.kind <= OpKind.WEIGHT_GRAD)
        compute = (self.lane == Lane.COMPUTE) & (ordered | of_llm)
        talks = (self.lane != Lane.COMPUTE) & ~np.isin(self.kind, RECVS) & (ordered | of_llm)
        before = np.maximum.accumulate(np.where(compute, np.arange(count), -1))
        rows = np.flatnonzero(talks & (before >= 0))
        rows = rows[lines.device[before[rows]] == lines.device[rows]]
        return rows, before[rows]

    def before_optimizer(self) -> Edges:
        """Returns waits of the optimizer for all encoder ops of its class, which have no fixed order."""
        lines, ops = self._lines, self._lines.ops
        finish = np.full(self._header.devices, -1, np.int64)
        ends = np.flatnonzero(lines.kind == OpKind.OPTIMIZER)
        finish[lines.device[ends]] = ends
        mine = np.flatnonzero((ops.module != self._header.llm) & (finish[ops.device] >= 0))
        return finish[ops.device[mine]], ops.last[mine]

    def _inside_ops(self) -> Iterator[Edges]:
        header, ops = self._header, self._lines.ops
        template = header.template[ops.module, ops.kind, ops.virtual]
        for number in np.unique(template):
            starts = ops.first[template == number]
            rows = ops.rows[starts[:, None, None] + header.edges[number][None, :, :]].reshape(-1, 2)
            yield rows[:, 0], rows[:, 1]

    def _inputs(self) -> Iterator[Edges]:
        """Yields waits of the entries of ops for the inputs of the op."""
        for ops, sources in self._op_inputs():
            yield from self._enter(ops, sources)

    def _enter(self, ops: Ints, sources: Ints) -> Iterator[Edges]:
        """Yields waits of every entry of each op for the source at the same position."""
        header, all_ops = self._header, self._lines.ops
        template = header.template[all_ops.module[ops], all_ops.kind[ops], all_ops.virtual[ops]]
        for number in np.unique(template):
            mine = template == number
            entries = header.entries[number]
            rows = all_ops.rows[all_ops.first[ops[mine]][:, None] + entries[None, :]]
            yield rows.ravel(), np.repeat(sources[mine], len(entries))

    def _op_inputs(self) -> Iterator[Edges]:
        """Yields ops, and the line that each waits for."""
        lines, header, ops = self._lines, self._header, self._lines.ops
        messages = self._messages
        # Inputs that arrive in messages.
        took = {OpKind.SEND_F: (OpKind.FORWARD,), OpKind.SEND_B: BACKWARDS, OpKind.SEND_SEAM_B: BACKWARDS}
        for sent, kinds in took.items():
            arriving = np.flatnonzero(messages.kind == sent)
            for kind in kinds:
                module, chunk = messages.module[arriving], messages.receiver_chunk[arriving]
                if sent == OpKind.SEND_SEAM_B:
                    chunk = header.last_virtual[module] // header.pp[module]
                key = lines.op_key(
                    messages.receiver[arriving],
                    module,
                    np.full(len(arriving), kind),
                    chunk,
                    messages.microbatch[arriving],
                )
                op = ops.number[key]
                yield op[op >= 0], self._sent[arriving[op >= 0]]
        arriving = np.flatnonzero(messages.kind == OpKind.SEND_SEAM)
        zeros = np.zeros(len(arriving), np.int64)
        fed = messages.microbatch[arriving] // header.per_llm_microbatch[messages.module[arriving]]
        chunk = zeros + header.plan.entry_chunk
        key = lines.op_key(
            messages.receiver[arriving], zeros + header.llm, zeros + OpKind.FORWARD, chunk, fed
        )
        yield ops.number[key], self._sent[arriving]
        # Inputs that are produced on the same class.
        yield from self._local_inputs()

    def _local_inputs(self) -> Iterator[Edges]:
        lines, header, ops = self._lines, self._header, self._lines.ops
        backward = (ops.kind == OpKind.BACKWARD) | (ops.kind == OpKind.INPUT_GRAD)
        for needs, kind in ((backward, OpKind.FORWARD), (ops.kind == OpKind.WEIGHT_GRAD, OpKind.INPUT_GRAD)):
            waiting = np.flatnonzero(needs)
            yield waiting, lines.end_of(*self._same(waiting, kind))
        alone = header.pp[ops.module] == 1
        follows = ops.virtual > header.first_virtual[ops.module]
        waiting = np.flatnonzero(alone & (ops.kind == OpKind.FORWARD) & follows)
        yield waiting, lines.end_of(*self._same(waiting, OpKind.FORWARD, chunk=-1))
        waiting = np.flatnonzero(alone & backward & (ops.virtual < header.last_virtual[ops.module]))
        device, module, _, chunk, microbatch = self._same(waiting, OpKind.BACKWARD, chunk=1)
        yield waiting, lines.backward_end(device, module, chunk, microbatch)
        # The seam, where encoder and LLM are on one class.
        entry_chunk = header.plan.entry_chunk
        local = (ops.module != header.llm) & (ops.virtual == header.last_virtual[ops.module])
        local &= header.entry[ops.device] == ops.device
        feeding = np.flatnonzero(local & (ops.kind == OpKind.FORWARD))
        zeros, fed = np.zeros(len(feeding), np.int64), self._llm_microbatch(feeding)
        key = lines.op_key(
            ops.device[feeding], zeros + header.llm, zeros + OpKind.FORWARD, zeros + entry_chunk, fed
        )
        yield ops.number[key], ops.last[feeding]
        waiting = np.flatnonzero(local & backward)
        zeros, fed = np.zeros(len(waiting), np.int64), self._llm_microbatch(waiting)
        yield waiting, lines.backward_end(ops.device[waiting], zeros + header.llm, zeros + entry_chunk, fed)

    def _llm_microbatch(self, ops: Ints) -> Ints:
        """Returns the LLM microbatch that encoder ops feed."""
        all_ops = self._lines.ops
        fed: Ints = all_ops.microbatch[ops] // self._header.per_llm_microbatch[all_ops.module[ops]]
        return fed

    def _same(self, ops: Ints, kind: OpKind, chunk: int = 0) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Returns the key of another op of the same module, microbatch and class."""
        all_ops = self._lines.ops
        return (
            all_ops.device[ops],
            all_ops.module[ops],
            np.full(len(ops), kind),
            all_ops.chunk[ops] + chunk,
            all_ops.microbatch[ops],
        )

    # ------------------------------------------------------------------------ meetings

    def meetings(self) -> Ints:
        """Returns the meeting that each line takes part in (-1: none)."""
        lines, header = self._lines, self._header
        meeting = np.full(len(lines), -1, np.int64)
        comm = (self.communicator >= Communicator.TP) & (self.communicator < Communicator.PP)
        collectives = np.flatnonzero(comm & (self.kind != OpKind.WAIT))
        at = (
            lines.module[collectives],
            self.communicator[collectives].astype(np.int64),
            lines.device[collectives],
        )
        several = header.group_size[at] > 1
        collectives, group = collectives[several], header.group[at][several]
        most = 1 + int(lines.place.max(initial=0))
        key = lines.op_key_of(collectives, group)
        _, number = np.unique(key * most + lines.place[collectives], return_inverse=True)
        meeting[collectives] = number
        meeting[lines.kind == OpKind.OPTIMIZER] = 1 + int(meeting.max(initial=-1))
        return meeting
