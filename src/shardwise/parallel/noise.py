"""Noise inside of split layers, which has to differ between ranks, among noise that has to be the same on all."""

import torch
from torch import Tensor, nn


class Noise:
    """Lets what is drawn between ``fork`` and ``join`` differ between tensor-parallel ranks, and repeat.

    The seed is drawn from the common generator, so that activation checkpointing, which restores that one, finds it
    again; the common generator itself moves alike on every rank.
    """

    def __init__(self, *, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._states: list[tuple[Tensor, Tensor | None, torch.device]] = []

    def fork(self, device: torch.device) -> None:
        """From here on draw what the other ranks do not; on the CPU and on ``device``."""
        seed = int(torch.randint(2**31, (1,))) * self._ranks + self._rank
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._states.append((torch.get_rng_state(), cuda, device))
        torch.manual_seed(seed)

    def join(self) -> None:
        """Draw again what all ranks draw; nothing if that is so."""
        if self._states:
            cpu, cuda, device = self._states.pop()
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)

    def inside(self, module: nn.Module) -> None:
        """Fork when ``module`` starts in training, and join when it ends, if nothing has done so before."""

        def fork(module: nn.Module, args: tuple) -> None:
            if module.training:
                self.fork(args[0].device)

        module.register_forward_pre_hook(fork)
        module.register_forward_hook(lambda module, args, out: self.join(), always_call=True)


def is_noisy(module: nn.Module) -> bool:
    """Whether something in ``module`` drops: torch's layers, and others by the name of what holds their rate."""
    return any(
        inner.p > 0
        if isinstance(inner, nn.modules.dropout._DropoutNd)
        else any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(inner).items())
        for inner in module.modules()
    )
