"""Loads ucxx and UCX, and makes UCX a good guest in somebody else's process.

UCX reads its global options when its library is loaded, so they are set around the import and taken back
after it: no signal handlers, no complaint about other programs' variables. What UCX logs goes to the logger
`kvwire.ucx`. With `RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true` the host's own UCX is loaded instead of the
wheel's, which has no InfiniBand.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("kvwire.ucx")

_QUIET: Final = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_ERROR_SIGNALS": "", "UCX_MEMTYPE_CACHE": "n"}
_STOP: Final = 0
_LEVELS: Final = (logging.WARNING, logging.WARNING, logging.INFO)
"""Python's levels for UCX's fatal, error, warn. What matters of them also reaches the caller as an error."""

_LogHandler = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
)


class Library:
    """ucxx's core API (`api`, `array`), and what it leaves out of UCX's."""

    def __init__(self, api: Any, array: Any) -> None:
        self.api = api
        self.array = array
        ucp = ctypes.CDLL("libucp.so.0")
        # It only writes to an event file. To give the interpreter's lock away for that would cost far more:
        # the thread that it wakes takes the lock at once.
        self._signal = ctypes.PyDLL("libucp.so.0").ucp_worker_signal
        self._signal.argtypes = (ctypes.c_void_p,)
        self._destroy_worker = ucp.ucp_worker_destroy
        self._destroy_worker.argtypes = (ctypes.c_void_p,)
        self._cleanup = ucp.ucp_cleanup
        self._cleanup.argtypes = (ctypes.c_void_p,)
        self._handler: Any = None
        self.survives_copy_errors: Final = self._route_log()

    def signal(self, worker_handle: int) -> None:
        """Wake the thread that waits for this worker's events. For any thread."""
        self._signal(worker_handle)

    def tear_down(self, worker: Any, context: Any) -> None:
        """End a worker whose operations never end.

        ucxx would wait for them, so its objects must be kept for good (`forked.never_destroy`), and UCX,
        which does not wait, is told directly. Afterwards none of them may be used.
        """
        events = worker.epoll_file_descriptor
        self._destroy_worker(worker.handle)
        self._cleanup(context.handle)
        os.close(events)

    def _route_log(self) -> bool:
        """Take over UCX's log.

        This is more than tidiness. When a copy between processes (CMA) fails because the peer has died or may
        not be read, UCX logs it as fatal, and its own log handler ends the process. With this handler in its
        place the copy's request fails, and nothing else. False where this UCX has no such hook: then CMA must
        not be used.
        """
        ucs = ctypes.CDLL("libucs.so.0")
        try:
            push, pop = ucs.ucs_log_push_handler, ucs.ucs_log_pop_handler
        except AttributeError:
            return False
        self._handler = _LogHandler(_log)
        push(self._handler)
        # UCX's destructors may log when the interpreter is gone already.
        atexit.register(pop)
        return True


@functools.cache
def load() -> Library:
    """Import ucxx, once per process. Raises MissingExtra."""
    with _quiet_environment():
        try:
            import ucxx  # noqa: F401  loads the shared libraries
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except ImportError as error:
            raise MissingExtra("The UCX data path", "ucx-cu12") from error
    return Library(libucxx, Array)


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """ucxx leaves settings of its own in the environment, which other users of UCX would get too."""
    before = dict(os.environ)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in [each for each in os.environ if each.startswith("UCX_") and each not in before]:
            del os.environ[name]


def _log(
    file: bytes, line: int, function: bytes, level: int, component: int, message: bytes, arguments: int
) -> int:
    text = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).vsnprintf(
        text, ctypes.c_size_t(1024), ctypes.c_char_p(message), ctypes.c_void_p(arguments)
    )
    logger.log(
        _LEVELS[level] if level < len(_LEVELS) else logging.DEBUG,
        "%s (%s:%d)",
        text.value.decode(errors="replace"),
        function.decode(errors="replace"),
        line,
    )
    return _STOP
