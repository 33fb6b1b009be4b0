"""Wrapper subclasses of tensors: flattened to their inner tensors, and made of such again.

Such a class has no bytes of its own: its ``__tensor_flatten__`` gives inner tensors and a context
(as torchao's low-bit optimizer states and quantized weights do). What is stored of a context is a
description, for comparison alone. Wrappers are only made with the class and context of a tensor in
the user's state, never of one in a checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.errors import UsageError
from tieredckpt.format.parts import Tree

Parts = dict[str, torch.Tensor]
"""The inner tensors by path: names with dots between them, where a wrapper is inside another."""

CLASS_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What the methods of a wrapper's class may raise if they do not support what is asked of them."""


def is_wrapper(value: object) -> bool:
    """Whether it is a tensor whose bytes are in others; a DTensor, and one in transfer, is not."""
    wraps: bool = is_traceable_wrapper_subclass(value)
    return wraps and not (isinstance(value, DTensor) or hasattr(value, "trigger_wait"))


def flatten(key: str, tensor: Any, like: Tree | None = None) -> tuple[Parts, Tree]:
    """The inner tensors of a wrapper, not detached, and its tree.

    Args:
        key: For messages.
        tensor: The wrapper.
        like: The tree is then that of a wrapper of this class and context and of the shapes in it.

    Raises:
        UsageError: A part of the context cannot be described, or an inner tensor is a DTensor.
        CLASS_ERRORS: The class does not support that.
    """
    names, context = tensor.__tensor_flatten__()
    shape = tuple(tensor.shape)
    sizes, below = (shape, {}) if like is None else (like[1], like[3])
    parts: Parts = {}
    inner: dict[str, Tree | None] = {}
    for name in names:
        value, inner[name] = getattr(tensor, name), None
        if is_wrapper(value):
            found, inner[name] = flatten(key, value, below.get(name))
            parts.update({f"{name}.{path}": part for path, part in found.items()})
        elif is_traceable_wrapper_subclass(value):
            text = f"{key!r} is a wrapper around a {type(value).__qualname__}: put it inside of one"
            raise UsageError(text, state_key=key)
        else:
            parts[name] = value
    described = _described(key, _resized(context, shape, sizes))
    return parts, (type(tensor).__qualname__, sizes, described, inner)


def unflatten(tensor: Any, parts: Mapping[str, torch.Tensor], like: Tree | None = None) -> Any:
    """A wrapper of the class and context of ``tensor`` around ``parts``.

    Args:
        tensor: A wrapper.
        parts: By path.
        like: A tree with the shapes of the new one; None: those of ``tensor``.

    Raises:
        CLASS_ERRORS: The class does not support that.
    """
    names, context = tensor.__tensor_flatten__()
    sizes, below = (tuple(tensor.shape), {}) if like is None else (like[1], like[3])
    inner = {}
    for name in names:
        value = getattr(tensor, name)
        if is_wrapper(value):
            ours = {path: part for path, part in parts.items() if path.startswith(f"{name}.")}
            ours = {path.removeprefix(f"{name}."): part for path, part in ours.items()}
            inner[name] = unflatten(value, ours, below.get(name))
        else:
            inner[name] = parts[name]
    strides = tensor.stride()
    if like is not None:
        strides = torch.empty(sizes, device="meta").stride()
    context = _resized(context, tuple(tensor.shape), sizes)
    return type(tensor).__tensor_unflatten__(inner, context, torch.Size(sizes), strides)


def plain_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have the bytes of ``value``: itself, or the parts of a wrapper."""
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    return [*flatten("", local)[0].values()] if is_wrapper(local) else [value]


def _resized(context: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """The context of a wrapper of ``sizes``: some classes have their own ``shape`` in it."""

    def change(value: Any) -> Any:
        is_shape = type(value) in (list, tuple, torch.Size) and tuple(value) == shape
        return type(value)(sizes) if is_shape else value

    if shape == sizes:
        return context
    if type(context) is dict:
        return {name: change(value) for name, value in context.items()}
    if type(context) in (list, tuple) and change(context) is context:
        return type(context)(map(change, context))
    return change(context)


def _described(key: str, value: Any) -> Any:
    """A part of a context as plain data: equal if and only if the part is."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.device):
        return "torch.device"  # content may move to another one
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        return (type(value).__qualname__, value.name)
    if isinstance(value, list | tuple):
        return [type(value).__qualname__] * hasattr(value, "_fields") + [
            _described(key, each) for each in value
        ]
    if isinstance(value, dict):
        return {str(name): _described(key, value[name]) for name in sorted(value, key=str)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return (type(value).__qualname__, _described(key, own))
    if isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__:
        return (
            f"{value.__module__}.{value.__qualname__}"  # not local: it could be another each time
        )
    raise UsageError(
        f"{key!r} is a wrapper whose context holds a {type(value).__qualname__}, which cannot be "
        "compared at a load: save its inner tensors instead",
        state_key=key,
    )
