"""Trains unmodified transformers models in a filled pipeline: splitting, inputs, loss, weights in and out.

    model = load_model(folder)  # on meta
    split = split_model(model, stages=[14, 14], blocks={"vision": [16, 16]})
    parts = [split.stages[0], *split.encoders["vision"]]  # of this rank
    load_weights(model, parts, folder)
    schedule = FillSchedule(
        parts[:1],
        split.encoders,
        plan,
        loss_fn=causal_lm_loss,
        tied=split.tied(parts),
        shapes=split.shapes,
    )
    batches = [split.inputs(output) for output in processor_outputs]
    args, kwargs = step_arguments(batches)
    schedule.step(*args, **kwargs, num_items=count_labels(batches))

Adapters are in `optimus.hf.lora`, which imports peft.
"""

from optimus.hf.filled_checkpoints import FilledCheckpoints
from optimus.hf.filled_model import FilledModel
from optimus.hf.inputs import MicrobatchInputs, count_labels, pack_documents, step_arguments
from optimus.hf.load import load_model
from optimus.hf.loss import causal_lm_loss
from optimus.hf.split import SplitModel, split_model
from optimus.hf.training import checkpoint_activations, freeze, train_only
from optimus.hf.weights import load_weights, save_weights, save_weights_distributed

__all__ = [
    "FilledCheckpoints",
    "FilledModel",
    "MicrobatchInputs",
    "SplitModel",
    "causal_lm_loss",
    "checkpoint_activations",
    "count_labels",
    "freeze",
    "load_model",
    "load_weights",
    "pack_documents",
    "save_weights",
    "save_weights_distributed",
    "split_model",
    "step_arguments",
    "train_only",
]
