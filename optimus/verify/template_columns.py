"""A template as columns, so that all ops that follow it can be derived at once."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import Ints, Lane, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Template


class Phases:
    """A template as columns."""

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
        """Phases of the layers that a bucket holds: all of them, if it is the whole stage's."""
        if bucket.chunk == WHOLE_STAGE:
            return np.arange(len(self.layer))
        return np.flatnonzero((self.layer >= bucket.first_layer) & (self.layer < bucket.end_layer))
