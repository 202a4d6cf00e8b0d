"""Rows of ranked answers in the layout of public data sets, and the examples of each step."""

from dialogues import HH, REPLY, USER, chat

from dschat.data.sources.adapters import Example

SFT, RM, PPO = "sft", "reward", "rlhf"

ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "why?",
    "models": ["a", "b", "c", "d"],
    "completions": [
        {"model": "a", "response": "so", "overall_score": 6.5, "fine-grained_score": 4.0},
        {"model": "b", "response": "as", "overall_score": 8.0, "fine-grained_score": 4.5},
        {"model": "c", "response": "eh", "overall_score": 2.0, "fine-grained_score": 1.0},
        {"model": "d", "response": "it", "overall_score": 6.5, "fine-grained_score": 4.0},
    ],
}
# best, worst, then the two that tie
OF_ULTRAFEEDBACK = {
    SFT: [chat("why?", "as")],
    RM: [
        Example(
            [USER("why?")],
            [REPLY("as")],
            [REPLY("eh")],
            [[REPLY("so")], [REPLY("it")]],
            [0, 2, 1, 1],
        )
    ],
    PPO: [chat("why?")],
}

RANKED_SETS = {
    "openbmb/UltraFeedback": ([ULTRAFEEDBACK], OF_ULTRAFEEDBACK),
    "berkeley-nest/Nectar": (
        [
            {
                "prompt": HH,
                "answers": [
                    {"answer": " no", "model": "a", "rank": 3.0},
                    {"answer": " yes", "model": "b", "rank": 1.0},
                    {"answer": " hm", "model": "c", "rank": 2.0},
                ],
                "turns": 2,
                "num_responses": 3,
            }
        ],
        {
            SFT: [Example(HH, " yes")],
            RM: [Example(HH, " yes", " no", [" hm"], [0, 2, 1])],
            PPO: [Example(HH)],
        },
    ),
}

RANKED_COLUMNS = {
    "a copy of UltraFeedback": ([ULTRAFEEDBACK], OF_ULTRAFEEDBACK),
    "ranks": (
        [{"prompt": "p", "answers": ["c", "a", "b"], "ranks": [3, 1, 2]}],
        {
            SFT: [Example("p", "a")],
            RM: [Example("p", "a", "c", ["b"], [0, 2, 1])],
            PPO: [Example("p")],
        },
    ),
    "scores of two answers": (
        [{"question": "q", "responses": ["a", "b"], "scores": [0.5, 0.75]}],
        {RM: [chat("q", "b", "a")]},
    ),
}
