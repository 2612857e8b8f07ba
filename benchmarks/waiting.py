"""Parameter traffic under which nothing runs: what filling is compared with."""

from __future__ import annotations

from optimus.engine.distributed_optimizer import ShardedBucket


class Waiting(ShardedBucket):
    """Nobody computes while parameters are gathered; gradients are reduced when all compute is over."""

    def gather(self) -> None:
        super().gather()
        super().wait_gathered()

    def reduce(self) -> None:
        """When it is waited for."""

    def wait_reduced(self) -> None:
        super().reduce()
        super().wait_reduced()
