"""What generates for callers: the engine, and transformers' `generate` for families it cannot run.

`engine` holds weights, cache and decoder, on one device or a rank of a tensor-parallel group;
`engine_config` has its sizes. `hf_generator` makes an engine of transformers' own module, or
decodes with the module's `generate`; `self_check` compares both with plain forwards first.
"""
