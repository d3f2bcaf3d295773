"""Cross-entropy over a vocabulary that is split between tensor-parallel ranks; the logits are never gathered.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): what the ranks exchange is a few numbers per token. Each rank runs
over its own columns first, with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); then follow two
all-reduces, the largest logit and, stacked, the sums: of the exponentials, of the target's logit (one rank has it),
and with label smoothing of all logits. The backward pass needs no collective.

With p the softmax of the logits x over all V columns, t the target and log Z the logarithm of the sum of exponentials,
the loss of a token is

    (1 - smoothing) * (log Z - x[t]) + smoothing * (log Z - mean(x)) + z_loss * (log Z)^2
    d loss / d x  =  (1 + 2 * z_loss * log Z) * p - (1 - smoothing) * onehot(t) - smoothing / V

Shapes: N tokens, V vocabulary, C columns at hand, D hidden width, S running sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError

IGNORED = -100
"""Target that counts for nothing, as in ``torch.nn.functional.cross_entropy``."""

BLOCK = {"cpu": 2**19, "cuda": 2**25}
"""Logits looked at together: on a CPU what stays in its caches, elsewhere what keeps temporaries small."""


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the whole vocabulary that this rank holds: ``start`` up to ``start`` + its number of columns."""

    group: dist.ProcessGroup | None
    """The ranks that hold the vocabulary together; None if this one holds it all."""
    start: int
    """Id of the first column here. A rank without columns may give any."""
    vocab: int
    """Size of the whole vocabulary."""


def shard_bounds(size: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [start, stop) of ``size`` that ``rank`` holds: as ``torch.chunk``, the last ranks fewer or none."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def vocabulary_shard(logits: DTensor) -> VocabularyShard:
    """Which columns of ``logits`` (..., V), split over V on a mesh of one axis, this rank has."""
    mesh, vocab = logits.device_mesh, logits.size(-1)
    start, _ = shard_bounds(vocab, rank=mesh.get_local_rank(), ranks=mesh.size())
    return VocabularyShard(mesh.get_group(), start, vocab)


@dataclass(frozen=True)
class _Loss:
    """What is computed, apart from the tensors."""

    shard: VocabularyShard
    label_smoothing: float
    z_loss: float
    soft_cap: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is outside [0, 1]: give a share such as 0.1")
        if self.z_loss < 0:
            raise ConfigError(f"z_loss={self.z_loss} is negative: give 0 for none, or a small weight such as 1e-4")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ConfigError(f"soft_cap={self.soft_cap} is not above 0: give null for none, or a bound such as 30")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    shard: VocabularyShard | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    """Loss of every token (...), 0 where the target is -100; the same on all ranks of the group.

    Two all-reduces forward, of one and of two numbers per token (three with label smoothing), none backward; none at
    all without a group. Kept for the backward pass are ``logits`` themselves and a few numbers per token, no second
    copy: do not change the logits in place.

    Args:
        logits: (..., C) this rank's columns. The arithmetic is in float32 or wider, the gradient in the logits' format.
        targets: (...) int64, ids of the whole vocabulary, the same on all ranks of the group.
        shard: which columns these are; None if they are all.
        label_smoothing: share of the target that is spread evenly over the whole vocabulary.
        z_loss: weight of the squared log Z (Chowdhery et al. 2022, arXiv 2204.02311, section 5: 1e-4).
        soft_cap: bound of the logits, ``soft_cap * tanh(logits / soft_cap)`` before everything else (Gemma 2,
            arXiv 2408.00118, section 2: 30).

    Raises:
        IndexError: a target that is neither -100 nor in the vocabulary. Looking would stall a GPU: there the
            loss of such a token is NaN, or torch's own kernel stops the program.
        ConfigError: a smoothing, weight or bound that cannot be.
    """
    columns = logits.size(-1)
    loss = _Loss(_checked(shard, columns, targets, logits.shape[:-1]), label_smoothing, z_loss, soft_cap)
    logits_NC = logits.reshape(targets.numel(), columns)  # -1 would be ambiguous without columns
    targets_N = targets.flatten()
    if shard is None and not z_loss and logits.numel() <= _block_size(logits):
        # Where logits stay in the caches torch's kernel is the faster one, and the copy that it keeps is small.
        logits_NC = logits_NC.to(_wide(logits.dtype))
        if soft_cap is not None:
            logits_NC = (logits_NC / soft_cap).tanh() * soft_cap
        try:
            loss_N = F.cross_entropy(
                logits_NC, targets_N, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
            )
        except IndexError:
            _look(targets_N, columns)
            raise
    else:
        _look(targets_N, loss.shard.vocab)
        loss_N = _CrossEntropy.apply(logits_NC, targets_N, loss)
    return loss_N.view(targets.shape)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int,
    shard: VocabularyShard | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    """``cross_entropy`` of the logits ``hidden @ weight.T``, of which only ``chunk`` columns exist at a time.

    Wijmans et al. 2024 (Cut Cross-Entropy, arXiv 2411.09009) without its kernels: the backward pass computes the
    logits again, four matrix products instead of three. Beside the weight and its gradient, memory grows with
    tokens x (width + chunk) and not with the vocabulary. Collectives as in ``cross_entropy``.

    Args:
        hidden: (..., D) whole on every rank. Its gradient is this rank's summand only, as before any column-split
            layer: the caller sums it over the group where the layer's region begins.
        weight: (C, D) this rank's rows. Their gradient is exact.
        targets: (...) int64, ids of the whole vocabulary, the same on all ranks of the group.
        chunk: columns at a time.
        shard, label_smoothing, z_loss, soft_cap: as for ``cross_entropy``.

    The matrix products are in the format of ``hidden`` and ``weight`` or, as for a linear layer, in autocast's; the
    softmax is in float32 or wider. Raises as ``cross_entropy`` does, and ConfigError if ``chunk`` is below 1.
    """
    if chunk < 1:
        raise ConfigError(f"chunk={chunk} is below 1: give the number of vocabulary columns at a time, such as 4096")
    loss = _Loss(_checked(shard, weight.size(0), targets, hidden.shape[:-1]), label_smoothing, z_loss, soft_cap)
    _look(targets, loss.shard.vocab)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = (
            x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight)
        )
    hidden_ND = hidden.reshape(targets.numel(), hidden.size(-1))
    with torch.autocast(device, enabled=False):
        loss_N = _LinearCrossEntropy.apply(hidden_ND, weight, targets.flatten(), loss, chunk)
    return loss_N.view(targets.shape)


def _checked(shard: VocabularyShard | None, columns: int, targets: Tensor, tokens: torch.Size) -> VocabularyShard:
    if targets.shape != tokens:
        raise ValueError(f"targets of shape {tuple(targets.shape)} do not match tokens of shape {tuple(tokens)}")
    shard = shard or VocabularyShard(group=None, start=0, vocab=columns)
    assert columns == 0 or 0 <= shard.start <= shard.vocab - columns, (shard, columns)
    assert shard.group is not None or columns == shard.vocab, (shard, columns)
    return shard


def _look(targets: Tensor, vocab: int) -> None:
    """Refuse targets that cannot be, where looking at them does not stall a device."""
    if targets.device.type == "cpu" and targets.numel():
        low, high = torch.aminmax(targets)
        if (low < 0 or high >= vocab) and (wrong := targets[_outside(targets, vocab)]).numel():
            raise IndexError(f"Target {wrong[0].item()} is out of bounds for a vocabulary of {vocab}.")


def _outside(targets: Tensor, vocab: int) -> Tensor:
    return ((targets < 0) | (targets >= vocab)) & (targets != IGNORED)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _capped(logits_NC: Tensor, cap: float | None) -> Tensor:
    return logits_NC if cap is None else (logits_NC.to(_wide(logits_NC.dtype)) / cap).tanh_().mul_(cap)


def _block_size(logits: Tensor) -> int:
    return BLOCK.get(logits.device.type, BLOCK["cuda"])


def _blocks(logits_NC: Tensor) -> Iterator[slice]:
    """Rows that are looked at together; none if there are no columns."""
    rows, columns = logits_NC.shape
    if columns:
        step = max(1, _block_size(logits_NC) // columns)
        yield from (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def _place(targets_N: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Each target's column (N, 1) where it is among these columns (another where it is not), and whether it is not."""
    local_N = targets_N - first
    column_N = local_N.clamp(0, max(columns, 1) - 1)
    return column_N.unsqueeze(1), column_N != local_N if columns else torch.ones_like(column_N, dtype=torch.bool)


def _new_sums(tensor: Tensor) -> Tensor:
    """(4, N) for N rows: the largest logit; relative to it, the sum of exponentials; the target's logit, or 0; and,
    relative to the largest again, the sum of the logits. As they stand for no columns."""
    sums_SN = tensor.new_zeros((4, tensor.size(0)), dtype=_wide(tensor.dtype))
    sums_SN[0] = torch.finfo(sums_SN.dtype).min  # finite: the difference of two must be a number
    return sums_SN


def _sum_columns(sums_SN: Tensor, logits_NC: Tensor, loss: _Loss, *, scratch: Tensor | None = None) -> None:
    """Write what `_new_sums` describes, apart from the target's logit, from capped logits of at least one column."""
    top_N, exponentials_N, _, total_N = sums_SN
    # Kernels that are fused everywhere. The largest logit stands for -log(sum of exponentials relative to it).
    logarithms_NC = torch.log_softmax(logits_NC, 1, dtype=sums_SN.dtype, out=scratch)
    log_sum_N = logarithms_NC.amax(dim=1).neg_()
    top_N.copy_(logits_NC.amax(dim=1))
    torch.exp(log_sum_N, out=exponentials_N)
    if loss.label_smoothing:
        total_N.copy_(logarithms_NC.sum(dim=1).add_(log_sum_N, alpha=logits_NC.size(1)))
    if loss.shard.group is not None:  # Nothing but -inf here does not mean the same on the other ranks.
        exponentials_N.masked_fill_(top_N == -torch.inf, 0)
        top_N.clamp_(min=torch.finfo(top_N.dtype).min)


def _merge(sums_SN: Tensor, more_SN: Tensor, *, columns: int, more_columns: int, loss: _Loss) -> None:
    """Online softmax: let the sums over some columns take in those over others."""
    top_N = torch.maximum(sums_SN[0], more_SN[0])
    for part_SN, count in ((sums_SN, columns), (more_SN, more_columns)):
        _rebase(part_SN, top_N, columns=count, loss=loss)
    sums_SN[1:] += more_SN[1:]


def _rebase(sums_SN: Tensor, top_N: Tensor, *, columns: int, loss: _Loss) -> None:
    """Make ``top_N`` what the sums are relative to."""
    shift_N = sums_SN[0] - top_N
    if loss.label_smoothing and columns:
        sums_SN[3].add_(shift_N, alpha=columns)
    sums_SN[1].mul_(shift_N.exp_())
    sums_SN[0] = top_N


def _reduce(sums_SN: Tensor, targets_N: Tensor, foreign_N: Tensor, columns: int, loss: _Loss) -> tuple[Tensor, Tensor]:
    """Loss (N) and log Z (N) relative to the largest logit, all ranks' columns together. The sums become the whole's,
    apart from the exponentials', which stay this rank's."""
    shard, smoothing = loss.shard, loss.label_smoothing
    if shard.group is not None:
        top_N = sums_SN[0].clone()
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=shard.group)
        _rebase(sums_SN, top_N, columns=columns, loss=loss)
    top_N, exponentials_N, target_N, total_N = sums_SN
    # Relative to the largest before anything else: large logits would leave no digits for the loss.
    target_N.sub_(top_N).masked_fill_(foreign_N, 0)
    if shard.group is not None:
        everyone_SN = sums_SN[1 : 4 if smoothing else 3].clone()
        dist.all_reduce(everyone_SN, group=shard.group)
        exponentials_N, target_N = everyone_SN[:2]
        total_N = everyone_SN[-1]
    log_sum_N = exponentials_N.log()
    loss_N = torch.sub(log_sum_N, target_N, alpha=1 - smoothing)
    if smoothing:
        loss_N.sub_(total_N, alpha=smoothing / shard.vocab)
    if loss.z_loss:
        loss_N.add_((log_sum_N + top_N).square_(), alpha=loss.z_loss)
    if targets_N.device.type != "cpu":
        loss_N.masked_fill_(_outside(targets_N, shard.vocab), torch.nan)
    return loss_N.masked_fill_(targets_N == IGNORED, 0), log_sum_N


def _factor(grad_N: Tensor, log_z_N: Tensor, loss: _Loss) -> Tensor:
    """What the softmax is multiplied with in the gradient of the logits: (N)."""
    return grad_N * (2 * loss.z_loss * log_z_N).add_(1) if loss.z_loss else grad_N


def _finish(
    softmax_NC: Tensor, factor_N: Tensor, grad_N: Tensor, place: tuple[Tensor, Tensor], capped_NC: Tensor, loss: _Loss
) -> None:
    """Turn a softmax into the gradient of the logits before the soft cap, in place; may overwrite capped logits."""
    column_N1, foreign_N = place
    grad_NC = softmax_NC.mul_(factor_N.unsqueeze(1))
    if loss.label_smoothing:
        grad_NC.sub_((grad_N * (loss.label_smoothing / loss.shard.vocab)).unsqueeze(1))
    hit_N1 = (grad_N * (loss.label_smoothing - 1)).masked_fill_(foreign_N, 0).unsqueeze(1)
    grad_NC.scatter_add_(1, column_N1, hit_N1)
    if loss.soft_cap is not None:  # d (cap * tanh(x / cap)) = 1 - tanh^2
        grad_NC.mul_(capped_NC.div_(loss.soft_cap).square_().neg_().add_(1))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, targets_N: Tensor, loss: _Loss) -> Tensor:
        columns = logits_NC.size(1)
        sums_SN = _new_sums(logits_NC)
        scratch = None
        for rows in _blocks(logits_NC):
            part_NC = _capped(logits_NC[rows], loss.soft_cap)
            if scratch is None:
                scratch = torch.empty_like(part_NC, dtype=sums_SN.dtype)
            _sum_columns(sums_SN[:, rows], part_NC, loss, scratch=scratch[: part_NC.size(0)])
        column_N1, foreign_N = _place(targets_N, loss.shard.start, columns)
        if columns:
            sums_SN[2] = _capped(logits_NC.gather(1, column_N1), loss.soft_cap).squeeze(1)
        loss_N, log_sum_N = _reduce(sums_SN, targets_N, foreign_N, columns, loss)
        share_N = sums_SN[1] / log_sum_N.exp() if loss.shard.group is not None else None
        log_z_N = log_sum_N + sums_SN[0] if loss.z_loss else None
        ctx.save_for_backward(logits_NC, targets_N, share_N, log_z_N)
        ctx.loss = loss
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        logits_NC, targets_N, share_N, log_z_N = ctx.saved_tensors
        loss: _Loss = ctx.loss
        grad_N = grad_N.masked_fill(targets_N == IGNORED, 0)
        factor_N = _factor(grad_N, log_z_N, loss)
        if share_N is not None:
            factor_N = factor_N * share_N
        column_N1, foreign_N = _place(targets_N, loss.shard.start, logits_NC.size(1))
        grad_NC = torch.empty_like(logits_NC, memory_format=torch.contiguous_format)
        wide = grad_NC.dtype == grad_N.dtype
        for rows in _blocks(logits_NC):
            capped_NC = _capped(logits_NC[rows], loss.soft_cap)
            softmax_NC = torch.softmax(capped_NC, 1, dtype=grad_N.dtype, out=grad_NC[rows] if wide else None)
            if share_N is not None:
                empty_N = share_N[rows] == 0  # nothing but -inf, say, of which the softmax is NaN
                if empty_N.device.type != "cpu" or empty_N.any():
                    softmax_NC.masked_fill_(empty_N.unsqueeze(1), 0)
            _finish(softmax_NC, factor_N[rows], grad_N[rows], (column_N1[rows], foreign_N[rows]), capped_NC, loss)
            if not wide:
                grad_NC[rows] = softmax_NC
        return grad_NC, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_CD: Tensor, targets_N: Tensor, loss: _Loss, chunk: int) -> Tensor:
        columns = weight_CD.size(0)
        sums_SN = _new_sums(hidden_ND)
        for at in range(0, columns, chunk):
            logits_NC = _capped(hidden_ND @ weight_CD[at : at + chunk].t(), loss.soft_cap)
            more_SN = torch.zeros_like(sums_SN)
            _sum_columns(more_SN, logits_NC, loss)
            column_N1, foreign_N = _place(targets_N, loss.shard.start + at, logits_NC.size(1))
            more_SN[2] = logits_NC.gather(1, column_N1).squeeze(1).masked_fill_(foreign_N, 0)
            _merge(sums_SN, more_SN, columns=at, more_columns=logits_NC.size(1), loss=loss)
        foreign_N = _place(targets_N, loss.shard.start, columns)[1]
        loss_N, log_sum_N = _reduce(sums_SN, targets_N, foreign_N, columns, loss)
        ctx.save_for_backward(hidden_ND, weight_CD, targets_N, sums_SN[0].clone(), log_sum_N)
        ctx.loss, ctx.chunk = loss, chunk
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, weight_CD, targets_N, top_N, log_sum_N = ctx.saved_tensors
        loss, chunk, dtype = ctx.loss, ctx.chunk, hidden_ND.dtype
        grad_N = grad_N.masked_fill(targets_N == IGNORED, 0)
        factor_N = _factor(grad_N, log_sum_N + top_N, loss) / log_sum_N.exp()
        # One summand per chunk: their sum needs more digits than bfloat16 has.
        grad_ND = torch.zeros_like(hidden_ND, dtype=grad_N.dtype) if ctx.needs_input_grad[0] else None
        grad_CD = torch.empty_like(weight_CD) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for at in range(0, weight_CD.size(0), chunk):
                part_CD = weight_CD[at : at + chunk]
                capped_NC = _capped(hidden_ND @ part_CD.t(), loss.soft_cap)
                grad_NC = (capped_NC - top_N.unsqueeze(1)).exp_()
                place = _place(targets_N, loss.shard.start + at, part_CD.size(0))
                _finish(grad_NC, factor_N, grad_N, place, capped_NC, loss)
                grad_NC = grad_NC.to(dtype)
                if grad_ND is not None and dtype == grad_ND.dtype:
                    grad_ND.addmm_(grad_NC, part_CD)
                elif grad_ND is not None:
                    grad_ND += grad_NC @ part_CD
                if grad_CD is not None:
                    torch.mm(grad_NC.t(), hidden_ND, out=grad_CD[at : at + chunk])
        return None if grad_ND is None else grad_ND.to(dtype), grad_CD, None, None, None
