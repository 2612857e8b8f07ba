"""Says which samples a step trains on: those of its number, but for what no step has room for.

A window of steps has as many samples as its steps take, in order. A sample whose images or sounds exceed the
capacity of its step is carried to the next step with room, and a later sample takes its place. What a step
holds follows from its number, the sizes and the capacity alone: it is the same under every plan and world
size, and a run resumes at any step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence

WINDOW = 8  # steps that share their samples

Loads = Mapping[str, int]  # encoder tokens, by encoder


class StepSamples:
    """The samples of every step. `tokens(n)` are those of sample n, `capacity` those of one step.

    Step n trains batch n, or, behind batches that are `left_out`, one as much later.
    """

    def __init__(
        self,
        tokens: Callable[[int], Loads],
        per_step: int,
        capacity: Loads,
        left_out: Sequence[int] = (),
    ) -> None:
        self.per_step = per_step
        self.left_out: list[int] = []
        self.leave_out(left_out)
        self._tokens, self._capacity = tokens, capacity
        self._window: tuple[int, list[list[int]]] = (-1, [])

    def leave_out(self, batches: Sequence[int]) -> None:
        """Leaves out more batches: later ones take the place of each."""
        self.left_out = sorted({*self.left_out, *batches})

    def batch(self, step: int) -> int:
        """Returns the number of the batch that a step trains."""
        number = step
        for left_out in self.left_out:
            number += left_out <= number
        return number

    def numbers(self, step: int) -> list[int]:
        """Returns the numbers of the samples of a step, in ascending order."""
        window, place = divmod(self.batch(step), WINDOW)
        if self._window[0] != window:
            first = window * WINDOW * self.per_step
            loads = [self._tokens(first + at) for at in range(WINDOW * self.per_step)]
            steps = carry_over(loads, self.per_step, self._capacity)
            self._window = window, [[first + at for at in of_step] for of_step in steps]
        return self._window[1][place]

    def held_out(self, batches: int) -> list[list[int]]:
        """Returns the numbers, below 0, of samples that no step trains on, by batch."""
        loads = [self._tokens(-1 - at) for at in range(batches * self.per_step)]
        return [[-1 - at for at in batch] for batch in carry_over(loads, self.per_step, self._capacity)]

    def count_carried(self, step: int) -> int:
        """Returns how many samples of a step come from an earlier one that had no room for them."""
        return sum(number // self.per_step < self.batch(step) for number in self.numbers(step))


def carry_over(loads: Sequence[Loads], per_step: int, capacity: Loads) -> list[list[int]]:
    """Assigns samples in order to steps of `per_step`, each within its capacity as far as that is possible.

    While a step exceeds it, its heaviest sample is carried, and the next lighter one takes its place.
    """
    waiting, steps = list(range(len(loads))), []
    while waiting:
        taken, waiting = waiting[:per_step], waiting[per_step:]
        while (heaviest := _find_excess(loads, taken, capacity)) is not None:
            carried = loads[heaviest]
            place = next((at for at, other in enumerate(waiting) if _is_lighter(loads[other], carried)), None)
            if place is None:
                break
            taken[taken.index(heaviest)] = waiting.pop(place)
            insort(waiting, heaviest)
        steps.append(sorted(taken))
    return steps


def _is_lighter(load: Loads, other: Loads) -> bool:
    """Returns whether a sample has less for one encoder than another sample, and more for none."""
    pairs = [(load.get(name, 0), other.get(name, 0)) for name in {**load, **other}]
    return all(ours <= theirs for ours, theirs in pairs) and any(ours < theirs for ours, theirs in pairs)


def _find_excess(loads: Sequence[Loads], taken: Sequence[int], capacity: Loads) -> int | None:
    """Returns the heaviest sample of a step that exceeds its capacity, in the first encoder that does."""
    for name, most in capacity.items():
        if sum(loads[at].get(name, 0) for at in taken) > most:
            return max(taken, key=lambda at: (loads[at].get(name, 0), at))
    return None
