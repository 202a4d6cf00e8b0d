"""Data: from a file or a hub name to the batches of a training step.

    files       a path                     -> its rows, one by one, with the place of every fault
    read        a name: file, folder, hub  -> its splits, or one line that says what is wrong
    turns       a value of a row           -> text, a chat's turns, or why it is neither
    table       -                          -> the table of known data sets: which column is what
    adapters    a raw row                  -> an `Example`'s fields, by a row of that table
    columns     a raw row                  -> its other columns, for reward functions
    normalised  raw rows                   -> a table of `Example`s on disk; what of the bad rows
    sources     --data_path                -> `Example`s, blended and parted for the three steps
    stream      the same, --streaming      -> an endless stream of them
    segments    a prompt, an answer        -> token ids, segment by segment
    tokenize    a config and a tokenizer   -> tables or streams of ids and loss masks
    text        plain text                 -> blocks of ids for the pretraining loss
    report      a tokenised table          -> what is kept, cut and dropped, and how long
    show        data flags                 -> all of that for people: `python -m dschat.data`
    batches     tokenised rows             -> each rank's micro-batches of every optimizer step
    collate     a micro-batch              -> right-padded tensors
    builtin     a seed                     -> a built-in data set, about the little `world`
    arithmetic  a seed                     -> another, whose answers a program can check
    gold        a prompt and an answer     -> how good it really is (built-in data only)

Nothing here knows models, DeepSpeed or processes: rank and world size come in as numbers.
"""
