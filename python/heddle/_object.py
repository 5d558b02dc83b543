# SPDX-License-Identifier: Apache-2.0
"""What contexts, groups, windows and exchanges share: a C object that is closed once, after its children."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from heddle._abi import Status
from heddle._error import InvalidError

_Self = TypeVar("_Self", bound="Object")
# Handle: what destroys it, and the handles that go before it.
_Handles: TypeAlias = "dict[int, tuple[Callable[[int], None], _Handles]]"

# Others get so long to come out of an object that is being closed.
_LEAVE_SECONDS = 5.0


def microseconds(seconds: float | None) -> int:
    """A time for the C interface; None = its default. A time that rounds to 0 is 1: 0 would be the default."""
    if seconds is None:
        return 0
    return max(1, int(seconds * 1e6)) if seconds >= 0 else -1


def _destroy_all(handles: _Handles) -> None:
    while handles:
        handle, (destroy, inner) = handles.popitem()
        _destroy_all(inner)
        destroy(handle)


class Object:
    """A C object. Children hold their parent, parents know their children, close() takes them in order.

    A parent also has the handles of its children: objects that became garbage together are finalised in any order,
    when the weak references between them are gone.

    Calls go through `call`, which notes who is inside, so that no object is freed under a call.
    """

    _what = "object"

    def __init__(self, parent: Object | None) -> None:
        self._handle: int | None = None
        self._inside: set[int] = set()
        self._children: weakref.WeakSet[Object] = weakref.WeakSet()
        self._handles: _Handles = {}
        self._siblings: _Handles = {} if parent is None else parent._handles
        self._closing = threading.RLock()
        self._parent = parent
        self._gone = "is closed"
        #: close() is over: the C object is gone.
        self.ended = False
        #: In a child made by fork, where the parent's objects do not work.
        self.forked = False

    def _opened(self, handle: int) -> None:
        self._handle = handle
        self._siblings[handle] = (self._destroy, self._handles)
        if self._parent is not None:
            self._parent._children.add(self)

    @property
    def handle(self) -> int:
        """Address of the C object. Raises InvalidError when it is closed."""
        if self._handle is None:
            raise InvalidError(Status.EINVAL, f"the {self._what} {self._gone}")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def children(self) -> list[Object]:
        """What was made from it and is not closed."""
        return [child for child in self._children if not child.closed]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(handle, *arguments), during which close() in another thread waits."""
        me = threading.get_ident()
        self._inside.add(me)
        try:
            return function(self.handle, *arguments)
        finally:
            self._inside.discard(me)

    def close(self) -> None:
        """Closes the object and what was made from it. Harmless if it is closed."""
        with self._closing:
            handle = self._handle
            if handle is None:
                return
            self._handle = None
            for child in list(self._children):
                child.close()
            if self._others_inside():
                self._interrupt(handle)
                deadline = time.monotonic() + _LEAVE_SECONDS
                while self._others_inside():
                    if time.monotonic() > deadline:
                        return  # kept for the thread that is still inside
                    time.sleep(0.001)
            _destroy_all(self._handles)
            if self._siblings.pop(handle, None) is not None:
                self._destroy(handle)
            self.ended = True
            self._destroyed()

    def _forget(self) -> None:
        """In a forked child: nothing of it works, nothing of it is freed."""
        for child in list(self._children):
            child._forget()
        self._closing = threading.RLock()  # a thread that is not here may hold the old one
        self._handle = None
        self.forked = True
        self._gone = "belongs to the parent process: a forked child makes its own context, or execs"

    def _others_inside(self) -> bool:
        return bool(self._inside - {threading.get_ident()})

    def _interrupt(self, handle: int) -> None:
        """Makes the calls of other threads return."""

    @staticmethod
    def _destroy(handle: int) -> None:
        raise NotImplementedError

    def _destroyed(self) -> None:
        """What is left to do when the C object is gone."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At the end of the interpreter heddle._context has closed what could be closed.
        if getattr(self, "_handle", None) is not None and not sys.is_finalizing():
            self.close()
