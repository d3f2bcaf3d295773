"""Lightning's spawned processes, with a model that comes back whole."""

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.states import TrainerFn

from shardwise.parallel.initialise import materialise


class Spawn(_MultiProcessingLauncher):
    """Brings rank 0's weights back to the caller: the whole ones, not a rank's part; also into the meta device."""

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        super()._wrapping_function(*args, **kwargs)
        if dist.is_initialized():
            # A spawned process ends without its exit handlers: whoever goes first would break the others' connections.
            dist.barrier()
            dist.destroy_process_group()

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        if trainer.state.fn == TrainerFn.FITTING:
            whole = trainer.strategy.lightning_module_state_dict()
            # This process ends here, and the base class asks the module.
            trainer.lightning_module.state_dict = lambda: whole  # type: ignore[method-assign,assignment]
        return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if worker_output.weights_path is not None:
            # The values are overwritten at once; what matters is that there is memory to write to.
            materialise(trainer.lightning_module, seed=0, device=torch.device("cpu"))
        super()._recover_results_in_main_process(worker_output, trainer)
