"""Marks for PyTorch's compiler that leave it unloaded: importing it takes as long as the rest of PyTorch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch


def constant_result(function: Callable) -> Callable:
    """`torch.compiler.assume_constant_result`, which loads the compiler to set this."""
    function._dynamo_marked_constant = True
    return function


def outside_graphs(function: Callable) -> Callable:
    """`torch.compiler.disable`, when there is a compiler to tell."""
    disabled = []

    @functools.wraps(function)
    def call(*arguments, **options):
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments, **options)

    return call
