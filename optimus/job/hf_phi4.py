"""Reads the encoders of Phi-4-multimodal of a config.json: SigLIP by crops, and a conformer."""

from __future__ import annotations

from dataclasses import replace

from optimus.job.attention import Attention
from optimus.job.hf_file import HfConfig
from optimus.job.hf_siglip import read_tower
from optimus.job.hf_towers import count_layers_used, count_patches
from optimus.job.model import Encoder, Linear, Llm, Mlp, Projector, Stack

AUDIO_SPAN = 500  # tokens that attend to each other: the class cuts longer sounds
POOLED = 4  # patches whose average is a token
CONFORMER_NOTE = (
    "of the convolutions before the audio encoder only the linear layer is priced (the others are a tenth of "
    "the encoder's FLOPs in the released size); matrices of its layers besides attention and the first MLP "
    "run replicated over a TP group"
)


def read_phi4_vision(config: HfConfig, llm: Llm) -> Encoder:
    """Reads the tower, which sees crops one by one: SigLIP up to `feature_layer`, the average of 2 x 2."""
    vision, width = config.inner("vision_config"), llm.stack.hidden
    projector = Projector(widths=(width, width), merge=POOLED, concatenates=False)
    encoder = read_tower(config, None, projector)
    layers = count_layers_used(vision, encoder.stack.layers, "feature_layer")
    return replace(
        encoder,
        stack=replace(encoder.stack, layers=layers),
        final_norm=False,
        tokens_per_item=max(1, count_patches(vision) // POOLED),
    )


def read_phi4_audio(config: HfConfig, llm: Llm) -> Encoder:
    """Reads the conformer: two gated MLPs, attention and a convolution in every layer."""
    audio, width = config.inner("audio_config"), llm.stack.hidden
    audio.derived.append(CONFORMER_NOTE)
    projector = Projector(widths=(width, width), merge=audio.count("downsample_rate"))
    return Encoder(
        name="audio",
        modality="audio",
        stack=_conformer(audio),
        projector=projector,
        patch_inputs=audio.count("nemo_conv_channels") * _count_mel_rows(audio),
        source=f"{audio.file} (audio_config)",
        final_norm=False,
    )


def _conformer(audio: HfConfig) -> Stack:
    hidden, heads = audio.count("hidden_size"), audio.count("num_attention_heads")
    if hidden % heads:
        problem = f"is not a divisor of hidden_size = {hidden}"
        raise audio["num_attention_heads"].error(problem, "correct the file", heads)
    mlp = Mlp(
        width=audio.count("intermediate_size"),
        bias=True,
        activation=audio.read(str, "activation"),
    )
    for key in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if audio.count(key) != hidden:
            problem = f"is not hidden_size = {hidden}: transformers' own layer cannot run"
            raise audio[key].error(problem, f"state {hidden}", audio.count(key))
    deep = hidden * audio.count("depthwise_multiplier")
    pairs = (
        (hidden, mlp.up_width),
        (mlp.width, hidden),
        (hidden, 2 * hidden),
        (deep, hidden),
        (hidden, hidden),
    )
    convolved = deep * (audio.count("kernel_size") + 1)
    return Stack(
        hidden=hidden,
        layers=audio.count("num_blocks"),
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            bias=True,
            causal=False,
            window_tokens=AUDIO_SPAN,
        ),
        mlp=mlp,
        norm="layernorm",
        norm_eps=1e-5,
        linears=tuple(Linear(inputs=inputs, outputs=outputs) for inputs, outputs in pairs),
        # Three norms, biases of the second MLP, of pointwise convolutions and of their gate.
        extra_parameters=3 * 2 * hidden + mlp.up_width + hidden + (2 + 2 + 1 + 1) * hidden + convolved,
    )


def _count_mel_rows(audio: HfConfig) -> int:
    """Returns the rows of a spectrogram that are left behind convolutions of stride 2."""
    rows, reduction = audio.count("input_size"), audio.count("time_reduction")
    while reduction > 1:
        rows, reduction = (rows + 1) // 2, reduction // 2
    return rows
