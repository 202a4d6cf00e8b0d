"""The table of wrong inputs: what somebody types, and what the one line of the answer must hold.

``{f}`` in a command is the folder of the files that `write_inputs` makes, ``{m}`` its models; a
command runs in an empty working directory. It must not know how commands are run.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

STEP1 = "step1_sft/main.py --output_dir out --model_name_or_path {m}/llama"
STEP2 = "step2_reward/main.py --output_dir out --model_name_or_path {m}/llama"
STEP3 = "step3_rlhf/main.py --output_dir out --actor_model_name_or_path {m}/llama"
STEP3_ALL = f"{STEP3} --critic_model_name_or_path {{m}}/llama_reward --data_path {{f}}/good.jsonl"
TRAIN = "train.py --output-dir out"
CHAT = "chat.py"
DATA = "-m dschat.data"
NEW1 = "step1_sft/main.py --output_dir out --data_path {f}/good.jsonl"
NEW2 = "step2_reward/main.py --output_dir out --data_path {f}/good.jsonl"
NEW3 = "step3_rlhf/main.py --output_dir out --data_path {f}/good.jsonl"


class Mistake(NamedTuple):
    name: str
    argv: list[str]  # what follows ``python``
    words: tuple[str, ...]  # of the line: what is wrong, and how to mend it


def mistakes(folder: Path) -> list[Mistake]:
    """The table, for inputs in ``folder``."""
    places = {"f": str(folder / "files"), "m": str(folder / "models")}
    return [
        Mistake(name, [word.format(**places) for word in words_of(command)], words)
        for group in (FLAGS, FILES, DATA_SETS, YAML, MODELS, SHAPES, MACHINES, API)
        for name, command, *words in group
    ]


def words_of(command: str | tuple[str, ...]) -> list[str]:
    return list(command) if isinstance(command, tuple) else shlex.split(command)


def api(code: str) -> tuple[str, ...]:
    """A script of three lines that calls the library, with the exit of ours for what users mend."""
    return ("-c", f"from dschat import cli\n{code}\n")


FLAGS = [
    ("unknown flag", f"{STEP1} --leraning_rate 1", "--leraning_rate", "did you mean --learning_rate"),
    ("unknown flag, train.py", f"{TRAIN} --actor-modle x", "--actor-modle", "did you mean --actor_model"),
    ("unknown flag, chat.py", f"{CHAT} --pth x", "--pth", "did you mean --path"),
    ("unknown flag, data", f"{DATA} {{f}}/good.jsonl --prompt x", "--prompt", "did you mean --prompt_column"),
    ("no value", f"{STEP1} --seed", "--seed needs a value"),
    ("no value, train.py", f"{TRAIN} --recipe", "--recipe needs a value"),
    ("not a number", f"{STEP1} --learning_rate fast", "--learning_rate 'fast'", "number"),
    ("not whole", f"{STEP3_ALL} --ppo_epochs 1.5", "--ppo_epochs '1.5'", "whole number"),
    ("nan", f"{STEP1} --learning_rate nan", "--learning_rate", "nan"),
    ("negative", f"{STEP2} --learning_rate -1", "--learning_rate", "negative"),
    ("zero batch", f"{STEP1} --per_device_train_batch_size 0", "--per_device_train_batch_size", "at least 1"),
    ("no such choice", f"{STEP1} --dtype fp8", "--dtype 'fp8'", "bf16"),
    ("neither true nor false", f"{STEP1} --offload perhaps", "--offload 'perhaps'", "true nor false"),
    ("stray word", f"{STEP1} data.jsonl", "data.jsonl", "--name value"),
    ("no such stage", f"{STEP1} --zero_stage 9", "--zero_stage 9", "0, 1, 2 and 3"),
    ("no such stage, train.py", f"{TRAIN} --step1.zero_stage 9", "--zero_stage 9", "0, 1, 2 and 3"),
    ("no such step", f"{TRAIN} --step 4", "--step 4", "1, 2 and 3"),
    ("flag of another step", f"{TRAIN} --step 1 --kl_coef 0.1", "--kl_coef", "step 3"),
    ("two shares", f"{STEP1} --data_split 1,2", "--data_split '1,2'", "three"),
    ("offload without ZeRO-3", f"{STEP1} --offload_parameters", "--offload_parameters", "--zero_stage 3"),
    ("top_p beyond 1", f"{STEP3_ALL} --top_p 1.5", "--top_p 1.5", "(0, 1]"),
    ("streaming without an end", f"{STEP1} --streaming", "--streaming", "--max_steps"),
    ("no models", "step3_rlhf/main.py --output_dir out", "--actor_model_name_or_path is missing"),
    ("no path", CHAT, "--path is missing"),
    ("negative temperature", f"{CHAT} --path {{m}}/llama --temperature -1", "--temperature -1"),
    ("empty output", "step1_sft/main.py --output_dir= --data_path {f}/good.jsonl --model_name_or_path {m}/nowhere", "nowhere"),
    ("batch that does not divide", f"{STEP3_ALL} --per_device_training_batch_size 5", "--per_device_training_batch_size", "divide"),
    ("huge seed", f"{STEP1} --data_path {{f}}/good.jsonl --seed 99999999999999999999999", "--seed"),
    ("negative seed", f"{STEP1} --data_path {{f}}/good.jsonl --seed -1", "--seed"),
    ("unknown attention", f"{STEP1} --data_path {{f}}/good.jsonl --attn_implementation fast", "--attn_implementation"),
    ("flash attention", f"{STEP1} --data_path {{f}}/good.jsonl --attn_implementation flash_attention_2", "--attn_implementation"),
    ("lora modules", f"{STEP1} --data_path {{f}}/good.jsonl --lora_dim 4 --lora_modules q_prj", "--lora_modules", "q_prj"),
    ("dropout 2", f"{STEP1} --data_path {{f}}/good.jsonl --dropout 2", "--dropout 2"),
    ("wandb", f"{STEP1} --data_path {{f}}/good.jsonl --enable_wandb", "--enable_wandb", "pip install"),
]

FILES = [
    ("no such file", f"{STEP1} --data_path {{f}}/none.jsonl", "none.jsonl", "--data_path"),
    ("no such file, train.py", f"{TRAIN} --data_path {{f}}/none.jsonl", "none.jsonl", "--data_path"),
    ("no such file, data", f"{DATA} {{f}}/none.jsonl", "none.jsonl"),
    ("empty file", f"{STEP1} --data_path {{f}}/empty.jsonl", "empty.jsonl is empty"),
    ("not UTF-8", f"{STEP1} --data_path {{f}}/latin1.jsonl", "latin1.jsonl:2", "UTF-8"),
    ("not UTF-8, CSV", f"{STEP1} --data_path {{f}}/latin1.csv", "latin1.csv:2", "UTF-8"),
    ("binary", f"{STEP1} --data_path {{f}}/binary.jsonl", "binary.jsonl"),
    ("unknown suffix", f"{STEP1} --data_path {{f}}/data.docx", "data.docx", ".csv"),
    ("empty folder", f"{STEP1} --data_path {{f}}/empty_folder", "empty_folder", "no data files"),
    ("pattern without files", f"{STEP1} --data_path {{f}}/none*.jsonl", "none*.jsonl", "pattern"),
    ("damaged parquet", f"{STEP1} --data_path {{f}}/bad.parquet", "bad.parquet"),
    ("half a saved data set", f"{STEP1} --data_path {{f}}/saved", "saved", "save it again"),
    ("file in the way", f"{STEP1} --data_path {{f}}/good.jsonl --output_dir {{f}}/good.jsonl/out", "--output_dir"),
    ("file in the way, train.py", "train.py --output-dir {f}/good.jsonl --actor-model {m}/llama --reward-model {m}/llama --data_path {f}/good.jsonl", "--output"),
    ("file as output", f"{STEP1} --data_path {{f}}/good.jsonl --output_dir {{f}}/good.jsonl", "--output_dir"),
    ("cannot be written", f"{STEP3_ALL} --output_dir /proc/dschat/out", "--output_dir /proc/dschat/out"),
    ("cannot be written, train.py", "train.py --output-dir /proc/dschat --actor-model {m}/llama --reward-model {m}/llama --data_path {f}/good.jsonl", "--output"),
    ("finished already", f"{STEP1} --data_path {{f}}/good.jsonl --output_dir {{f}}/finished", "--overwrite_output_dir"),
    ("chat template missing", f"{STEP1} --data_path {{f}}/good.jsonl --chat_template {{f}}/none.jinja", "--chat_template"),
    ("chat template broken", f"{STEP1} --data_path {{f}}/good.jsonl --chat_template {{f}}/broken.jinja", "--chat_template", "broken.jinja"),
    ("deepspeed file missing", f"{STEP1} --data_path {{f}}/good.jsonl --deepspeed_config {{f}}/none.json", "--deepspeed_config", "none.json"),
    ("deepspeed file broken", f"{STEP1} --data_path {{f}}/good.jsonl --deepspeed_config {{f}}/broken.json", "--deepspeed_config", "line"),
    ("deepspeed file contradicts", f"{STEP1} --data_path {{f}}/good.jsonl --deepspeed_config {{f}}/stage2.json", "--zero_stage 0", "stage"),
    ("deepspeed file type", f"{STEP1} --data_path {{f}}/good.jsonl --deepspeed_config {{f}}/typed.json", "--deepspeed_config"),
]

DATA_SETS = [
    ("missing column", f"{STEP2} --data_path {{f}}/column.jsonl", "question", "--prompt_column"),
    ("no such column", f"{STEP2} --data_path {{f}}/good.jsonl --prompt_column frage", "--prompt_column", "frage"),
    ("no rejected answers", f"{STEP2} --data_path {{f}}/answers.jsonl", "rejected"),
    ("broken JSON line", f"{STEP1} --data_path {{f}}/broken.jsonl", "broken.jsonl:3"),
    ("broken JSON", f"{STEP1} --data_path {{f}}/broken.json", "broken.json:"),
    ("list of lists", f"{STEP1} --data_path {{f}}/lists.json", "lists.json"),
    ("ragged CSV", f"{STEP1} --data_path {{f}}/ragged.csv", "ragged.csv:3", "columns"),
    ("CSV without a header", f"{STEP1} --data_path {{f}}/header.csv", "header.csv"),
    ("chosen equals rejected", f"{STEP2} --data_path {{f}}/same.jsonl", "alike"),
    ("prompts too long", f"{STEP3_ALL} --max_prompt_seq_len 1", "--max_prompt_seq_len"),
    ("share of nothing", f"{STEP1} --data_path {{f}}/good.jsonl --data_split 0,1,1", "--data_split"),
    ("weight of zero", f"{STEP1} --data_path {{f}}/good.jsonl:0", "good.jsonl"),
    ("fewer prompts than a rollout", f"{STEP3_ALL} --per_device_generation_batch_size 64", "--per_device_generation_batch_size"),
    ("evaluation file", f"{STEP1} --data_path {{f}}/good.jsonl --eval_data_path {{f}}/none.jsonl", "--eval_data_path", "none.jsonl"),
    ("no text column", f"{STEP3_ALL} --unsupervised_dataset_name {{f}}/good.jsonl --unsup_column txt", "--unsup_column"),
    ("bad row", f"{STEP1} --data_path {{f}}/blank.jsonl --on_bad_row error", "blank.jsonl:2"),
    ("no rejected, data", f"{DATA} {{f}}/answers.jsonl --step 2", "rejected"),
    ("not on the hub", f"{STEP1} --data_path nobody/nothing", "nobody/nothing"),
]

YAML = [
    ("no such config", f"{STEP1} --config {{f}}/none.yaml", "none.yaml"),
    ("config key", f"{STEP1} --config {{f}}/key.yaml", "key.yaml", "leraning_rate", "did you mean learning_rate"),
    ("config broken", f"{STEP1} --config {{f}}/broken.yaml", "broken.yaml", "line"),
    ("config type", f"{STEP1} --config {{f}}/type.yaml", "type.yaml", "--seed", "whole number"),
    ("config list", f"{STEP1} --config {{f}}/list.yaml", "list.yaml", "mapping"),
    ("config list for one", f"{STEP1} --config {{f}}/many.yaml", "many.yaml", "seed"),
    ("config folder", f"{STEP1} --config {{f}}", "Is a directory"),
    ("config binary", f"{STEP1} --config {{f}}/binary.jsonl", "binary.jsonl"),
    ("no such recipe", f"{TRAIN} --recipe opt-1b", "--recipe opt-1b", "opt-1.3b"),
    ("recipe section", f"{TRAIN} --recipe {{f}}/section.yaml", "stepp1", "did you mean step1"),
    ("recipe key", f"{TRAIN} --recipe {{f}}/recipe_key.yaml", "step3", "kl_cof", "did you mean kl_coef"),
    ("recipe value", f"{TRAIN} --recipe {{f}}/recipe_value.yaml", "step1", "--seed"),
    ("recipe number", f"{TRAIN} --recipe {{f}}/recipe_model.yaml", "actor_model"),
]

MODELS = [
    ("no such model", f"{NEW1} --model_name_or_path {{f}}/nowhere", "--model_name_or_path", "nowhere"),
    ("no such model, train.py", f"{TRAIN} --actor-model {{f}}/nowhere --reward-model {{m}}/llama", "--actor_model", "nowhere"),
    ("no such model, chat.py", f"{CHAT} --path {{f}}/nowhere", "--path", "nowhere"),
    ("no such model on the hub", f"{NEW1} --model_name_or_path nobody/nothing", "nobody/nothing"),
    ("no config.json", f"{NEW1} --model_name_or_path {{m}}/no_config", "config.json"),
    ("no config.json, chat.py", f"{CHAT} --path {{m}}/no_config", "config.json"),
    ("no config.json, train.py", f"{TRAIN} --actor-model {{m}}/no_config --reward-model {{m}}/llama", "config.json"),
    ("broken config.json", f"{NEW1} --model_name_or_path {{m}}/broken_config", "config.json"),
    ("file as model", f"{NEW1} --model_name_or_path {{f}}/good.jsonl", "good.jsonl"),
    ("missing tensor", f"{NEW1} --model_name_or_path {{m}}/missing_tensor", "q_proj"),
    ("missing tensor, step 2", f"{NEW2} --model_name_or_path {{m}}/missing_tensor", "q_proj"),
    ("missing tensor, actor", f"{STEP3_ALL} --actor_model_name_or_path {{m}}/missing_tensor", "q_proj"),
    ("missing tensor, chat.py", f"{CHAT} --path {{m}}/missing_tensor", "q_proj"),
    ("truncated weights", f"{NEW1} --model_name_or_path {{m}}/truncated", "cannot be read"),
    ("truncated weights, reward", f"{NEW3} --actor_model_name_or_path {{m}}/llama --critic_model_name_or_path {{m}}/truncated_reward", "cannot be read"),
    ("truncated weights, chat.py", f"{CHAT} --path {{m}}/truncated", "truncated"),
    ("no weights", f"{NEW1} --model_name_or_path {{m}}/no_weights", "no_weights"),
    ("no weights, chat.py", f"{CHAT} --path {{m}}/no_weights", "no_weights"),
    ("lost shard", f"{NEW1} --model_name_or_path {{m}}/lost_shard", "lost_shard"),
    ("code in .bin", f"{NEW1} --model_name_or_path {{m}}/pickled", "refused"),
    ("BERT", f"{NEW1} --model_name_or_path {{m}}/bert", "BertFor", "causal LM"),
    ("BERT, step 2", f"{NEW2} --model_name_or_path {{m}}/bert", "score head"),
    ("BERT, chat.py", f"{CHAT} --path {{m}}/bert", "causal LM"),
    ("adapter", f"{NEW1} --model_name_or_path {{m}}/adapter", "LoRA adapter", "merge"),
    ("adapter, step 3", f"{NEW3} --actor_model_name_or_path {{m}}/adapter --critic_model_name_or_path {{m}}/llama_reward", "--actor_model_name_or_path", "LoRA adapter"),
    ("adapter, chat.py", f"{CHAT} --path {{m}}/adapter", "LoRA adapter"),
    ("reward model as base", f"{NEW1} --model_name_or_path {{m}}/llama_reward", "reward model"),
    ("reward model as actor", f"{NEW3} --actor_model_name_or_path {{m}}/llama_reward --critic_model_name_or_path {{m}}/llama_reward", "--actor_model_name_or_path", "reward model"),
    ("reward model, chat.py", f"{CHAT} --path {{m}}/llama_reward", "reward model"),
    ("SFT model as reward", f"{NEW3} --actor_model_name_or_path {{m}}/llama --critic_model_name_or_path {{m}}/llama", "not a reward model"),
    ("no tokenizer", f"{NEW1} --model_name_or_path {{m}}/no_tokenizer", "no tokenizer"),
    ("no tokenizer, actor", f"{STEP3_ALL} --actor_model_name_or_path {{m}}/no_tokenizer", "no tokenizer"),
    ("no tokenizer, chat.py", f"{CHAT} --path {{m}}/no_tokenizer", "no tokenizer"),
    ("broken tokenizer", f"{NEW1} --model_name_or_path {{m}}/broken_tokenizer", "tokenizer"),
    ("no such tokenizer", f"{STEP1} --data_path {{f}}/good.jsonl --tokenizer_name_or_path {{f}}/nowhere", "--tokenizer_name_or_path"),
    ("critic of other words", f"{STEP3_ALL} --reward_model_name_or_path {{m}}/llama_reward --critic_model_name_or_path {{m}}/llama_reward_reversed", "--critic_model_name_or_path", "vocabulary"),
    ("no step 3 yet", f"{CHAT} --path {{f}}", "config.json"),
]

SHAPES = [
    ("longer than positions", f"{STEP1} --data_path {{f}}/good.jsonl --max_seq_len 100000", "--max_seq_len"),
    ("rollout longer than positions", f"{STEP3_ALL} --max_prompt_seq_len 60 --max_answer_seq_len 60", "--max_prompt_seq_len", "--max_answer_seq_len"),
    ("tensor parallelism in one process", f"{STEP3_ALL} --inference_tp_size 2", "--inference_tp_size 2", "1 process"),
    ("tensor parallelism, train.py", f"{TRAIN} --actor-model {{m}}/llama --reward-model {{m}}/llama --inference_tp_size 2 --num-gpus 3", "--inference_tp_size 2", "3 processes"),
    ("mini-batches, train.py", f"{TRAIN} --per_device_training_batch_size 7", "--per_device_training_batch_size"),
    ("cache too small", f"{STEP3_ALL} --max_prompt_seq_len 16 --max_answer_seq_len 16 --kv_cache_gib 1e-9", "kv_cache_gib"),
    ("unsupported tp", f"{STEP3_ALL} --inference_tp_size 3", "--inference_tp_size 3"),
    ("max_new_tokens", f"{CHAT} --path {{m}}/llama --max_new_tokens 0", "--max_new_tokens"),
]

MACHINES = [
    ("fp16 on a CPU", f"{STEP1} --data_path {{f}}/good.jsonl --dtype fp16", "--dtype fp16", "bf16"),
    ("node rank without address", f"{TRAIN} --num-nodes 2 --node-rank 1", "--node_rank", "--master_addr"),
    ("no hostfile", f"{TRAIN} --num-nodes 2", "--hostfile"),
    ("hostfile missing", f"{TRAIN} --num-nodes 2 --hostfile {{f}}/none", "--hostfile", "none"),
    ("hostfile line", f"{TRAIN} --num-nodes 2 --hostfile {{f}}/hosts", "hosts:2", "slots"),
    ("hostfile short", f"{TRAIN} --num-nodes 3 --hostfile {{f}}/two_hosts", "--num_nodes 3", "2 machines"),
    ("no processes", f"{TRAIN} --num-gpus 0", "--num_gpus 0", "at least 1"),
    ("port", f"{TRAIN} --master-port 99999", "--master_port 99999"),
    ("memory", f"{TRAIN} --plan --device-memory-gib -1", "--device_memory_gib"),
    ("launcher", f"{TRAIN} --num-nodes 2 --launcher ssh", "--launcher 'ssh'", "slurm"),
]

IE = "from dschat.inference import InferenceEngine, SamplingParams\n"
ENGINE = "InferenceEngine.from_pretrained('{m}/llama')"
RLHF = (
    "from dschat import DeepSpeedRLHFEngine, DeepSpeedPPOTrainer\n"
    "from transformers import AutoTokenizer\n"
    "tokenizer = AutoTokenizer.from_pretrained('{m}/llama')\n"
    "def engine(actor='{m}/llama', critic='{m}/llama_reward', **args):\n"
    "    return DeepSpeedRLHFEngine(actor, critic, tokenizer, 1, args)\n"
)
API = [
    ("engine: no folder", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{f}}/nowhere'))"), "nowhere"),
    ("engine: dtype", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama', dtype='fp8'))"), "dtype fp8", "bfloat16"),
    ("engine: device", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama', device='tpu9'))"), "device tpu9"),
    ("engine: cuda", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama', device='cuda'))"), "device cuda", "cpu"),
    ("engine: BERT", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/bert'))"), "bert"),
    ("engine: reward model", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama_reward'))"), "lm_head"),
    ("engine: missing tensor", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/missing_tensor'))"), "q_proj"),
    ("engine: truncated", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/truncated'))"), "truncated"),
    ("engine: adapter", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/adapter'))"), "adapter"),
    ("engine: sequences", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama', max_num_seqs=0))"), "max_num_seqs 0"),
    ("engine: length", api(f"{IE}cli.run(lambda: InferenceEngine.from_pretrained('{{m}}/llama', max_seq_len=4096))"), "max_seq_len"),
    ("engine: strings", api(f"{IE}cli.run(lambda: {ENGINE}.generate(['hello'], SamplingParams()))"), "prompt 0"),
    ("engine: flat list", api(f"{IE}cli.run(lambda: {ENGINE}.generate([1, 2, 3], SamplingParams()))"), "prompt 0"),
    ("engine: empty prompt", api(f"{IE}cli.run(lambda: {ENGINE}.generate([[]], SamplingParams()))"), "prompt 0 is empty"),
    ("engine: foreign id", api(f"{IE}cli.run(lambda: {ENGINE}.generate([[1, 64]], SamplingParams(max_new_tokens=4)))"), "64"),
    ("engine: too long", api(f"{IE}cli.run(lambda: {ENGINE}.generate([[1] * 60], SamplingParams(max_new_tokens=10)))"), "60 tokens"),
    ("sampling: top_p", api(f"{IE}cli.run(lambda: SamplingParams(top_p=0))"), "top_p 0"),
    ("sampling: type", api(f"{IE}cli.run(lambda: SamplingParams(max_new_tokens='many'))"), "max_new_tokens"),
    ("sampling: nan", api(f"{IE}cli.run(lambda: SamplingParams(temperature=float('nan')))"), "temperature nan"),
    ("rlhf: no actor", api(f"{RLHF}cli.run(lambda: engine(actor='{{f}}/nowhere'))"), "nowhere"),
    ("rlhf: knob of no sense", api(f"{RLHF}cli.run(lambda: engine(gamma=7))"), "gamma"),
    ("rlhf: knob of a wrong type", api(f"{RLHF}cli.run(lambda: engine(ppo_epochs='two'))"), "ppo_epochs"),
    ("rlhf: stage", api(f"{RLHF}cli.run(lambda: engine(actor_zero_stage=5))"), "actor_zero_stage 5"),
    ("rlhf: tensor parallelism", api(f"{RLHF}cli.run(lambda: engine(inference_tp_size=2))"), "--inference_tp_size 2"),
    ("rlhf: SFT model as critic", api(f"{RLHF}cli.run(lambda: engine(critic='{{m}}/llama'))"), "not a reward model"),
    ("rlhf: tokenizer", api(f"{RLHF}tokenizer = None\ncli.run(lambda: engine())"), "tokenizer"),
    ("ppo: prompts of strings", api(f"{RLHF}E = dict(max_prompt_seq_len=16, max_answer_seq_len=16, per_device_generation_batch_size=2, per_device_training_batch_size=2)\ncli.run(lambda: DeepSpeedPPOTrainer(engine(**E)).generate_experience(['hello', 'you']))"), "prompt 0"),
    ("ppo: too many prompts", api(f"{RLHF}E = dict(max_prompt_seq_len=16, max_answer_seq_len=16, per_device_generation_batch_size=2, per_device_training_batch_size=2)\ncli.run(lambda: DeepSpeedPPOTrainer(engine(**E)).generate_experience([[2, 3]] * 3))"), "3"),
    ("ppo: long prompt", api(f"{RLHF}E = dict(max_prompt_seq_len=16, max_answer_seq_len=16, per_device_generation_batch_size=2, per_device_training_batch_size=2)\ncli.run(lambda: DeepSpeedPPOTrainer(engine(**E)).generate_experience([[2] * 20] * 2))"), "max_prompt_seq_len"),
]


def write_inputs(folder: Path) -> None:
    """``folder/files`` and ``folder/models``: data, recipes and checkpoints, most of them wrong."""
    write_files(folder / "files")
    write_models(folder / "models")


def write_files(folder: Path) -> None:
    row = {"prompt": "w3 w4", "chosen": "w5", "rejected": "w6"}
    rows = [{"prompt": f"w{i} w4", "chosen": "w5", "rejected": "w6"} for i in range(2, 62)]
    good = json.dumps(row)
    texts = {
        "good.jsonl": "\n".join(map(json.dumps, rows)),
        "empty.jsonl": "",
        "data.docx": "PK",
        "column.jsonl": json.dumps({"question": "a", "chosen": "b", "rejected": "c"}),
        "answers.jsonl": json.dumps({"prompt": "a", "chosen": "b"}),
        "broken.jsonl": f"{good}\n{good}\n{{not json\n",
        "broken.json": f"[{good},\n{{]",
        "lists.json": "[[1, 2], [3]]",
        "ragged.csv": "prompt,chosen\na,b\na,b,c\n",
        "header.csv": "a,a,b\n1,2,3\n",
        "same.jsonl": json.dumps(row | {"rejected": "w5"}),
        "blank.jsonl": f"{good}\n{json.dumps(row | {'chosen': ''})}\n",
        "broken.jinja": "{% for m in messages %}",
        "stage2.json": json.dumps({"zero_optimization": {"stage": 2}}),
        "typed.json": json.dumps({"zero_optimization": {"reduce_bucket_size": "big"}}),
        "key.yaml": "leraning_rate: 1",
        "broken.yaml": "seed: 1\ndata_path: [",
        "type.yaml": "seed: many",
        "list.yaml": "- seed",
        "many.yaml": "seed: [1, 2]",
        "section.yaml": "stepp1: {seed: 1}",
        "recipe_key.yaml": "step3: {kl_cof: 0.1}",
        "recipe_value.yaml": "step1: {seed: x}",
        "recipe_model.yaml": "model: {actor_model: [1, 2], reward_model: {a: b}}",
        "hosts": "alpha slots=2\nbeta\n",
        "two_hosts": "alpha slots=2\nbeta slots=2\n",
        "finished/COMPLETE": "",
        "saved/dataset_info.json": "{}",
        "saved/state.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    latin1 = {
        "latin1.jsonl": f'{good}\n{{"prompt": "\xe4", "chosen": "b", "rejected": "c"}}\n',
        "latin1.csv": "prompt,chosen\na\xe4,b\n",
        "binary.jsonl": "\x00\x01\x02\xff\xfe" * 40,
        "bad.parquet": "PAR1\x00\x00PAR1",
    }
    for name, text in latin1.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    (folder / "empty_folder").mkdir()


def write_models(folder: Path) -> None:
    import tiny_models

    folder.mkdir()
    good = tiny_models.ensure(folder, "llama")
    reward = tiny_models.ensure(folder, "llama_reward")
    tiny_models.ensure(folder, "llama_reward_reversed")
    for name, damage in DAMAGES.items():
        source = reward if name.endswith("_reward") else good
        damage(Path(shutil.copytree(source, folder / name)))


def _missing_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _lost_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled(path: Path) -> None:
    import pickle

    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": print}))


def _bert(path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertForMaskedLM(config).save_pretrained(path)


def _adapter(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "facebook/opt-125m", "r": 4}
    (path / "adapter_config.json").write_text(json.dumps(settings))


DAMAGES = {
    "no_config": lambda path: (path / "config.json").unlink(),
    "broken_config": lambda path: (path / "config.json").write_text("{"),
    "missing_tensor": _missing_tensor,
    "truncated": _truncated,
    "truncated_reward": _truncated,
    "no_weights": lambda path: (path / "model.safetensors").unlink(),
    "lost_shard": _lost_shard,
    "pickled": _pickled,
    "bert": _bert,
    "adapter": _adapter,
    "no_tokenizer": lambda path: [file.unlink() for file in path.glob("tokenizer*")],
    "broken_tokenizer": lambda path: (path / "tokenizer.json").write_text("{"),
}
