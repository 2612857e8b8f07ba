"""Names of our own layers' parameters in transformers' models, as data: one file a family."""
