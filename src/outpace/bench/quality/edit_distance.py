"""Edit distance between token sequences."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Fewest insertions, deletions and substitutions of tokens that turn ``one`` into ``other``.

    Bit-parallel (Myers 1999; Hyyrö 2003): a column of the table is one integer, so that it takes
    O(len(other)) operations on integers of len(one) bits.
    """
    if not one:
        return len(other)
    every = (1 << len(one)) - 1
    last = 1 << (len(one) - 1)
    places: dict[int, int] = {}
    for place, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << place
    up, down, distance = every, 0, len(one)  # where the column rises and falls by one
    for token in other:
        equal = places.get(token, 0)
        vertical = equal | down
        horizontal = (((equal & up) + up) ^ up) | equal
        rises = down | (~(horizontal | up) & every)
        falls = up & horizontal
        distance += bool(rises & last) - bool(falls & last)
        rises = rises << 1 | 1
        up = (falls << 1 | ~(vertical | rises)) & every
        down = rises & vertical & every
    return distance
