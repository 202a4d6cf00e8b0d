"""Tasks of reasoning-gym as rows, and its scores as a reward (pip install reasoning-gym).

    python examples/reasoning_gym_tasks.py tasks.jsonl spell_backward ransom_note
    python step3_rlhf/main.py --data_path tasks.jsonl \\
        --reward_fn examples/reasoning_gym_tasks.py:score ...

Rows have `question` and `answer`; `task` and `entry` are for the reward.
"""

import functools
import json
import sys

import reasoning_gym

SIZE = 1200  # rows of each task
dataset = functools.cache(reasoning_gym.create_dataset)


def score(answers: list[str], task: list[str], entry: list[str]) -> list[float]:
    """reasoning-gym's own score of each answer, from 0 to 1."""
    triples = zip(answers, task, entry, strict=True)
    return [dataset(t).score_answer(a.strip(), json.loads(e)) for a, t, e in triples]


def main() -> None:
    path, *tasks = sys.argv[1:]
    made = {task: dataset(task, size=SIZE, seed=0) for task in tasks}
    with open(path, "w") as file:
        for number in range(SIZE):  # the tasks take turns
            for task, entries in made.items():
                entry = entries[number]
                row = {"question": entry["question"], "answer": entry["answer"], "task": task}
                file.write(json.dumps(row | {"entry": json.dumps(entry)}) + "\n")


if __name__ == "__main__":
    main()
