"""One of the processes that test_processes.py starts: FOLDER, the step at which the second one dies, and "resume"."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from outpace.core.errors import BadInput
from outpace.training.processes import started_together
from test_trainer import made, weights


def main() -> int:
    folder, dies_at, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
    processes = started_together("cpu")
    trainer = made(folder, processes=processes, save_every=0.0)
    if resume:
        assert trainer.resume()

    def watch(progress: Any, share: float) -> None:
        if processes.rank == 1 and progress.step == dies_at:
            os._exit(9)

    try:
        trainer.run(watch)
    except BadInput as error:
        print(error, flush=True)
        return 2
    torch.save({"weights": weights(trainer), "tokens": trainer.progress.tokens}, folder / f"rank{processes.rank}.pt")
    processes.wait()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a process group that has lost a member need not be taken down
