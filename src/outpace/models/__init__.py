"""Finding and loading models: the embedded default, local folders, GGUF files, the hub, and models loaded elsewhere.

Importing this package imports neither torch nor transformers; :func:`load` does.

>>> from outpace.models import load
>>> model = load("smollm2")                # doctest: +SKIP
>>> model.info["dtype"], model.info["device"]  # doctest: +SKIP
('bfloat16', 'cpu')
"""

from outpace.models.base import ChatTokenizer, Message, Model
from outpace.models.loading import load, load_from, load_tokenizer

__all__ = ["ChatTokenizer", "Message", "Model", "load", "load_from", "load_tokenizer"]
