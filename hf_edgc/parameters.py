"""The trainable parameters of a model: names and sizes, and where their gradients lie in DDP's buckets."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, which the stubs lack


class Parameters:
    """By name: buckets are rebuilt and have no stable index.

    Attributes:
        shapes: name and shape of each, in the order of the model.
        gradient_bytes: size of each one's gradient by name, in that order.
        device: of the first one, or the CPU.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Keep those that require a gradient."""
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self.shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable]
        self.gradient_bytes = {name: parameter.numel() * parameter.element_size() for name, parameter in trainable}
        self.device = trainable[0][1].device if trainable else torch.device("cpu")
        self.complex_names = [name for name, parameter in trainable if parameter.is_complex()]
        self._names = {id(parameter): name for name, parameter in trainable}

    @property
    def ids(self) -> set[int]:
        """``id`` of each parameter."""
        return set(self._names)

    def digest(self) -> int:
        """CRC-32 of the names, equal on workers that train the same parameters."""
        return zlib.crc32(repr(sorted(self._names.values())).encode())

    def gradients(self, bucket: GradBucket) -> list[tuple[str, Tensor]]:
        """Names and gradients, views of the bucket in the parameters' shapes.

        Raises:
            RuntimeError: a parameter is not known.
        """
        pairs = []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) not in self._names:
                raise RuntimeError(
                    "EDGCState met a parameter that it was not given, of shape "
                    f"{tuple(parameter.shape)}: one was unfrozen or added after the state was made, or it serves "
                    "two models. Make one EDGCState for each DDP, from all its trainable parameters."
                )
            if parameter.dim() == 2 and not parameter.is_contiguous():
                grad = grad.as_strided(parameter.shape, parameter.stride())  # DDP shows its memory as if contiguous
            pairs.append((self._names[id(parameter)], grad))
        return pairs
