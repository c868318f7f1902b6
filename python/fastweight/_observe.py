"""What ran, and why: logging, the last implementation, and one of the user's choice."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator

from ._info import info
from ._library import module_path

_library = ctypes.CDLL(str(module_path))
_Log = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_library.fastweight_set_log.argtypes = [_Log]
_library.fastweight_choose.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
_library.fastweight_set_segments.argtypes = [ctypes.c_int]
_library.fastweight_last.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]


@_Log
def _receive(line: bytes) -> None:
    logger.debug(line.decode().removeprefix("fastweight: "))


logger = logging.getLogger("fastweight")
_set_level = logger.setLevel


def _set_level_and_log(level: int | str) -> None:
    """Lines are made where this logger itself has the level DEBUG, and cost nothing elsewhere."""
    _set_level(level)
    wanted = logging.NOTSET < logger.level <= logging.DEBUG
    _library.fastweight_set_log(_receive if wanted else _Log())


logger.setLevel = _set_level_and_log
logger.setLevel(logger.level)  # which may have been set before this import
if os.environ.get("FASTWEIGHT_VERBOSE", "0") not in ("", "0"):
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)


def last_implementation(function: str | None = None) -> str | None:
    """The implementation that ran last, in any thread of the process.

    Args:
        function: of the library, such as `delta_rule_forward`, `gla_backward` or `short_conv_step`: the families are
            those of `info()`. None: any.

    Returns:
        Its name, such as `chunk` or `recurrent`; None: nothing has run.
    """
    text = ctypes.create_string_buffer(256)
    _library.fastweight_last((function or "").encode(), text, len(text))
    _, _, name = text.value.decode().partition(" ")
    return name or None


_chosen: dict[str, str] = {}
_segments = 0


def _choose(family: str, implementation: str) -> None:
    _chosen[family] = implementation
    _library.fastweight_choose(family.encode(), implementation.encode())


def _set_segments(chunks: int) -> None:
    global _segments
    _segments = chunks
    _library.fastweight_set_segments(chunks)


def _segment_chunks(segments: bool | int) -> int:
    """As `Context::segment_chunks`."""
    if isinstance(segments, bool):
        return 0 if segments else -1
    if not isinstance(segments, int) or segments < 1:
        raise ValueError(f"segments: expected True, False or a number of chunks, got {segments!r}")
    return segments


def _families(implementation: str, family: str | None) -> list[str]:
    """Those that have it on any device, by its name or as a form."""
    known = info()["implementations"]
    if family is not None and family not in known:
        raise ValueError(f"family: expected one of {', '.join(known)}, got {family!r}")
    names = {
        name: {entry for modes in devices.values() for entries in modes.values() for entry in entries}
        for name, devices in known.items()
        if family in (None, name)
    }
    found = [
        name
        for name, entries in names.items()
        if any(entry == implementation or entry.startswith(f"{implementation}_") for entry in entries)
    ]
    if not found:
        known_names = ", ".join(sorted(set().union(*names.values())))
        raise ValueError(f"implementation: expected one of {known_names}, got {implementation!r}")
    return found


@contextlib.contextmanager
def using(
    implementation: str | None = None, family: str | None = None, *, segments: bool | int | None = None
) -> Iterator[None]:
    """Within it, an implementation runs by its name, or the call fails with the reason why it cannot.

    It counts for the whole process, gradients that are computed within it included, and for every family that has an
    implementation of this name in any mode; the others choose for themselves.

    Args:
        implementation: a name of `info()["implementations"]`, or a form: `chunk` stands for `chunk_16bit` and
            `chunk_fp32`. None: the choice stays as it is.
        family: of these, such as `delta_rule`; None: all that have it.
        segments: whether the delta rule's `chunk_sm90` may cut long sequences of few heads into segments that run at
            once, which rounds differently and makes more work for batches that fill the device by themselves; a number:
            segments of so many chunks, however many heads there are. None: as it is.
    """
    families = [] if implementation is None else _families(implementation, family)
    before = {name: _chosen.get(name, "") for name in families}
    segments_before = _segments
    if segments is not None:
        _set_segments(_segment_chunks(segments))
    for name in families:
        _choose(name, implementation)
    try:
        yield
    finally:
        for name, previous in before.items():
            _choose(name, previous)
        if segments is not None:
            _set_segments(segments_before)
