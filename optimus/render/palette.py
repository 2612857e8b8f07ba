"""Defines the colours of charts by what they stand for, for light and for dark screens.

They are Okabe and Ito's: blue is the LLM, orange an encoder, pink waits for TP, green for DP, grey for the
pipeline. Within a colour, lightness tells parts apart, also for readers who see no hue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimus.ir.op import OpKind
from optimus.schedule.bubbles import CAUSES


@dataclass(frozen=True)
class LegendEntry:
    """Label and colour of what an interval of a compute lane is spent on."""

    label: str
    colour: str


# Within a module, dark is late.
ENCODER_WORK = {
    OpKind.FORWARD: LegendEntry("encoder forward", "#e69f00"),
    OpKind.RECOMPUTE: LegendEntry("encoder recompute", "#f7d68a"),
    OpKind.BACKWARD: LegendEntry("encoder backward", "#c2500a"),
    OpKind.INPUT_GRAD: LegendEntry("encoder backward", "#c2500a"),
    OpKind.WEIGHT_GRAD: LegendEntry("encoder weight gradient", "#7a2f04"),
}
LLM_WORK = {
    OpKind.FORWARD: LegendEntry("LLM forward", "#56b4e9"),
    OpKind.RECOMPUTE: LegendEntry("LLM recompute", "#b5dcf5"),
    OpKind.BACKWARD: LegendEntry("LLM backward", "#0072b2"),
    OpKind.INPUT_GRAD: LegendEntry("LLM backward", "#0072b2"),
    OpKind.WEIGHT_GRAD: LegendEntry("LLM weight gradient", "#00395c"),
}
OPTIMIZER = LegendEntry("optimizer", "#4d4d4d")
IDLE_TP = LegendEntry("idle: waits for TP", "#e8bcd4")
IDLE_DP = LegendEntry("idle: waits for DP", "#93d3bd")
IDLE_PP = LegendEntry("idle: waits for the pipeline", "#e3e3e3")
# Order of the fills in a box, from its bottom to its top.
STACK = tuple(
    dict.fromkeys([*ENCODER_WORK.values(), *LLM_WORK.values(), OPTIMIZER, IDLE_TP, IDLE_DP, IDLE_PP])
)
TRAFFIC = {
    OpKind.UNSHARD: LegendEntry("DP all-gather", "#00b383"),
    OpKind.UNSHARD_B: LegendEntry("DP all-gather", "#00b383"),
    OpKind.REDUCE_GRAD: LegendEntry("DP reduce-scatter", "#00543d"),
}
IDLE_FILLS = np.array(
    [STACK.index({"dp": IDLE_DP, "tp": IDLE_TP, "pp": IDLE_PP}[cause.partition("_")[0]]) for cause in CAUSES]
)

# Parts of a step: label, light and dark colour, by CSS class.
PARTS = {
    "llm": ("LLM compute", "#0072b2", "#3d9bd1"),
    "encoder": ("encoder compute", "#e69f00", "#e69f00"),
    "optimizer": ("optimizer", "#4d4d4d", "#a8a8a8"),
    "tp": ("idle: TP", "#cc79a7", "#cc79a7"),
    "dp_all_gather": ("idle: DP all-gather", "#00b383", "#2bc79b"),
    "dp_reduce_scatter": ("idle: DP reduce-scatter", "#006b4f", "#0f8a69"),
    "pp_warmup": ("idle: PP warm-up", "#d9d9d9", "#3d434a"),
    "pp_cooldown": ("idle: PP cool-down", "#a3a3a3", "#6f767e"),
    "pp_other": ("idle: PP other", "#bfbfbf", "#565d65"),
}
# Components of memory, permanent ones first: light and dark colour.
MEMORY = {
    "parameters": ("#00395c", "#1d6fa3"),
    "gradients": ("#0072b2", "#3d9bd1"),
    "optimizer": ("#56b4e9", "#8ccdf2"),
    "logits": ("#cc79a7", "#cc79a7"),
    "working": ("#b5dcf5", "#cfe8f8"),
    "communicators": ("#a3a3a3", "#6f767e"),
    "reserve": ("#d9d9d9", "#474d54"),
    "llm activations": ("#009e73", "#2bc79b"),
    "encoder activations": ("#e69f00", "#e69f00"),
    "seam": ("#c2500a", "#e0722e"),
    "gathered": ("#1a5c86", "#2787c2"),
}
_STACK_DARK = {
    "LLM recompute": "#9fd0ef",
    "LLM forward": "#56b4e9",
    "LLM backward": "#2787c2",
    "LLM weight gradient": "#1a5c86",
    "optimizer": "#a8a8a8",
    "idle: waits for TP": "#6b4159",
    "idle: waits for DP": "#2c5e4f",
    "idle: waits for the pipeline": "#31363c",
}
LANES = {"TP traffic": ("#b0578a", "#d58ab4"), "messages between stages": ("#8a8a8a", "#9aa0a6")}
FILLS = {
    **{fill.label: (fill.colour, _STACK_DARK.get(fill.label, fill.colour)) for fill in STACK},
    **{
        fill.label: (fill.colour, "#2bc79b" if "gather" in fill.label else "#0f8a69")
        for fill in TRAFFIC.values()
    },
    **LANES,
}  # of the timeline chart
OF_CAUSE = {"dp": "idle: waits for DP", "tp": "idle: waits for TP", "pp": "idle: waits for the pipeline"}
CAUSE_FILLS = [OF_CAUSE[cause.partition("_")[0]] for cause in CAUSES]


def memory_css_class(component: str) -> str:
    """Returns the CSS class of a memory component's colour."""
    return f"m-{component.replace(' ', '-')}" if component in MEMORY else "m-reserve"


def build_colour_css() -> str:
    """Returns CSS variables and classes of all colours."""
    both: dict[str, tuple[str, str]] = {
        f"p-{name}": (light, dark) for name, (_, light, dark) in PARTS.items()
    }
    both |= {memory_css_class(name): pair for name, pair in MEMORY.items()}
    both |= {f"f-{place}": pair for place, pair in enumerate(FILLS.values())}
    light = "".join(f"--{name}:{pair[0]};" for name, pair in both.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in both.items() if pair[0] != pair[1])
    uses = "".join(f".{name}{{background:var(--{name});fill:var(--{name})}}" for name in both)
    svg = "".join(f"path[fill='{pair[0]}']{{fill:var(--f-{at})}}" for at, pair in enumerate(FILLS.values()))
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{uses}\n{svg}\n"
    )
