"""Loads the operators, and gives their errors the class that they deserve."""

import pathlib
import re
import sys

import torch

_OLDEST_TORCH = (2, 11)
_CLASSES = {"ValueError": ValueError, "NotImplementedError": NotImplementedError, "MemoryError": MemoryError}
_MARKED = re.compile(r"\[(ValueError|NotImplementedError|MemoryError)\] (.*)", re.DOTALL)


def _check_version() -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < _OLDEST_TORCH:
        raise ImportError(f"fastweight: expected PyTorch 2.11 or newer, got {torch.__version__}")


def _module() -> pathlib.Path:
    folders = sys.modules[__package__].__path__  # two of them in an editable installation
    for folder in folders:
        path = pathlib.Path(folder) / "fastweight_torch.so"
        if path.exists():
            return path
    raise ImportError(
        f"fastweight: expected fastweight_torch.so in {list(folders)}, got none: is this the source tree?"
    )


_check_version()
torch.ops.load_library(_module())
operators = torch.ops.fastweight
library = torch.library.Library("fastweight", "FRAGMENT")


def argument_names(operator: str) -> list[str]:
    """The arguments of an operator by name. Their list stands in one place, a table of the C++ library."""
    return [argument.name for argument in getattr(operators, operator).default._schema.arguments]


def translated(error: RuntimeError) -> BaseException:
    """The exception to raise in place of what an operator raised: python/bindings/convert.h marks the class."""
    match = _MARKED.match(str(error))
    return _CLASSES[match[1]](match[2]) if match else error
