"""The Python interpreter that runs vLLM: the environment of ``make vllm``, the running one, or the one that is named.

vLLM asks for versions of torch and transformers of its own, so it usually lives in another environment than outpace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from outpace.bench.peers.processes import VLLM_PYTHON
from outpace.core.errors import BadInput
from outpace.core.files import home_expanded
from outpace.integrations.vllm.versions import REQUIREMENT, check_version

INSTALL = f"install it (pip install '{REQUIREMENT}'; for a CPU: make vllm) or name its interpreter: --vllm-python PATH"
_PATIENCE = 60  # seconds for an interpreter to answer
_ASK = """
import importlib.util, json, pathlib, re
found = importlib.util.find_spec("vllm")
version = None
if found is not None and found.origin:
    file = pathlib.Path(found.origin).parent / "_version.py"
    match = re.search(r"^__version__ = .*['\\"]([0-9][^'\\"]*)['\\"]", file.read_text() if file.is_file() else "", re.M)
    version = match[1] if match else "of an unknown version"
print(json.dumps({"vllm": version, "suffix": importlib.util.find_spec("arctic_inference") is not None}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """``path`` of the interpreter; ``version`` of its vLLM, None where it has none. ``suffix``: whether it has the
    package that vLLM's suffix decoding needs."""

    path: str
    version: str | None
    suffix: bool = False


def find_interpreter(named: str | None, *, must_have_vllm: bool = True) -> Interpreter:
    """The interpreter that vLLM is started with.

    ``named``: as --vllm-python gives it. ``must_have_vllm``: False where the command is only printed; then an
    interpreter without vLLM will do, unless it was named. Raises BadInput for none, and for a version of vLLM that is
    not supported.
    """
    if named is not None:
        path = home_expanded(named)
        if not path.is_file():
            raise BadInput(f"--vllm-python: there is no file {named}")
        found = _asked(path)
        if found is None:
            raise BadInput(f"--vllm-python: {named} does not run as a Python interpreter")
        if found.version is None:
            raise BadInput(f"--vllm-python: {named} has no vLLM; {INSTALL}")
        check_version(found.version, named)
        return found
    running = Path(sys.executable)
    for path in (*_made_by_make(), running):
        found = _asked(path)
        if found is not None and found.version is not None:
            check_version(found.version, str(path))
            return found
    if must_have_vllm:
        raise BadInput(f"vLLM is not installed; {INSTALL}")
    return Interpreter(str(running), None)


def _made_by_make() -> list[Path]:
    """The interpreter of ``make vllm``, beside the current folder or in outpace's checkout."""
    checkout = Path(__file__).resolve().parents[4]
    places = dict.fromkeys((VLLM_PYTHON.absolute(), checkout / VLLM_PYTHON))
    return [path for path in places if path.is_file()]


def _asked(path: Path) -> Interpreter | None:
    """What an interpreter has, without importing vLLM, which would take half a minute. None: this is no interpreter."""
    try:
        ran = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_PATIENCE, check=True)
        found = json.loads(ran.stdout)
        # Not resolved: an environment's interpreter is a link, and the place of the link counts.
        return Interpreter(str(path.absolute()), found["vllm"], bool(found["suffix"]))
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        return None
