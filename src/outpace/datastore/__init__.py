"""Datastores: a tokenised corpus on disk, and the places where any context occurred in it.

``outpace datastore build FILES... --model M --out PATH`` makes one; ``rest`` and ``sam`` copy from it.

>>> store = Datastore.of([[1, 2, 3, 4], [2, 3, 5]])
>>> found = store.find([9, 2, 3])
>>> found.length, found.count, store.continuations(found, 8, 2)
(2, 2, [[4], [5]])
"""

from outpace.datastore.build import build_datastore
from outpace.datastore.store import Datastore, Found, open_datastore

__all__ = ["Datastore", "Found", "build_datastore", "open_datastore"]
