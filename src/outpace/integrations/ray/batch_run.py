"""An offline batch: passes over the rows that have no result yet, until each has one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import BadInput, shortened
from outpace.integrations.ray.batch_answers import REFUSAL, Answerer, BatchWorker
from outpace.integrations.ray.batch_journal import Journal
from outpace.integrations.ray.batch_rows import Row

Pass = Callable[[Sequence[Row], int], Iterable[Sequence[dict[str, Any]]]]
"""Computes rows in blocks of that many, and gives the results of each block as it ends; blocks may be missing."""
_RETRIES = 3
"""Workers that one block may lose before it is given up in a pass."""
_LEAST_ROWS, _MOST_ROWS = 8, 32
LOST = "the worker that computed this row died every time"


def block_size(rows: int, workers: int) -> int:
    """Rows that a worker gets at once: enough to be decoded together, and few enough that all workers end together.

    So many are computed again where a worker dies.
    """
    return min(_MOST_ROWS, max(_LEAST_ROWS, -(-rows // (4 * workers))))


def run_batch(rows: Sequence[Row], journal: Journal, compute: Pass, block: int, moved: Callable[[int], object]) -> None:
    """Fill the journal with a result for every row. ``moved`` is told how many there are.

    Blocks that a pass gave up are computed again row by row, so that the row that brings workers down is the only one
    that is lost, and is named.
    """
    journal.add(row.failed(row.error) for row in rows if row.error is not None and row.line not in journal.done)
    moved(len(journal.done))
    for size in (block, 1):
        left = [row for row in rows if row.line not in journal.done]
        if not left:
            return
        for results in compute(left, size):
            journal.add(results)
            moved(len(journal.done))
    journal.add(row.failed(LOST) for row in rows if row.line not in journal.done)
    moved(len(journal.done))


@dataclass(frozen=True, slots=True)
class RayPass:
    """A pass with Ray Data: ``workers`` processes of so many CPUs, each of which loads the model once."""

    open_answers: Callable[[], Answerer]
    workers: int
    cpus: int
    gpus: int = 0

    def __call__(self, rows: Sequence[Row], block: int) -> Iterator[list[dict[str, Any]]]:
        """The results of each block. Raises BadInput where the workers cannot load the model."""
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # what is missing is computed in the next pass
        context.print_on_execution_start = False
        items = [{"row": json.dumps(row.as_dict())} for row in rows]
        blocks = -(-len(items) // block)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the last two have no other place yet
            data = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
                BatchWorker,
                fn_constructor_args=(self.open_answers,),
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=min(self.workers, blocks)),
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                max_restarts=-1,
                max_task_retries=_RETRIES,
            )
        for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
            results = [json.loads(text) for text in batch["result"]]
            if REFUSAL in results[0]:
                raise BadInput(f"the workers do not start: {shortened(results[0][REFUSAL])}")
            yield results
