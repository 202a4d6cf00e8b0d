"""From files and hub names to the batches of a training step.

sources/             files, folders and hub names -> ``Example`` rows of a step
    resolve          name of --data_path -> splits of raw rows, or a one-line error
    readers          local file -> its rows, one at a time, with the place of every fault
    known_datasets   table of known data sets: which column is what
    adapters         raw row -> an ``Example`` by a row of that table, and its other columns
    turns            value of a row -> text, chat turns, or why it is unusable
    normalize        raw rows -> ``Example`` rows, cached on disk; reports bad rows
    table_cache      tables in the cache of ``datasets``, keyed by content and code
    splits           --data_path -> blended ``Example`` rows, split over the three steps
    stream           the same as an endless stream (--streaming)
segments             prompt and answer -> token ids, segment by segment
tokenize             config and tokenizer -> tables or streams of ids and loss masks
pretraining_text     plain text -> blocks of ids for the pretraining loss (ptx)
report               tokenized table -> counts of kept, cut and dropped rows, and lengths
inspect              data flags -> the report of ``python -m dschat.data``
batches              tokenized rows -> each rank's rows of every optimizer step or rollout
micro_batches        a rank's rows -> micro-batches, by rows or by tokens
collate              rows of a micro-batch -> packed tensors

Rank and world size are plain numbers here; no model, DeepSpeed or process group is needed.
"""
