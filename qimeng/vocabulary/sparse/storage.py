"""The kind of action that stores the single elements of a weight in another form.

Deals in names of forms. Knows nothing about kernels.
"""

from __future__ import annotations

from qimeng.actions import ScheduleKind
from qimeng.vocabulary.sparse.schedules import STORAGES


class StorageForm(ScheduleKind):
    """Store the single elements of a weight in another form, and share them among programs as it suggests.

    args: ``csr`` (by columns of the result, each as long as it is), ``balanced`` (the same number of elements for each
    program, whatever columns they are of: for lengths that differ much), ``ell`` (every column padded to the longest
    one, so that neighbours are loaded together: for lengths that are nearly equal), ``csc`` (by depth in each tile of
    columns, multiplied on the tensor cores: for many rows, and more elements).
    rewrite: ``for e in range(first[c], first[c + 1]): x[at[e]] * v[e]`` -> ``for e: x[at[e, c]] * v[e, c]``
    """

    name = "storage"
    family = "sparse"
    options = STORAGES


__all__ = ["StorageForm"]
