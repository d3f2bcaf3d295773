"""One Lightning strategy for every layout: a device mesh, and the numbers of one device.

Lightning's batch is this rank's share of one global batch; it is cut into micro-batches here, and gradients travel once
per optimizer step. The loss of the step is the mean over the global batch: each micro-batch is weighted with what it
counts (samples, or targets that are not ignored) over what all ranks count.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning_fabric.plugins import ClusterEnvironment
from lightning_fabric.utilities.optimizer import _optimizers_to_device
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shardwise.checkpoint.rank_state import seed_random
from shardwise.errors import ConfigError
from shardwise.parallel.fsdp import reshard
from shardwise.parallel.grad_norm import scale_gradients_
from shardwise.parallel.initialise import materialise, share_values
from shardwise.parallel.layout import Layout, lay_out
from shardwise.parallel.local_tensors import Leaves, partial_parameters, sum_partial_gradients
from shardwise.parallel.named_values import Gathered, NamedGather
from shardwise.parallel.own_gradients import OwnGradients
from shardwise.parallel.plan import Plan
from shardwise.parallel.replicas import check_replicas
from shardwise.parallel.sharded_step import check_sharded
from shardwise.parallel.timed_collectives import timed_reducer
from shardwise.seeds import stable_seed
from shardwise.strategies.checkpoints import MeshCheckpoints
from shardwise.strategies.logged import LoggedOnStep, log_over_ranks, reduce_metrics_over
from shardwise.strategies.micro_batches import batch_samples, check_same_batch, split_batch
from shardwise.strategies.nonfinite import NonFinite
from shardwise.strategies.precision import MIXED, MeshClipping, mesh_precision
from shardwise.strategies.step import Step

log = logging.getLogger(__name__)


class MeshStrategy(MeshCheckpoints):
    """Data parallelism, replicated or sharded, and tensor parallelism, in any combination, on one device mesh.

    Args:
        dp_replicate: replicas whose gradients are all-reduced; -1 (the default unless another degree is -1) means the
            remaining ranks.
        dp_shard: ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 likewise.
        tp: ranks that split each layer between them (tensor parallelism); -1 likewise. The innermost axis.
        sequence_parallel: split activations along the sequence between the split layers; None: where the plan allows.
        plan: module-name pattern -> style, in place of the model's own (shardwise.parallel.plan, and .styles).
        activation_checkpointing: ``none``, ``selective`` or ``full``: what of a block is computed again in the backward
            pass (shardwise.parallel.blocks).
        compile: compile each block.
        async_tensor_parallel: hide the communication of split layers behind their products (GPUs, with ``compile``).
        check_replicas_every_n_steps: compare what should be equal on several ranks this often; None for never.
        accumulate: micro-batches into which each of Lightning's batches is cut; Trainer's own
            ``accumulate_grad_batches`` has to stay 1.
        seed: initial weights, and (with the data-parallel rank) noise such as dropout.
        reshard_after_forward: free a block's gathered parameters after its forward pass (FSDP).
        defer_gradient_sync: reduce gradients once, after the last micro-batch; False trades traffic for the memory of
            unsharded gradients (FSDP).
        find_unused_parameters: as in DistributedDataParallel.
        start_timeout: seconds for meeting the other ranks and for the first step.
        collective_timeout: seconds for a collective after the first step.
        nonfinite: what is done about a loss or a gradient that is not finite: ``stop``, ``skip`` or ``ignore``
            (shardwise.strategies.nonfinite).
        facts: name -> plain value on which all ranks have to agree when training starts.

    The product of the degrees has to be the number of processes. Works with CPUs (gloo) and GPUs (NCCL).
    """

    def __init__(
        self,
        *,
        dp_replicate: int | None = None,
        dp_shard: int = 1,
        tp: int = 1,
        sequence_parallel: bool | None = None,
        plan: Mapping[str, str] | None = None,
        activation_checkpointing: str = "none",
        compile: bool = False,
        async_tensor_parallel: bool = False,
        check_replicas_every_n_steps: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        reshard_after_forward: bool = True,
        defer_gradient_sync: bool = True,
        find_unused_parameters: bool = False,
        start_timeout: float = 600.0,
        collective_timeout: float = 120.0,
        nonfinite: str = "stop",
        facts: Mapping[str, Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        self._precision_name: str | None = None
        super().__init__(
            degrees={
                "dp_replicate": (1 if -1 in (dp_shard, tp) else -1) if dp_replicate is None else dp_replicate,
                "dp_shard": dp_shard,
                "tp": tp,
            },
            facts={"seed": seed, "micro-batches": accumulate, **(facts or {})},
            start_timeout=start_timeout,
            collective_timeout=collective_timeout,
            cluster_environment=cluster_environment,
        )
        self.accumulate = accumulate
        self.seed = seed
        self._layout = Layout(
            plan=dict(plan or {}),
            sequence_parallel=sequence_parallel,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            async_tensor_parallel=async_tensor_parallel,
            reshard_after_forward=reshard_after_forward,
        )
        self.plan: Plan | None = None
        """By which layers are split; known once they are."""
        self._leaves: Leaves | None = None
        self.own_gradients: OwnGradients | None = None
        """To be shown each rank's own gradient before it is added up over ranks; given before training starts."""
        self._check_replicas_every = check_replicas_every_n_steps
        self._defer_gradient_sync = defer_gradient_sync
        self._find_unused_parameters = find_unused_parameters
        self._step: Step | None = None
        self.nonfinite = NonFinite(nonfinite, self)
        self._counts_late = False
        self._starting = True
        self.gathers_logged = True
        """Whether what the module logs is put together over ranks as the step ends; False where a callback gathers it
        with other things (``step_values``)."""
        self._logged: LoggedOnStep | None = None
        self._gather: NamedGather | None = None
        self._warned: set[str] = set()

    # ---- start ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._set_up_precision()
        module = self.lightning_module
        if self.dp_group is not None:
            log_over_ranks(module, trainer, self.dp_group)
        if self.dims.world_size > 1:
            reduce_metrics_over(module, self.dp_group)
            self._gather = NamedGather(dist.group.WORLD, self.root_device)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _check_contract(module, trainer)
        self._parallelise(module)
        if fitting:
            if self.dims.dp_replicate > 1 and not self.dims.uses_fsdp:
                self.model = self._wrap_ddp(module)
            if self.own_gradients is not None and isinstance(self.model, FSDPModule):
                self.own_gradients.attach(self.model, dp_size=self.dp_size)
            self._counts_late = False
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self.remember_groups()
            if self.holds_parts:
                self._check_optimizers()
            # Initial weights are drawn from generators of their own; from here on each share of the data has its noise.
            seed_random(stable_seed(self.seed, "noise", self.dp_rank))
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        # Buffers that FSDP gathers, and metrics that are reset, under inference_mode would be of no use in training.
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = False
        trainer.predict_loop.inference_mode = False

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                note = check_sharded(type(optimizer), group)
            if note and self.is_global_zero:
                log.warning(note)

    def _set_up_precision(self) -> None:
        self.dims.check_precision(self._precision_name or "")
        # The next call of the trainer keeps the plugin, whose scaler has learned something.
        plugin = self._precision_plugin
        if not isinstance(plugin, MeshClipping):
            self.precision_plugin = mesh_precision(
                self._precision_name or "32-true",
                device_type=self.root_device.type,
                autocast=not self.dims.uses_fsdp,
                scaler=getattr(plugin, "scaler", None),
            )
        used: Any = self.precision_plugin
        used.nonfinite = self.nonfinite

    def _parallelise(self, module: LightningModule) -> None:
        """Formats, sharding, then memory and initial values: nothing is held whole that is kept in parts.

        A module that comes a second time keeps its values and its sharding.
        """
        layout = f"{self.dims} in {self._precision_name}"
        before = getattr(module, "_layout", None)
        if before is not None or isinstance(module, FSDPModule):
            text, wanted, self.plan, self._leaves = before or ("a mesh of its own", None, None, None)
            if text != layout or wanted != self._layout:
                what = layout if text != layout else f"the same mesh with {self._layout}"
                raise ConfigError(
                    f"{type(module).__name__} is laid out over {text}, and cannot become {what}: construct it anew and "
                    f"load a checkpoint"
                )
            return
        self.precision_plugin.convert_module(module)
        if self.dims.world_size > 1:
            share_values(module, device=self.root_device)
        self.plan = lay_out(
            module,
            self._layout,
            mesh=self.mesh,
            dims=self.dims,
            compute_dtype=MIXED.get(self._precision_name or ""),
        )
        materialise(module, seed=self.seed, device=self.root_device)
        if self.plan is not None and not self.dims.uses_fsdp:
            self._leaves = Leaves()
            self._leaves.attach(module)
        if self.holds_parts or self._layout.works_on_blocks:
            # A second trainer finds what the first has done.
            module._layout = (layout, self._layout, self.plan, self._leaves)  # type: ignore[assignment]

    def _wrap_ddp(self, module: LightningModule) -> DistributedDataParallel:
        on_gpu = self.root_device.type == "cuda"
        # torch 2.14 renamed it.
        new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        # Only running statistics change during training; tables such as rotary positions never do.
        running = any(isinstance(layer, _BatchNorm) for layer in module.modules())
        options: dict[str, Any] = {"forward_sync_buffers" if new_name else "broadcast_buffers": running}
        return DistributedDataParallel(
            module,
            device_ids=[self.root_device.index] if on_gpu else None,
            process_group=self.dp_group,
            find_unused_parameters=self._find_unused_parameters,
            gradient_as_bucket_view=True,
            **options,
        )

    def on_train_start(self) -> None:
        super().on_train_start()
        self.continue_training()
        self._settle_buckets()
        assert self.lightning_module is not None
        self.clock.step = self.lightning_module.trainer.global_step

    def _settle_buckets(self) -> None:
        """Let DistributedDataParallel order its buckets before the first step.

        It orders them anew after its first backward pass, so that sums over ranks round otherwise from then on: a run
        that is resumed in step 7 would differ from one that goes through. A pass over nothing is its first here.
        """
        model, module = self.model, self.lightning_module
        if not isinstance(model, DistributedDataParallel) or self._find_unused_parameters:
            return
        assert module is not None
        trained, forward = [p for p in module.parameters() if p.requires_grad], module.forward
        module.forward = lambda: torch.stack([p.flatten()[:1].sum().real.double() for p in trained]).sum()  # type: ignore
        try:
            model().backward()
        finally:
            module.forward = forward  # type: ignore[method-assign]
        module.zero_grad()

    def model_to_device(self) -> None:
        """Nothing: parameters are created where they belong."""

    def process_dataloader(self, dataloader: object) -> object:
        """A loader without a generator gets one: else each iteration over it, in validation say, moves dropout."""
        if isinstance(dataloader, DataLoader) and dataloader.generator is None:
            dataloader.generator = torch.Generator().manual_seed(stable_seed(self.seed, "loader", self.dp_rank))
        return dataloader

    # ---- one optimizer step ---------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *args: Any) -> Tensor:
        """Cut the batch, start counting over the ranks, and run the first micro-batch; ``backward`` does the rest.

        Returns:
            Mean loss of the first micro-batch on this rank.
        """
        with self.clock.phase("forward"):
            return self._begin_step(batch, args)

    def _begin_step(self, batch: Any, args: tuple) -> Tensor:
        if self._starting and self.tp_group is not None:
            check_same_batch(batch, self.tp_group)
        count_targets = getattr(self.lightning_module, "count_targets", None)
        batches = split_batch(batch, self.accumulate)
        counts = None if self._counts_late else self._count(batches, count_targets)
        self._step = step = Step(
            batches,
            args,
            counts=counts,
            assumed=count_targets is None,
            group=self.dp_group,
            device=self.root_device,
        )
        self.nonfinite.begin(step)
        loss = self._forward(step, 0)
        self._counts_late = step.late
        return loss

    def _count(self, batches: list[Any], count_targets: Callable[[Any], Any] | None) -> list[Any]:
        if count_targets is not None:
            return [count_targets(batch) for batch in batches]
        if self.dp_size == 1 and len(batches) == 1:
            return [1]  # with nothing to weigh it against, any type of batch will do
        return [batch_samples(batch) for batch in batches]

    def _forward(self, step: Step, index: int) -> Tensor:
        last = index == len(step.batches) - 1
        self._sync_gradients(last or not self._defer_gradient_sync, last=last)
        with self.precision_plugin.train_step_context():
            output = self._run("training_step", step.batches[index], *step.args)
        loss = step.take(index, output)
        self.nonfinite.see_loss(index, loss)
        return loss

    def _sync_gradients(self, wanted: bool, *, last: bool) -> None:
        """Whether the coming forward and backward pass communicates gradients."""
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = wanted
        elif isinstance(model, FSDPModule) and self.accumulate > 1:  # it walks through all modules
            model.set_requires_gradient_sync(wanted)
            # What is already in parts need not be added up over replicas before the end.
            model.set_requires_all_reduce(last)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward pass of the first micro-batch, then forward and backward of the others."""
        with self.clock.phase("backward"):
            return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step, module = self._step, self.lightning_module
        assert step is not None
        assert module is not None
        plugin = self.precision_plugin
        several = len(step.batches) > 1
        self._logged = logged = LoggedOnStep(module.trainer)
        if several:
            logged.keep()
        weighted = plugin.pre_backward(step.weigh(0, closure_loss), module)
        with self._each_gradient(module), self._timed_reducer(weighted):
            plugin.backward(weighted, module, optimizer, *args, **kwargs)
        for index in range(1, len(step.batches)):
            # The module may log from its training_step.
            hook, module._current_fx_name = module._current_fx_name, "training_step"
            with self.clock.phase("forward"):
                loss = self._forward(step, index)
            module._current_fx_name = hook
            logged.keep()
            weighted = plugin.scale_loss(step.weigh(index, loss))
            with self._each_gradient(module), self._timed_reducer(weighted):
                plugin.backward(weighted, module, optimizer, *args, **kwargs)
        if self._leaves is not None:
            self._leaves.hand_over()
        if self.tp_group is not None:
            sum_partial_gradients(partial_parameters(module), self.tp_group)
        if several:
            logged.merge(step.shares())
        if self._logs_now(module):
            values = self.step_values()
            assert self._gather is not None
            self.put_step_values(self._gather(list(values), torch.stack(list(values.values()))))
        correction = step.correction()
        if correction is not None:
            scale_gradients_(module.parameters(), correction)
        self.nonfinite.after_backward()
        return plugin.post_backward(weighted, module)

    def _logs_now(self, module: LightningModule) -> bool:
        """Whether what the module has logged in this step is to be put together over ranks; all ranks agree."""
        if not self.gathers_logged:
            return False
        every: int = module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._gather is None or not every or (module.trainer.global_step + 1) % every:
            return False
        return getattr(module, "logs_in_training", True)

    def _timed_reducer(self, loss: Tensor) -> contextlib.AbstractContextManager[None]:
        model = self.model
        if not (self.clock.running and loss.requires_grad and isinstance(model, DistributedDataParallel)):
            return contextlib.nullcontext()
        return timed_reducer(self.clock, loss) if model.require_backward_grad_sync else contextlib.nullcontext()

    def _each_gradient(self, module: LightningModule) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass: each micro-batch has a gradient of its own, which FSDP adds up out of reach."""
        own = self.own_gradients
        if own is None or not own.wanted or isinstance(self.model, FSDPModule):
            return contextlib.nullcontext()
        return own.of_each(module.parameters())

    def shares_of_gradient(self) -> tuple[Tensor, Tensor]:
        """Of the step before the optimizer's: the squared norm of the mean gradient over each micro-batch of this rank
        (FSDP: over all of them), and what it counts over what all count. 1-dim, float64, one element a share.

        ``own_gradients`` has to be there, and have been ``wanted``; where nothing counts, the first is not a number.
        """
        assert self._step is not None
        assert self.own_gradients is not None
        step, scaler = self._step, getattr(self.precision_plugin, "scaler", None)
        weights = step.weights()
        if isinstance(self.model, FSDPModule):
            weights = weights.sum(0, keepdim=True)
        # What was seen is scaled, and weighted by the step (``Step.weigh``).
        factor = self.dp_size * weights * (1.0 if scaler is None else scaler.get_scale())
        return self.own_gradients.take() * (step.factor / factor) ** 2, weights

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that this process has left out, as a loss or a gradient was not finite."""
        return self.nonfinite.skipped_steps

    @property
    def defers_gradient_sync(self) -> bool:
        """Whether gradients are reduced once, after the last micro-batch."""
        return self._defer_gradient_sync

    def step_values(self) -> dict[str, Tensor]:
        """What this rank knows of the last step: sum of its losses, what that is a sum over, and what the module has
        logged; 0-dim, float64. Whoever gathers them over all ranks hands them to ``put_step_values``."""
        assert self._step is not None
        assert self._logged is not None
        values = {"step/loss_sum": self._step.loss_sum, "step/count": self._step.count(), **self._logged.mine()}
        device = self.root_device
        return {name: value.detach().to(device, torch.float64) for name, value in values.items()}

    def put_step_values(self, gathered: Gathered) -> dict[str, float]:
        """Make what the module has logged in the last step that of all ranks.

        Args:
            gathered: ``step_values`` of all ranks, among other numbers.

        Returns:
            What only other ranks have logged, by name.
        """
        assert self._logged is not None
        dp_ranks = np.array([self.dims.dp_rank(rank) for rank in range(len(gathered.values))])
        return self._logged.put(gathered, gathered.column("step/count"), dp_ranks, self._warned)

    def global_loss(self) -> Tensor:
        """Mean loss of the last step over its global batch: 0-dim, float64. A collective."""
        assert self._step is not None
        return self._step.global_loss()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.clock.phase("optimizer"):  # from which the forward and backward pass in the closure take theirs
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            if self._step is not None:
                self._step.batches = []  # so far, the step might have had to be run again
            self._check_replicas()
        self.clock.step += 1
        if self._starting:
            self._starting = False
            self.started()
        return result

    def _check_replicas(self) -> None:
        every, module = self._check_replicas_every, self.lightning_module
        if self.mesh is None or not every or module is None:
            return
        step = module.trainer.global_step + 1  # Lightning counts it when this has returned
        if step % every == 0:
            check_replicas(module, self.optimizers, mesh=self.mesh, step=step)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def _run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the LightningModule through the wrapper's forward, whose hooks gather and reduce."""
        model, module = self.model, self.lightning_module
        assert model is not None
        assert module is not None
        if isinstance(model, (DistributedDataParallel, FSDPModule)) or self.dims.tp > 1:
            return self._forward_redirection(model, module, method, *args, **kwargs)
        return getattr(module, method)(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", *args, **kwargs)

    def _reshard(self) -> None:
        if self.lightning_module is not None:
            reshard(self.lightning_module)

    on_validation_end = on_test_end = on_predict_end = _reshard

    # ---- precision, and the end --------------------------------------------------------------------------------

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """Format in which gradients are added up over ranks; None with one device."""
        if self.dp_size == 1 or self.lightning_module is None:
            return None
        if self.dims.uses_fsdp and self._precision_name in MIXED:
            return torch.float32
        return next((p.dtype for p in self.lightning_module.parameters() if p.requires_grad), None)

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            self._precision_name = str(precision_plugin.precision)

    def on_exception(self, exception: BaseException) -> None:
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            fix = "a parameter has no part in the loss: strategy.find_unused_parameters=true, or freeze it"
            exception.args = (f"{fix}\n{exception}",)

    def teardown(self) -> None:
        module = self.lightning_module
        parts = getattr(module, "_layout", None) is not None or isinstance(module, FSDPModule)
        if module is not None and not parts and not any(p.is_meta for p in module.parameters()):
            super().teardown()
            return
        self.stop_clock()
        # The base class moves the module to the CPU, which sharded parameters on a GPU mesh do not survive, and which
        # fails on the meta device, where an error has left the module: that error is the one to show.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _check_contract(module: LightningModule, trainer: Trainer) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} uses manual optimization, but backward, accumulation and clipping are the strategy's: return the "
            f"loss from training_step and leave automatic_optimization=True"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): leave it 1, and type "
            f"MeshStrategy(accumulate={trainer.accumulate_grad_batches})"
        )
