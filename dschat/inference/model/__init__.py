"""Runs a transformer on packed tokens over a paged cache of keys and values.

What a model is built of is found by a `trial` of transformers' module: `roles` and those beside it
find which weight is what, and `decoder_trial` holds our decoder against the module. The result is a
`spec`; `architectures` keeps it. `weights` holds a rank's share of a stream of checkpoint tensors
(`linear` packs products for a CPU, `borrowed` reads training's own). `decoder` runs the layers,
with `attention` over the pages of `kv_cache`, `experts` and `positions`; on CUDA through
`step_kernels`. Models of which a part is not found run as transformers wrote them:
`module_decoder`, its weights in `module_weights`, by our products and kernels in `module_parts`.
`states` has what layers without keys carry from token to token.
"""
