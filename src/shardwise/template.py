"""Imported last by the process that workers are forked from, and by nothing else.

What it has imported is never collected, neither by its children, which would copy what they share with it, nor when it
ends: the interpreter takes seconds to take everything down again.
"""

import atexit
import gc
import os


def _end(pid: int) -> None:
    if os.getpid() == pid:
        os._exit(0)


gc.freeze()
atexit.register(_end, os.getpid())
