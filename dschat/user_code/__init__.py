"""Loads and runs code that users bring: reward functions, environments and tools.

    calls        resolves file.py:name and pkg.mod:name within a time limit, and calls what it finds
                 in threads and event loops; a failed call becomes a `Fault`, one line
    surroundings keeps working directory, ranks and the like from what that code does to them
    processes    runs calls in worker processes that can be killed

What a function gets and may return is up to the caller. No torch here: worker processes import this
package and should start fast.
"""
