"""Holds the programs of all device classes as columns, with the header's data and messages of every line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from optimus.ir.op import COMPUTE_OPS, Bools, Communicator, Floats, Ints, OpKind
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM

BACKWARDS = (OpKind.BACKWARD, OpKind.INPUT_GRAD)


class PlanHeaderArrays:
    """Templates and modules of a plan as arrays, to look up many lines at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.ranks = plan, plan.ranks
        self.names = tuple(plan.modules)
        self.llm = self.names.index(LLM)
        self.devices = self.ranks.num_classes
        modules = [plan.modules[name] for name in self.names]
        self.pp: Ints = np.array([module.layout.pp for module in modules])
        self.virtual_stages: Ints = np.array([len(module.chunks) for module in modules])
        self.first_virtual: Ints = np.array([module.virtual_stages[0] for module in modules])
        self.last_virtual: Ints = np.array([module.virtual_stages[-1] for module in modules])
        self.per_llm_microbatch: Ints = np.array(
            [module.microbatches_per_llm_microbatch for module in modules]
        )
        every = np.arange(plan.microbatches * int(self.per_llm_microbatch.max()))
        self.turn: Ints = np.stack([np.resize(module.turns or every, len(every)) for module in modules])
        self.chunks = max(module.layout.chunks for module in modules)
        self.microbatches = plan.microbatches * int(self.per_llm_microbatch.max())
        self._flatten_templates()
        self._place_modules()

    def _flatten_templates(self) -> None:
        numbers = {name: number for number, name in enumerate(self.plan.templates)}
        templates = list(self.plan.templates.values())
        self.size: Ints = np.array([len(template) for template in templates], np.int64)
        self.first: Ints = np.cumsum(self.size) - self.size
        phases = [phase for template in templates for phase in template]
        self.duration_s: Floats = np.array([phase.duration_s for phase in phases])
        self.bytes: Ints = np.array([phase.bytes for phase in phases], np.int64)
        self.kind: Ints = np.array([phase.kind for phase in phases], np.int8)
        self.lane: Ints = np.array([phase.lane for phase in phases], np.int8)
        self.communicator: Ints = np.array([phase.communicator for phase in phases], np.int8)
        self.layer: Ints = np.array([phase.layer for phase in phases], np.int32)
        labels = [f"layer {phase.layer} {phase.name}" for phase in phases]
        self.labels = tuple(dict.fromkeys(labels))
        places = {label: place for place, label in enumerate(self.labels)}
        self.label: Ints = np.array([places[label] for label in labels], np.int64)
        self.edges = [  # (phase, phase it comes after) of every template
            np.array([(k, a) for k, p in enumerate(t) for a in p.after], np.int64).reshape(-1, 2)
            for t in templates
        ]
        self.entries = [
            np.array([k for k, phase in enumerate(t) if not phase.after], np.int64) for t in templates
        ]
        opens = [not any(t[a].layer == phase.layer for a in phase.after) for t in templates for phase in t]
        self.opens_layer: Bools = np.array(opens, np.bool_)
        shape = len(self.names), 1 + max(COMPUTE_OPS), int(self.virtual_stages.max())
        self.template: Ints = np.full(shape, -1, np.int64)  # by module, kind, virtual stage
        for number, name in enumerate(self.names):
            for virtual, chunk in enumerate(self.plan.modules[name].chunks):
                for kind in COMPUTE_OPS:
                    if kind in chunk.templates:
                        self.template[number, kind, virtual] = numbers[chunk.templates[kind]]

    def _place_modules(self) -> None:
        ranks, everywhere = self.ranks, range(self.devices)
        shape = len(self.names), self.devices

        def table(value_of: Callable[[str, int], int]) -> Ints:
            rows = [[value_of(name, device) for device in everywhere] for name in self.names]
            return np.array(rows, np.int64).reshape(shape)

        self.stage = table(ranks.stage_of)
        self.pipeline = table(ranks.pipeline_of)
        self.following = table(ranks.next_stage)
        self.preceding = table(lambda name, device: ranks.next_stage(name, device, -1))
        self.entry: Ints = np.array([ranks.entry_of(device) for device in everywhere], np.int64)
        kinds = tuple(each for each in Communicator if Communicator.TP <= each < Communicator.PP)
        groups = {
            (m, kind, d): ranks.group_classes(name, kind, d)
            for m, name in enumerate(self.names)
            for kind in kinds
            for d in everywhere
        }
        shape3 = len(self.names), len(kinds), self.devices
        self.group: Ints = np.zeros(shape3, np.int64)  # the first class of the group
        self.group_size: Ints = np.ones(shape3, np.int64)
        for place, members in groups.items():
            self.group[place], self.group_size[place] = min(members), len(members)

    def needs_grad(self, module: int, virtual: int) -> bool:
        """Returns whether a virtual stage or an earlier one has a backward, so that gradients flow."""
        return bool((self.template[module, list(BACKWARDS), : virtual + 1] >= 0).any())


@dataclass(frozen=True, eq=False)
class ProgramTable:
    """Lines of all programs as columns, class after class, each in program order.

    A line runs one phase of an op (compute, the launch of a collective, or the wait for it), a message, a
    gather or reduce of a bucket, or the optimizer; `place` is the phase in its op's template, or the bucket.
    """

    header: PlanHeaderArrays
    device: Ints
    module: Ints
    kind: Ints
    chunk: Ints
    microbatch: Ints
    place: Ints

    @classmethod
    def of(cls, header: PlanHeaderArrays, programs: Sequence[Program]) -> ProgramTable:
        rows = np.concatenate([program.rows for program in programs]).astype(np.int64)
        device = np.repeat(np.arange(len(programs)), [len(program) for program in programs])
        return cls(header, device, *rows.T)

    def __len__(self) -> int:
        return len(self.kind)

    def program(self, lines: Ints) -> Program:
        """Returns some of the lines as the program of one class."""
        columns = [self.module, self.kind, self.chunk, self.microbatch, self.place]
        return Program.of(np.stack([column[lines] for column in columns], axis=1))

    @cached_property
    def phases(self) -> Ints:
        """Lines that run a phase."""
        return np.flatnonzero(self.kind <= OpKind.WEIGHT_GRAD)

    @cached_property
    def virtual(self) -> Ints:
        """Virtual stage of every line (meaningless for OPTIMIZER)."""
        module = np.minimum(self.module, len(self.header.names) - 1)
        virtual: Ints = self.chunk * self.header.pp[module] + self.header.stage[module, self.device]
        return virtual

    @cached_property
    def phase(self) -> Ints:
        """Index of every phase line in the header's columns (-1 for other lines)."""
        header, here = self.header, self.phases
        template = header.template[self.module[here], self.kind[here], self.virtual[here]]
        phase = np.full(len(self), -1, np.int64)
        phase[here] = header.first[template] + self.place[here]
        return phase

    @cached_property
    def lane(self) -> Ints:
        """Lane of every phase line; -1 for others."""
        lane = np.full(len(self), -1, np.int64)
        lane[self.phases] = self.header.lane[self.phase[self.phases]]
        return lane

    def op_key(self, device: Ints, module: Ints, kind: Ints, chunk: Ints, microbatch: Ints) -> Ints:
        """Returns a number for one op of one class."""
        header = self.header
        key = (device * len(header.names) + module) * len(OpKind) + kind
        keys: Ints = (key * header.chunks + chunk) * header.microbatches + microbatch
        return keys

    def op_key_of(self, rows: Ints, device: Ints) -> Ints:
        """Returns the number of the op that lines belong to, as if they were on another class."""
        return self.op_key(
            device, self.module[rows], self.kind[rows], self.chunk[rows], self.microbatch[rows]
        )

    @cached_property
    def ops(self) -> _OpTable:
        """Ops of the phase lines."""
        here = self.phases
        key = self.op_key_of(here, self.device[here])
        order = np.argsort(key * (1 + int(self.place.max(initial=0))) + self.place[here], kind="stable")
        rows, key = here[order], key[order]
        first = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else np.zeros(0, np.int64)
        count = np.diff(np.append(first, len(key)))
        header = self.header
        size = len(header.names) * len(OpKind) * header.chunks * header.microbatches * header.devices
        number = np.full(size, -1, np.int64)
        number[key[first]] = np.arange(len(first))
        head = rows[first]
        return _OpTable(
            rows=rows,
            first=first,
            last=rows[first + count - 1],
            number=number,
            device=self.device[head],
            module=self.module[head],
            kind=self.kind[head],
            chunk=self.chunk[head],
            microbatch=self.microbatch[head],
            virtual=self.virtual[head],
        )

    def end_of(self, device: Ints, module: Ints, kind: Ints, chunk: Ints, microbatch: Ints) -> Ints:
        """Returns the last line of an op; its phases are in order and every launch is waited for."""
        number = self.ops.number[self.op_key(device, module, kind, chunk, microbatch)]
        assert (number >= 0).all(), "an op is missing"
        ends: Ints = self.ops.last[number]
        return ends

    def backward_end(self, device: Ints, module: Ints, chunk: Ints, microbatch: Ints) -> Ints:
        """Returns the last line of the op that computes the input gradient: B, or I."""
        numbers = [
            self.ops.number[self.op_key(device, module, np.full_like(device, kind), chunk, microbatch)]
            for kind in BACKWARDS
        ]
        number = np.maximum(*numbers)
        assert (number >= 0).all(), "a backward is missing"
        ends: Ints = self.ops.last[number]
        return ends


@dataclass(frozen=True, kw_only=True, eq=False)
class _OpTable:
    """Ops as columns; the lines of op n are `rows[first[n]] ...` in order of their phases."""

    rows: Ints
    first: Ints
    last: Ints  # line of the last phase
    number: Ints  # of an op by its key, -1: none
    device: Ints
    module: Ints
    kind: Ints
    chunk: Ints
    microbatch: Ints
    virtual: Ints

    def __len__(self) -> int:
        return len(self.first)


# ---------------------------------------------------------------------------- messages


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageTable:
    """Messages as columns; the kind of a receive is the kind of its send plus one."""

    sender: Ints
    receiver: Ints
    module: Ints
    kind: Ints  # of the send
    sender_chunk: Ints
    receiver_chunk: Ints
    microbatch: Ints
    produced: Ints  # line after which it is sent
    duration_s: Floats
    bytes: Ints

    def __len__(self) -> int:
        return len(self.sender)


def find_messages(lines: ProgramTable) -> MessageTable:
    """Finds all messages, in a fixed order."""
    ops, header = lines.ops, lines.header
    parts = []
    for module in range(len(header.names)):
        mine = np.flatnonzero(ops.module == module)
        parts += _between_stages(lines, module, mine)
        if module != header.llm:
            parts += _over_seam(lines, module, mine)
    return MessageTable(
        **{
            field.name: np.concatenate(
                [np.zeros(0, np.int64), *(getattr(part, field.name) for part in parts)]
            )
            for field in fields(MessageTable)
        }
    )


def _between_stages(lines: ProgramTable, module: int, mine: Ints) -> list[MessageTable]:
    """Returns activations to the next virtual stage and gradients to the previous one."""
    header, ops = lines.header, lines.ops
    if header.pp[module] == 1:
        return []
    chunks = header.plan.modules[header.names[module]].chunks
    size = np.array([chunk.output_bytes for chunk in chunks], np.int64)
    seconds = np.array([chunk.send_s for chunk in chunks])
    needs_grad = np.array([header.needs_grad(module, virtual) for virtual in range(len(chunks))])
    messages = []
    for step, kind in ((1, OpKind.SEND_F), (-1, OpKind.SEND_B)):
        forward = kind == OpKind.SEND_F
        produces = (
            ops.kind[mine] == OpKind.FORWARD
            if forward
            else (ops.kind[mine] == OpKind.BACKWARD) | (ops.kind[mine] == OpKind.INPUT_GRAD)
        )
        peer_virtual = ops.virtual[mine] + step
        sent = produces & (peer_virtual >= header.first_virtual[module])
        sent &= peer_virtual <= header.last_virtual[module]
        if not forward:
            sent &= needs_grad[np.maximum(peer_virtual, 0)]
        op, peer_virtual = mine[sent], peer_virtual[sent]
        peers = header.following if forward else header.preceding
        carried = ops.virtual[op] if forward else peer_virtual  # a gradient is as large as its activations
        messages.append(
            MessageTable(
                sender=ops.device[op],
                receiver=peers[module, ops.device[op]],
                module=ops.module[op],
                kind=np.full(len(op), kind, np.int64),
                sender_chunk=ops.chunk[op],
                receiver_chunk=peer_virtual // header.pp[module],
                microbatch=ops.microbatch[op],
                produced=ops.last[op],
                duration_s=seconds[carried],
                bytes=size[carried],
            )
        )
    return messages


def _over_seam(lines: ProgramTable, module: int, mine: Ints) -> list[MessageTable]:
    """Returns an encoder's outputs to the LLM and their gradient back; none if both are on one class.

    Both are messages of chunk 0, whichever chunks exchange them.
    """
    header, ops = lines.header, lines.ops
    planned = header.plan.modules[header.names[module]]
    last = (ops.kind[mine] == OpKind.FORWARD) & (ops.virtual[mine] == header.last_virtual[module])
    op = mine[last & (header.entry[ops.device[mine]] != ops.device[mine])]
    source, entry, zeros = ops.device[op], header.entry[ops.device[op]], np.zeros(len(op), np.int64)
    shared = {
        "module": ops.module[op],
        "sender_chunk": zeros,
        "receiver_chunk": zeros,
        "microbatch": ops.microbatch[op],
        "duration_s": np.full(len(op), planned.seam_s),
        "bytes": np.full(len(op), planned.seam_bytes, np.int64),
    }
    forward = MessageTable(
        sender=source, receiver=entry, kind=zeros + OpKind.SEND_SEAM, produced=ops.last[op], **shared
    )
    if not header.needs_grad(module, int(header.last_virtual[module])):
        return [forward]
    fed = ops.microbatch[op] // planned.microbatches_per_llm_microbatch
    produced = lines.backward_end(entry, zeros + header.llm, zeros + header.plan.entry_chunk, fed)
    backward = MessageTable(
        sender=entry, receiver=source, kind=zeros + OpKind.SEND_SEAM_B, produced=produced, **shared
    )
    return [forward, backward]
