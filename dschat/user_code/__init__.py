"""Loads and runs code that users bring: reward functions, environments and tools.

    imports      resolves file.py:name and pkg.mod:name within a time limit, here and in workers
    calls        what a failed call becomes: a `Fault`, one line
    threads      runs calls in threads and event loops, each with a time limit
    processes    runs calls in worker processes that can be killed

What a function gets and may return is up to the caller. No torch here: worker processes import this
package and should start fast.
"""
