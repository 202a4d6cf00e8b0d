"""Tokenizers of every kind, trained on a small text, chat templates, and awkward dialogues."""

import json
import random
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
LINES = [
    "the capital of France is Paris, and the sun is a star. It is five (5) o'clock: 1, 2, 3!",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 12345))\n",
    "[INST] user assistant model system <|user|> <|assistant|> Human: Assistant: [/INST]",
    "Ä naïve café; she said -- hello   world & x = y * z? #1 / 0xA0\n\n- one\n- two\n",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "default": None,
}

SPACE = "\u2581"  # SentencePiece's


def _metaspace(scheme):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


_SPACES = normalizers.Replace(" ", SPACE)
_PREPENDED = normalizers.Sequence([normalizers.Prepend(SPACE), _SPACES])
_BYTES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
# model, normalizer, pre-tokenizer, decoder
KINDS = {
    "metaspace-always": ("bpe", None, _metaspace("always"), "strip"),
    "metaspace-first": ("bpe", None, _metaspace("first"), "strip"),
    "metaspace-never": ("bpe", None, _metaspace("never"), "bytes"),
    "prepend": ("bpe", _PREPENDED, None, "strip"),
    "prepend-and-metaspace": ("bpe", normalizers.Prepend(SPACE), _metaspace("never"), "strip"),
    "replace": ("bpe", _SPACES, None, "bytes"),  # Gemma's
    "byte-level": ("bpe", None, pre_tokenizers.ByteLevel(add_prefix_space=False), "level"),
    "byte-level-prefix": ("bpe", None, pre_tokenizers.ByteLevel(add_prefix_space=True), "level"),
    "unigram-always": ("unigram", None, _metaspace("always"), "metaspace"),
    "unigram-first": ("unigram", normalizers.NFKC(), _metaspace("first"), "metaspace"),
    "wordpiece": ("wordpiece", None, pre_tokenizers.BertPreTokenizer(), "wordpiece"),
}
PREFIXED = [k for k in KINDS if k not in {"metaspace-never", "replace", "byte-level", "wordpiece"}]


@cache
def _backend(kind):
    model, normalizer, pre_tokenizer, decoder = KINDS[kind]
    is_level = decoder == "level"
    fallback = [] if is_level or model != "bpe" else [f"<0x{b:02X}>" for b in range(256)]
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if is_level else [SPACE, *map(chr, range(33, 127))]
    )
    size = {"special_tokens": [*SPECIAL, *fallback], "initial_alphabet": sorted(alphabet)}
    if model == "bpe":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=not is_level, fuse_unk=True))
        trainer = trainers.BpeTrainer(vocab_size=len(fallback) + 500, max_token_length=8, **size)
    elif model == "unigram":
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **size)
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(vocab_size=400, **size)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.train_from_iterator(LINES, trainer)
    made.decoder = {
        "strip": decoders.Sequence([*_BYTES, decoders.Strip(" ", 1, 0)]),
        "bytes": decoders.Sequence(_BYTES),
        "level": decoders.ByteLevel(),
        "metaspace": decoders.Metaspace(),
        "wordpiece": decoders.WordPiece(cleanup=False),
    }[decoder]
    state = made.to_str()
    if fallback:  # bytes are tokens of the model alone
        raw = json.loads(state)
        raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] in SPECIAL]
        state = json.dumps(raw)
    return state


def tokenizer_of(kind, template=None, eos="</s>"):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(kind)),
        bos_token="<s>",
        eos_token=eos,
        unk_token="<unk>",
        pad_token=eos,
        chat_template=template,
    )


_PIECES = [
    "Paris", " Paris", "the sun", "is a star", "It is five.", "def add(a, b):\n    return a + b",
    "    indented", "\n", "\n\n", " ", "   ", "12345", "3.14", "\U0001f600", "\u6771", "naïve",
    "-- x", "(5)", "'s", "<b>", "[INST]", "Human:", "\t", ":", ".", "user",
]  # fmt: skip


def awkward_text(draw: random.Random) -> str:
    count = draw.randint(1, 5)
    return "".join(draw.choice(_PIECES) + draw.choice(["", "", " ", "\n"]) for _ in range(count))


def dialogue(draw: random.Random, num_turns: int):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": awkward_text(draw)} for i in range(num_turns)]
