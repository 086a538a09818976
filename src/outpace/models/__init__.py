"""Finding weights and tokenizers: the embedded model, folders, GGUF files and the hub."""
