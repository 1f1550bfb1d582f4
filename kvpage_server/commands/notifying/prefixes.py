"""Values by prefix, in a radix tree: which prefixes a name begins with is found in one pass over the name.

Cost: O(length of the name) to find, O(length of the prefix) to set and remove, however many prefixes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Node(Generic[T]):
    """A node of the tree. Its prefix is that of the node above and `label`; the first bytes of labels below differ."""

    __slots__ = ("below", "label", "value")

    def __init__(self, label: bytes) -> None:
        self.label = label
        self.value: T | None = None  # of the prefix that ends here
        self.below: dict[int, _Node[T]] = {}  # by the first byte of the label


class Prefixes(Generic[T]):
    """Prefixes, each with a value that is not None. The empty prefix is one of every name."""

    def __init__(self) -> None:
        self._root = _Node[T](b"")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, prefix: bytes) -> T | None:
        """The value of a prefix, or None."""
        node = self._path(prefix)[-1]
        return node.value if node is not None else None

    def set(self, prefix: bytes, value: T) -> None:
        """Set the value of a prefix."""
        node, at = self._root, 0
        while at < len(prefix):
            child = node.below.get(prefix[at])
            if child is None:
                child = node.below[prefix[at]] = _Node(prefix[at:])
            common = _common(child.label, prefix[at : at + len(child.label)])
            if common < len(child.label):
                child = node.below[prefix[at]] = _divided(child, common)
            node, at = child, at + common
        self._count += node.value is None
        node.value = value

    def remove(self, prefix: bytes) -> None:
        """Remove a prefix. Raises KeyError if it is not there."""
        *above, node = self._path(prefix)
        if node is None or node.value is None:
            raise KeyError(prefix)
        node.value = None
        self._count -= 1
        for _ in range(2):  # a node above may have been there only to divide two labels
            parent = above.pop() if above else None
            if parent is not None:
                _fold(parent, node)
                node = parent

    def of(self, name: bytes, longer_than: int = -1) -> Iterator[T]:
        """The values of the prefixes of a name, the shortest first, that have more than so many bytes."""
        node, at = self._root, 0
        while True:
            if node.value is not None and at > longer_than:
                yield node.value
            child = node.below.get(name[at]) if at < len(name) else None
            if child is None or not name.startswith(child.label, at):
                return
            node, at = child, at + len(child.label)

    def extend(self, name: bytes) -> bool:
        """Whether there are prefixes that begin with a name and are longer."""
        node, at = self._root, 0
        while at < len(name):
            child = node.below.get(name[at])
            if child is None:
                return False
            if len(child.label) >= len(name) - at:
                return child.label.startswith(name[at:]) and (len(child.label) > len(name) - at or bool(child.below))
            if not name.startswith(child.label, at):
                return False
            node, at = child, at + len(child.label)
        return bool(node.below)

    def _path(self, prefix: bytes) -> list[_Node[T] | None]:
        """The nodes down to that of a prefix; the last one is None if there is no node for it."""
        path: list[_Node[T] | None] = [self._root]
        node, at = self._root, 0
        while at < len(prefix):
            child = node.below.get(prefix[at])
            if child is None or not prefix.startswith(child.label, at):
                return [*path, None]
            path.append(child)
            node, at = child, at + len(child.label)
        return path


def _common(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin. `other` is not the longer one."""
    return next((at for at, byte in enumerate(other) if byte != one[at]), len(other))


def _divided(node: _Node[T], at: int) -> _Node[T]:
    """A node with the first bytes of a node's label, above that node."""
    upper = _Node[T](node.label[:at])
    node.label = node.label[at:]
    upper.below[node.label[0]] = node
    return upper


def _fold(parent: _Node[T], node: _Node[T]) -> None:
    """Remove a node without a value that has nothing below, or join it with the only node below."""
    if node.value is not None or len(node.below) > 1:
        return
    first = node.label[0]
    if not node.below:
        del parent.below[first]
        return
    [child] = node.below.values()
    child.label = node.label + child.label
    parent.below[first] = child
