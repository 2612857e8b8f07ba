"""Trains unmodified transformers models in a filled pipeline: splitting, inputs, loss, weights in and out.

    model = load_model(folder)  # on meta
    split = split_model(model, stages=[14, 14], blocks={"vision": [16, 16]})
    parts = [split.stages[0], *split.encoders["vision"]]  # of this rank
    load_weights(model, parts, folder)
    batch = split.inputs(processor_output)

Adapters are in `optimus.hf.lora`, which imports peft.
"""

from optimus.hf.inputs import EncoderInputs, MicrobatchInputs, count_labels, pack_documents
from optimus.hf.load import load_model
from optimus.hf.loss import CausalLmLoss
from optimus.hf.split import SplitModel, split_model
from optimus.hf.training import checkpoint_activations, freeze, train_only
from optimus.hf.weights import load_weights, save_weights, save_weights_distributed

__all__ = [
    "CausalLmLoss",
    "EncoderInputs",
    "MicrobatchInputs",
    "SplitModel",
    "checkpoint_activations",
    "count_labels",
    "freeze",
    "load_model",
    "load_weights",
    "pack_documents",
    "save_weights",
    "save_weights_distributed",
    "split_model",
    "train_only",
]
