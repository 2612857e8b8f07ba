"""Colours of the page by what they stand for, for light and for dark screens.

Okabe and Ito's, as in the other pictures: blue is the LLM, orange an encoder, pink waits for TP, green for
DP, grey for the pipeline. Within a colour, lightness tells parts apart, also for those who see no hue.
"""

from __future__ import annotations

from optimus.render.boxes import STACK, TRAFFIC
from optimus.schedule.bubbles import CAUSES

# Of the bars: class, words, light, dark.
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
# Of memory, from what is always there to what comes and goes.
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
}  # of the stages over time
OF_CAUSE = {"dp": "idle: waits for DP", "tp": "idle: waits for TP", "pp": "idle: waits for the pipeline"}
CAUSE_FILLS = [OF_CAUSE[cause.partition("_")[0]] for cause in CAUSES]


def memory_class(component: str) -> str:
    """The class of a component's colour."""
    return f"m-{component.replace(' ', '-')}" if component in MEMORY else "m-reserve"


def colour_css() -> str:
    """Variables and classes of all colours."""
    both: dict[str, tuple[str, str]] = {
        f"p-{name}": (light, dark) for name, (_, light, dark) in PARTS.items()
    }
    both |= {memory_class(name): pair for name, pair in MEMORY.items()}
    both |= {f"f-{place}": pair for place, pair in enumerate(FILLS.values())}
    light = "".join(f"--{name}:{pair[0]};" for name, pair in both.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in both.items() if pair[0] != pair[1])
    uses = "".join(f".{name}{{background:var(--{name});fill:var(--{name})}}" for name in both)
    svg = "".join(f"path[fill='{pair[0]}']{{fill:var(--f-{at})}}" for at, pair in enumerate(FILLS.values()))
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{uses}\n{svg}\n"
    )
