"""One run, seen: a page of its curves, of where the time of every rank goes, and of what it was made from.

Read from the files of a run folder, without torch. A folder may come from a stranger: plain data only, shown escaped.
"""
