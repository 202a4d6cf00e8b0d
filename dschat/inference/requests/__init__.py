"""Answers requests: which run in a step, what it computes, and which tokens are drawn.

`sequence` has the nouns: a `Request` asks for answers to a prompt, a `Sequence` is one of them,
with its pages of the cache. `scheduler` chooses the sequences of each step and gives pages out;
where none is left the newest sequence waits and is computed again. `step_runner` makes a step's
tensors and runs the decoder, on CUDA as a captured graph (`cuda_graphs`, with `decode_state` in
place). `sampler` draws the tokens of all rows. `core` puts these together: requests are added and
cancelled between two steps; `captured_core` starts a step before the tokens of the last one are
read. `stats` counts and times.
"""
