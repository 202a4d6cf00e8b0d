"""Byte-level tokenizers with a few merges, and what a row trains in their text."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(eos, template=None, frame="$A", **tokens):
    """Bytes and a few merges; ``frame``: special tokens that the tokenizer adds to a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    corpus = ["\n\nHuman: hello there\n\nAssistant: hello", "the answer the answer"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[(token, i) for i, token in enumerate(special)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def trained(tokenizer, row):
    """The text of each run of trained tokens."""
    runs, previous = [], False
    for token, target in zip(row["input_ids"], row["loss_mask"], strict=True):
        if target:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = target
    return [tokenizer.decode(run) for run in runs]
