"""What one way to call a library is.

Deals in regions and the text that computes one. Knows nothing about whether it is fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from qimeng.device import Device
from qimeng.graph.opgraph import Node
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region
from qimeng.program.implementation import Implementation

LANGUAGE = "library"


class NotOffered(Exception):
    """The library does not compute this region; the message says why, with the numbers."""


class LibraryCall(ABC):
    """One way to have a region computed by a library.

    Attributes:
        name: option of the action `library`.
    """

    name: str

    @abstractmethod
    def check(self, region: Region, device: Device) -> None:
        """Raise `NotOffered` where it does not compute `region` on `device`."""

    @abstractmethod
    def write(self, region: Region, prefix: str) -> Implementation:
        """The implementation of a region; top-level names in its text begin with `prefix`.

        Raises:
            NotOffered: there is no text for such a region. What depends on the device was checked before.
        """


def heavy(region: Region) -> list[Node]:
    """The operators of `region` but for views."""
    return [n for n in region.ops if n.packet not in VIEWS]


def inputs_of(region: Region) -> list[str]:
    """Names of the inputs, as `Region.function` names them."""
    return [f"x{i}" for i in range(len(region.inputs))]


__all__ = ["LANGUAGE", "LibraryCall", "NotOffered", "heavy", "inputs_of"]
