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
module_path = _module()
torch.ops.load_library(module_path)
operators = torch.ops.fastweight
library = torch.library.Library("fastweight", "FRAGMENT")


def argument_names(operator: str) -> list[str]:
    """The arguments of an operator by name. Their list stands in one place, a table of the C++ library."""
    return [argument.name for argument in getattr(operators, operator).default._schema.arguments]


# What the library's names for arguments are in Python, by family or operator; None: in all.
_NAMES = {
    None: {
        "a_log": "A_log",
        "da_log": "A_log",
        "ddt_bias": "dt_bias",
        "gate_in_kernel": "use_gate_in_kernel",
        "beta_sigmoid": "use_beta_sigmoid_in_kernel",
        "mini_batch": "chunk_size",
    },
    "short_conv": {"w": "weight", "state": "cache"},
    "dplr": {"g": "gk"},
    "chunk_local_cumsum": {"x": "g"},
    "gate_activation": {"x": "g", "dg": "dyg"},
    "scaled_dot_kkt": {"gamma": "g"},
    "wy": {"gamma": "g", "j": "A"},
    "solve_tril": {"a": "A"},
    "rms_norm": {"gate": "g"},
    "delta_rule_map_forward": {"q": "k"},
    "delta_rule_map_backward": {"v": "d_o"},
}
_SUFFIXES = re.compile("_(forward|differentiable|backward|step|in_place)$")


def _in_python(operator: str, text: str) -> str:
    """A message with the names that the arguments have in Python: at its start, where it says whose fault it is, and,
    if no other word is spelt like them, anywhere."""
    names = _NAMES[None] | _NAMES.get(_SUFFIXES.sub("", operator), {}) | _NAMES.get(operator, {})
    name, colon, rest = text.partition(":")
    text = names.get(name, name) + colon + rest
    return re.sub(rf"\b({'|'.join(_NAMES[None])})\b", lambda match: _NAMES[None][match[0]], text)


def translated(error: RuntimeError, operator: str) -> BaseException:
    """The exception to raise in place of what an operator raised: python/bindings/convert.h marks the class."""
    match = _MARKED.match(str(error))
    return _CLASSES[match[1]](_in_python(operator, match[2])) if match else error
