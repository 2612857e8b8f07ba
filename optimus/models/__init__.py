"""What runs: encoders and LLMs cut into segments, behind the phases protocol."""
