"""Every mistake a user can make in a job, one per case, and the message it earns."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from optimus.cli.sweep import SweepCommand
from optimus.cli.why import WhyCommand
from optimus.errors import UserError
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.plan import Plan
from optimus.job.read import find_job, load_job, make_job

JOB = """\
format: optimus.job/1
name: demo
model:
  use: qwen2.5-vl-72b
cluster:
  use: h100
  gpus: 512
workload:
  sequence_tokens: 8192
  sequences_per_step: 1024
  vision_tokens: {p50: 2600, p95: 7400, max: 8000}
layout:
  llm: {dp: 16, pp: 4, tp: 8}
  vision: {pp: 1, tp: 1}
  limits: {microbatch_sequences: [1, 2]}
today:
  framework: megatron-core 0.19
  layout: {llm: {dp: 16, pp: 4, tp: 8, chunks: 5}, vision: stage0}
  measured: {step_s: 17.9, peak_memory_gb: 71}
run:
  steps: 20000
"""

HAND = """\
format: optimus.job/1
model:
  encoders:
    - name: vision
      stack:
        hidden: 1024
        layers: 24
        attention: {heads: 16, kv_heads: 16, head_dim: 64, causal: false}
        mlp: {width: 4096, gated: false}
      projector: {widths: [2048], merge: 4}
  llm:
    stack:
      hidden: 2048
      layers: 32
      attention: {heads: 32, kv_heads: 8, head_dim: 64}
      mlp: {width: 8192}
      experts: {count: 64, active: 8, width: 1024}
    vocab: 32000
cluster: {use: h100, gpus: 64}
workload: {sequence_tokens: 4096, sequences_per_step: 256}
layout:
  llm: {}
"""

MINIMAL_CONFIG = '{"model_type": "qwen3_vl", "tie_word_embeddings": false, "text_config": {%s}}'


@dataclass(frozen=True, kw_only=True)
class Case:
    """A title for the reader, files to write, and the call that must fail."""

    title: str
    files: dict[str, str] = field(default_factory=dict)
    call: Callable[[], object] = lambda: load_job("job.yaml")

    def message(self) -> str:
        """The two lines a user sees, from an empty folder that holds only this case's files."""
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name, text in self.files.items():
                Path(name).write_text(text, encoding="utf-8")
            try:
                self.call()
            except UserError as error:
                return str(error)
        raise AssertionError(f"no error: {self.title}")


def job(title: str, old: str, new: str) -> Case:
    """The job above with one thing changed."""
    assert JOB.count(old) == 1, (title, old)
    return Case(title=title, files={"job.yaml": JOB.replace(old, new)})


def hand(title: str, old: str, new: str) -> Case:
    """The model by hand with one thing changed."""
    assert HAND.count(old) == 1, (title, old)
    return Case(title=title, files={"job.yaml": HAND.replace(old, new)})


def raw(title: str, text: str) -> Case:
    return Case(title=title, files={"job.yaml": text})


def lengths(title: str, row: str) -> Case:
    """A lengths file whose second row is wrong."""
    text = JOB.replace("vision_tokens: {p50: 2600, p95: 7400, max: 8000}", "lengths: lengths.jsonl")
    rows = '{"text": 4710, "vision": [1024, 1610]}\n' + row + "\n"
    return Case(title=title, files={"job.yaml": text, "lengths.jsonl": rows})


def named(title: str, name: str, on: str | None = None) -> Case:
    return Case(title=title, call=lambda: find_job(name, on=on))


def config(title: str, text: str) -> Case:
    def call() -> object:
        return make_job(model="config.json", on="h100:512")

    return Case(title=title, files={"config.json": text}, call=call)


@cache
def tiny_plan() -> Plan:
    """A plan of the smallest job, at a layout that is planned at once."""
    from optimus.planner.planning import make_plan

    job = find_job("cpu/tiny-vl", None, ["llm=pp1,tp1"])
    return make_plan(job, strategy="optimus", systems=[]).plan


def why(title: str, *layouts: str, **changes: Any) -> Case:
    """A question about the tiny plan, of which something may be changed."""

    def call() -> object:
        from optimus.sensitivity.why_not import explain_layout

        return explain_layout(replace(tiny_plan(), **changes), *layouts)

    return Case(title=title, call=call)


def crowded() -> dict[str, Any]:
    """What a plan is bound to whose sequences hold more images than the file lists."""
    job = find_job("cpu/tiny-vl")
    many = replace(job.workload.sequences[0], items=(("vision", (1,) * 64),))
    changed = replace(job, workload=replace(job.workload, sequences=(many,)))
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(changed))
    return {"bound_to": bound_to, "hashes": hashes}


def sweep(title: str, **given: Any) -> Case:
    return Case(title=title, call=SweepCommand(job="cpu/tiny-vl", **given))


BOMB = "\n".join(
    ["format: optimus.job/1", "run:", "  a0: &a0 [x, x, x, x, x, x, x, x]"]
    + [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 8)]
)

SECTIONS: dict[str, list[Case]] = {
    "Naming a job": [
        named("A name that nothing bears", "paper/strong-3000"),
        named("A model without a cluster", "qwen2.5-vl-72b"),
        named("A cluster without its GPUs", "qwen2.5-vl-72b", "h100"),
        named("A cluster that is not in the catalog", "qwen2.5-vl-72b", "h10:512"),
        named("Half a node too many", "qwen2.5-vl-72b", "h100:508"),
        named("A job file that is not there", "missing.yaml"),
        named("A config.json that is not there", "missing/config.json", "h100:512"),
        named("A paper job on GPUs that its layout does not divide", "paper/D", "h100:96"),
    ],
    "YAML": [
        raw("Brackets that do not close", "format: optimus.job/1\nlayout: {llm: {tp: 8}\nrun: {}\n"),
        raw("A list instead of a mapping", "- format: optimus.job/1\n"),
        raw("Two documents", JOB + "---\nformat: optimus.job/1\n"),
        raw("An empty file", ""),
        job("A key given twice", "  gpus: 512\n", "  gpus: 512\n  gpus: 256\n"),
        job("Not a number", "step_s: 17.9", "step_s: .nan"),
        job("Infinity in disguise", "step_s: 17.9", "step_s: 1e999"),
        job("A number too long", "gpus: 512", "gpus: 51200000000000000000"),
        job("A tag that would run code", "steps: 20000", "steps: !!python/object/apply:os.system [ls]"),
        raw("An alias bomb", BOMB),
        raw("An alias inside its own anchor", "format: optimus.job/1\nrun: &run\n  again: *run\n"),
        raw("An alias without its anchor", "format: optimus.job/1\nrun: *settings\n"),
        raw("Nested too deeply", "format: optimus.job/1\nrun: " + "[" * 40 + "]" * 40 + "\n"),
        raw("More than a mebibyte", "format: optimus.job/1\n" + "# padding\n" * 110_000),
    ],
    "Fields": [
        job("A version we do not know", "optimus.job/1", "optimus.job/2"),
        job("A block misspelt", "workload:", "worklod:"),
        job("A field misspelt", "sequences_per_step", "sequence_per_step"),
        job("A field left out", "  gpus: 512\n", ""),
        job("No value", "gpus: 512", "gpus:"),
        job("Text for a number", "gpus: 512", "gpus: many"),
        job("A fraction of a GPU", "gpus: 512", "gpus: 512.5"),
        job("True is not 1", "gpus: 512", "gpus: true"),
        job("No GPUs", "gpus: 512", "gpus: 0"),
        job("A mapping for a number", "gpus: 512", "gpus: {count: 512}"),
        job("A number for a mapping", "vision: {pp: 1, tp: 1}", "vision: 1"),
        job("A number for a list", "[1, 2]", "2"),
        job("A share above one", "max: 8000}", "max: 8000, text_only_share: 1.2}"),
    ],
    "Model": [
        job("A model misspelt", "use: qwen2.5-vl-72b", "use: qwen2.5-vl-27b"),
        job("Two origins", "use: qwen2.5-vl-72b", "use: qwen2.5-vl-72b\n  hf: config.json"),
        job("No origin", "use: qwen2.5-vl-72b", "name: mine"),
        job("A config.json that is not there", "use: qwen2.5-vl-72b", "hf: ./config.json"),
        job(
            "An unknown module",
            "use: qwen2.5-vl-72b",
            "use: qwen2.5-vl-72b\n  modules: {visual: {train: false}}",
        ),
        job(
            "An unknown way to recompute",
            "use: qwen2.5-vl-72b",
            "use: qwen2.5-vl-72b\n  modules: {vision: {recompute: ful}}",
        ),
        hand("A width left out", "        hidden: 1024\n", ""),
        hand("KV heads that do not divide the heads", "kv_heads: 8", "kv_heads: 12"),
        hand("More active experts than experts", "active: 8", "active: 80"),
        hand(
            "A full layer that does not exist",
            "causal: false",
            "causal: false, window_tokens: 64, full_layers: [7, 24]",
        ),
        hand("A projector that misses the LLM's width", "widths: [2048]", "widths: [4096, 1024]"),
        hand("A seam behind the last layer", "merge: 4}", "merge: 4}\n      feeds: [0, 32]"),
        hand("An encoder called llm", "name: vision", "name: llm"),
        hand(
            "Two encoders of one name",
            "  llm:\n    stack",
            "    - {name: vision, use: vit-3b, projector: {widths: [2048]}}\n  llm:\n    stack",
        ),
        hand(
            "An LLM for an encoder",
            "  llm:\n    stack",
            "    - {name: two, use: gpt-11b, projector: {widths: [2048]}}\n  llm:\n    stack",
        ),
        hand("Experts in parallel, too many", "llm: {}", "llm: {ep: 48}"),
        hand("Experts in parallel, over too few ranks", "llm: {}", "llm: {dp: 1, pp: 16, tp: 4, ep: 8}"),
    ],
    "config.json": [
        config("Not JSON", '{"model_type": "qwen3_vl" "text_config": {}}'),
        config("A key given twice", '{"model_type": "qwen3_vl", "model_type": "qwen3_vl"}'),
        config("Not a number", '{"model_type": "qwen3_vl", "text_config": NaN}'),
        config("A model we do not know", '{"model_type": "mllama"}'),
        config("A language model alone", '{"model_type": "llama", "hidden_size": 4096}'),
        config("A key left out", MINIMAL_CONFIG % '"model_type": "qwen3_vl_text"'),
        config(
            "A width that is text", MINIMAL_CONFIG % '"model_type": "qwen3_vl_text", "hidden_size": "4096"'
        ),
    ],
    "Cluster": [
        job("A cluster misspelt", "use: h100", "use: h1000"),
        job("Half a node too many", "gpus: 512", "gpus: 508"),
        job("More reserve than memory", "gpus: 512", "gpus: 512\n  reserve_gb_per_gpu: 96"),
        job("Curves that were never measured", "gpus: 512", "gpus: 512\n  gpu: {curves: h100_pcie}"),
        job("A link that does not exist", "gpus: 512", "gpus: 512\n  across_nodes: {gb_per_s_per_gpu: 46}"),
    ],
    "Workload": [
        job("An encoder the model does not have", "vision_tokens", "audio_tokens"),
        job("Percentiles in disorder", "p95: 7400", "p95: 1400"),
        job("More image tokens than the sequence holds", "max: 8000", "max: 9000"),
        job("Items too small to count", "max: 8000}", "max: 8000, item: 1}"),
        job("A sequence without end", "sequence_tokens: 8192", "sequence_tokens: 81920000"),
        job("Lengths and percentiles", "max: 8000}", "max: 8000}\n  lengths: lengths.jsonl"),
        lengths("A row longer than the sequence", '{"text": 4710, "vision": [4096, 1610]}'),
        lengths("A row with an unknown module", '{"text": 4710, "visual": [1024]}'),
        lengths("A row without text", '{"vision": [1024]}'),
        lengths("A row with a number for a list", '{"text": 4710, "vision": 1024}'),
        lengths("A row with an empty image", '{"text": 4710, "vision": [0]}'),
        lengths("A row that is cut off", '{"text": 4710, "vision": [1024'),
    ],
    "Layout": [
        job("Ranks that do not make up the GPUs", "dp: 16, pp: 4, tp: 8}\n", "dp: 32, pp: 4, tp: 8}\n"),
        job("Ranks that do not divide the GPUs", "llm: {dp: 16, pp: 4, tp: 8}\n", "llm: {pp: 3}\n"),
        job("TP against the heads", "llm: {dp: 16, pp: 4, tp: 8}\n", "llm: {tp: 128}\n"),
        raw(
            "TP against the KV heads",
            HAND.replace("heads: 32, kv_heads: 8", "heads: 36, kv_heads: 6").replace(
                "llm: {}", "llm: {tp: 4}"
            ),
        ),
        raw(
            "TP against the MLP",
            HAND.replace("mlp: {width: 8192}", "mlp: {width: 8200}").replace("llm: {}", "llm: {tp: 16}"),
        ),
        job("More stages than layers", "llm: {dp: 16, pp: 4, tp: 8}\n", "llm: {pp: 128}\n"),
        job("More chunks than layers", "llm: {dp: 16, pp: 4, tp: 8}\n", "llm: {pp: 8, chunks: 12}\n"),
        job("Encoder PP against the LLM's", "vision: {pp: 1, tp: 1}", "vision: {pp: 8}"),
        job("Encoder TP against the LLM's", "vision: {pp: 1, tp: 1}", "vision: {tp: 16}"),
        job("Expert parallelism without experts", "pp: 4, tp: 8}\n", "pp: 4, tp: 8, ep: 8}\n"),
        job("A batch that DP does not divide", "sequences_per_step: 1024", "sequences_per_step: 1000"),
        job("A microbatch that does not divide the share", "[1, 2]", "[3]"),
        job("No microbatch size", "[1, 2]", "[]"),
        job("Chunks against the microbatches", "sequences_per_step: 1024", "sequences_per_step: 96"),
        job("A limit below what is stated", "[1, 2]}", "[1, 2], max_pp: 2}"),
        job("A module that does not exist", "  vision: {pp: 1, tp: 1}", "  audio: {pp: 1, tp: 1}"),
        job("An axis that does not exist", "vision: {pp: 1, tp: 1}", "vision: {pp: 1, vpp: 2}"),
        job("A system that does not exist", "[1, 2]}", "[1, 2], allow: [fill, ballanced]}"),
    ],
    "Today": [
        job("A place that does not exist", "vision: stage0", "vision: stage1"),
        job("A layout for other GPUs", "pp: 4, tp: 8, chunks: 5}", "pp: 2, tp: 8, chunks: 5}"),
        job("More memory than the GPU has", "peak_memory_gb: 71", "peak_memory_gb: 91"),
        job("A step of no time", "step_s: 17.9", "step_s: 0"),
    ],
    "Asking why": [
        why("No layout"),
        why("A layout of no module", "pp8"),
        why("A module that the plan does not have", "audio=tp2"),
        why("An axis that does not exist", "llm=vpp2"),
        why("A module twice", "llm=pp2", "llm=tp2"),
        why("More images than the plan file lists", "llm=tp2", **crowded()),
        why("A plan made with a profile", "llm=tp2", bound_to={"profile": {"kernels": "sha256:0"}}),
        why("A plan that does not say what it is for", "llm=tp2", bound_to={"profile": {"kernels": []}}),
        why("A plan without its assumptions", "llm=tp2", notes={}),
        Case(
            title="A cluster without a job",
            call=WhyCommand(plan=Path("a.plan.json"), layouts=("llm=tp2",), on="h100:8"),
        ),
    ],
    "Sweeping": [
        sweep("No range"),
        sweep("Two ranges", gpus=("2", "4"), batch=("8",)),
        sweep("A word for a number", gpus=("two",)),
        sweep("No stages", pp=("0",)),
        sweep("A picture of another kind", gpus=("2",), output=Path("sweep.png")),
        sweep("A strategy misspelt", gpus=("2",), strategy="optimal"),
        sweep("A system without a plan", gpus=("2",), strategy="separate-gpus"),
        sweep("A system misspelt", gpus=("2",), system=("stage1",)),
    ],
}


def document() -> str:
    """All messages in one text to be read from top to bottom."""
    lines = [
        "Every message a user can get for a mistake in a job. Regenerate: python tests/regenerate_errors.py"
    ]
    for section, cases in SECTIONS.items():
        lines += ["", "", section, "=" * len(section)]
        for case in cases:
            lines += ["", case.title, case.message()]
    return "\n".join(lines) + "\n"
