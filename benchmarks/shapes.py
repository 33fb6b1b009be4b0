"""The state that is measured, as numbers only: names, dtypes and shapes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the state, by its fully qualified name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a Llama-like transformer."""

    vocab: int
    dim: int
    kv_dim: int
    ffn: int
    layers: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, in the order of the model."""
        found: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.dim)}
        for layer in range(self.layers):
            found |= {
                f"layers.{layer}.attention_norm": (self.dim,),
                f"layers.{layer}.wq": (self.dim, self.dim),
                f"layers.{layer}.wk": (self.kv_dim, self.dim),
                f"layers.{layer}.wv": (self.kv_dim, self.dim),
                f"layers.{layer}.wo": (self.dim, self.dim),
                f"layers.{layer}.ffn_norm": (self.dim,),
                f"layers.{layer}.w1": (self.ffn, self.dim),
                f"layers.{layer}.w2": (self.dim, self.ffn),
                f"layers.{layer}.w3": (self.ffn, self.dim),
            }
        return found | {"norm": (self.dim,), "head": (self.vocab, self.dim)}

    def tensors(self) -> tuple[TensorSpec, ...]:
        """bf16 parameters and two fp32 moments: what mixed-precision Adam training saves."""
        parameters = self.parameters()
        return tuple(
            TensorSpec(f"{group}.{name}", dtype, shape)
            for group, dtype in (
                ("model", "bfloat16"),
                ("optim.exp_avg", "float32"),
                ("optim.exp_avg_sq", "float32"),
            )
            for name, shape in parameters.items()
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors())


FULL = Shape(vocab=32000, dim=1536, kv_dim=512, ffn=4944, layers=4)
"""2.0 GiB in 117 tensors."""

QUICK = Shape(vocab=4096, dim=128, kv_dim=64, ffn=512, layers=4)
"""19 MiB in 117 tensors: shows that everything runs, says nothing about speed."""
