"""Encoders and LLMs cut into segments, behind the phases protocol of `chunk`."""
