"""A perturbed cost model made true: the job and assumptions whose own prices are those of the model."""

from __future__ import annotations

from dataclasses import replace

from optimus.cost.assumptions import Assumptions
from optimus.job.job import Job
from optimus.job.workload import PackedSequence
from optimus.sensitivity.perturb import PerturbedCostModel


def replanned(job: Job, assumptions: Assumptions, model: PerturbedCostModel) -> tuple[Job, Assumptions]:
    """Encoders that compute worse than the LLM get more tokens, slower TP links hide less than nothing."""
    link = job.cluster.between_nodes
    nic = link.bandwidth_bytes_per_s * model.dp_bandwidth
    cluster = replace(
        job.cluster,
        between_nodes=replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * model.pp_bandwidth),
    )
    images = model.image_tokens * model.llm_efficiency / model.encoder_efficiency
    sequences = tuple(_scaled(sequence, images) for sequence in job.workload.sequences)
    workload = replace(job.workload, sequences=sequences)
    exposed = (1 - assumptions.tp_overlapped_share) * (1 - model.tp_overlapped) / model.tp_bandwidth
    return replace(job, cluster=cluster, workload=workload), replace(
        assumptions,
        efficiency=assumptions.efficiency * model.llm_efficiency,
        residence_slowdown=model.slowdown,
        launch_s=model.launch_s,
        tp_overlapped_share=1 - exposed,
        nic_gather_bytes_per_s=nic,
        nic_reduce_bytes_per_s=nic,
    )


def _scaled(sequence: PackedSequence, factor: float) -> PackedSequence:
    """Larger or smaller items, and as much less or more text."""
    items = tuple((name, tuple(round(n * factor) for n in lengths)) for name, lengths in sequence.items)
    return PackedSequence(text=sequence.tokens - sum(sum(n) for _, n in items), items=items)
