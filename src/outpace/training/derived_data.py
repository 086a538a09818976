"""DerivedData: training data of which some batches are made anew, with what the head wrote or drafted itself."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.heads.base import Batch, Head, Teacher
from outpace.targets.base import Target
from outpace.training.dataset import TrainingData


class DerivedData:
    """``data``, and what a ``share`` of its batches is made anew with. What is held out stays as it is.

    Those who derive from it write ``train``.
    """

    def __init__(self, data: TrainingData, head: Head, teacher: Teacher, target: Target, share: float) -> None:
        self.data, self.head, self.teacher, self.target, self.share = data, head, teacher, target, share

    @property
    def cut(self) -> list[int]:
        return self.data.cut

    @property
    def reading(self) -> float:
        return self.data.reading

    def answer_tokens(self) -> int:
        return self.data.answer_tokens()

    def held_out(self) -> Iterator[Batch]:
        return self.data.held_out()

    def all_held_out(self) -> Iterator[Batch]:
        return self.data.all_held_out()
