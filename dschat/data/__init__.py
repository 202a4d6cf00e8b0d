"""Data: from a file or a hub name to the batches of a training step.

    read       a file or a hub name       -> a table, or one line that says what is wrong
    adapters   a raw row                  -> an `Example`; holds the table of known data sets
    sources    --data_path                -> `Example`s, blended and parted for the three steps
    segments   a prompt, an answer        -> token ids, segment by segment
    tokenize   a config and a tokenizer   -> tables of ids and loss masks (`datasets.map`)
    batches    tokenised rows             -> each rank's micro-batches of every optimizer step
    collate    a micro-batch              -> right-padded tensors
    builtin    a seed                     -> the built-in data set, about the little `world`
    gold       a prompt and an answer     -> how good it really is (built-in data only)

Nothing here knows models, DeepSpeed or processes: rank and world size come in as numbers.
"""
