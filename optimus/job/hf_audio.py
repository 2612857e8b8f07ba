"""Reads audio encoders of a config.json: Whisper's layers behind convolutions."""

from __future__ import annotations

from dataclasses import replace

from optimus.job.attention import Attention
from optimus.job.hf_file import HfConfig
from optimus.job.model import Encoder, Llm, Mlp, Projector, Stack

MEL_REDUCTION = 8  # of Qwen3-Omni's three convolutions of stride 2


def read_qwen2_audio(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2-Audio's: learned positions, average of two tokens, one linear layer."""
    audio = config.inner("audio_config")
    stack = _stack(audio)
    projector = Projector(widths=(llm.stack.hidden,), merge=2, concatenates=False)
    return _encoder(audio, stack, projector, positions=audio.count("max_source_positions"))


def read_qwen2_5_omni(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2.5-Omni's: sinusoids, windows of `n_window` tokens, average of two tokens."""
    audio = config.inner("audio_config")
    stack = _stack(audio, window_tokens=audio.count("n_window"))
    projector = Projector(widths=(audio.count("output_dim"),), merge=2, concatenates=False)
    return _encoder(audio, stack, projector)


def read_qwen3_omni(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen3-Omni's: three convolutions and a linear layer before the tower, two behind it."""
    audio = config.inner("audio_config")
    stack = _stack(audio)
    mel = -(-audio.count("num_mel_bins") // MEL_REDUCTION)
    audio.derived.append("convolutions of the audio encoder are left out, but for their linear layer")
    projector = Projector(widths=(stack.hidden, audio.count("output_dim")))
    encoder = _encoder(audio, stack, projector, inputs=audio.count("downsample_hidden_size") * mel)
    return replace(encoder, patch_bias=False)


def _stack(audio: HfConfig, window_tokens: int | None = None) -> Stack:
    hidden, heads = audio.count("d_model"), audio.count("encoder_attention_heads")
    if hidden % heads:
        problem = f"is not a divisor of d_model = {hidden}"
        raise audio["encoder_attention_heads"].error(problem, "correct the file")
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        bias=True,
        causal=False,
        window_tokens=window_tokens,
    )
    activation = audio.read_or("gelu", str, "activation_function")
    mlp = Mlp(width=audio.count("encoder_ffn_dim"), gated=False, bias=True, activation=activation)
    layers = audio.count("encoder_layers")
    return Stack(hidden=hidden, layers=layers, attention=attention, mlp=mlp, norm="layernorm", norm_eps=1e-5)


def _encoder(
    audio: HfConfig, stack: Stack, projector: Projector, *, positions: int = 0, inputs: int | None = None
) -> Encoder:
    """Returns an encoder behind two convolutions of width 3, which count as inputs of its tokens."""
    return Encoder(
        name="audio",
        modality="audio",
        stack=stack,
        projector=projector,
        patch_inputs=inputs or 3 * (audio.count("num_mel_bins") + stack.hidden),
        positions=positions,
        source=f"{audio.file} (audio_config)",
    )
