"""``outpace generate --ray IN.jsonl OUT.jsonl``: an offline batch over workers of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.interrupt import Interrupted, terminable
from outpace.cli.output import err
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus
from outpace.core.progress import stage
from outpace.integrations.ray.batch_journal import Journal
from outpace.integrations.ray.batch_rows import Row, read_rows
from outpace.integrations.ray.cluster import check_fits, connected, require_ray

if TYPE_CHECKING:
    from outpace.integrations.ray.batch_answers import Answers

_NAMED = 5
"""Rows without an answer that are named on standard error; the output has all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What every worker loads, and how it answers."""

    machine: Machine
    drafting: Drafting
    settings: dict[str, dict[str, Any]]
    options: Mapping[str, Any]
    system: str | None
    raw: bool

    def open_answers(self) -> Answers:
        """Load the model; called once in a worker's process."""
        from outpace.integrations.ray.batch_answers import Answers

        model, [method] = self.drafting.build(self.machine, self.settings)
        return Answers(model, method, self.options, self.system, self.raw)

    def about(self, source: bytes) -> dict[str, Any]:
        """What the answers depend on."""
        return {
            "input": sha256(source).hexdigest(),
            "model": self.machine.model,
            "precision": [self.machine.dtype, self.machine.kv_dtype],
            "drafting": repr([self.settings, asdict(self.drafting)]),
            "sampling": repr(sorted(self.options.items())),
            "template": [self.system, self.raw],
        }


def generate_batch(batch: Batch, source: Path, output: Path, workers: int, *, resume: bool) -> int:
    """Answer all rows of ``source``. Returns how many have no answer.

    Raises BadInput before anything runs, and Interrupted, with what remains, at Ctrl-C or SIGTERM.
    """
    from outpace.integrations.ray.batch_run import RayPass, block_size, run_batch

    rows = read_rows(source)
    _check_output(source, output)
    require_ray("outpace generate --ray")
    threads = batch.machine.threads or max(1, usable_cpus() // workers)
    check_fits(workers, threads)
    own = replace(batch, machine=replace(batch.machine, threads=threads))
    block = block_size(len(rows), workers)
    gpu = int((batch.machine.device or "").startswith("cuda"))
    with Journal(output, batch.about(source.read_bytes()), resume=resume) as journal:
        try:
            with terminable(), stage("answering", total=len(rows), unit="rows") as at, connected():
                run_batch(rows, journal, RayPass(own.open_answers, workers, threads, gpu), block, at.move)
        except KeyboardInterrupt:
            raise Interrupted.kept(f"{len(journal.done)} of {len(rows)} rows", journal.path) from None
        journal.finish()
    _tell(rows, journal, output)
    return len(journal.failed)


def _check_output(source: Path, output: Path) -> None:
    if not output.parent.is_dir():
        raise BadInput(f"{output}: there is no folder {output.parent}")
    if source.resolve() == output.resolve():
        raise BadInput(f"{output} is the input; name another output")


def _tell(rows: list[Row], journal: Journal, output: Path) -> None:
    said, failed = err(), journal.failed
    for line in sorted(failed)[:_NAMED]:
        said.print(f"line {line}: {failed[line]}", soft_wrap=True, markup=False)
    if len(failed) > _NAMED:
        said.print(f"... and {len(failed) - _NAMED} more rows without an answer", markup=False)
    lossy = "" if journal.lossy is None else f", lossy: {journal.lossy}"
    answered = f"{len(rows) - len(failed)} of {len(rows)} rows answered"
    said.print(f"{answered}: {output}{lossy}", soft_wrap=True, markup=False)
