"""Downloads from the hub are stages, and the hub client prints nothing of its own."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import tqdm as hub_tqdm  # type: ignore[attr-defined]

from outpace.core.progress import Stage, reporting
from outpace.models.hub_progress import HubBar


class Notes:
    """Notes what is reported."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float, float | None]] = []

    def began(self, one: Stage) -> None:
        self.told.append(("began", one.name, one.done, one.total))

    def moved(self, one: Stage) -> None:
        self.told.append(("moved", one.name, one.done, one.total))

    def ended(self, one: Stage) -> None:
        self.told.append(("ended", one.name, one.done, one.total))


def test_bytes_are_reported_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    with reporting(notes), HubBar(total=100, unit="B", desc="model.safetensors: ", unit_scale=True, initial=20) as bar:
        bar.update(30)
        bar.update(50)
    name = "downloading model.safetensors"
    assert notes.told == [
        ("began", name, 0, 100),
        ("moved", name, 50, 100),
        ("moved", name, 100, 100),
        ("ended", name, 100, 100),
    ]
    with reporting(notes), HubBar(["a", "b"], desc="files") as files:  # counts files, not bytes
        assert list(files) == ["a", "b"]
    assert len(notes.told) == 4
    assert capsys.readouterr() == ("", "")
    assert not issubclass(HubBar, hub_tqdm), "the hub client's switch for its own bars does not reach it"
