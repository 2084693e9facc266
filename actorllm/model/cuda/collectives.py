"""What the ranks of one model exchange on their devices; `model.parallel` says which rank holds what.

All of them make the same launches in the order of the plans. An exchange is one launch among them, on the stream of the step
and inside its graph. So whatever decides which launches are made must be the same everywhere. That is plans, and what ranks have
told each other (`all_agree`). It is never what a rank sees alone, such as its idle time. What a rank has to find out about
itself it computes with nothing exchanged (`alone`).

On GPUs torch.distributed goes through NCCL, on CPU tensors through gloo. With one rank nothing here launches anything. Owned by
the runner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import CudaDevice, Device
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.linear import LinearWeight
from actorllm.model.parallel import Ranks

GPU_BACKEND = "cpu:gloo,cuda:nccl"
"""Of torch.distributed: what ranks agree on is on the host (`Collectives.all_agree`)."""


def own_device(config: EngineConfig, rank: int) -> CudaDevice:
    """The GPU of this rank: the visible one of its number. Raises ConfigError when there is none, or none that can be used."""
    if config.world_size == 1:
        return CudaDevice()
    count = torch.cuda.device_count()
    if torch.cuda.is_available() and config.world_size > count:
        raise ConfigError(
            f"tensor_parallel_size={config.world_size} needs a GPU for every rank, and {count} can be seen (CUDA_VISIBLE_DEVICES "
            f"may hide some); set tensor_parallel_size={count} or less, or device='cpu'"
        )
    # A launch behind one of NCCL's may not begin early: the two together were never tried.
    device = CudaDevice(rank, uses_pdl=False)
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            f"tensor_parallel_size={config.world_size}: torch {torch.__version__} is built without NCCL; use a build that has it, "
            f"or tensor_parallel_size=1"
        )
    torch.cuda.set_device(device.torch_device)
    return device


class Collectives:
    """The exchanges of this rank. Without arguments: of one that is alone."""

    def __init__(self, ranks: Ranks | None = None, *, is_silent: bool = False) -> None:
        """is_silent: nothing is exchanged, ever; for launches that are not run."""
        self.ranks = ranks if ranks is not None else Ranks()
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self._is_silent = is_silent

    @classmethod
    def connect(cls, config: EngineConfig, rank: int, device: Device) -> Collectives:
        """Wait for all ranks of the engine, and exchange something once: what a graph holds must have been set up before."""
        is_gpu = device.torch_device.type == "cuda"
        collectives = cls(Ranks.connect(config, rank, GPU_BACKEND if is_gpu else "gloo"))
        if collectives.size > 1:
            with device.active():
                ones = torch.ones(1, 1, dtype=torch.int32, device=device.torch_device)
                collectives.sum_(ones)
                _gather(ones, torch.empty(collectives.size, 1, dtype=torch.int32, device=device.torch_device))
                _broadcast(ones)
                device.download([ones]).wait()
        return collectives

    def silent(self) -> Collectives:
        """The same rank, for launches that are not run."""
        return Collectives(self.ranks, is_silent=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, every sum is this rank's part of it. Other ranks need not come here, or not now."""
        was, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = was

    @property
    def _exchanges(self) -> bool:
        return self.size > 1 and not self._is_silent

    def all_agree(self, yes: bool) -> bool:
        """Whether all ranks say yes, which all of them must be asked at the same point. The host waits for the others."""
        if not self._exchanges:
            return yes
        votes = torch.from_numpy(np.array([yes], np.int32))
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
        return bool(votes[0])

    # Launches: these may be recorded ----------------------------------------------------------------------------------

    def sum_(self, x: torch.Tensor) -> None:
        """The sum over all ranks, in place: the same bits everywhere."""
        if self._exchanges:
            _all_reduce(x)

    def norm_(
        self, parts: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], eps: float, squares: torch.Tensor
    ) -> None:
        """RMSNorm, in place, of rows whose columns are shared out evenly: of each of several parts of them by itself.

        parts: [num_rows, columns of this rank] each; squares: float32 [num_rows, len(parts)], for their exchange.
        """
        for i, part in enumerate(parts):
            _square_sums(part, squares[:, i])
        self.sum_(squares)
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            # Columns that several ranks have are summed, and counted, as often.
            _scale_rows(part, weight, squares[:, i], len(weight) * self.size, eps)

    def tell(self, results: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor) -> None:
        """What rank 0 has sampled, for all. results: its first row is the tokens; rows: slots, or -1.

        Elsewhere the tokens are put where the next step looks for its inputs: the host need not know them before.
        """
        if self._exchanges:
            _broadcast(results)
            if self.rank:
                _put(results[0, : len(rows)], rows, last_token)


class Vocabulary:
    """The ids whose embeddings and logits are this rank's."""

    def __init__(self, collectives: Collectives, size: int, scale: float = 1.0) -> None:
        """scale: embeddings are multiplied by it."""
        self._collectives = collectives
        self.size, self._scale = size, scale
        self.part = collectives.ranks.part(size)
        self.width = -(-size // collectives.size)
        """Rows of the tables here, of which the last one may be empty: equal parts are exchanged."""
        self._logits: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None

    def padded(self, table: torch.Tensor) -> torch.Tensor:
        """A table of this rank's ids, [len(part), hidden_size], with `width` rows."""
        missing = self.width - len(table)
        return torch.nn.functional.pad(table, (0, 0, 0, missing)) if missing else table

    def padded_head(self, head: LinearWeight) -> LinearWeight:
        """The same of a head. An output that is missing is another one once more: nothing reads its logits."""
        missing = self.width - head.out_features
        if not missing:
            return head
        outputs = torch.arange(self.width).clamp_max_(head.out_features - 1)
        return head.reordered(outputs)

    def allocate(self, num_rows: int, device: torch.device) -> None:
        """Make room for the logits of so many rows."""
        if self._collectives.size > 1:
            self._logits = torch.empty(num_rows, self.width, device=device)
            self._gathered = torch.empty(self._collectives.size * num_rows, self.width, device=device)

    def embed(self, ids: torch.Tensor, table: torch.Tensor, y: torch.Tensor, *, pdl: bool) -> None:
        """y = embeddings of any ids, [num_tokens, hidden_size]."""
        if self._collectives.size == 1:
            ops.embed(ids, table, y, self._scale, pdl=pdl)
        else:
            _embed_part(ids, self.part.start, table, y, self._scale, pdl=pdl)
            self._collectives.sum_(y)

    def logits(self, final: torch.Tensor, head: DeviceLinear, logits: torch.Tensor) -> None:
        """float32 [num_rows, size]; with several ranks on the first one only. Alone: of this rank's ids, and 0."""
        if self._collectives.size == 1:
            head.wide(final, logits)
            return
        count, size = len(final), self._collectives.size
        assert self._logits is not None, "`allocate` comes first"
        assert self._gathered is not None
        ours, gathered = self._logits[:count], self._gathered[: size * count]
        if len(ours) < count:  # many rows of prompts, never recorded
            ours, gathered = (torch.empty(n, self.width, device=logits.device) for n in (count, size * count))
        head.wide(final, ours)
        if not self._collectives._exchanges:
            _place_alone(ours, self.part, logits)
            return
        _gather(ours, gathered)
        if self._collectives.rank == 0:
            for rank, part in enumerate(gathered.view(size, count, self.width)):
                columns = Ranks(rank, size).part(self.size)
                ops.copy(part[:, : columns.stop - columns.start], logits[:, columns])


@ops.launchable
def _all_reduce(x: torch.Tensor) -> None:
    torch.distributed.all_reduce(x)


@ops.launchable
def _broadcast(x: torch.Tensor) -> None:
    torch.distributed.broadcast(x, 0)


@ops.launchable
def _gather(x: torch.Tensor, everybodys: torch.Tensor) -> None:
    """At every rank: sends and receives between two ranks cost no less time, and would have to be set up one by one."""
    torch.distributed.all_gather_into_tensor(everybodys, x)


@ops.launchable
def _put(tokens: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor) -> None:
    """last_token[rows] = tokens, but for rows of no slot, which must not write what another row writes."""
    slots = rows.clamp_min(0).long()
    differences = torch.where(rows >= 0, tokens - last_token[slots], 0)
    last_token.index_add_(0, slots, differences)


@ops.launchable
def _embed_part(
    ids: torch.Tensor, first: int, table: torch.Tensor, y: torch.Tensor, scale: float, *, pdl: bool
) -> None:
    ops.embed(ids - first, table, y, scale, pdl=pdl)


@ops.launchable
def _square_sums(x: torch.Tensor, sums: torch.Tensor) -> None:
    sums.copy_(x.float().square().sum(1))


@ops.launchable
def _scale_rows(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor, size: int, eps: float) -> None:
    """x *= weight / sqrt(squares / size + eps)."""
    x.copy_(x.float() * torch.rsqrt(squares / size + eps).unsqueeze(1) * weight.float())


@ops.launchable
def _place_alone(part: torch.Tensor, columns: slice, logits: torch.Tensor) -> None:
    logits.zero_()
    logits[:, columns].copy_(part[:, : columns.stop - columns.start])
