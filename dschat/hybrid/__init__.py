"""Gathers the actor's weights from ZeRO's shards into a generator, and frees memory meanwhile."""
