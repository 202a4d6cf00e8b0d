"""Gymnasium's games that are drawn as text, in turns.

    # rows.jsonl: {"prompt": "Walk from [S] to G.", "game": "FrozenLake-v1", "start": 1}
    --data_path rows.jsonl --environment examples/environments/gymnasium_text.py:GymText

A row's ``start`` seeds its game: all episodes of a prompt begin alike. The last word of an answer
that is a move counts; an answer without one is told so. A game with other moves needs its row here.
"""

import re

import gymnasium

MOVES = {
    "FrozenLake-v1": ["left", "down", "right", "up"],
    "CliffWalking-v1": ["up", "right", "down", "left"],
}


class GymText:
    def reset(self, game: str, start: int) -> str:
        self._moves = MOVES[game]
        self._game = gymnasium.make(game, render_mode="ansi")
        self._game.reset(seed=start)
        return f"\n{self._board()}\nMoves: {', '.join(self._moves)}"

    def step(self, answer: str) -> tuple[str, float, bool]:
        found = [word for word in re.findall("[a-z]+", answer.lower()) if word in self._moves]
        if not found:
            return f"Say a move: {', '.join(self._moves)}", 0.0, False
        _, reward, has_ended, is_cut, _ = self._game.step(self._moves.index(found[-1]))
        return self._board(), float(reward), has_ended or is_cut

    def _board(self) -> str:
        """What a terminal would show; the colored place stands in brackets."""
        return re.sub(r"\x1b\[\d+m(.*?)\x1b\[0m", r"[\1]", self._game.render()).strip()
