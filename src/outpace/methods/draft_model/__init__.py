"""Methods that draft with a smaller language model."""
