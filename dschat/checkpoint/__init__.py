"""Training checkpoints, and Hugging Face export of models.

A checkpoint is a folder, complete or absent. `manifest` identifies and compares checkpoints (no
torch needed), `atomic_files` writes files that survive a power cut, `deepspeed_state` captures and
restores state, `async_writer` copies it to host memory and writes in the background; `manager`
combines them.
"""
