"""Every message of a plan: who sends it, who receives it, and which op makes what it carries."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from optimus.ir.op import Floats, Ints, OpKind
from optimus.schedule.program_table import Lines


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Messages as columns. The receive's kind is the send's, plus one."""

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


def find_transfers(lines: Lines) -> Transfers:
    """All messages, in a fixed order."""
    ops, header = lines.ops, lines.header
    parts = []
    for module in range(len(header.names)):
        mine = np.flatnonzero(ops.module == module)
        parts += _between_stages(lines, module, mine)
        if module != header.llm:
            parts += _over_seam(lines, module, mine)
    return Transfers(
        **{
            field.name: np.concatenate(
                [np.zeros(0, np.int64), *(getattr(part, field.name) for part in parts)]
            )
            for field in fields(Transfers)
        }
    )


def _between_stages(lines: Lines, module: int, mine: Ints) -> list[Transfers]:
    """Activations to the next virtual stage, gradients to the previous one."""
    header, ops = lines.header, lines.ops
    if header.pp[module] == 1:
        return []
    chunks = header.plan.modules[header.names[module]].chunks
    size = np.array([chunk.output_bytes for chunk in chunks], np.int64)
    seconds = np.array([chunk.send_s for chunk in chunks])
    learns = np.array([header.learns(module, virtual) for virtual in range(len(chunks))])
    found = []
    for step, kind in ((1, OpKind.SEND_F), (-1, OpKind.SEND_B)):
        forward = kind == OpKind.SEND_F
        made = (
            ops.kind[mine] == OpKind.FORWARD
            if forward
            else (ops.kind[mine] == OpKind.BACKWARD) | (ops.kind[mine] == OpKind.INPUT_GRAD)
        )
        there = ops.virtual[mine] + step
        sent = made & (there >= 0) & (there < len(chunks))
        if not forward:
            sent &= learns[np.maximum(there, 0)]
        op, there = mine[sent], there[sent]
        peers = header.following if forward else header.preceding
        carried = ops.virtual[op] if forward else there  # a gradient has the size of what it belongs to
        found.append(
            Transfers(
                sender=ops.device[op],
                receiver=peers[module, ops.device[op]],
                module=ops.module[op],
                kind=np.full(len(op), kind, np.int64),
                sender_chunk=ops.chunk[op],
                receiver_chunk=there // header.pp[module],
                microbatch=ops.microbatch[op],
                produced=ops.last[op],
                duration_s=seconds[carried],
                bytes=size[carried],
            )
        )
    return found


def _over_seam(lines: Lines, module: int, mine: Ints) -> list[Transfers]:
    """An encoder's rows to LLM stage 0, and their gradient back; none where both are on one class."""
    header, ops = lines.header, lines.ops
    planned = header.plan.modules[header.names[module]]
    last = (ops.kind[mine] == OpKind.FORWARD) & (ops.virtual[mine] == header.pp[module] - 1)
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
    forward = Transfers(
        sender=source, receiver=entry, kind=zeros + OpKind.SEND_SEAM, produced=ops.last[op], **shared
    )
    if not header.learns(module, int(header.pp[module]) - 1):
        return [forward]
    fed = ops.microbatch[op] // planned.microbatches_per_llm_microbatch
    made = lines.backward_end(entry, zeros + header.llm, zeros, fed)
    backward = Transfers(
        sender=entry, receiver=source, kind=zeros + OpKind.SEND_SEAM_B, produced=made, **shared
    )
    return [forward, backward]
