"""A folder of runs, read and understood: numbers for notebooks, and a page that needs nothing but a browser.

Everything in a run folder may come from a stranger: it is read as plain data, in bounded amounts, and shown escaped.
"""

from shardwise.report.analysis import Analysis, analyse
from shardwise.report.load import find_outputs, load_runs, newest_sweep
from shardwise.report.runs import Curve, Run, Runs

__all__ = ["Analysis", "Curve", "Run", "Runs", "analyse", "find_outputs", "load_runs", "newest_sweep"]
