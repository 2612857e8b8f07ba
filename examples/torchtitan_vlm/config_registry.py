"""The runs that `torchtitan.train --module torchtitan_vlm --config NAME` can start."""

from __future__ import annotations

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from optimus import StageInputs
from optimus.integrations.torchtitan import Encoder, fill_pipeline

from .data import NoTokenizer, SyntheticImages
from .model import DIM, VOCAB, vlm_config


def image_shapes(block: int, inputs: StageInputs) -> list[tuple[int, int]]:
    """Returns the shape of a block's output: a row for every patch."""
    return [(inputs.args[0].shape[0], DIM)]


def small(encoder_pp: int = 1) -> Trainer.Config:
    """Returns a run in which the encoder has one stage, and so as many replicas as there are ranks."""
    images = Encoder(blocks="vision", inputs=["pixel_values"], pp=encoder_pp, shapes=image_shapes)
    return Trainer.Config(
        model_spec=ModelSpec(
            name="torchtitan_vlm",
            flavor="small",
            model=vlm_config(),
            parallelize_fn=parallelize_llama,
            pipelining_fn=fill_pipeline({"images": images}),
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        tokenizer=NoTokenizer.Config(),
        dataloader=SyntheticImages.Config(),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=32,
            steps=6,
            max_norm=0.5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", pipeline_parallel_microbatch_size=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=0),
    )


def small_encoder_pp2() -> Trainer.Config:
    """Returns the same run with an encoder of two stages."""
    return small(encoder_pp=2)
