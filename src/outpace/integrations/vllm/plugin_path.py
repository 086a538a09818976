"""Outpace for an interpreter in which it is not installed: one folder for ``PYTHONPATH``, with its entry points.

vLLM's environment has torch, transformers and numpy of its own, and the plug-in needs nothing else. So the folder
holds a link to this package, and the metadata by which vLLM finds the plug-in; no other package of this environment
comes with them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from outpace.core import version
from outpace.core.errors import BadInput
from outpace.core.files import atomic_folder
from outpace.models.gguf_cache import cache_dir

ENTRY_POINTS = "[vllm.general_plugins]\noutpace = outpace.integrations.vllm:register\n"


def plugin_path() -> Path:
    """The folder, made where there is none. Raises BadInput for a cache that cannot be written."""
    package, number = Path(version.__file__).parents[1], version.__version__
    digest = hashlib.sha256(str(package).encode()).hexdigest()[:16]
    folder = cache_dir() / "vllm" / f"plugin-{number}-{digest}"
    if (folder / "outpace").exists():
        return folder
    try:
        with atomic_folder(folder) as unfinished:
            about = unfinished / f"outpace-{number}.dist-info"
            about.mkdir()
            about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: outpace\nVersion: {number}\n")
            about.joinpath("entry_points.txt").write_text(ENTRY_POINTS)
        # Last, and not in the folder that becomes whole above: that sets the modes of all it holds, the package's too.
        (folder / "outpace").symlink_to(package, target_is_directory=True)
    except OSError as error:
        if not (folder / "outpace").exists():  # another process may have been quicker
            raise BadInput(f"cannot write '{folder}': {error.strerror or error}; set OUTPACE_CACHE") from error
    return folder
