"""Prints the fullest rank over the mean, as drawn and balanced, of five distributions."""

from __future__ import annotations

from test_balanced_sampler import measure
from test_dealing import DATA

LAYOUTS = ((8, 4, 1), (32, 16, 1), (8, 4, 4), (64, 1, 8))  # ranks, microbatches, samples of each


def main() -> None:
    print("ranks x microbatches x samples: " + ", ".join("x".join(map(str, each)) for each in LAYOUTS))  # noqa: T201
    for name in DATA:
        cells = []
        for ranks, microbatches, batch_size in LAYOUTS:
            drawn, dealt = measure(name, ranks=ranks, microbatches=microbatches, batch_size=batch_size)
            cells.append(f"{drawn:.3f} -> {dealt:.3f}")
        print(f"{name:<24}" + "  ".join(cells))  # noqa: T201


if __name__ == "__main__":
    main()
