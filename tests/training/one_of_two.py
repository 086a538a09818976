"""One of the processes that test_processes.py starts: FOLDER, the step at which the second one dies, and words.

"resume": go on; "shard": share out the optimiser; "seldom": save at the end alone.
"""

import os
import sys
from pathlib import Path

import torch

from outpace.core.errors import BadInput
from outpace.training.processes import started_together
from outpace.training.run import train_to_the_end
from outpace.training.training_progress import TrainingProgress
from test_trainer import made


def main() -> int:
    folder, dies_at, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    processes = started_together("cpu")
    trainer = made(folder, processes=processes, save_every=1e9 if "seldom" in words else 0.0, shard="shard" in words)
    if "resume" in words:
        assert trainer.resume()

    def report(now: TrainingProgress) -> None:
        if processes.rank == 1 and now.done == dies_at and now.doing != "first step":
            os._exit(9)

    try:
        train_to_the_end(trainer, folder, report)
    except BadInput as error:
        print(error, flush=True)
        return 2
    copies = sum(copy.numel() for _, copy in trainer.optimiser.copies)
    found = {"weights": dict(zip("abcdef", trainer.optimiser.values(), strict=False)), "copies": copies}
    torch.save(found | {"tokens": trainer.progress.tokens}, folder / f"rank{processes.rank}.pt")
    processes.wait()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a process group that has lost a member need not be taken down
