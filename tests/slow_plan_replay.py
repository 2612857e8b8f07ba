"""What docs/plan-file.md says, once more, line by line and without any cleverness: the validator's oracle."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from optimus.ir.op import COMPUTE_OPS, RECVS, SENDS, Communicator, Lane, OpKind
from optimus.ir.plan import WHOLE_STAGE, Phase, Plan
from optimus.ir.ranks import LLM

COLLECTIVES = (OpKind.UNSHARD, OpKind.REDUCE_GRAD)
PHASES = tuple(COMPUTE_OPS)


class Id(NamedTuple):
    """A line."""

    device: int
    module: str
    kind: OpKind
    chunk: int
    microbatch: int
    place: int


class SlowPlan:
    """A plan as lists of ids, with what each waits for."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.ranks = plan, plan.ranks
        self.programs = [
            [Id(device, plan.names[m], OpKind(v), c, i, p) for m, v, c, i, p in program.rows.tolist()]
            for device, program in enumerate(plan.programs)
        ]
        self.at = {line: place for program in self.programs for place, line in enumerate(program)}
        self.ops: dict[tuple[int, str, OpKind, int, int], list[Id]] = defaultdict(list)
        self.seams: dict[tuple[str, OpKind, int], list[Id]] = defaultdict(list)
        for line in self.at:
            if line.kind in PHASES:
                self.ops[line.device, line.module, line.kind, line.chunk, line.microbatch].append(line)
            elif line.kind == OpKind.SEND_SEAM:
                self.seams[line.module, line.kind, line.microbatch].append(line)
        self.gathers = [[line for line in p if line.kind == OpKind.UNSHARD] for p in self.programs]
        self.needs = {line: list(dict.fromkeys(self._needs(line))) for line in self.at}
        self.recv_of = {self.send_of(recv): recv for recv in self.at if recv.kind in RECVS}
        self.meetings = self._meetings()

    def virtual(self, line: Id) -> int:
        return line.chunk * self.plan.modules[line.module].layout.pp + self.ranks.stage_of(
            line.module, line.device
        )

    def template(self, line: Id) -> tuple[Phase, ...]:
        chunk = self.plan.modules[line.module].chunks[self.virtual(line)]
        return self.plan.templates[chunk.templates[line.kind]]

    def phase(self, line: Id) -> Phase | None:
        return self.template(line)[line.place] if line.kind in PHASES else None

    def op(
        self, device: int, module: str, kinds: tuple[OpKind, ...], chunk: int, microbatch: int
    ) -> list[Id]:
        """All lines of the op, whichever of the kinds it has."""
        return [line for kind in kinds for line in self.ops[device, module, kind, chunk, microbatch]]

    def other(self, line: Id, virtual: int) -> tuple[int, int]:
        """The class and chunk of another virtual stage of the same pipeline."""
        layout = self.plan.modules[line.module].layout
        stage, context, position = self.ranks.coordinates(line.device)
        there = stage // layout.pp * layout.pp + virtual % layout.pp
        return self.ranks.class_at(there, context, position), virtual // layout.pp

    def send_of(self, recv: Id) -> Id:
        """The send that a receive ends with."""
        device, module, kind, _, microbatch, _ = recv
        sent = OpKind(kind - 1)
        if kind in (OpKind.RECV_F, OpKind.RECV_B):
            there, chunk = self.other(recv, self.virtual(recv) + (-1 if kind == OpKind.RECV_F else 1))
            return Id(there, module, sent, chunk, microbatch, 0)
        if kind == OpKind.RECV_SEAM_B:
            _, context, position = self.ranks.coordinates(device)
            return Id(self.ranks.class_at(0, context, position), module, sent, 0, microbatch, 0)
        (found,) = [
            line
            for line in self.seams[module, sent, microbatch]
            if self.ranks.coordinates(line.device)[1:] == self.ranks.coordinates(device)[1:]
        ]
        return found

    def _needs(self, line: Id) -> list[Id]:
        device, module, kind, chunk, microbatch, _ = line
        if kind in PHASES:
            return self._phase_needs(line)
        if kind in RECVS:
            return [self.send_of(line)]
        if kind in (OpKind.SEND_F, OpKind.SEND_SEAM):
            return self.op(device, module, (OpKind.FORWARD,), chunk, microbatch)
        if kind == OpKind.SEND_B:
            return self.op(device, module, (OpKind.BACKWARD, OpKind.INPUT_GRAD), chunk, microbatch)
        if kind == OpKind.SEND_SEAM_B:
            fed = microbatch // self.plan.modules[module].microbatches_per_llm_microbatch
            return self.op(device, LLM, (OpKind.BACKWARD, OpKind.INPUT_GRAD), 0, fed)
        if kind == OpKind.UNSHARD:
            return []
        if kind == OpKind.OPTIMIZER:
            return [other for other in self.programs[device] if other.kind == OpKind.REDUCE_GRAD]
        return [
            other
            for other in self.programs[device]
            if other.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
            and self._holds(line, other)
        ]

    def _holds(self, traffic: Id, line: Id) -> bool:
        """Whether the bucket of a gather or reduce holds the layer of a phase."""
        if traffic.module != line.module:
            return False
        module = self.plan.modules[line.module]
        bucket = module.buckets[self.ranks.stage_of(line.module, line.device)][traffic.place]
        if bucket.chunk == WHOLE_STAGE:
            return True
        layer = self.template(line)[line.place].layer
        return bucket.chunk == line.chunk and bucket.first_layer <= layer < bucket.end_layer

    def _phase_needs(self, line: Id) -> list[Id]:
        device, module, kind, chunk, microbatch, place = line
        planned = self.plan.modules[module]
        needs = []
        if kind == OpKind.FORWARD:
            buckets = planned.buckets[self.ranks.stage_of(module, device)]
            needs += [g for g in self.gathers[device] if self._holds(g, line) and buckets[g.place].gates]
        after = self.template(line)[place].after
        if after:
            return needs + [line._replace(place=dep) for dep in after]
        virtual, last = self.virtual(line), planned.layout.virtual_stages - 1
        back = (OpKind.BACKWARD, OpKind.INPUT_GRAD)
        if kind == OpKind.WEIGHT_GRAD:
            needs += self.op(device, module, (OpKind.INPUT_GRAD,), chunk, microbatch)
        elif kind == OpKind.FORWARD and virtual > 0:
            there, other = self.other(line, virtual - 1)
            received = [Id(device, module, OpKind.RECV_F, chunk, microbatch, 0)]
            needs += (
                received if there != device else self.op(device, module, (OpKind.FORWARD,), other, microbatch)
            )
        elif kind == OpKind.FORWARD and module == LLM:
            for name, encoder in self.plan.encoders.items():
                count = encoder.microbatches_per_llm_microbatch
                for piece in range(microbatch * count, (microbatch + 1) * count):
                    arrives = Id(device, name, OpKind.RECV_SEAM, 0, piece, 0)
                    needs += [arrives] if arrives in self.at else []
                    if encoder.layout.pp == 1:
                        needs += self.op(device, name, (OpKind.FORWARD,), 0, piece)
        elif kind in back:
            needs += self.op(device, module, (OpKind.FORWARD,), chunk, microbatch)
            if virtual < last:
                there, other = self.other(line, virtual + 1)
                received = [Id(device, module, OpKind.RECV_B, chunk, microbatch, 0)]
                needs += received if there != device else self.op(device, module, back, other, microbatch)
            elif module != LLM:
                received = [Id(device, module, OpKind.RECV_SEAM_B, 0, microbatch, 0)]
                local = self.op(device, LLM, back, 0, microbatch // planned.microbatches_per_llm_microbatch)
                needs += local if self.ranks.coordinates(device)[0] == 0 else received
        return needs

    def group(self, line: Id) -> tuple[str, Communicator, tuple[int, ...]] | None:
        """The communicator of a collective."""
        if line.kind in COLLECTIVES:
            communicator = Communicator.DP
        else:
            phase = self.phase(line)
            if phase is None or phase.kind != OpKind.LAUNCH:
                return None
            communicator = phase.communicator
        return line.module, communicator, self.ranks.group_classes(line.module, communicator, line.device)

    def _meetings(self) -> dict[Id, list[Id]]:
        """All lines that start together, for each of them."""
        turns: dict[object, list[Id]] = defaultdict(list)
        for program in self.programs:
            count: dict[object, int] = defaultdict(int)
            for line in program:
                group = "finish" if line.kind == OpKind.OPTIMIZER else self.group(line)
                if group is not None and (group == "finish" or len(group[2]) > 1):
                    turns[group, count[group]].append(line)
                    count[group] += 1
        return {line: lines for lines in turns.values() for line in lines}

    def wanted(self, line: Id) -> int:
        """How many lines must be there before one of them starts."""
        group = self.group(line)
        return len(self.programs) if line.kind == OpKind.OPTIMIZER else 1 if group is None else len(group[2])

    # ------------------------------------------------------------------------ time

    def lane(self, line: Id) -> Lane | None:
        if line.kind in RECVS:
            return None
        if line.kind in SENDS:
            return Lane.P2P
        if line.kind in COLLECTIVES:
            stage = self.ranks.stage_of(line.module, line.device)
            return self.plan.modules[line.module].buckets[stage][line.place].lane
        phase = self.phase(line)
        return phase.lane if phase is not None and phase.kind == OpKind.LAUNCH else Lane.COMPUTE

    def seconds(self, line: Id) -> float:
        phase = self.phase(line)
        if phase is not None:
            return phase.duration_s
        if line.kind == OpKind.OPTIMIZER:
            return self.plan.finish_s[self.ranks.coordinates(line.device)[0]]
        module = self.plan.modules[line.module]
        if line.kind in COLLECTIVES:
            bucket = module.buckets[self.ranks.stage_of(line.module, line.device)][line.place]
            return bucket.gather_s if line.kind == OpKind.UNSHARD else bucket.reduce_s
        if line.kind in (OpKind.SEND_SEAM, OpKind.SEND_SEAM_B):
            return module.seam_s
        return module.chunks[self.virtual(line) - (line.kind == OpKind.SEND_B)].send_s

    def issue_s(self) -> dict[Id, float]:
        """When hosts issue their lines; a send also needs the issue of its receive."""
        issue = {}
        for program in self.programs:
            count = 0
            for line in program:
                issue[line] = self.plan.launch_s * count
                phase = self.phase(line)
                count += phase is None or phase.kind != OpKind.WAIT
        for send, recv in self.recv_of.items():
            issue[send] = max(issue[send], issue[recv])
        return issue

    def enqueued_before(self) -> dict[Id, list[Id]]:
        """Of every line of communication, all compute that stands before it; a receive is posted aside."""
        found: dict[Id, list[Id]] = {}
        for program in self.programs:
            last: list[Id] = []
            for line in program:
                computes = self.lane(line) == Lane.COMPUTE
                found[line] = [] if computes or line.kind in RECVS else last
                last = [line] if computes else last
        return found


def slow_replay(slow: SlowPlan) -> dict[Id, tuple[float, float]] | None:
    """Start and end of every line, by stepping from event to event; None if the plan never ends."""
    queues: dict[tuple[int, Lane], list[Id]] = defaultdict(list)
    receives: list[Id] = []
    for program in slow.programs:
        for line in program:
            lane = slow.lane(line)
            (receives if lane is None else queues[line.device, lane]).append(line)
    issue, enqueued = slow.issue_s(), slow.enqueued_before()
    sender = {recv: send for send, recv in slow.recv_of.items()}
    slows = {line for line in slow.at if slow.group(line) and slow.lane(line) in (Lane.TP, Lane.DP)}
    computes = {
        line for line in slow.at if (p := slow.phase(line)) and p.kind not in (OpKind.LAUNCH, OpKind.WAIT)
    }
    left = {line: slow.seconds(line) for line in slow.at}
    start: dict[Id, float] = {}
    end: dict[Id, float] = {}
    there: set[Id] = set()  # could start
    now = 0.0
    while len(end) < len(slow.at):
        changed = True
        while changed:
            changed = False
            for recv in [recv for recv in receives if sender[recv] in end]:
                start[recv] = end[recv] = now
                receives.remove(recv)
                changed = True
            for queue in queues.values():
                if not queue:
                    continue
                line = queue[0]
                issued = issue[line] <= now + 1e-12
                needs = *slow.needs[line], *enqueued[line]
                if line not in there and issued and all(need in end for need in needs):
                    there.add(line)
                    changed = True
                    meeting = slow.meetings.get(line, [line])
                    if there.issuperset(meeting) and len(meeting) >= slow.wanted(line):
                        start.update(dict.fromkeys(meeting, now))
                if line in start and left[line] <= 1e-12:
                    end[line] = now
                    there.remove(line)
                    queue.pop(0)
                    changed = True
        slowed = {line.device for line in there if line in slows}
        running = [line for line in there if line in start]
        pace = {
            line: 1 + slow.plan.slowdown if line in computes and line.device in slowed else 1.0
            for line in running
        }
        steps = [left[line] * pace[line] for line in running]
        heads = [issue[queue[0]] for queue in queues.values() if queue]
        steps += [moment - now for moment in heads if moment > now + 1e-12]
        if not steps:
            break
        step = min(steps)
        for line in running:
            left[line] -= step / pace[line]
        now += step
    return {line: (start[line], end[line]) for line in end} if len(end) == len(slow.at) else None
