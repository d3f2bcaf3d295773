"""Parallelism is an override, not a rewrite. A tour, in the order in which the data flow:

``cli.py`` composes with ``hydra_setup.py`` against the dataclasses of ``config.py``; ``resolve.py`` and ``steps.py``
have the rules that cross groups, ``slots.py`` checks what is plugged in, ``rerun.py`` what is continued; ``sweep/``
does so for many jobs and runs them side by side.

-> ``launch.py`` starts the ranks, ``worker.py`` is one of them, ``batch_finder.py`` probes before; ``run.py`` and
``trainer.py`` build everything in a rank.

-> ``parallel/`` has mesh, plans, sharding, loss, clipping, optimizer steps and initial weights on
``torch.distributed`` alone; ``strategies/`` makes a Lightning strategy of them.

-> ``models/``, ``data/``, ``optim/``, ``lr_scaling.py``, ``schedules.py``; ``module.py`` has the two tasks,
``noise_scale.py`` measures the gradients.

-> ``checkpoint/`` saves and restores, ``weights/`` exports, ``use.py`` evaluates, predicts and generates.

-> ``progress.py``, ``tracking/``, ``provenance.py``, ``summary.py`` say what happened; ``report/`` draws it for many
runs.
"""
