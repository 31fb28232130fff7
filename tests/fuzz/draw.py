"""Random numbers, sizes and memory layouts, determined by (name, seed, number)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EDGES = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70)  # near the sizes of the kernels' vectors and blocks


class Draw:
    """A source of random calls, the values of which do not depend on the device."""

    def __init__(self, name: str, seed: int, number: int, device: str = "cpu") -> None:
        self.random = random.Random(f"{name} {seed} {number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.number, self.device = number, device
        self.choice, self.integer = self.random.choice, self.random.randint
        self.buffers: list[Tensor] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def extent(self, largest: int = 80) -> int:
        """Draw a size: mostly small, often 1, sometimes near a block of the kernels."""
        kind = self.random.random()
        if kind < 0.15:
            return min(1, largest)
        if kind < 0.9:
            return min(self.integer(2, 9) if kind < 0.75 else self.integer(10, 30), largest)
        return min(self.choice(EDGES), largest)

    def extents(self, count: int, product: int) -> tuple[int, ...]:
        """Draw sizes whose product is at most ``product``."""
        sizes: list[int] = []
        for _ in range(count):
            sizes.append(self.extent(max(1, product)))
            product //= sizes[-1]
        self.random.shuffle(sizes)
        return tuple(sizes)

    def rarely_none(self, size: int, probability: float = 0.02) -> int:
        """Return ``size``, or rarely 0."""
        return 0 if self.chance(probability) else size

    def short(self, numbers: Sequence[int]) -> int | Sequence[int]:
        """Return an option's numbers as a single one if all are equal, as a tuple or as a list."""
        if len(set(numbers)) == 1 and self.chance(0.5):
            return numbers[0]
        return list(numbers) if self.chance(0.3) else tuple(numbers)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=dtype)

    def below(self, probability: float, *shape: int) -> Tensor:
        """Draw a mask that is true with a probability."""
        return self.uniform(*shape, dtype=torch.float32) < probability

    def logits(self, shape: Sequence[int], axes: int, dtype: torch.dtype) -> Tensor:
        """Draw logits that broadcast along some of the first ``axes``, large ones, -inf in places or in whole rows."""
        shape = [1 if n < axes and self.chance(0.25) else size for n, size in enumerate(shape)]
        logits = self.normal(*shape, scale=self.choice((1.0, 1.0, 5.0, 1000.0)))
        if self.chance(0.3):
            kept = self.uniform(*shape, dtype=torch.float32) > self.choice((0.1, 0.5, 0.9))
            logits = logits.masked_fill(~kept, float("-inf"))
        if self.chance(0.15) and shape:
            logits = logits.masked_fill(self.below(0.3, *shape[:-1], 1), float("-inf"))
        return self.finish(logits, dtype)

    def finish(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert ``tensor`` to a dtype, the device and a random layout, possibly expanded along an axis."""
        return self.laid_out(tensor.to(dtype).to(self.device))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Copy the values to memory with any order of axes, with gaps of NaN, or shared along an axis."""
        kind, dims = self.random.random(), tensor.dim()
        if dims == 0 or kind < 0.2:
            return self._own(tensor.contiguous())
        if kind < 0.3:  # shared: one number for a whole axis
            axis = self.random.randrange(dims)
            if tensor.shape[axis]:
                return self._own(tensor.narrow(axis, 0, 1).contiguous()).expand(tensor.shape)
        order = list(range(dims))
        if kind < 0.5 and dims >= 3:  # channels-last, or heads second to last
            order = [0, *order[2:], 1] if dims == 4 or self.chance(0.3) else [0, *order[2:-1], 1, dims - 1]
        elif kind < 0.7:
            self.random.shuffle(order)
        before, after, step = [0] * dims, [0] * dims, [1] * dims
        if self.chance(0.6):  # a slice of a larger buffer, or every second number of one
            for axis in range(dims):
                if self.chance(0.4):
                    before[axis], after[axis] = self.integer(0, 3), self.integer(0, 3)
                if self.chance(0.1):
                    step[axis] = self.integer(2, 3)
        sizes = [b + n * s + a for b, n, s, a in zip(before, tensor.shape, step, after)]
        poison = float("nan") if tensor.is_floating_point() else True
        buffer = self._own(torch.full([sizes[n] for n in order], poison, dtype=tensor.dtype, device=tensor.device))
        view = buffer.permute([order.index(axis) for axis in range(dims)])
        for axis in range(dims):
            view = view.narrow(axis, before[axis], tensor.shape[axis] * step[axis])
            view = view[(slice(None),) * axis + (slice(None, None, step[axis]),)]
        view.copy_(tensor)
        if self.chance(0.1):  # strides of axes of size 1 are arbitrary
            strides = [s if n > 1 else self.integer(0, 50) for n, s in zip(view.shape, view.stride())]
            if view.numel():
                view = torch.as_strided(view, view.shape, strides, view.storage_offset())
        return view

    @contextmanager
    def watched(self, faults: list[str]) -> Iterator[None]:
        """Add a fault if what runs meanwhile writes to a tensor or to memory beside it."""
        before = [buffer.clone() for buffer in self.buffers]
        yield
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, self.buffers)):
            faults.append("an argument, or memory beside it, was written to")

    def _own(self, buffer: Tensor) -> Tensor:
        self.buffers.append(buffer)
        return buffer
