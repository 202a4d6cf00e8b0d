"""From files and hub names to the batches of a training step.

sources/             files, folders and hub names -> ``Example`` rows of a step
    resolve          name of --data_path -> splits of raw rows, or a one-line error
    readers          local file -> its rows, one at a time, with the place of every fault
    known_datasets   table of known data sets, and the choice among them: which column is what
    tables           rows -> tables in the cache of ``datasets``; counts, lengths and dropped rows
    turns            value of a row -> text, chat turns, or why it is unusable
    adapters         raw row -> an ``Example`` by a row of that table, and its other columns
    splits           --data_path -> blended ``Example`` rows, split over the three steps
segments             prompt and answer -> token ids, segment by segment, cut to a length
preference_rows      pairs and rankings -> step 2's rows
tokenize             config and tokenizer -> tables of ids and loss masks
pretraining_text     plain text -> blocks of ids for the pretraining loss (ptx)
inspect              data flags -> the report of ``python -m dschat.data``
batches              tokenized rows -> each rank's rows of every optimizer step or rollout
micro_batches        a rank's rows -> micro-batches, by rows or by tokens, as packed tensors

Rank and world size are plain numbers here; no model, DeepSpeed or process group is needed.
"""
