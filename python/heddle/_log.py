# SPDX-License-Identifier: Apache-2.0
"""The library's log lines as records of the logger `heddle`.

Lines go through a pipe to a thread of Python's: a control thread that had to wait for the interpreter could miss its
heartbeats.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading

from heddle._abi import LogLevel

log = logging.getLogger("heddle")

_LINE = re.compile(r"heddle (error|warn|info|debug)(?: rank (\d+))?: (.*)")
_LEVELS = {"error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_END = b"\0\n"


class _Pipe:
    """One for the process, made when it is first needed."""

    def __init__(self) -> None:
        self._get, self.put = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.put, False)  # the library drops a line rather than wait
        self._thread = threading.Thread(target=self._run, name="heddle-log", daemon=True)
        self._thread.start()
        self._pid = os.getpid()

    def _run(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._get, 65536)).split(b"\n")
            for line in lines:
                if line == _END[:-1]:
                    return
                _emit(line.decode(errors="replace"))

    def end(self) -> None:
        """Hands on what has been written so far, for at most a second."""
        if self._pid == os.getpid():
            try:
                os.write(self.put, _END)
            except BlockingIOError:
                return
            self._thread.join(1)


def _emit(line: str) -> None:
    found = _LINE.fullmatch(line)
    if found is None:
        log.warning("%s", line)
        return
    level, rank, text = found.groups()
    log.log(_LEVELS[level], "%s", text if rank is None else f"rank {rank}: {text}")


_lock = threading.Lock()
_pipe: _Pipe | None = None


def descriptor() -> int:
    """Where the library is to write: a pipe if the application has set up logging, else 0 = stderr."""
    global _pipe
    if not log.hasHandlers():
        return 0
    with _lock:
        if _pipe is None or _pipe._pid != os.getpid():
            _pipe = _Pipe()
        return _pipe.put


def level() -> LogLevel:
    """What the logger lets through, unless HEDDLE_LOG says it."""
    if not log.hasHandlers() or os.environ.get("HEDDLE_LOG"):
        return LogLevel.DEFAULT
    effective = log.getEffectiveLevel()
    for bound, found in (
        (logging.DEBUG, LogLevel.DEBUG),
        (logging.INFO, LogLevel.INFO),
        (logging.WARNING, LogLevel.WARN),
    ):
        if effective <= bound:
            return found
    return LogLevel.ERROR


@atexit.register
def _end() -> None:
    if _pipe is not None:
        _pipe.end()
