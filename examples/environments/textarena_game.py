"""TextArena's games of one player, in turns.

    # rows.jsonl: {"prompt": "Play.", "game": "GuessTheNumber-v0", "start": 1}
    --data_path rows.jsonl --environment examples/environments/textarena_game.py:Game

A row's ``start`` seeds its game: all episodes of a prompt begin alike. The library says what a move
looks like; its reward of the finished game is the episode's.
"""

import random
import threading

import textarena

_lock = threading.Lock()  # games draw from Python's random numbers, which all threads share


class Game:
    def reset(self, game: str, start: int) -> str:
        # "-raw": an observation has what is new, not the whole game again
        self._game = textarena.make(f"{game}-raw")
        with _lock:
            before = random.getstate()
            self._game.reset(num_players=1, seed=start)
            random.setstate(before)
        return f"\n{self._observed()}"

    def step(self, answer: str) -> tuple[str, float, bool]:
        done, _ = self._game.step(answer)
        if not done:
            return self._observed(), 0.0, False
        rewards, _ = self._game.close()
        return "", float(rewards[0]), True

    def _observed(self) -> str:
        _, messages = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind != own)
