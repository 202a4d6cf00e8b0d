"""From training's weights to whatever generates: streams of whole tensors out of ZeRO's shards."""
