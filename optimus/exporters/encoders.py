"""What a trainer that knows encoders only inside the LLM's first stage cannot run of them."""

from __future__ import annotations

from optimus.exporters.facts import Facts
from optimus.exporters.target import NotSupported


def not_supported_of_encoders(facts: Facts, *, stages: str, layout: str) -> list[NotSupported]:
    """Use of idle time, several stages, another layout, pieces; two reasons are the target's own."""
    llm, found = facts.layout, list[NotSupported]()
    if facts.plan.encoders:
        why = "it runs an encoder only as part of the first pipeline stage's forward and backward"
        found.append(NotSupported(what="encoder work in the LLM's idle time", why=why))
    for name, module in facts.plan.encoders.items():
        own = module.layout
        if own.pp > 1:
            found.append(NotSupported(what=f"{name} over {own.pp} pipeline stages", why=stages))
        if (own.tp, own.pp) != (llm.tp, llm.pp) or llm.cp > 1:
            found.append(NotSupported(what=f"{name} in a layout of its own ({own})", why=layout))
        if module.pieces > 1:
            what = f"{name} in {module.pieces} pieces per microbatch of the LLM"
            found.append(NotSupported(what=what, why="it runs an encoder on whole microbatches"))
    return found
