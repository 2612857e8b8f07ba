"""A small vision-language model of torchtitan's own parts, trained with a filled pipeline."""
